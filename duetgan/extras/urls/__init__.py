"""Folders of images below a URL (s3://, gs://, hf://, http://, ...) as sources, with fsspec."""

COMMANDS: dict[str, tuple[str, str]] = {}
ATTACHES = {"duetgan.data.sources": "duetgan.extras.urls.source"}
