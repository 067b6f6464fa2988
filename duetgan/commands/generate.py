"""Draw images, films and data sets with a trained generator, or find an image among those that it
can draw.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:  # what needs torch is imported when the options are known to be right
    from duetgan.inference.samples import Sampler

SEARCH, EDIT = settings.ProjectionConfig(), settings.EditConfig()  # the defaults
WEIGHT, ABOVE_0 = number(float, 0), number(float, 0, inner=True)


def parser() -> Parser:
    """The options: a subcommand, then its own."""
    options = Parser(prog="generate.py", description=__doc__)
    commands = options.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def begin(
        run: Callable[[Namespace], str],
        name: str,
        text: str,
        without: str = "",
        out: Sequence[str] = (".png",),
    ) -> Callable[..., Any]:
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
            help="the file to write; of grid also a folder",
        )
        add("--seed", type=number(int), default=0, help="of every draw")
        if "classes" not in without:
            add(
                "--classes",
                default="all",
                metavar="A,B",
                help='names of classes, or of sets of them: "cat;dog"',
            )
        text = "numpy: z by the rule of NVIDIA's programs, so that their seed is ours"
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

    in_all = "images in all (default: {} a class; {} without classes)"
    add = begin(draw_table, "grid", "a grid of samples; a row for each class", out=(".png", ""))
    add("--n", type=positive, metavar="N", help=in_all.format(*settings.GRID))

    add = begin(draw_table, "truncation", "the same samples at several truncations", without="psi")
    add("--psis", type=psis, default="0,0.3,0.5,0.7,1", metavar="X,Y", help="rows")
    add("--n", type=positive, metavar="N", help="columns (default: 8, or one a class up to 16)")

    add = begin(draw_table, "mix", "a table of style mixing")
    text = "layers whose style comes from B, e.g. 0-3,6; the first are the coarse ones"
    add("--layers", default="0-3", metavar="L", help=text)
    add("--n", type=positive, metavar="N", help="sources A, and as many B (default: 8)")

    text = "a film from sample to sample, .mp4 or .gif"
    add_film_options(begin(interpolate, "interpolate", text, out=(".mp4", ".gif")))
    text = "the nearest images to a given one, in w and in w+"
    add_projection_options(begin(find_image, "project", text, without="noise, psi"))
    text = (
        "strips of images on their way from one class of a classifier to another, the rest staying"
    )
    add_edit_options(begin(edit, "edit", text, without="classes"))

    add = begin(
        write_dataset, "dataset", "a packed data set of samples, for train.py", out=(".lmdb",)
    )
    add("--n", type=positive, metavar="N", help=in_all.format(*settings.DATASET))
    add("--encoding", choices=settings.ENCODINGS, default="raw", help="how they are stored")
    add("--overwrite", action="store_true", help="replace --out if it exists")
    return options


def add_film_options(add: Callable[..., Any]) -> None:
    add(
        "--space",
        choices=("w", "z"),
        help="straight in w, or along great circles in z (default: w if there is one)",
    )
    add(
        "--n",
        type=number(int, 2),
        metavar="N",
        help="samples to go through (default: 8, or one a class up to 16)",
    )
    add("--frames", type=positive, default=settings.FRAMES, help="from one to the next")
    add("--fps", type=positive, default=settings.FPS, help="frames a second")
    add(
        "--scale",
        type=positive,
        metavar="N",
        help="a pixel becomes NxN (default: small images to 256 px)",
    )


def add_projection_options(add: Callable[..., Any]) -> None:
    add("--image", required=True, type=Path, metavar="FILE", help="the image to reproduce")
    add("--resize", choices=("crop", "pad"), help="how it is resized (default: as in training)")
    add(
        "--space",
        choices=tuple(settings.SPACES),
        default="both",
        help="one w for all layers, or one each",
    )
    add(
        "--features",
        choices=settings.FEATURES,
        help="what is compared (default: resnet50, without its weights pixels)",
    )
    add("--weights", metavar="FILE", help="ResNet-50's weights (default: $DUET_WEIGHTS, weights/)")
    add("--pixel-weight", type=WEIGHT, default=SEARCH.pixel_weight)
    add("--steps", type=positive, default=SEARCH.steps, help="in each space")
    add("--lr", type=ABOVE_0, default=SEARCH.lr, help="highest learning rate")
    add(
        "--noise-mode",
        choices=("const", "none", "optimise"),
        default="const",
        help="the stored noise maps, none, or searched for as well",
    )
    add("--noise-weight", type=WEIGHT, default=SEARCH.noise_weight)
    add(
        "--save",
        type=file(".safetensors"),
        metavar="FILE.safetensors",
        help="latents and noise that were found",
    )


def add_edit_options(add: Callable[..., Any]) -> None:
    add("--classifier", required=True, metavar="RUN_OR_FILE", help="whose answer is moved")
    add(
        "--from", required=True, dest="source", metavar="CLASS", help="the class that images are of"
    )
    add("--to", required=True, dest="target", metavar="CLASS", help="the class that they become")
    add("--n", type=positive, default=4, metavar="N", help="samples, a strip each")
    add("--columns", type=number(int, 2), default=7, metavar="N", help="images of a strip")
    add(
        "--image",
        type=Path,
        metavar="FILE",
        help="an image to start from instead of samples; it is projected into w+",
    )
    add("--resize", choices=("crop", "pad"), help="how it is resized (default: as in training)")
    add("--steps", type=positive, default=SEARCH.steps, help="of its projection")
    text = "another classifier, whose answers stand beside; it took no part in finding the edit"
    add("--judge", metavar="RUN_OR_FILE", help=text)
    add("--space", choices=("w", "z"), help="default: w if there is one, else z")
    text = "of each of the two classes, on which the direction is found"
    add("--samples", type=number(int, 2), default=EDIT.samples, metavar="N", help=text)
    for name, what in (("pixel", "pixels"), ("keep", "other classes")):
        text = f"how much change of {what} counts"
        add(f"--{name}-weight", type=WEIGHT, default=EDIT.pixel_weight, metavar="X", help=text)
    add(
        "--reach",
        type=number(float, 0, 1, inner=True),
        default=EDIT.reach,
        help="probability at which it is there",
    )
    add("--limit", type=ABOVE_0, default=EDIT.limit, help="the largest step that is tried")


def psis(text: str) -> list[float]:
    """Numbers with commas between, as an option's type."""
    return [PSI(part) for part in text.split(",")]


