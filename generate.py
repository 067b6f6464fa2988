"""Draw pictures with a trained generator."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from metrics.pictures import save_rows
from metrics.precision import exact_float32
from models.restore import generator_from
from models.sampling import generate
from models.stylegan2 import Generator
from utils.arguments import add_model_options, positive
from utils.checkpoint import load, resolve
from utils.cli import Parser, did_you_mean
from utils.distributed import choose_device
from utils.errors import UserError, run_cli

PER_CLASS = 8  # pictures of a class unless said
UNCONDITIONAL = 64  # pictures of a generator without classes unless said
COLUMNS = 8  # of a grid without classes


def parser() -> Parser:
    """The options: a subcommand, then its own."""
    options = Parser(prog="generate.py", description=__doc__)
    commands = options.add_subparsers(dest="command", required=True, metavar="COMMAND")
    grid = commands.add_parser("grid", help="a grid of samples; a row for each class", prog="generate.py grid")
    add_common_options(grid)
    default = f"(default: {PER_CLASS} a class; {UNCONDITIONAL} without classes)"
    grid.add_argument("--n", type=positive, metavar="N", help=f"pictures in all {default}")
    grid.set_defaults(run=draw_grid)
    return options


def add_common_options(command: argparse.ArgumentParser) -> None:
    """What every subcommand takes."""
    add = command.add_argument
    add_model_options(command)
    add("--out", required=True, type=Path, metavar="FILE", help="the file to write, a PNG")
    add("--seed", type=int, default=0, help="of the samples (default: 0)")
    add("--classes", default="all", metavar="A,B", help="names of classes, or all (default: all)")
    add("--truncation-psi", type=float, default=1.0, help="1: all variety; towards 0: typical pictures (default: 1)")
    add("--noise-mode", choices=("random", "const", "none"), default="random", help="per-pixel noise (default: random)")


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    options = parser().parse_args(argv)
    options.run(options)
    return 0


def draw_grid(options: argparse.Namespace) -> None:
    """Write a grid of samples to a PNG file: a row for each class, or a block of samples without classes."""
    if options.out.suffix.lower() != ".png":
        raise UserError(f"--out {options.out}: a grid is a PNG file; let the name end in .png")
    device = choose_device(options.device)
    checkpoint = load(resolve(options.checkpoint, options.which))
    generator = generator_from(checkpoint, device)
    if generator.classes:
        chosen = chosen_classes(options.classes, checkpoint["classes"])
        counts = shares(options.n or PER_CLASS * len(chosen), len(chosen))
        rows = class_rows(generator, chosen, counts, options)
    else:
        if options.classes != "all":
            raise UserError(f"--classes {options.classes}: this generator is unconditional and has none; leave it out")
        count = options.n or UNCONDITIONAL
        rows = [list(samples(generator, None, range(count), options))]
    columns = max(len(row) for row in rows) if len(rows) > 1 else min(COLUMNS, len(rows[0]))
    save_rows(rows, options.out, columns=columns, most_rows=len(rows))
    print(f"wrote {sum(map(len, rows))} pictures to {options.out}")


def chosen_classes(names: str, classes: Sequence[str]) -> list[int]:
    """Labels of `all` classes, or of those named with commas between; UserError for an unknown or a repeated one."""
    if names == "all":
        return list(range(len(classes)))
    chosen = []
    for name in (part.strip() for part in names.split(",")):
        if name not in classes:
            near = did_you_mean(name, classes)
            raise UserError(f"--classes: no class {name!r}{near}; there are {', '.join(classes)}")
        chosen.append(classes.index(name))
    if len(set(chosen)) < len(chosen):
        raise UserError(f"--classes {names}: a class is named twice; name it once")
    return chosen


def shares(total: int, parts: int) -> list[int]:
    """`total` in whole parts that differ by at most one, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def class_rows(
    generator: Generator, chosen: Sequence[int], counts: Sequence[int], options: argparse.Namespace
) -> list[list[Tensor]]:
    """Samples of each chosen class. The j-th sample of a class is the same whatever else is drawn with it."""
    labels = [label for label, count in zip(chosen, counts, strict=True) for _ in range(count)]
    indices = [
        position * generator.classes + label
        for label, count in zip(chosen, counts, strict=True)
        for position in range(count)
    ]
    pictures = samples(generator, torch.tensor(labels), indices, options)
    return [list(part) for part in pictures.split(list(counts)) if len(part)]


def samples(
    generator: Generator, labels: Tensor | None, indices: Sequence[int], options: argparse.Namespace
) -> Tensor:
    """Samples uint8 [n, C, H, W] with the options' seed, truncation and noise."""
    with exact_float32(next(generator.parameters()).device):
        return generate(
            generator,
            labels=labels,
            indices=indices,
            seed=options.seed,
            truncation_psi=options.truncation_psi,
            noise_mode=options.noise_mode,
            batch_size=options.batch_size,
        )


if __name__ == "__main__":
    sys.exit(run_cli(main))
