"""The format of export.py."""

from duetgan.inference.export.formats import FORMATS, Format

FORMATS["folder"] = Format(
    module="duetgan.extras.model_folder.folder",
    help="weights, a model card and a page of Python that only needs torch and safetensors",
    several_labels=False,
    folder=True,
)
