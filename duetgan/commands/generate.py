"""Draw images, films and data sets with a trained generator, or reproduce a given image with it."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from duetgan.data.lmdb.writer import check_target
from duetgan.inference import settings
from duetgan.utils import extras
from duetgan.utils.checkpoint import Checkpoint, resolve
from duetgan.utils.config.cli import (
    PSI,
    Parser,
    add_model_options,
    add_truncation_options,
    file,
    number,
    positive,
)
from duetgan.utils.errors import refuse
from duetgan.utils.files import check_writable

if TYPE_CHECKING:  # imports of torch take seconds, so the options are checked first
    from duetgan.inference.samples import Sampler
    from duetgan.models.gan import NoiseMode

SEARCH = settings.ProjectionConfig()  # defaults of options
IN_ALL = "number of images in all (default: {} per class; {} without classes)"
Add = Callable[..., object]  # a parser's `add_argument`
C = TypeVar("C")


@dataclass(frozen=True)
class Output:
    """A subcommand of generate.py, such as `grid`: its function, options and help."""

    help: str
    run: Callable[[Namespace], str]  # returns a message about what was written
    add_options: Callable[[Add], None]
    suffixes: tuple[str, ...] = (".png",)  # of the file
    classes: bool = True  # False without the option --classes
    psi: bool = True  # False without the option --truncation-psi
    noise: bool = True  # False without the options of truncation and noise
    # names of the options that choose samples by seeds and files, with the samples in their help
    sources: Mapping[str, str] = field(default_factory=dict)


def parser() -> Parser:
    """Return the parser, with a subcommand for each of OUTPUTS."""
    options = Parser(prog="generate.py", description=__doc__)
    commands = options.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, output in OUTPUTS.items():
        command = commands.add_parser(
            name, help=output.help, description=output.help, prog=f"generate.py {name}"
        )
        command.set_defaults(
            run=output.run,
            classes="all",
            truncation_psi=1.0,
            truncation_cutoff=None,
            truncation_mean="class",
            seeds=(),
        )
        add_model_options(command)
        add = command.add_argument
        add(
            "--out",
            required=True,
            type=file(*output.suffixes),
            metavar="FILE",
            help="the file to write; for grid also a folder",
        )
        text = "seed of the samples (default: 0)"
        if output.sources:
            text = "the first seed; each further sample of a class has the next one (default: 0)"
        add("--seed", type=number(int), help=text)
        for option, samples in output.sources.items():
            add(
                f"--{option}",
                type=settings.sources,
                default=(),
                metavar="LIST",
                help=f"{samples}: seeds and files of project --save, such as "
                "2,3,10-80,found.safetensors (instead of --seed and --n)",
            )
        if output.classes:
            add(
                "--classes",
                default="all",
                metavar="A,B",
                help='names of classes, or of sets of classes: "cat;dog"',
            )
        add(
            "--latents",
            choices=("torch", "numpy"),
            default="torch",
            help="numpy: draw z as NVIDIA's repositories do, so that a seed gives the same image "
            "there",
        )
        if output.noise:
            add_truncation_options(command, psi=output.psi)
            text = "truncate the first L layers only (default: all)"
            add("--truncation-cutoff", type=number(int, 0), metavar="L", help=text)
            add(
                "--noise-mode",
                choices=("random", "const", "none"),
                default="random",
                help="per-pixel noise",
            )
        output.add_options(add)
    return options


def add_grid_options(add: Add) -> None:
    add("--n", type=positive, metavar="N", help=IN_ALL.format(*settings.GRID))


def write_grid(options: Namespace) -> str:
    """Write a grid of samples as a PNG file; return a message about it for the user.

    If `--out` does not end in .png, it is a folder, to which each sample is written as a file.
    """
    sampler, checkpoint, _ = open_sampler(options, every_class=True)
    from duetgan.inference.samples import draw_grid

    names = sampler.generator.label_names(checkpoint["classes"])
    count = draw_grid(sampler, options.out, count=options.n, names=names)
    return f"wrote {count} images to {options.out}"


def psis(text: str) -> list[float]:
    """Return the numbers in the text of `--psis`, which are values of psi (truncation)."""
    return [PSI(part) for part in text.split(",")]


def add_truncation_table_options(add: Add) -> None:
    add("--psis", type=psis, default="0,0.3,0.5,0.7,1", metavar="X,Y", help="psi of each row")
    add("--n", type=positive, metavar="N", help="columns (default: 8, or one per class up to 16)")


def write_truncation(options: Namespace) -> str:
    """Write a PNG file with truncated samples; return a message about it for the user.

    There is a row for each value of `--psis`. All rows show the same samples.
    """
    sampler, checkpoint, _ = open_sampler(options)
    from duetgan.inference.samples import draw_truncation

    names = sampler.generator.label_names(checkpoint["classes"])
    count = draw_truncation(sampler, names, options.out, psis=options.psis, count=options.n)
    return f"wrote {count} samples at {len(options.psis)} psi to {options.out}"


def add_mix_options(add: Add) -> None:
    text = "layers whose style comes from B, such as 0-3,6; the first layers are coarse"
    add("--layers", default="0-3", metavar="L", help=text)
    add(
        "--n", type=positive, metavar="N", help="number of samples A, and of samples B (default: 8)"
    )


def write_mix(options: Namespace) -> str:
    """Write a PNG file with a table of mixed samples; return a message about it for the user.

    Each cell mixes the styles of its row's sample A with those of its column's sample B.
    """
    sampler, checkpoint, _ = open_sampler(options)
    from duetgan.inference.samples import draw_mix, load_sources, parse_layers, with_styles

    names = sampler.generator.label_names(checkpoint["classes"])
    layers = parse_layers(options.layers, with_styles(sampler.generator, "mix").num_ws)
    size = draw_mix(
        sampler,
        names,
        options.out,
        layers=layers,
        count=options.n,
        rows=load_sources(options.rows, sampler.generator, names),
        columns=load_sources(options.cols, sampler.generator, names),
    )
    return f"wrote {size} mixtures, layers {options.layers} from B, to {options.out}"


def add_film_options(add: Add) -> None:
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


def interpolate(options: Namespace) -> str:
    settings.check_film(options.out, fps=options.fps)
    refuse(
        (len(options.seeds) == 1, "--seeds: a film goes from sample to sample, give two or more")
    )
    sampler, checkpoint, _ = open_sampler(options)
    from duetgan.inference.interpolate import Journey, draw_film
    from duetgan.inference.samples import captions

    journey = Journey(sampler, options.space, options.n, options.frames)
    count = draw_film(journey, options.out, fps=options.fps, scale=options.scale)
    names = journey.sampler.generator.label_names(checkpoint["classes"])
    heads = captions(journey.sampler, names, range(journey.keyframes))
    keyframes = ", ".join(head.replace("\n", " ") for head in heads)
    return f"{keyframes}\nwrote {count} frames, {count / options.fps:.1f} s, to {options.out}"


def add_projection_options(add: Add) -> None:
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
    add("--steps", type=positive, default=SEARCH.steps, help="steps of the search, in each space")
    add(
        "--noise-mode",
        choices=("const", "none", "optimise"),
        default="const",
        help="use the stored noise maps, none, or optimise them as well",
    )
    add(
        "--save",
        type=file(".safetensors"),
        metavar="FILE.safetensors",
        help="write the latents and the noise to this file",
    )


def find_image(options: Namespace) -> str:
    config = config_from(options, settings.ProjectionConfig)
    sampler, checkpoint, _ = open_sampler(options, noise_mode="const")
    from duetgan.inference.inputs import read_target
    from duetgan.inference.projection import project

    target = read_target(options.image, checkpoint, options.resize)[None]
    names = sampler.generator.label_names(checkpoint["classes"])
    lines = project(sampler, names, target, options.out, config, save_to=options.save)
    files = f"{options.out} and {options.save}" if options.save else str(options.out)
    return "\n".join([*lines, f"wrote {files}"])


def add_dataset_options(add: Add) -> None:
    add("--n", type=positive, metavar="N", help=IN_ALL.format(*settings.DATASET))
    add("--encoding", choices=settings.ENCODINGS, default="raw", help="how they are stored")
    add("--overwrite", action="store_true", help="replace --out if it exists")


def write_dataset(options: Namespace) -> str:
    check_target(options.out, options.overwrite)
    sampler, checkpoint, path = open_sampler(options, every_class=True)
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


OUTPUTS = {
    "grid": Output(
        "draw a grid of samples, with a row for each class",
        write_grid,
        add_grid_options,
        suffixes=(".png", ""),
        sources={"seeds": "samples of each class"},
    ),
    "truncation": Output(
        "draw the same samples at several truncations",
        write_truncation,
        add_truncation_table_options,
        psi=False,
        sources={"seeds": "samples, whose classes take turns"},
    ),
    "mix": Output(
        "draw a table of style mixing",
        write_mix,
        add_mix_options,
        sources={"rows": "samples A, whose classes take turns", "cols": "samples B"},
    ),
    "interpolate": Output(
        "write a film from sample to sample, .mp4 or .gif",
        interpolate,
        add_film_options,
        suffixes=(".mp4", ".gif"),
        sources={"seeds": "samples to visit, whose classes take turns"},
    ),
    "project": Output(
        "find the latents whose image is nearest to a given image, in w and in w+",
        find_image,
        add_projection_options,
        noise=False,
    ),
    "dataset": Output(
        "write a packed data set of samples, for train.py",
        write_dataset,
        add_dataset_options,
        suffixes=(".lmdb",),
        sources={"seeds": "samples of each class, without files"},
    ),
}


def config_from(options: Namespace, config_class: type[C]) -> C:
    """Return an instance of a dataclass, with values from the command-line options.

    A field gets the value of the option with the same name. If there is no such option, the field
    has its default.
    """
    names = {field.name for field in fields(config_class)}  # type: ignore[arg-type]
    return config_class(**{name: value for name, value in vars(options).items() if name in names})


def open_sampler(
    options: Namespace,
    *,
    noise_mode: "NoiseMode | None" = None,
    several: bool = True,
    every_class: bool = False,
) -> "tuple[Sampler, Checkpoint, Path]":
    """Read the checkpoint, and make a sampler with the settings of the command-line options.

    Returns the sampler, the checkpoint's content, and the checkpoint's path. Raises UserError for
    unusable options or checkpoints.

    Args:
        noise_mode: replaces the option `--noise-mode`; None: use the option.
        several: True to accept a generator of images with several labels each.
        every_class: True to draw each of `--seeds` once for each class. Otherwise each seed gives
            one sample, and its class is the next one in turn.
    """
    refuse(
        (
            options.seeds and (options.seed is not None or options.n),
            "--seeds names the samples: leave out --seed and --n",
        )
    )
    check_writable(options.out.parent)
    path = resolve(options.checkpoint, options.which)
    from duetgan.inference.samples import Sampler, chosen_classes, load_sources
    from duetgan.models.restore import generator_from, read
    from duetgan.utils.distributed.collectives import choose_device

    checkpoint = read(path)
    generator = generator_from(checkpoint, choose_device(options.device), several=several)
    classes = generator.label_names(checkpoint["classes"])
    max_sets = None if generator.label_sets is None else settings.LABEL_SETS
    chosen = chosen_classes(options.classes, classes, max_sets)
    times = len(chosen) if every_class else 1
    sampler = Sampler(
        generator=generator,
        chosen=chosen,
        seed=options.seed or 0,
        sources=load_sources(options.seeds, generator, classes, times=times),
        truncation_psi=options.truncation_psi,
        truncation_cutoff=options.truncation_cutoff,
        truncation_mean=options.truncation_mean,
        noise_mode=noise_mode or options.noise_mode,
        numpy_latents=options.latents == "numpy",
        batch_size=options.batch_size,
    )
    return sampler, checkpoint, path


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    print(options.run(options))
    return 0


extras.attach(__name__)
