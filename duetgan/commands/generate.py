"""Draw images, films and data sets with a trained generator, or reproduce a given image with it."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from duetgan.data.lmdb.writer import check_target
from duetgan.inference import settings
from duetgan.utils.checkpoint import resolve_for_people
from duetgan.utils.config.cli import (
    PSI,
    Parser,
    add_model_options,
    add_truncation_options,
    file,
    number,
    positive,
)
from duetgan.utils.errors import require_same_classes
from duetgan.utils.files import check_writable

if TYPE_CHECKING:  # imports of torch take seconds, so the options are checked first
    from duetgan.inference.samples import Sampler

SEARCH, EDIT = settings.ProjectionConfig(), settings.EditConfig()  # defaults of options
WEIGHT, ABOVE_0 = number(float, 0), number(float, 0, inner=True)
C = TypeVar("C", settings.ProjectionConfig, settings.EditConfig)


def parser() -> Parser:
    """Return the parser, with a subcommand for each kind of output."""
    options = Parser(prog="generate.py", description=__doc__)
    commands = options.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def begin(
        run: Callable[[Namespace], str],
        name: str,
        text: str,
        without: str = "",
        out: Sequence[str] = (".png",),
    ) -> Callable[..., object]:
        command = commands.add_parser(name, help=text, description=text, prog=f"generate.py {name}")
        command.set_defaults(
            run=run,
            classes="all",
            truncation_psi=1.0,
            truncation_cutoff=None,
            truncation_mean="class",
        )
        add_model_options(command)
        add = command.add_argument
        add(
            "--out",
            required=True,
            type=file(*out),
            metavar="FILE",
            help="the file to write; for grid also a folder",
        )
        add("--seed", type=number(int), default=0, help="seed of the samples")
        if "classes" not in without:
            add(
                "--classes",
                default="all",
                metavar="A,B",
                help='names of classes, or of sets of classes: "cat;dog"',
            )
        text = (
            "numpy: draw z as NVIDIA's repositories do, so that a seed gives the same image there"
        )
        add("--latents", choices=("torch", "numpy"), default="torch", help=text)
        if "noise" not in without:
            add_truncation_options(command, psi="psi" not in without)
            text = "truncate the first L layers only (default: all)"
            add("--truncation-cutoff", type=number(int, 0), metavar="L", help=text)
            add(
                "--noise-mode",
                choices=("random", "const", "none"),
                default="random",
                help="per-pixel noise",
            )
        return add

    in_all = "number of images in all (default: {} per class; {} without classes)"
    add = begin(
        draw_table, "grid", "draw a grid of samples, with a row for each class", out=(".png", "")
    )
    add("--n", type=positive, metavar="N", help=in_all.format(*settings.GRID))

    add = begin(
        draw_table, "truncation", "draw the same samples at several truncations", without="psi"
    )
    add("--psis", type=psis, default="0,0.3,0.5,0.7,1", metavar="X,Y", help="psi of each row")
    add("--n", type=positive, metavar="N", help="columns (default: 8, or one per class up to 16)")

    add = begin(draw_table, "mix", "draw a table of style mixing")
    text = "layers whose style comes from B, such as 0-3,6; the first layers are coarse"
    add("--layers", default="0-3", metavar="L", help=text)
    add(
        "--n", type=positive, metavar="N", help="number of samples A, and of samples B (default: 8)"
    )

    text = "write a film from sample to sample, .mp4 or .gif"
    add_film_options(begin(interpolate, "interpolate", text, out=(".mp4", ".gif")))
    text = "find the latents whose image is nearest to a given image, in w and in w+"
    add_projection_options(begin(find_image, "project", text, without="noise, psi"))
    text = "change images from one class of a classifier to another, and as little else as possible"
    add_edit_options(begin(edit, "edit", text, without="classes"))

    add = begin(
        write_dataset, "dataset", "write a packed data set of samples, for train.py", out=(".lmdb",)
    )
    add("--n", type=positive, metavar="N", help=in_all.format(*settings.DATASET))
    add("--encoding", choices=settings.ENCODINGS, default="raw", help="how they are stored")
    add("--overwrite", action="store_true", help="replace --out if it exists")
    return options


def add_film_options(add: Callable[..., object]) -> None:
    add(
        "--space",
        choices=("w", "z"),
        help="interpolate linearly in w, or along great circles in z (default: w if the generator has it)",
    )
    add(
        "--n",
        type=number(int, 2),
        metavar="N",
        help="samples to visit (default: 8, or one per class up to 16)",
    )
    add(
        "--frames",
        type=positive,
        default=settings.FRAMES,
        help="frames from one sample to the next",
    )
    add("--fps", type=positive, default=settings.FPS, help="frames per second")
    add(
        "--scale",
        type=positive,
        metavar="N",
        help="enlarge each pixel to NxN (default: small images to 256 px)",
    )


def add_projection_options(add: Callable[..., object]) -> None:
    add("--image", required=True, type=Path, metavar="FILE", help="the image to reproduce")
    add("--resize", choices=("crop", "pad"), help="how it is resized (default: as in training)")
    add(
        "--space",
        choices=tuple(settings.SPACES),
        default="both",
        help="one w for all layers (w), or one per layer (w+)",
    )
    add(
        "--features",
        choices=settings.FEATURES,
        help="features to compare images by (default: resnet50, or pixels without its weights)",
    )
    add("--weights", metavar="FILE", help="ResNet-50's weights (default: $DUET_WEIGHTS, weights/)")
    add(
        "--pixel-weight",
        type=WEIGHT,
        default=SEARCH.pixel_weight,
        help="weight of the pixels' difference in the loss",
    )
    add("--steps", type=positive, default=SEARCH.steps, help="steps of the search, in each space")
    add("--lr", type=ABOVE_0, default=SEARCH.lr, help="highest learning rate")
    add(
        "--noise-mode",
        choices=("const", "none", "optimise"),
        default="const",
        help="use the stored noise maps, none, or optimise them as well",
    )
    add(
        "--noise-weight",
        type=WEIGHT,
        default=SEARCH.noise_weight,
        help="weight of the noise regularisation",
    )
    add(
        "--save",
        type=file(".safetensors"),
        metavar="FILE.safetensors",
        help="write the latents and the noise to this file",
    )


def add_edit_options(add: Callable[..., object]) -> None:
    add(
        "--classifier",
        required=True,
        metavar="RUN_OR_FILE",
        help="classifier whose prediction is changed",
    )
    add("--from", required=True, dest="source", metavar="CLASS", help="class of the images")
    add(
        "--to", required=True, dest="target", metavar="CLASS", help="class that they are changed to"
    )
    add(
        "--n",
        type=positive,
        default=4,
        metavar="N",
        help="number of samples, each with a strip of images",
    )
    add("--columns", type=number(int, 2), default=7, metavar="N", help="images per strip")
    add(
        "--image",
        type=Path,
        metavar="FILE",
        help="an image to start from instead of samples; it is projected into w+",
    )
    add("--resize", choices=("crop", "pad"), help="how it is resized (default: as in training)")
    add("--steps", type=positive, default=SEARCH.steps, help="steps of the projection")
    text = "a second classifier, which took no part in the edit; its predictions are shown too"
    add("--judge", metavar="RUN_OR_FILE", help=text)
    add(
        "--space",
        choices=("w", "z"),
        help="latent space (default: w if the generator has it, else z)",
    )
    text = "samples of each of the two classes for the search of a direction"
    add("--samples", type=number(int, 2), default=EDIT.samples, metavar="N", help=text)
    for name, noun in (("pixel", "pixels"), ("keep", "other classes")):
        text = f"weight of changes of {noun} in the loss"
        add(f"--{name}-weight", type=WEIGHT, default=EDIT.pixel_weight, metavar="X", help=text)
    add(
        "--reach",
        type=number(float, 0, 1, inner=True),
        default=EDIT.reach,
        help="probability of the new class at which the edit is complete",
    )
    add("--limit", type=ABOVE_0, default=EDIT.limit, help="longest step in the latent space")


def psis(text: str) -> list[float]:
    """Parse comma-separated truncations (psi), as the type of an option."""
    return [PSI(part) for part in text.split(",")]


def draw_table(options: Namespace) -> str:
    """Write a PNG file for the subcommand `grid`, `truncation` or `mix`, or, for `grid`, a folder
    of images if `--out` names one.
    """
    sampler, checkpoint, _ = open_sampler(options)
    from duetgan.inference.samples import (
        draw_grid,
        draw_mix,
        draw_truncation,
        parse_layers,
        with_styles,
    )

    out = options.out
    names = sampler.generator.label_names(checkpoint["classes"])
    count = options.n
    if options.command == "grid":
        return f"wrote {draw_grid(sampler, out, count=count, names=names)} images to {out}"
    if options.command == "truncation":
        count = draw_truncation(sampler, names, out, psis=options.psis, count=count)
        return f"wrote {count} samples at {len(options.psis)} psi to {out}"
    layers = parse_layers(options.layers, with_styles(sampler.generator, "mix").num_ws)
    count = draw_mix(sampler, names, out, layers=layers, count=count)
    return f"wrote {count} x {count} mixtures, layers {options.layers} from B, to {out}"


def interpolate(options: Namespace) -> str:
    settings.check_film(options.out, fps=options.fps)
    sampler, *_ = open_sampler(options)
    from duetgan.inference.interpolate import Journey, draw_film

    journey = Journey(sampler, options.space, options.n, options.frames)
    count = draw_film(journey, options.out, fps=options.fps, scale=options.scale)
    return f"wrote {count} frames, {count / options.fps:.1f} s, to {options.out}"


def find_image(options: Namespace) -> str:
    config = config_from(options, settings.ProjectionConfig)
    sampler, checkpoint, _ = open_sampler(options)
    from duetgan.inference.inputs import read_target
    from duetgan.inference.projection import project

    target = read_target(options.image, checkpoint, options.resize)[None]
    names = sampler.generator.label_names(checkpoint["classes"])
    lines = project(sampler, names, target, options.out, config, save_to=options.save)
    files = f"{options.out} and {options.save}" if options.save else str(options.out)
    return "\n".join([*lines, f"wrote {files}"])


def edit(options: Namespace) -> str:
    """Draw images that change from one class to another."""
    config = config_from(options, settings.EditConfig)
    sampler, checkpoint, _ = open_sampler(options)
    from duetgan.inference.editing import Editor, pair_of
    from duetgan.inference.inputs import read_target
    from duetgan.inference.strips import counterfactual, make_strips, save_strips, summary
    from duetgan.metrics.lineage import load_judge
    from duetgan.models.restore import classifier_from, read

    guide = read(resolve_for_people(options.classifier))
    names = guide["classes"]
    if sampler.generator.classes:
        require_same_classes(
            "the generator", checkpoint["classes"], f"the classifier {options.classifier}", names
        )
    editor = Editor(sampler, classifier_from(guide, sampler.device), names, config)
    source, target = pair_of(names, options.source, options.target)
    judge = None
    if options.judge is not None:
        judge = load_judge(
            options.judge,
            checkpoint,
            names,
            sampler.device,
            None,
            option="--judge",
            guide=options.classifier,
        )
    if options.image is not None:
        image = read_target(options.image, checkpoint, options.resize)[None]
        strip, direction = counterfactual(
            editor,
            image,
            source,
            target,
            steps=options.steps,
            columns=options.columns,
            judge=judge,
        )
        strips = [strip]
    else:
        start = editor.starts(source, options.n)
        direction = editor.direction(source, target)
        strips = make_strips(editor, start, direction, columns=options.columns, judge=judge)
    save_strips(strips, options.out)
    return f"{summary(strips, names, direction)}\nwrote {options.out}"


def write_dataset(options: Namespace) -> str:
    check_target(options.out, options.overwrite)
    sampler, checkpoint, path = open_sampler(options)
    from duetgan.inference import dataset

    source = dataset.provenance(path, checkpoint, sampler)
    meta = dataset.write_dataset(
        sampler,
        checkpoint,
        options.out,
        source=source,
        count=options.n,
        encoding=options.encoding,
        overwrite=options.overwrite,
    )
    return f"wrote {meta.count} images to {options.out}: {source}"


def config_from(options: Namespace, config_class: type[C]) -> C:
    """Return a config whose fields have the values of the options of the same names."""
    names = {field.name for field in fields(config_class)}
    return config_class(**{name: value for name, value in vars(options).items() if name in names})


def open_sampler(options: Namespace) -> "tuple[Sampler, dict[str, Any], Path]":
    """Return a sampler that follows the options, the checkpoint's content, and its path. Raises
    UserError.
    """
    check_writable(options.out.parent)
    path = resolve_for_people(options.checkpoint, options.which)
    from duetgan.inference.samples import Sampler, chosen_classes
    from duetgan.models.restore import generator_from, read
    from duetgan.utils.distributed.collectives import choose_device

    checkpoint = read(path)
    generator = generator_from(
        checkpoint, choose_device(options.device), several=options.command != "edit"
    )
    classes = generator.label_names(checkpoint["classes"])
    max_sets = None if generator.label_sets is None else settings.LABEL_SETS
    sampler = Sampler(
        generator=generator,
        chosen=chosen_classes(options.classes, classes, max_sets),
        seed=options.seed,
        truncation_psi=options.truncation_psi,
        truncation_cutoff=options.truncation_cutoff,
        truncation_mean=options.truncation_mean,
        noise_mode="const" if options.command == "project" else options.noise_mode,
        numpy_latents=options.latents == "numpy",
        batch_size=options.batch_size,
    )
    return sampler, checkpoint, path


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    print(options.run(options))
    from duetgan.reporting.report import refresh

    refresh(options.out)
    return 0
