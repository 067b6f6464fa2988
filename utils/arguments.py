"""Options that the scripts which use a trained model share."""

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1, as an option's type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """`--checkpoint`, `--which`, `--device` and `--batch-size`."""
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="RUN_OR_FILE", help="run folder or checkpoint file")
    add("--which", choices=("last", "best"), default="last", help="which checkpoint of a run folder (default: last)")
    add("--device", help="cpu, cuda or cuda:N (default: the accelerator if there is one)")
    add("--batch-size", type=positive, default=64, metavar="N", help="changes speed and memory only (default: 64)")
