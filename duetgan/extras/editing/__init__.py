"""Edits that move an image from one class to another.

`generate.py edit` edits samples of a generator. `predict.py --counterfactual` edits image files.
"""

ATTACHES = {
    "duetgan.commands.generate": "duetgan.extras.editing.generate",
    "duetgan.inference.additions": "duetgan.extras.editing.predict",
}