def draw_table(options: Namespace) -> str:
    """`grid`, `truncation` or `mix`: a PNG file; of `grid` also a folder of single ones."""
    sampler, checkpoint, _ = open_sampler(options)
    from duetgan.inference.samples import (
        draw_grid,
        draw_mix,
        draw_truncation,
        parse_layers,
        with_styles,
    )

    out, names, count = options.out, sampler.generator.label_names(checkpoint["classes"]), options.n
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
    config = chosen(options, settings.ProjectionConfig)
    sampler, checkpoint, _ = open_sampler(options)
    from duetgan.inference.inputs import read_target
    from duetgan.inference.projection import project

    target = read_target(options.image, checkpoint, options.resize)[None]
    names = sampler.generator.label_names(checkpoint["classes"])
    lines = project(sampler, names, target, options.out, config, save_to=options.save)
    return "\n".join(
        [*lines, f"wrote {options.out}" + (f" and {options.save}" if options.save else "")]
    )


def edit(options: Namespace) -> str:
    """Images on their way from a class to another."""
    config = chosen(options, settings.EditConfig)
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
    how: dict[str, Any] = {"columns": options.columns}
    if options.judge is not None:
        about = {"option": "--judge", "guide": options.classifier}
        how["judge"] = load_judge(options.judge, checkpoint, names, sampler.device, None, **about)
    if options.image is not None:
        image = read_target(options.image, checkpoint, options.resize)[None]
        strip, direction = counterfactual(editor, image, source, target, steps=options.steps, **how)
        strips = [strip]
    else:
        start, direction = editor.starts(source, options.n), editor.direction(source, target)
        strips = make_strips(editor, start, direction, **how)
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


def chosen(options: Namespace, config: Any) -> Any:
    """A config of what the options say of its fields; they have the same names."""
    names = {field.name for field in fields(config)}
    return config(**{name: value for name, value in vars(options).items() if name in names})


def open_sampler(options: Namespace) -> "tuple[Sampler, dict[str, Any], Path]":
    """The generator with the options of its sampling, its checkpoint, and that one's file. Raises
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
    sampler = Sampler(
        generator=generator,
        chosen=chosen_classes(
            options.classes, classes, None if generator.sets is None else settings.SETS
        ),
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
