"""The export format `folder`: weights and a model card for publication."""

ATTACHES = {"duetgan.inference.export.formats": "duetgan.extras.model_folder.formats"}
