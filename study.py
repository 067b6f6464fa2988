"""Compare many runs with controls and intervals: `python study.py augment`."""

from duetgan.commands import run

if __name__ == "__main__":
    run("study")
