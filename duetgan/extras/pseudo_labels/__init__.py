"""Pseudo-labels (`duet pseudo-labels`): labels from a classifier's confident predictions."""

COMMANDS = {
    "pseudo-labels": (
        "duetgan.extras.pseudo_labels.command",
        "label images with a classifier's confident predictions",
    )
}
