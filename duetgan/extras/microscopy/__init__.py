"""Images of many channels: TIFF files of several pages, or of more than 8 bits."""

COMMANDS: dict[str, tuple[str, str]] = {}
ATTACHES = {"duetgan.data.images.values": "duetgan.extras.microscopy.tiff"}
