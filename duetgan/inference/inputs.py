"""An image of a user's as a network takes it; and what predict.py is given: images, folders,
patterns, archives, packed files and lists, as one row of images.
"""

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from duetgan.data.errors import ImageError
from duetgan.data.images import fit, trained_mode
from duetgan.data.sources import is_source, open_images
from duetgan.data.sources.base import Source
from duetgan.data.sources.files import LocalSource, read_file
from duetgan.data.values import Content, Values, bring, check_shape, decode_image, known, of_pillow
from duetgan.utils import bounded
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import ImageSpec

Image: TypeAlias = "str | os.PathLike[str] | PIL.Image.Image | np.ndarray | Tensor"


@dataclass(frozen=True)
class Transform:
    """An image as a network takes it: float32 [C, H, W], those of `spec`, in [-1, 1].

    Brings it to size as the images of the network's training were. Takes a file's name; a PIL
    image; an array [H, W], [H, W, C]; a tensor [C, H, W]: uint8, or floats in [0, 1]; where `spec`
    is not plain, values as it has them. Can be sent to the workers of a DataLoader. Raises
    UserError for an image that cannot be read, and for floats outside [0, 1].
    """

    spec: ImageSpec  # of what it gives
    mode: str  # of data.images.fit: crop, pad, or as a ready-made network has it

    def __call__(self, image: Image) -> Tensor:
        return self.spec.to_float(self.pixels(image)[None], channels_last=False)[0]

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], resize: str | None = None) -> "Transform":
        """That of a checkpoint's network; `resize`: crop or pad instead of what its training did."""
        return cls(ImageSpec.read(checkpoint["shape"]), resize or trained_mode(checkpoint))

    def read(self, image: "Image | Content") -> Tensor:
        """`pixels`, also of a file's bytes; raises ImageError, whose message lacks the image's
        name.
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
            values = _eight_bits(values) if spec.plain else known(values)
            pixels = bring(Values(values, spec.alpha and values.shape[2] == spec.channels), spec)
        return torch.from_numpy(
            fit(pixels, spec.size, self.mode, spec.alpha).transpose(2, 0, 1).copy()
        )

    def pixels(self, image: Image) -> Tensor:
        """The same in the depth of `spec`: [C, H, W]."""
        name = os.fspath(image) if isinstance(image, str | os.PathLike) else "the image"
        with explained(ImageError, lambda why: f"{name} {why}"):
            return self.read(image)


def _hwc(image: np.ndarray | Tensor, plain: bool) -> np.ndarray:
    """An array or a tensor as an array [H, W, C]; with `plain` C is 1 or 3."""
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
        layout = (
            "a tensor [C, H, W]" if isinstance(image, Tensor) else "an array [H, W] or [H, W, C]"
        )
        raise ImageError(
            f"is of shape {list(image.shape)}; give {layout}{' with 1 or 3 channels' * plain}"
        )
    check_shape(*array.shape)
    return array


def _eight_bits(array: np.ndarray) -> np.ndarray:
    """Bytes as they are, and floats in [0, 1] as bytes."""
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise ImageError(f"is of type {array.dtype}; give uint8, or floats in [0, 1]")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):
        raise ImageError(f"has values from {low:.3g} to {high:.3g}; floats are taken as [0, 1]")
    return np.asarray((array * 255).round(), dtype=np.uint8)


def read_target(
    path: str | Path, checkpoint: Mapping[str, Any], resize: str | None = None
) -> Tensor:
    """The image that `--image` names, as `Transform.pixels`. Raises UserError if it cannot be read."""
    with explained(ImageError, lambda why: f"--image {path}: {why}; give another image"):
        return Transform.of(checkpoint, resize).read(path)


class Input(NamedTuple):
    """An image that is read when its turn comes."""

    name: str
    content: Callable[[], Content]  # a file's bytes or pixels [H, W, C]; raises ImageError


def file_input(path: str | Path) -> Input:
    return Input(str(path), partial(read_file, Path(path)))


class Inputs:
    """The images that `given` names, in order: image files; folders (with all that lies below) and
    patterns like `a/**/*.jpg`; zip, tar, CSV, Parquet, Arrow and LMDB files; .txt files, which name
    an image in each line.

    A file that is not there is an image that cannot be read. Raises UserError for a pattern that
    nothing matches, and for sources without images, before any image is read.
    """

    def __init__(self, given: Sequence[str], stack: ExitStack) -> None:
        """Args: `stack` closes the files."""
        self._parts: list[tuple[str, Source | list[str]]] = []
        for name in given:
            part = _part(name)
            self._parts.append(
                (name, stack.enter_context(part) if isinstance(part, Source) else part)
            )

    def __len__(self) -> int:
        return sum(len(part) for _, part in self._parts)

    @property
    def are_files(self) -> bool:
        """Whether all have a file of their own."""
        return all(isinstance(part, list | LocalSource) for _, part in self._parts)

    def names(self) -> Iterator[str]:
        """A name for each image; a file's is its path."""
        for given, part in self._parts:
            if isinstance(part, list):
                yield from part
                continue
            for index in range(len(part)):
                own = part.item_name(index)
                yield own if own.startswith(given) else f"{given}: {own}"

    def __iter__(self) -> Iterator[Input]:
        names = self.names()
        for _, part in self._parts:
            for index in range(len(part)):
                name = next(names)
                yield file_input(name) if isinstance(part, list) else Input(name, part.later(index))


def _part(name: str) -> Source | list[str]:
    path = Path(name)
    if glob.has_magic(name) and not path.exists():
        if not (
            files := sorted(
                found for found in glob.glob(name, recursive=True) if Path(found).is_file()
            )
        ):
            raise UserError(f"{name}: no file matches; quote the pattern, or give a folder")
        return files
    if path.suffix.lower() == ".txt":
        with bounded.reading(path, "give a list of images, a line each"):
            lines = os.fsdecode(bounded.read_file(path, bounded.TABLE)).splitlines()
        return [str(path.parent / line.strip()) for line in lines if line.strip()]
    return open_images(name) if is_source(path) else [name]
