"""A classifier on corrupted images and on images of other classes (docs/extras/robustness.md)."""

ATTACHES = {
    "duetgan.commands.evaluate": "duetgan.extras.robustness.options",
    "duetgan.metrics.evaluate_classifier": "duetgan.extras.robustness.measure",
    "duetgan.metrics.tables": "duetgan.extras.robustness.tables",
}
