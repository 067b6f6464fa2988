"""The command `duet COMMAND ARGS`, also `python -m duetgan`: each command is one of Duet's scripts.

A script runs in a process of its own.
"""

import os
import sys
from pathlib import Path

from duetgan import HOME, __version__
from duetgan.utils.config.cli import did_you_mean

COMMANDS = {  # name -> script or module, and what it does
    "quickstart": ("quickstart.py", "train and evaluate both models on the sample or on your own images"),
    "pack": ("duetgan.data.pack", "pack images into one file"),
    "inspect": ("duetgan.data.inspect", "say what a packed file holds, and draw a grid of its images"),
    "duplicates": ("duetgan.data.duplicates", "find look-alikes within a packed file or between two"),
    "train": ("train.py", "train a GAN or a classifier, or resume; --list prints the recipes"),
    "evaluate": ("evaluate.py", "evaluate a checkpoint"),
    "study": ("study.py", "many runs, controls, one verdict: do samples help a classifier?"),
    "generate": ("generate.py", "samples, films and projections of a generator"),
    "predict": ("predict.py", "what a classifier says of images"),
    "influence": ("duetgan.inference.influence", "which training images a classifier's predictions come from"),
    "pseudo-labels": ("duetgan.inference.pseudo_labels", "label images with what a classifier is sure of"),
    "explore": ("explore.py", "look at what the models do, in a browser"),
    "export": ("export.py", "write a model for use elsewhere"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: duet COMMAND [ARGS]", "", *lines, "", "Every command has --help."])


def line(argv: list[str]) -> list[str]:
    """Python's arguments for `duet argv...`."""
    script, *arguments = COMMANDS[argv[0]][0], *argv[1:]
    if script.endswith(".py"):
        return [str(HOME / script), *arguments]
    return ["-P", "-m", script, *arguments]  # -P: not the current folder's own `duetgan`


def main() -> int:
    """Become the command's process."""
    argv = sys.argv[1:]
    if not argv or argv[0] in ("help", "-h", "--help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(f"duet {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        hint = did_you_mean(argv[0], list(COMMANDS))
        print(f"error: no command {argv[0]}{hint}; `duet --help` lists them", file=sys.stderr)
        return 2
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *line(argv)], environment)


if __name__ == "__main__":
    sys.exit(main())
