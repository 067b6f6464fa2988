"""The accuracy of a classifier on corrupted images (`evaluate.py --robustness`).

See docs/extras/robustness.md.
"""

ATTACHES = {
    "duetgan.commands.evaluate": "duetgan.extras.robustness.options",
    "duetgan.metrics.evaluate_classifier": "duetgan.extras.robustness.measure",
    "duetgan.metrics.tables": "duetgan.extras.robustness.tables",
}
