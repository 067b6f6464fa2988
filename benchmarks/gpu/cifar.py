"""CIFAR-10 in a few MB: all images of a split as one JPEG, tile beside tile. A tile is 4x4 blocks of JPEG's 8 px and
its colours are not thinned out, so no image gets anything of its neighbour's.
"""

import json
from pathlib import Path

import cv2
import numpy as np

from duetgan.data.packing.records import pack_arrays
from duetgan.data.packing.sources import open_source
from duetgan.data.packing.sources.base import ArraySource

SPLITS = ("train", "test")
COLUMNS = 200  # JPEG allows 65,535 px
QUALITIES = (98, 97, 96, 95, 94, 93, 92, 90)  # below the recipe could not reach its aim for the data's sake


def load(root: Path | None) -> dict[str, ArraySource]:
    """Both splits. Raises UserError where they are not there."""
    found = {split: open_source("cifar10", split=split, root=root) for split in SPLITS}
    return {split: source for split, source in found.items() if isinstance(source, ArraySource)}


def tiles(images: np.ndarray) -> np.ndarray:
    """Images [n, H, H, C] as one; the last row is filled up with black."""
    count, side = images.shape[:2]
    filled = np.concatenate([images, np.zeros((-count % COLUMNS, *images.shape[1:]), np.uint8)])
    grid = filled.reshape(-1, COLUMNS, *images.shape[1:]).swapaxes(1, 2)
    return grid.reshape(len(filled) // COLUMNS * side, COLUMNS * side, -1)


def untiled(picture: np.ndarray, count: int) -> np.ndarray:
    """The first `count` images of `tiles`."""
    side = picture.shape[1] // COLUMNS
    grid = picture.reshape(-1, side, COLUMNS, side, picture.shape[2]).swapaxes(1, 2)
    return grid.reshape(-1, side, side, picture.shape[2])[:count]


def encoded(sets: dict[str, ArraySource], quality: int) -> dict[str, bytes]:
    """Files, by name, of JPEGs of this quality and of the labels."""
    how = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_OPTIMIZE, 1]
    how += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444]
    files = {
        f"cifar10-{split}.jpg": cv2.imencode(".jpg", tiles(np.asarray(source.images))[:, :, ::-1], how)[1].tobytes()
        for split, source in sets.items()
    }
    labels = {split: "".join(map(str, source.labels())) for split, source in sets.items()}
    return files | {"cifar10.json": json.dumps(labels | {"quality": quality}).encode()}


def fitting(sets: dict[str, ArraySource], room: int) -> dict[str, bytes] | None:
    """The files of the best quality that take no more bytes than that."""
    for quality in QUALITIES:
        files = encoded(sets, quality)
        if sum(map(len, files.values())) <= room:
            return files
    return None


def pack(folder: Path, target: Path) -> int:
    """Both files of a bundle as packed files in `target`; their JPEG quality."""
    about = json.loads((folder / "cifar10.json").read_text())
    for split in SPLITS:
        labels = np.array(list(map(int, about[split])))
        picture = cv2.imread(str(folder / f"cifar10-{split}.jpg"), cv2.IMREAD_COLOR)
        if picture is None:
            raise ValueError(f"{folder}/cifar10-{split}.jpg is damaged; fill the bundle again")
        images = untiled(picture[:, :, ::-1], len(labels))
        classes = [str(number) for number in range(10)]
        where = target / f"cifar10-{split}.lmdb"
        pack_arrays(where, images.transpose(0, 3, 1, 2), labels, classes, overwrite=True, source="cifar10")
    return int(about["quality"])
