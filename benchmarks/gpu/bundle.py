"""Fill the folder that `python -m benchmarks.gpu` needs on a machine without a network: wheels, peers, CIFAR-10.

`python -m benchmarks.gpu.bundle [--has FILE] [--py 3.12] [--cifar10 FOLDER] [--peers FOLDER] [--limit MB] [--out DIR]`,
or `make gpu-bundle HAS=FILE PY=3.12 CIFAR10=FOLDER PEERS=FOLDER`. Without --has the machine is taken for one of the
usual images with PyTorch, which bring NumPy, OpenCV, matplotlib, TensorBoard and pytest along.

Wheels come first, for without them nothing starts; then the peers; CIFAR-10 gets the room that is left: all 60,000
images as JPEG of the best quality that fits. bundle.json says what is in it, and what is not, and why.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import cifar, wheels
from duetgan.utils.config.cli import Parser, number
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.files import as_json

MB = 1_000_000
LIMIT = 60.0  # MB, without torch
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", "*.pyc", "docs", "*.png", "*.jpg", "*.gif", "*.mp4")


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def fill(out: Path, has: set[str], python: str, cifar10: Path | None, peers: Path | None, limit: int) -> dict[str, Any]:
    """Make the folder anew; what bundle.json says. Raises UserError where the wheels alone are too large."""
    shutil.rmtree(out, ignore_errors=True)
    for name in ("wheels", "peers", "data"):
        (out / name).mkdir(parents=True)
    about: dict[str, Any] = {"python": python, "limit_mb": limit / MB, "left_out": {}}
    try:
        wheels.fetch(wheels.wanted(has, python), python, out / "wheels")
    except wheels.Unusable as error:
        raise UserError(str(error)) from None
    about["wheels_mb"] = {path.name: path.stat().st_size / MB for path in sorted((out / "wheels").glob("*.whl"))}
    left = limit - size_of(out / "wheels")
    if left < 0:
        three = sorted(about["wheels_mb"].items(), key=lambda item: -item[1])[:3]
        largest = ", ".join(f"{name.split('-')[0]} {size:.1f}" for name, size in three)
        told = f"the wheels take {(limit - left) / MB:.1f} MB, {limit / MB:g} are allowed ({largest})"
        raise UserError(f"{told}: say what the machine has (HAS=FILE, its `pip list`), or allow more (LIMIT=MB)")
    about["peers_mb"] = {}
    for peer in sorted(path for path in (peers.iterdir() if peers else ()) if path.is_dir()):
        target = out / "peers" / peer.name
        shutil.copytree(peer, target, ignore=LEFT_OUT)
        size = size_of(target)
        if size > left:
            shutil.rmtree(target)
            about["left_out"][peer.name] = f"{size / MB:.1f} MB, {left / MB:.1f} were left"
        else:
            left -= size
            about["peers_mb"][peer.name] = size / MB
    about |= _data(out / "data", cifar10, left - MB // 10, about["left_out"])  # bundle.json takes a little
    (out / "bundle.json").write_bytes(as_json(about))
    about["total_mb"] = size_of(out) / MB
    return about


def _data(folder: Path, cifar10: Path | None, room: int, left_out: dict[str, str]) -> dict[str, Any]:
    try:
        files = cifar.fitting(cifar.load(cifar10), room)
    except UserError as error:
        left_out["cifar10"] = str(error)
        return {"data_mb": {}}
    if files is None:
        left_out["cifar10"] = f"not even as JPEG of quality {cifar.QUALITIES[-1]} does it fit into {room / MB:.1f} MB"
        return {"data_mb": {}}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {"data_mb": {name: len(content) / MB for name, content in files.items()}}


def main(argv: list[str]) -> None:
    parser = Parser(prog="benchmarks.gpu.bundle", description=__doc__)
    add = parser.add_argument
    add("--has", type=Path, metavar="FILE", help="`pip list` of the machine (default: what images with PyTorch bring)")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    add("--py", default=here, metavar="X.Y", help=f"Python of the machine (default: {here}, as here)")
    add("--cifar10", type=Path, metavar="FOLDER", help="as --root of `duet pack cifar10`")
    add("--peers", type=Path, metavar="FOLDER", help="with stylegan3/ and timm/, or one of them")
    add("--limit", type=number(float, 1), default=LIMIT, metavar="MB", help=f"of all of it (default: {LIMIT:g})")
    add("--out", type=Path, default=wheels.BUNDLE, metavar="DIR", help="made anew (default: build/gpu-bundle)")
    options = parser.parse_args(argv)
    for name in ("has", "cifar10", "peers"):
        path = getattr(options, name)
        if path is not None and not path.exists():
            raise UserError(f"--{name} {path}: there is no such file or folder")
    if options.out.is_dir() and any(options.out.iterdir()) and not (options.out / "wheels").is_dir():
        raise UserError(f"--out {options.out}: is no bundle and not empty; name another folder")
    has = set(wheels.IMAGE) if options.has is None else wheels.names_in(options.has.read_text())
    limit = round(options.limit * MB)
    about = fill(options.out, has, options.py, options.cifar10, options.peers, limit)
    for kind in ("wheels", "peers", "data"):
        sizes = about[f"{kind}_mb"]
        each = ", ".join(f"{name.partition('-cp')[0]} {size:.2f}" for name, size in sizes.items())
        print(f"{kind:8} {sum(sizes.values()):6.2f} MB: {each or 'none'}")
    for name, why in about["left_out"].items():
        print(f"left out: {name}: {why}")
    print(f"{options.out}: {about['total_mb']:.1f} MB of {options.limit:g}, for Python {options.py}")


if __name__ == "__main__":
    sys.exit(run_cli(main))
