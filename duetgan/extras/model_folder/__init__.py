"""A folder for publication: weights and a model card (`export.py --format folder`)."""

ATTACHES = {"duetgan.inference.export.formats": "duetgan.extras.model_folder.formats"}
