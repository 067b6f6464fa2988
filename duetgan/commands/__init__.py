"""The commands of `duet` and of the scripts at the top of a checkout: each module turns options
into one call.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from duetgan.utils.script import exit_cli, handle_interrupts

# name -> module whose `main` takes the arguments, and its line in `duet --help`; empty: not listed
COMMANDS = {
    "quickstart": (
        "duetgan.commands.quickstart",
        "train and evaluate both models on the sample or on your own images",
    ),
    "pack": ("duetgan.commands.pack", "pack images into one file"),
    "inspect": (
        "duetgan.commands.inspect",
        "describe a packed file, and draw a grid of its images",
    ),
    "duplicates": (
        "duetgan.commands.duplicates",
        "find look-alikes within a packed file or between two",
    ),
    "train": (
        "duetgan.commands.train",
        "train a GAN or a classifier, or resume; --list prints the recipes",
    ),
    "evaluate": ("duetgan.commands.evaluate", "evaluate a checkpoint"),
    "compare": ("duetgan.reporting.compare", "write a page that compares evaluated runs"),
    "study": (
        "duetgan.commands.study",
        "many runs, controls, one verdict: do samples help a classifier?",
    ),
    "generate": ("duetgan.commands.generate", "samples, films and projections of a generator"),
    "predict": ("duetgan.commands.predict", "classify images"),
    "influence": (
        "duetgan.inference.influence",
        "find the training images behind a classifier's predictions",
    ),
    "pseudo-labels": (
        "duetgan.inference.pseudo_labels",
        "label images with a classifier's confident predictions",
    ),
    "explore": ("duetgan.commands.explore", "explore the models in a browser"),
    "export": ("duetgan.commands.export", "write a model for use elsewhere"),
    "convert": ("duetgan.models.convert", "convert StyleGAN checkpoints of other programs"),
    "track": ("duetgan.utils.runlog.trackers", "send the metrics of a run to a tracker"),
    "quickstart-plan": ("duetgan.commands.planning.measure", ""),
    "quickstart-networks": ("duetgan.commands.planning.networks", ""),
    "quickstart-replan": ("duetgan.commands.planning.replan", ""),
}
PACKAGE = Path(__file__).resolve().parents[1]
REQUIRED = ("lmdb", "pydantic", "torchvision")  # packages that the environment of `make setup` has


def run(name: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end this process with its exit code.

    Args:
        name: a key of COMMANDS.
        argv: its arguments; default: those of this process.
    """
    handle_interrupts()  # the imports below take seconds
    if sys.path and PACKAGE in Path(sys.path[0]).resolve().parents:
        # of `python data/pack.py`: data/inspect.py would hide the standard library's module
        del sys.path[0]
    if not all(map(importlib.util.find_spec, REQUIRED)):
        remedy = "needs the packages of this project: `make setup`, then .venv/bin/python ..."
        print(f"error: Duet {remedy}", file=sys.stderr)
        sys.exit(2)
    module = importlib.import_module(COMMANDS[name][0])
    exit_cli(module.main, list(sys.argv[1:] if argv is None else argv))
