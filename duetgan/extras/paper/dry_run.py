"""Add `--dry-run gpu` to train.py."""

from duetgan.commands.train import DRY_RUNS

DRY_RUNS["gpu"] = (
    "duetgan.extras.paper.predictions",
    "also estimates memory and speed on various GPU models",
)
