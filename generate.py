"""Draw images, films and data sets with a trained generator, or find an image among those that it can draw."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from inference.dataset import ENCODINGS, check_dataset, provenance, write_dataset
from inference.dataset import PER_CLASS as DATASET_PER_CLASS
from inference.dataset import UNCONDITIONAL as DATASET_UNCONDITIONAL
from inference.interpolate import FilmConfig, draw_film
from inference.perceptual import FEATURES
from inference.project import SAVED, SPACES, project, read_target
from inference.projection import ProjectionConfig
from inference.samples import Sampler, chosen_classes, with_styles
from inference.tables import (
    PER_CLASS,
    UNCONDITIONAL,
    draw_grid,
    draw_mix,
    draw_truncation,
    parse_layers,
    parse_psis,
)
from inference.video import check_film
from models.restore import generator_from
from utils.arguments import add_model_options, positive
from utils.checkpoint import load, resolve
from utils.cli import Parser
from utils.distributed.collectives import choose_device
from utils.errors import UserError, run_cli
from utils.files import check_writable

FILM, SEARCH = FilmConfig(), ProjectionConfig()  # the defaults


def parser() -> Parser:
    """The options: a subcommand, then its own."""
    options = Parser(prog="generate.py", description=__doc__)
    commands = options.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (run, add_options, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, prog=f"generate.py {name}")
        add_model_options(command)
        command.add_argument("--out", required=True, type=Path, metavar="FILE", help="the file to write")
        command.add_argument("--seed", type=int, default=0, help="of every draw (default: 0)")
        command.add_argument("--classes", default="all", metavar="A,B", help="names of classes, or all (default: all)")
        add_options(command)
        command.set_defaults(run=run)
    return options


def add_look(command: argparse.ArgumentParser, *, psi: bool = True) -> None:
    """Truncation and noise."""
    add = command.add_argument
    if psi:
        psi_help = "1: all variety; towards 0: typical images (default: 1)"
        add("--truncation-psi", type=float, default=1.0, metavar="X", help=psi_help)
    add("--truncation-cutoff", type=int, metavar="L", help="truncate the first L layers only (default: all)")
    add("--noise-mode", choices=("random", "const", "none"), default="random", help="per-pixel noise (default: random)")


def add_grid(command: argparse.ArgumentParser) -> None:
    """Options of `grid`."""
    add_look(command)
    default = f"(default: {PER_CLASS} a class; {UNCONDITIONAL} without classes)"
    command.add_argument("--n", type=positive, metavar="N", help=f"images in all {default}")


def add_truncation(command: argparse.ArgumentParser) -> None:
    """Options of `truncation`."""
    add_look(command, psi=False)
    command.add_argument("--psis", default="0,0.3,0.5,0.7,1", metavar="X,Y", help="rows (default: 0,0.3,0.5,0.7,1)")
    command.add_argument("--n", type=positive, metavar="N", help="columns (default: 8, or one a class up to 16)")


def add_mix(command: argparse.ArgumentParser) -> None:
    """Options of `mix`."""
    add_look(command)
    layers = "layers whose style comes from B, e.g. 0-3,6; the first are the coarse ones (default: 0-3)"
    command.add_argument("--layers", default="0-3", metavar="L", help=layers)
    command.add_argument("--n", type=positive, metavar="N", help="sources A, and as many B (default: 8)")


def add_interpolate(command: argparse.ArgumentParser) -> None:
    """Options of `interpolate`."""
    add_look(command)
    add = command.add_argument
    add("--space", choices=("w", "z"), help="straight in w, or along great circles in z (default: w if there is one)")
    through = "samples to go through (default: 8, or one a class up to 16)"
    add("--n", type=positive, dest="keyframes", metavar="N", help=through)
    add("--frames", type=positive, default=FILM.frames, help=f"from one to the next (default: {FILM.frames})")
    add("--fps", type=positive, default=FILM.fps, help=f"frames a second (default: {FILM.fps})")
    add("--scale", type=positive, metavar="N", help="a pixel becomes NxN (default: small images to 256 px)")


def add_project(command: argparse.ArgumentParser) -> None:
    """Options of `project`."""
    add = command.add_argument
    add("--image", required=True, type=Path, metavar="FILE", help="the image to reproduce")
    add("--resize", choices=("crop", "pad"), help="how it is resized (default: as in training)")
    add("--space", choices=tuple(SPACES), default="both", help="one w for all layers, or one each (default: both)")
    add("--features", choices=FEATURES, default="resnet50", help="what is compared (default: resnet50)")
    add("--weights", metavar="FILE", help="ResNet-50's weights (default: $DUET_WEIGHTS, weights/)")
    add("--pixel-weight", type=float, default=SEARCH.pixel_weight, help=f"default: {SEARCH.pixel_weight:g}")
    add("--steps", type=positive, default=SEARCH.steps, help=f"in each space (default: {SEARCH.steps})")
    add("--lr", type=float, default=SEARCH.lr, help=f"highest learning rate (default: {SEARCH.lr})")
    noise = "the stored noise maps, none, or searched for as well (default: const)"
    add("--noise-mode", choices=("const", "none", "optimise"), default="const", help=noise)
    add("--noise-weight", type=float, default=SEARCH.noise_weight, help=f"default: {SEARCH.noise_weight:g}")
    add("--save", type=Path, metavar="FILE", help=f"latents and noise that were found, a {SAVED} file")


def add_dataset(command: argparse.ArgumentParser) -> None:
    """Options of `dataset`."""
    add_look(command)
    default = f"(default: {DATASET_PER_CLASS} a class; {DATASET_UNCONDITIONAL} without classes)"
    command.add_argument("--n", type=positive, metavar="N", help=f"images in all {default}")
    command.add_argument("--encoding", choices=ENCODINGS, default="raw", help="how they are stored (default: raw)")
    command.add_argument("--overwrite", action="store_true", help="replace --out if it exists")


def run_grid(options: argparse.Namespace) -> str:
    """A grid of samples."""
    check_png(options.out)
    sampler, *_ = open_sampler(options)
    count = draw_grid(sampler, options.out, count=options.n)
    return f"wrote {count} images to {options.out}"


def run_truncation(options: argparse.Namespace) -> str:
    """The same samples at several psi."""
    check_png(options.out)
    psis = parse_psis(options.psis)
    sampler, checkpoint, _ = open_sampler(options)
    count = draw_truncation(sampler, checkpoint["classes"], options.out, psis=psis, count=options.n)
    return f"wrote {count} samples at {len(psis)} psi to {options.out}"


def run_mix(options: argparse.Namespace) -> str:
    """A table of style mixing."""
    check_png(options.out)
    sampler, checkpoint, _ = open_sampler(options)
    layers = parse_layers(options.layers, with_styles(sampler.generator, "mix").num_ws)
    count = draw_mix(sampler, checkpoint["classes"], options.out, layers=layers, count=options.n)
    return f"wrote {count} x {count} mixtures, layers {options.layers} from B, to {options.out}"


def run_interpolate(options: argparse.Namespace) -> str:
    """A film."""
    config = FilmConfig(**chosen(options, FilmConfig))
    check_film(options.out, fps=options.fps)
    sampler, *_ = open_sampler(options)
    count = draw_film(sampler, options.out, config)
    return f"wrote {count} frames, {count / options.fps:.1f} s, to {options.out}"


def run_project(options: argparse.Namespace) -> str:
    """An image's place in w and w+."""
    check_png(options.out)
    if options.save is not None and options.save.suffix.lower() != SAVED:
        raise UserError(f"--save {options.save}: latents are kept in a {SAVED} file; its name must end so")
    config = ProjectionConfig(**chosen(options, ProjectionConfig))
    sampler, checkpoint, _ = open_sampler(options)
    lines = project(
        sampler,
        checkpoint["classes"],
        read_target(options.image, checkpoint, resize=options.resize),
        options.out,
        config,
        space=options.space,
        features=options.features,
        weights=options.weights,
        save_to=options.save,
    )
    return "\n".join([*lines, f"wrote {options.out}" + (f" and {options.save}" if options.save else "")])


