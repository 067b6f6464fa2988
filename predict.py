"""Classify images: `python predict.py --checkpoint runs/classifier photos/`."""

from duetgan.commands import run

if __name__ == "__main__":
    run("predict")
