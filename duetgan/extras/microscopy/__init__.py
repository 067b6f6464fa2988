"""Images of many channels or pages: TIFF files with tifffile, and stacks of files with one channel
each (`duet pack --stack`).
"""

COMMANDS: dict[str, tuple[str, str]] = {}
ATTACHES = {
    "duetgan.data.images.values": "duetgan.extras.microscopy.tiff",
    "duetgan.data.packing.sources": "duetgan.extras.microscopy.sources",
}
