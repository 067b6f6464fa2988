"""Convert another program's network (a file of NVIDIA's, R3GAN's or rosinality's) to a run folder.

`duet convert FILE OUT`: give OUT to --checkpoint of generate.py, evaluate.py and export.py, to
hubconf.py, or to --init-from of train.py. FILE is read without running anything in it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from duetgan.utils import files
from duetgan.utils.config.cli import Parser
from duetgan.utils.config.yaml_files import Tree
from duetgan.utils.errors import UserError

if TYPE_CHECKING:
    from duetgan.extras.official.names import Converted


def parser() -> Parser:
    """Return the parser of `duet convert`."""
    options = Parser(prog="duet convert", description=__doc__)
    options.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="NVIDIA's StyleGAN2 .pkl (PyTorch or TensorFlow), R3GAN's .pkl, rosinality's .pt, or "
        "a file of export.py",
    )
    options.add_argument("out", type=Path, metavar="OUT", help="the run folder to create")
    options.add_argument(
        "--classes", metavar="A,B", help="names of the classes, in order (default: 0, 1, ...)"
    )
    return options


def main(argv: list[str]) -> int:
    """Run `duet convert` and return its exit code."""
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
                f"--classes has {len(set(names))} different names, the networks have {count} "
                "classes"
            )
    content = checkpoint_of(converted, names)
    with writing(folder):
        path = checkpoints.save(folder, content)
        checkpoints.point(folder, "last", path)
    side = converted.shape["resolution"]
    channels = converted.shape["channels"]
    classes = f"{len(names)} classes" if names else "without classes"
    print(
        f"{converted.architecture}, {side}x{side} px, {channels} channels, {classes}: "
        f"{', '.join(converted.state)}"
    )
    for note in converted.notes:
        print(f"note: {note}")
    print(f"wrote {path}")
    return 0


def read(path: Path) -> "Converted":
    """Return the networks in a file of another program.

    The program is recognised by the suffix and the content of the file. No code in the file is run.
    Raises UserError for a file that is missing, damaged, or holds networks that Duet does not
    support.
    """
    from duetgan.extras.official import nvidia, r3gan, rosinality, tensorflow
    from duetgan.extras.official.unpickle import Inert, read_pickle
    from duetgan.models.weights import read_plain

    # Refused is a ValueError.
    faults = (ValueError, TypeError, LookupError, RuntimeError)
    with files.reading(
        path,
        "give a network of NVIDIA's StyleGAN, R3GAN or rosinality's stylegan2-pytorch",
        *faults,
    ):
        if path.suffix == ".safetensors":
            return nvidia.from_file(path)
        if path.suffix != ".pkl":
            return rosinality.convert(read_plain(path, "fetch it again"))
        content = read_pickle(path)
        if not isinstance(content, dict):
            return tensorflow.convert(content)
        generator = content.get("G_ema")
        if isinstance(generator, Inert) and "_init_kwargs" in generator.state:
            return nvidia.convert(content)
        return r3gan.convert(content)


def checkpoint_of(converted: "Converted", names: list[str]) -> Tree:
    """Return the content of a checkpoint with the converted networks and class names `names`."""
    from duetgan.utils.checkpoint import SCHEMA

    config: Tree = {"task": "gan", "architecture": converted.architecture}
    config |= {"generator": converted.generator, "discriminator": converted.discriminator}
    head = {"schema": SCHEMA, "task": "gan", "step": 0, "config": config, "classes": names}
    return {**head, "shape": converted.shape, "state": converted.state}
