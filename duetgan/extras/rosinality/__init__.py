"""LMDB files of rosinality's StyleGAN2 as sources of images."""

COMMANDS: dict[str, tuple[str, str]] = {}
ATTACHES = {"duetgan.data.packing.sources.lmdb_files": "duetgan.extras.rosinality.source"}
