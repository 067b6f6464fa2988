"""Take the weights of another program: a run folder from NVIDIA's, R3GAN's or rosinality's file.

`duet convert FILE OUT`: OUT serves --checkpoint of generate.py, evaluate.py and export.py,
hubconf.py, and --init-from of train.py. FILE is read without running anything in it.
"""

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duetgan.utils import bounded
from duetgan.utils.config.cli import Parser
from duetgan.utils.errors import UserError

if TYPE_CHECKING:
    from duetgan.models.official.names import Converted


def parser() -> Parser:
    options = Parser(prog="duet convert", description=__doc__)
    options.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="NVIDIA's StyleGAN2 .pkl (PyTorch or TensorFlow), R3GAN's .pkl, rosinality's .pt, or what export.py wrote",
    )
    options.add_argument("out", type=Path, metavar="OUT", help="the run folder to make")
    options.add_argument(
        "--classes", metavar="A,B", help="names of its classes, in order (default: 0, 1, ...)"
    )
    return options


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    folder = options.out / "checkpoints"
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise UserError(f"{options.out}: exists; give a new folder")
    from duetgan.utils import checkpoint as checkpoints
    from duetgan.utils.files import writing

    converted = read(options.file)
    count = converted.shape["classes"]
    names = [str(number) for number in range(count)]
    if options.classes is not None:
        names = [name.strip() for name in options.classes.split(",")]
        if len(names) != count or len(set(names)) != count or not all(names):
            raise UserError(
                f"--classes has {len(set(names))} different names, the networks have {count} classes"
            )
    content = checkpoint_of(converted, names)
    with writing(folder):
        path = checkpoints.save(folder, content)
        checkpoints.point(folder, "last", path)
    side, channels = converted.shape["resolution"], converted.shape["channels"]
    of = f"{len(names)} classes" if names else "without classes"
    print(
        f"{converted.architecture}, {side}x{side} px, {channels} channels, {of}: {', '.join(converted.state)}"
    )
    for note in converted.notes:
        print(f"note: {note}")
    print(f"wrote {path}")
    return 0


def read(path: Path) -> "Converted":
    """The networks in a file of one of the programs, which its content tells apart.

    Raises UserError for a file that is missing, damaged, or holds what Duet's networks cannot be;
    nothing in it is run.
    """
    from duetgan.models.official import nvidia, r3gan, rosinality, tensorflow
    from duetgan.models.official.unpickle import Inert, read_pickle
    from duetgan.models.weights import read_plain

    bounded.refuse_page(path)
    faults = ValueError, TypeError, LookupError, RuntimeError  # Refused is a ValueError
    with bounded.reading(path, "give a StyleGAN2 or R3GAN network", *faults):
        if path.suffix == ".safetensors":
            return nvidia.from_file(path)
        if path.suffix != ".pkl":
            plain = read_plain(path, "fetch it again")
            refuse_other_programs(path, plain if isinstance(plain, dict) else {})
            return rosinality.convert(plain)
        refuse_other_programs(path, {})
        content = read_pickle(path)
        if not isinstance(content, dict):
            return tensorflow.convert(content)
        refuse_other_programs(path, content)
        average: Any = content.get("G_ema")
        persistent = isinstance(average, Inert) and "_init_kwargs" in average.state
        return nvidia.convert(content) if persistent else r3gan.convert(content)


def refuse_other_programs(path: Path, content: dict[str, Any]) -> None:
    """Raise UserError for a file of a program whose networks Duet has not, by its name."""
    from duetgan.models.official.unpickle import Inert

    g, d = (content.get(name) for name in ("G_ema", "D"))
    parts = g.state.get("_modules", {}) if isinstance(g, Inert) else {}
    synthesis = parts.get("synthesis") if isinstance(parts, dict) else None
    layers = synthesis.state.get("_modules", {}) if isinstance(synthesis, Inert) else {}
    with (
        bounded.open_file(path, bounded.WEIGHTS) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        projected, alias_free = (
            text.find(word) >= 0 for word in (b"pg_modules", b"networks_stylegan3")
        )
    programs = {
        "Projected GAN or StyleGAN-XL": projected
        or (isinstance(d, Inert) and d.name == "ProjectedDiscriminator"),
        "StyleGAN3": alias_free or (isinstance(layers, dict) and "input" in layers),
        "lucidrains' stylegan2-pytorch": "GAN" in content and "g_ema" not in content,
        "PyTorch-StudioGAN": "state_dict" in content and "g_ema" not in content,
    }
    for name in [name for name, found in programs.items() if found]:
        raise UserError(
            f"{path}: is a checkpoint of {name}; Duet reads those of NVIDIA's StyleGAN2, R3GAN and rosinality's "
            "stylegan2-pytorch"
        )


def checkpoint_of(converted: "Converted", names: list[str]) -> dict[str, Any]:
    """The checkpoint of networks whose classes have these names."""
    from duetgan.utils.checkpoint import SCHEMA

    config: dict[str, Any] = {"task": "gan", "architecture": converted.architecture}
    config |= {"generator": converted.generator, "discriminator": converted.discriminator}
    head = {"schema": SCHEMA, "task": "gan", "step": 0, "config": config, "classes": names}
    return {**head, "shape": converted.shape, "state": converted.state}
