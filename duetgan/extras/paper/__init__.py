"""Predictions of memory and speed on GPUs that are not at hand (docs/extras/predictions.md)."""

ATTACHES = {"duetgan.commands.train": "duetgan.extras.paper.dry_run"}
