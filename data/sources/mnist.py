"""Idx files (MNIST's format), and Fashion-MNIST (Zalando SE, MIT licence), of which a sample comes with the program.

A file is: two zero bytes, 8 for unsigned bytes, the number of dimensions, each dimension as a big-endian 32-bit number,
then the values in C order.
"""

import math
import struct
from pathlib import Path

import numpy as np

from data.sources.base import ArraySource
from data.sources.download import cache_folder, downloading
from utils import bounded
from utils.errors import UserError

PREFIX = {"train": "train", "test": "t10k"}
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist
SAMPLE = Path(__file__).parents[1] / "sample"


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array of an idx file, gzipped if its name ends in ".gz". Raises UserError for a damaged one."""
    try:
        content = (bounded.read_gzip if path.suffix == ".gz" else bounded.read_file)(path, bounded.ARRAY)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); get it again") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise UserError(f"{path} is not an idx file of bytes; get it again")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    shape = struct.unpack_from(f">{dimensions}I", content, 4) if len(content) >= start else ()
    if not shape or len(content) != start + math.prod(shape):
        raise UserError(f"{path} is truncated or damaged: {len(content):,} bytes do not fit its header; get it again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def find_idx(folder: Path, split: str) -> tuple[Path, Path] | None:
    """The files of images and labels of a split in `folder`, gzipped or not, or None if one is missing."""
    found = []
    for kind in ("images-idx3", "labels-idx1"):
        stem = f"{PREFIX[split]}-{kind}-ubyte"
        names = (stem, f"{stem}.gz", stem.replace("-idx", ".idx"), stem.replace("-idx", ".idx") + ".gz")
        found.append(next((folder / name for name in names if (folder / name).is_file()), None))
    images, labels = found
    return (images, labels) if images and labels else None


def idx_source(name: str, folder: Path, split: str, classes: list[str] | None = None) -> ArraySource:
    """Images [n, H, W] and labels [n] of the idx files in `folder`; class names are numbers unless given.

    Raises UserError if a file is missing or damaged, or if they do not match.
    """
    paths = find_idx(folder, split)
    if paths is None:
        prefix = PREFIX[split]
        raise UserError(f"{folder} lacks {prefix}-images-idx3-ubyte[.gz] or {prefix}-labels-idx1-ubyte[.gz]: add them")
    images, labels = read_idx(paths[0]), read_idx(paths[1])
    if images.ndim != 3 or labels.shape != images.shape[:1] or not len(images):
        raise UserError(f"{paths[0]} has shape {images.shape}, {paths[1]} {labels.shape}: they do not match")
    if classes is None:
        classes = [str(label) for label in range(int(labels.max()) + 1)]
    if labels.max() >= len(classes):
        raise UserError(f"{paths[1]} holds label {labels.max()}, but there are {len(classes)} classes; get it again")
    return ArraySource(name, images[:, :, :, None], labels, classes)


def open_fashion_mnist(split: str, root: Path | None) -> ArraySource:
    """The full set: 60,000 training or 10,000 test images, grey, 28x28 px.

    Looked for in `root` (the four idx files there, or torchvision's sub-folder); without `root` in Debian's folder.
    What is not found is downloaded by torchvision, into `root` or the cache. Raises UserError if that fails.
    """
    for folder in [DEBIAN] if root is None else [root, root / "FashionMNIST" / "raw"]:
        if find_idx(folder, split):
            return idx_source(f"fashion-mnist {split}", folder, split, CLASSES)
    target = root or cache_folder()
    raw = target / "FashionMNIST" / "raw"
    if not find_idx(raw, split):
        from torchvision.datasets import FashionMNIST  # slow to import, rarely needed

        remedy = "install Debian's package dataset-fashion-mnist or pass --root with a folder of its four idx files"
        with downloading("Fashion-MNIST", remedy):
            FashionMNIST(str(target), download=True)
    return idx_source(f"fashion-mnist {split}", raw, split, CLASSES)


def open_sample(split: str, root: Path | None) -> ArraySource:
    """The embedded part of Fashion-MNIST: 1,000 training or 200 test images of each class."""
    if root is not None:
        raise UserError("--root does not apply to the embedded sample: leave it out")
    return idx_source(f"sample {split}", SAMPLE, split, CLASSES)
