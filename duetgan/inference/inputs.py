"""Prepare a user's image for a network, and open the inputs of predict.py.

The inputs may be images, folders, file name patterns, archives, packed files and lists.
"""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from duetgan.data.errors import ImageError
from duetgan.data.images import fit, trained_mode
from duetgan.data.images.values import (
    Content,
    Values,
    bring,
    check_shape,
    checked_pixels,
    decode_image,
    of_pillow,
)
from duetgan.data.packing.sources import is_source, open_images
from duetgan.data.packing.sources.base import Source
from duetgan.data.packing.sources.files import LocalSource, read_file
from duetgan.utils import files
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import ImageSpec

Image: TypeAlias = "str | os.PathLike[str] | PIL.Image.Image | np.ndarray | Tensor"


@dataclass(frozen=True)
class Transform:
    """Function that converts an image to a network's input: float32 [C, H, W] in [-1, 1].

    The result has the shape of `spec`. An image is a file name, a PIL image, an array [H, W] or [H,
    W, C], or a tensor [H, W] or [C, H, W]. Arrays and tensors hold uint8, or floats in [0, 1]. If
    `spec` is not 8-bit grey or RGB, they instead hold values that `data.images.values.bring`
    converts to `spec`. Images are resized as the network's training images were. Transforms can be
    pickled for the workers of a DataLoader. Raises UserError for an image that cannot be read or
    converted.
    """

    spec: ImageSpec  # format of the result
    mode: str  # resize mode of `data.images.fit`: crop, pad, or that of a ready-made network

    def __call__(self, image: Image) -> Tensor:
        return self.spec.to_float(self.pixels(image)[None], channels_last=False)[0]

    @classmethod
    def of(cls, checkpoint: Checkpoint, resize: str | None = None) -> "Transform":
        """Return the transform for a checkpoint's network.

        `resize`, "crop" or "pad", replaces the resize mode of the training images.
        """
        return cls(ImageSpec.read(checkpoint["shape"]), resize or trained_mode(checkpoint))

    def read(self, image: "Image | Content") -> Tensor:
        """Read an image, or the content of an image file, and resize it.

        Returns pixels [C, H, W] in the depth of `spec`. Raises ImageError, whose message does not
        name the image.
        """
        if isinstance(image, str | os.PathLike):
            image = read_file(Path(image))
        spec = self.spec
        if isinstance(image, bytes | Values):
            pixels = decode_image(image, spec)
        elif isinstance(image, PIL.Image.Image):
            pixels = bring(of_pillow(image), spec)
        else:
            values = _hwc(image, spec.plain)
            values = _eight_bits(values) if spec.plain else checked_pixels(values)
            pixels = bring(Values(values, spec.alpha and values.shape[2] == spec.channels), spec)
        fitted = fit(pixels, spec.size, self.mode, spec.alpha)
        return torch.from_numpy(fitted.transpose(2, 0, 1).copy())

    def pixels(self, image: Image) -> Tensor:
        """Read an image and resize it to pixels [C, H, W] in the depth of `spec`.

        Raises UserError if the image cannot be read.
        """
        name = os.fspath(image) if isinstance(image, str | os.PathLike) else "the image"
        with explained(ImageError, lambda error: f"{name} {error}"):
            return self.read(image)


def _hwc(image: np.ndarray | Tensor, plain: bool) -> np.ndarray:
    """Convert an array or a tensor to an array [H, W, C]; if `plain` is True, C must be 1 or 3."""
    if isinstance(image, Tensor):
        image = image.detach().float() if image.is_floating_point() else image
        array = image.cpu().numpy()
    else:
        array = np.asarray(image)
    if array.ndim == 2:
        array = array[:, :, None]
    elif isinstance(image, Tensor) and array.ndim == 3:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or (plain and array.shape[2] not in (1, 3)):
        layout = "an array [H, W] or [H, W, C]"
        if isinstance(image, Tensor):
            layout = "a tensor [C, H, W]"
        channels = " with 1 or 3 channels" if plain else ""
        raise ImageError(f"is of shape {list(image.shape)}; give {layout}{channels}")
    check_shape(*array.shape)
    return array


def _eight_bits(array: np.ndarray) -> np.ndarray:
    """Convert floats in [0, 1] to uint8; return uint8 unchanged."""
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise ImageError(f"is of type {array.dtype}; give uint8, or floats in [0, 1]")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):
        raise ImageError(f"has values from {low:.3g} to {high:.3g}; floats are taken as [0, 1]")
    return np.asarray((array * 255).round(), dtype=np.uint8)


def read_target(path: str | Path, checkpoint: Checkpoint, resize: str | None) -> Tensor:
    """Read the image of the option `--image` and resize it for a checkpoint's network.

    `resize` is as in `Transform.of`. Returns pixels [C, H, W]. Raises UserError if the image cannot
    be read.
    """
    with explained(ImageError, lambda error: f"--image {path}: {error}; give another image"):
        return Transform.of(checkpoint, resize).read(path)


class Input(NamedTuple):
    """A named image, which is read only when `content` is called."""

    name: str
    content: Callable[[], Content]  # returns a file's bytes or pixels [H, W, C]; raises ImageError


def file_input(path: str | Path) -> Input:
    return Input(str(path), partial(read_file, Path(path)))


class Inputs:
    """The images that predict.py's arguments name, in order.

    A name is an image file; a folder, which is searched recursively; a pattern like `a/**/*.jpg`; a
    zip, tar, CSV, Parquet, Arrow or LMDB file; or a .txt file with the path of an image in each
    line. A missing file counts as an image that cannot be read. Raises UserError, before any image
    is read, for a pattern without a match and for a source without images.
    """

    def __init__(self, names: Sequence[str], stack: ExitStack) -> None:
        """Open the sources; `stack` closes them."""
        self._parts: list[tuple[str, Source | list[str]]] = []
        for name in names:
            part = _part(name)
            if isinstance(part, Source):
                stack.enter_context(part)
            self._parts.append((name, part))

    def __len__(self) -> int:
        return sum(len(part) for _, part in self._parts)

    @property
    def are_files(self) -> bool:
        """True if every image is a file."""
        return all(isinstance(part, list | LocalSource) for _, part in self._parts)

    def names(self) -> Iterator[str]:
        """Yield the name of each image; the name of an image file is its path."""
        for source_name, part in self._parts:
            if isinstance(part, list):
                yield from part
                continue
            for index in range(len(part)):
                name = part.item_name(index)
                yield name if name.startswith(source_name) else f"{source_name}: {name}"

    def __iter__(self) -> Iterator[Input]:
        names = self.names()
        for _, part in self._parts:
            for index in range(len(part)):
                name = next(names)
                yield file_input(name) if isinstance(part, list) else Input(name, part.later(index))


def _part(name: str) -> Source | list[str]:
    """Return the images that `name`, one of the names of `Inputs`, stands for.

    They are an open source, or a list of paths. Raises UserError as `Inputs` does.
    """
    path = Path(name)
    if glob.has_magic(name) and not path.exists():
        matches = glob.glob(name, recursive=True)
        names = sorted(match for match in matches if Path(match).is_file())
        if not names:
            raise UserError(f"{name}: no file matches; quote the pattern, or give a folder")
        return names
    if path.suffix.lower() == ".txt":
        with files.reading(path, "give a list of images, a line each"):
            lines = os.fsdecode(files.read_file(path, files.TABLE)).splitlines()
        return [str(path.parent / line.strip()) for line in lines if line.strip()]
    return open_images(name) if is_source(path) else [name]
