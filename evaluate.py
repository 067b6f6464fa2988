"""Evaluate a checkpoint: `python evaluate.py --checkpoint runs/gan`."""

from duetgan.commands import run

if __name__ == "__main__":
    run("evaluate")
