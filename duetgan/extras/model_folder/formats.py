"""Register the format `folder` with export.py."""

from duetgan.inference.export.formats import FORMATS, Format

FORMATS["folder"] = Format(
    module="duetgan.extras.model_folder.folder",
    help="weights with a model card",
    several_labels=False,
    folder=True,
)
