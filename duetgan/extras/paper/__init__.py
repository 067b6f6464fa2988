"""Predictions of a training on GPUs without having them (docs/extras/predictions.md)."""

COMMANDS: dict[str, tuple[str, str]] = {}
ATTACHES = {"duetgan.commands.train": "duetgan.extras.paper.dry_run"}
