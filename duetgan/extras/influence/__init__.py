"""Influence (`duet influence`): the training images behind a classifier's predictions."""

COMMANDS = {
    "influence": (
        "duetgan.extras.influence.command",
        "find the training images behind a classifier's predictions",
    )
}
