"""Folders of images below a URL (s3://, gs://, hf://, http://, ...) as sources, with fsspec."""

COMMANDS: dict[str, tuple[str, str]] = {}
ATTACHES = {"duetgan.data.packing.sources": "duetgan.extras.urls.source"}
