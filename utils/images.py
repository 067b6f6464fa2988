"""Image grids and atomic PNG files, for samples during training and for evaluation."""

import io
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from utils.files import write_atomic

ImageArray = torch.Tensor | np.ndarray


def to_numpy(images: ImageArray) -> np.ndarray:
    """uint8 images [n, C, H, W] as NumPy on the CPU. Raises ValueError for another type or shape (C is 1 or 3)."""
    array = images.detach().cpu().numpy() if isinstance(images, torch.Tensor) else np.asarray(images)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1] not in (1, 3):
        raise ValueError(f"expected uint8 images [n, 1 or 3, H, W], got {array.dtype} {list(array.shape)}")
    return array


def grid(
    images: ImageArray,  # uint8 [n, C, H, W]
    *,
    columns: int | None = None,  # images in a row; None makes the grid about square
    scale: int = 1,  # each pixel becomes scale x scale
    padding: int = 0,  # pixels between images, counted after scaling
    background: int = 255,  # value of the padding and of empty places, 0 to 255
) -> np.ndarray:
    """Lay images out in rows, left to right and top to bottom; returns uint8 [H', W', C].

    Raises ValueError for no images, a wrong type or shape, or a number below its least value.
    """
    array = to_numpy(images)
    count, channels, height, width = array.shape
    columns = math.ceil(math.sqrt(count)) if columns is None else columns
    if count < 1 or columns < 1 or scale < 1 or padding < 0:
        raise ValueError(f"a grid of {count} images, {columns} columns, scale {scale}, padding {padding} is empty")
    rows = math.ceil(count / columns)
    height, width = height * scale, width * scale
    canvas = np.full(
        (rows * (height + padding) - padding, columns * (width + padding) - padding, channels), background, np.uint8
    )
    for index, image in enumerate(array.transpose(0, 2, 3, 1)):
        top, left = index // columns * (height + padding), index % columns * (width + padding)
        canvas[top : top + height, left : left + width] = image.repeat(scale, axis=0).repeat(scale, axis=1)
    return canvas


def save_png(image: np.ndarray, path: str | Path) -> None:
    """Write a uint8 image [H, W, C] (C 1 or 3) as a PNG, atomically; makes missing folders."""
    buffer = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(buffer, format="PNG")
    write_atomic(path, buffer.getvalue())
