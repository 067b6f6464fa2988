"""Support of TIFF files with several pages, which become channels, or with more than 8 bits."""

COMMANDS: dict[str, tuple[str, str]] = {}
ATTACHES = {"duetgan.data.images.values": "duetgan.extras.microscopy.tiff"}