def run_dataset(options: argparse.Namespace) -> str:
    """A packed file of samples."""
    check_dataset(options.out, overwrite=options.overwrite)
    sampler, checkpoint, path = open_sampler(options)
    source = provenance(path, checkpoint, sampler)
    how = {"source": source, "count": options.n, "encoding": options.encoding, "overwrite": options.overwrite}
    meta = write_dataset(sampler, checkpoint, options.out, **how)
    return f"wrote {meta.count} images to {options.out}: {source}"


def chosen(options: argparse.Namespace, config: type) -> dict[str, Any]:
    """What the options say of a config's fields; they have the same names."""
    names = {field.name for field in fields(config)}
    return {name: value for name, value in vars(options).items() if name in names}


def check_png(path: Path) -> None:
    """Raise UserError unless the name is a PNG file's."""
    if path.suffix.lower() != ".png":
        raise UserError(f"--out {path}: this is a PNG file; its name must end in .png")


def open_sampler(options: argparse.Namespace) -> tuple[Sampler, dict[str, Any], Path]:
    """The generator with the options of its sampling, its checkpoint, and that one's file. Raises UserError."""
    check_writable(options.out.parent)
    device = choose_device(options.device)
    path = resolve(options.checkpoint, options.which)
    checkpoint = load(path)
    generator = generator_from(checkpoint, device)
    sampler = Sampler(
        generator=generator,
        chosen=chosen_classes(options.classes, checkpoint["classes"], conditional=bool(generator.classes)),
        seed=options.seed,
        truncation_psi=getattr(options, "truncation_psi", 1.0),
        truncation_cutoff=getattr(options, "truncation_cutoff", None),
        noise_mode="const" if options.command == "project" else options.noise_mode,
        batch_size=options.batch_size,
    )
    return sampler, checkpoint, path


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    options = parser().parse_args(argv)
    print(options.run(options))
    return 0


COMMANDS = {
    "grid": (run_grid, add_grid, "a grid of samples; a row for each class"),
    "truncation": (run_truncation, add_truncation, "the same samples at several truncations"),
    "mix": (run_mix, add_mix, "a table of style mixing"),
    "interpolate": (run_interpolate, add_interpolate, "a film from sample to sample, .mp4 or .gif"),
    "project": (run_project, add_project, "the nearest images to a given one, in w and in w+"),
    "dataset": (run_dataset, add_dataset, "a packed data set of samples, for train.py"),
}

if __name__ == "__main__":
    sys.exit(run_cli(main))
