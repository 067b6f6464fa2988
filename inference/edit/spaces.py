"""Where edits happen: w or z. The noise stays as it is, and in z the class that is asked for.

In w the class is no input any more: the mapping network has put it into w, and a move of w can change it. R3GAN and
DCGAN have z and the class's embedding side by side; there z moves, and the embedding stays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from inference.samples import Sampler, truncated_styles, with_styles
from models.gan import ImageGenerator, NoiseMode, StyledGenerator


@dataclass(frozen=True)
class Start:
    """Images that edits start from."""

    code: Tensor  # the styles [n, num_ws, w_dim], or z [n, z_dim]
    labels: Tensor | None  # int64 [n] beside z; None without classes, and beside w
    noise: list[Tensor] | NoiseMode  # maps [n, 1, H, W] for each layer, or the mode's name

    def __len__(self) -> int:
        return len(self.code)

    def take(self, rows: Any) -> "Start":
        """Some of the images: a slice, numbers or a mask."""
        noise = self.noise if isinstance(self.noise, str) else [level[rows] for level in self.noise]
        return Start(self.code[rows], None if self.labels is None else self.labels[rows], noise)

    def batches(self, size: int) -> Iterator["Start"]:
        """All images in parts of at most `size`."""
        for first in range(0, len(self), size):
            yield self.take(slice(first, first + size))

    @staticmethod
    def join(parts: Sequence["Start"]) -> "Start":
        """All images of several; they are of one generator and one mode of noise."""
        labels = [part.labels for part in parts if part.labels is not None]
        noise = parts[0].noise
        if not isinstance(noise, str):
            noise = [torch.cat(levels) for levels in zip(*(part.noise for part in parts), strict=True)]
        return Start(torch.cat([part.code for part in parts]), torch.cat(labels) if labels else None, noise)


class LatentSpace:
    """z."""

    name: ClassVar[str] = "z"

    def __init__(self, generator: ImageGenerator) -> None:
        self.generator = generator
        self.size = generator.z_dim  # dimensions

    def start(self, sampler: Sampler, numbers: Sequence[int]) -> Start:
        """The sampler's images."""
        return Start(*sampler.latents(numbers))

    def points(self, start: Start) -> Tensor:
        """Where the images lie in this space, [n, size]."""
        return start.code

    def images(self, start: Start, offsets: Tensor) -> Tensor:
        """The images [n, C, H, H] in about [-1, 1], moved by `offsets` [n, size]; differentiable."""
        return self.generator(start.code + offsets, start.labels, noise=start.noise)


class StyleSpace(LatentSpace):
    """w, the same for all layers: a move of w is added to the style of each."""

    name = "w"
    generator: StyledGenerator

    def __init__(self, generator: StyledGenerator) -> None:
        super().__init__(generator)
        self.size = generator.w_avg.numel()

    def start(self, sampler: Sampler, numbers: Sequence[int]) -> Start:
        ws, noise = truncated_styles(sampler, self.generator, numbers, sampler.truncation_psi)
        return Start(ws, None, noise)

    def points(self, start: Start) -> Tensor:
        return start.code.mean(1)

    def images(self, start: Start, offsets: Tensor) -> Tensor:
        return self.generator.synthesis(start.code + offsets[:, None], start.noise)


def space_of(generator: ImageGenerator, name: str | None) -> LatentSpace:
    """A space by name; None: w if there is one, else z. UserError for one that the generator does not have."""
    if name is None:
        name = "w" if generator.has_styles else "z"
    return LatentSpace(generator) if name == "z" else StyleSpace(with_styles(generator, "--space w"))
