"""The benchmark's images: parts of scikit-learn's two photographs, drawn from a fixed key."""

from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from sklearn.datasets import load_sample_images

from duetgan.utils.seeding import numpy_generator

CLASSES = 10
PHOTO = (500, 375)  # width and height in px, the commonest of ImageNet
JPEG_QUALITY = 90


class Photographs:
    """Any number of different images: a random part of a photograph, scaled, mirrored, darker or brighter."""

    def __init__(self) -> None:
        self._photographs = load_sample_images().images  # two of uint8 [427, 640, 3]

    def image(self, index: int, width: int, height: int) -> np.ndarray:
        """Image number `index`: uint8 [height, width, 3]."""
        draws = numpy_generator(0, "benchmark", index)
        photograph = self._photographs[draws.integers(len(self._photographs))]
        tallest = min(photograph.shape[0], photograph.shape[1] * height // width)
        tall = int(draws.integers(tallest * 4 // 5, tallest + 1))
        wide = tall * width // height
        top = int(draws.integers(photograph.shape[0] - tall + 1))
        left = int(draws.integers(photograph.shape[1] - wide + 1))
        part = cv2.resize(
            photograph[top : top + tall, left : left + wide], (width, height), interpolation=cv2.INTER_AREA
        )
        part = part[:, ::-1] if draws.random() < 0.5 else part
        return np.clip(part * draws.uniform(0.7, 1.2), 0, 255).astype(np.uint8)


def label_of(index: int) -> int:
    """The class of image number `index`."""
    return index % CLASSES


def small_images(count: int, side: int) -> np.ndarray:
    """uint8 [count, 3, side, side]."""
    photographs = Photographs()
    images = [photographs.image(index, side, side).transpose(2, 0, 1) for index in range(count)]
    return np.ascontiguousarray(images)


def write_png_folder(
    folder: Path,
    images: np.ndarray,  # uint8 [n, 3, H, W]
) -> None:
    """A folder of class folders."""
    for index, image in enumerate(images):
        cv2.imwrite(str(_file(folder, index, "png")), image.transpose(1, 2, 0)[:, :, ::-1])


def write_jpeg_folder(folder: Path, count: int) -> int:
    """A folder of class folders with JPEG files of PHOTO px, 4:2:0; returns their bytes."""
    photographs, size = Photographs(), 0
    for index in range(count):
        image = photographs.image(index, *PHOTO)
        content = simplejpeg.encode_jpeg(image, quality=JPEG_QUALITY, colorsubsampling="420")
        _file(folder, index, "jpg").write_bytes(content)
        size += len(content)
    return size


def jpeg_files(folder: Path) -> list[Path]:
    """The files that `write_jpeg_folder` has written, in order of their numbers."""
    return sorted(folder.glob("*/*.jpg"), key=lambda file: file.name)


def _file(folder: Path, index: int, suffix: str) -> Path:
    """Where image number `index` goes; its class folder is made."""
    parent = folder / str(label_of(index))
    parent.mkdir(parents=True, exist_ok=True)
    return parent / f"{index:06d}.{suffix}"
