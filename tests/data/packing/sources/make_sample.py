"""Make data/sample/ from the full Fashion-MNIST: the first images of every class, in the order of the full set.

`python -m tests.data.packing.sources.make_sample [--root DIR] [--out DIR]` writes the four idx files bit for bit as
they are in the repository (with zlib's own deflate; another implementation may compress to other bytes).
"""

import gzip
import io
import struct
import sys
from pathlib import Path

import numpy as np

from duetgan.data.packing.sources.base import ArraySource
from duetgan.data.packing.sources.named import PREFIX, SAMPLE, open_fashion_mnist
from duetgan.utils.config.cli import Parser
from duetgan.utils.distributed.process import run_cli

PER_CLASS = {"train": 1000, "test": 200}


def idx_gz(array: np.ndarray) -> bytes:
    """A uint8 array as a gzipped idx file; the same array gives the same bytes (no name, no time)."""
    head = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as file:
        file.write(head + np.ascontiguousarray(array, np.uint8).tobytes())
    return buffer.getvalue()


def choose(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Indices of the first `per_class` images of each class, ascending."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in np.unique(labels)]))


def sample_files(root: Path | None) -> dict[str, bytes]:
    """The sample's files by name, made from the full set (found as `fashion-mnist` is)."""
    files = {}
    for split, per_class in PER_CLASS.items():
        full: ArraySource = open_fashion_mnist(split, root)
        chosen = choose(full.labels(), per_class)
        files[f"{PREFIX[split]}-images-idx3-ubyte.gz"] = idx_gz(full.images[chosen, :, :, 0])
        files[f"{PREFIX[split]}-labels-idx1-ubyte.gz"] = idx_gz(full.labels()[chosen].astype(np.uint8))
    return files


def main(argv: list[str]) -> None:
    """The command line."""
    name = "python -m tests.data.packing.sources.make_sample"
    parser = Parser(prog=name, description="Make data/sample/ from the full set.")
    parser.add_argument("--root", type=Path, help="folder of the four idx files of the full set")
    parser.add_argument("--out", type=Path, default=SAMPLE, help="folder to write to")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, content in sample_files(args.root).items():
        (args.out / name).write_bytes(content)
        print(f"{args.out / name}: {len(content):,} bytes")


if __name__ == "__main__":
    sys.exit(run_cli(main))
