"""The benchmark's images: the first of the embedded sample, as RGB of 32 px, packed and as a folder of PNG files."""

from pathlib import Path

import cv2
import numpy as np

from duetgan.data.packing.records import pack_arrays
from duetgan.data.packing.sources import open_source
from duetgan.data.packing.sources.base import ArraySource

SIDE = 32  # px


def make(work: Path, count: int) -> tuple[Path, Path]:
    """The same `count` images and labels as `work/train.lmdb` and `work/png/CLASS/NUMBER.png`; returns both paths."""
    source = open_source("sample", split="train", root=None)
    assert isinstance(source, ArraySource)
    small = [cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR) for image in source.images[:count]]
    images = np.repeat(np.stack(small)[:, None], 3, axis=1)  # uint8 [n, 3, H, W]
    labels = source.labels()[:count]
    packed, folder = work / "train.lmdb", work / "png"
    pack_arrays(packed, images, labels=labels, classes=source.classes)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        parent = folder / str(label)
        parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(parent / f"{index:06d}.png"), image.transpose(1, 2, 0))
    return packed, folder
