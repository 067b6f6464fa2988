"""Edits: images that move from one class to another (`generate.py edit`), and counterfactuals of
given images (`predict.py --counterfactual`).
"""

ATTACHES = {
    "duetgan.commands.generate": "duetgan.extras.editing.generate",
    "duetgan.inference.additions": "duetgan.extras.editing.predict",
}
