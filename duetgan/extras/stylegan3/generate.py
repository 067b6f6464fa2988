"""The subcommand `move` of generate.py: a film whose images move and turn."""

from argparse import ArgumentTypeError, Namespace

from duetgan.commands.generate import OUTPUTS, Add, Output, open_sampler
from duetgan.inference import settings
from duetgan.utils.config.cli import number, positive

NUMBER = number(float)


def shift(text: str) -> tuple[float, float]:
    """Parse the value X,Y of an option as two numbers."""
    parts = [NUMBER(part) for part in text.split(",")]
    if len(parts) != 2:
        raise ArgumentTypeError(f"{text!r}: give two numbers, X,Y")
    return parts[0], parts[1]


def add_options(add: Add) -> None:
    add(
        "--translate",
        type=shift,
        default=(0.0, 0.0),
        metavar="X,Y",
        help="largest shift to the right and down, in widths of the image; during the film the "
        "image moves that far, to the opposite side and back",
    )
    add(
        "--rotate",
        type=NUMBER,
        default=0.0,
        metavar="DEGREES",
        help="angle by which the image turns clockwise about its centre during the film",
    )
    add("--n", type=positive, default=1, metavar="N", help="samples to visit (default: 1)")
    add("--frames", type=positive, default=60, help="frames from one sample to the next")
    add("--fps", type=positive, default=settings.FPS, help="frames per second")


def move(options: Namespace) -> str:
    """Write the film and return a message about it."""
    settings.check_film(options.out, fps=options.fps)
    sampler, *_ = open_sampler(options)
    from duetgan.extras.stylegan3.film import Motion
    from duetgan.inference.interpolate import draw_film

    motion = Motion(sampler, options.n, options.frames, options.translate, options.rotate)
    count = draw_film(motion, options.out, fps=options.fps)
    return f"wrote {count} frames, {count / options.fps:.1f} s, to {options.out}"


OUTPUTS["move"] = Output(
    "write a film of StyleGAN3's samples that move and turn, .mp4 or .gif",
    move,
    add_options,
    suffixes=(".mp4", ".gif"),
)
