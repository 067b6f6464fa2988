"""Explore trained models in a browser: `python explore.py --checkpoint runs/quickstart`."""

from duetgan.commands import run

if __name__ == "__main__":
    run("explore")
