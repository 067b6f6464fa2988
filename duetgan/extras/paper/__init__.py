"""Predictions of a training on GPUs without having them (docs/extras/predictions.md)."""

ATTACHES = {"duetgan.commands.train": "duetgan.extras.paper.dry_run"}
