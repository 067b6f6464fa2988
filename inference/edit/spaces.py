"""Where edits happen: w, single style channels, or z. The noise stays as it is, and in z the class that is asked for.

In w the class is no input any more: the mapping network has put it into w, and a move of w can change it. R3GAN and
DCGAN have z and the class's embedding side by side; there z moves, and the embedding stays.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from inference.samples import Sampler, truncated_styles, with_styles
from models.gan import ImageGenerator, NoiseMode, StyledGenerator
from models.stylegan2_layers import ModulatedConv2d
from utils.errors import UserError


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

    def describe(self, place: int) -> str:
        """A dimension's name."""
        return f"{self.name}[{place}]"


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


class ChannelSpace(StyleSpace):
    """The style channels: what the affine layer of each modulated convolution makes of w (StyleSpace, 2011.12799)."""

    name = "s"

    def __init__(self, generator: StyledGenerator) -> None:
        super().__init__(generator)
        found = [(name, module) for name, module in generator.named_modules() if isinstance(module, ModulatedConv2d)]
        if not found:
            raise UserError("--space s moves StyleGAN2's style channels, which this generator does not have; use w")
        self.widths = [module.weight.shape[1] for _, module in found]
        self.affines: list[nn.Module] = [module.affine for _, module in found]
        self.names = [name.removesuffix(".conv") for name, _ in found]
        self.size = sum(self.widths)
        # activations that are computed again in the backward pass would not see the offsets, whose hooks are gone then
        for module in generator.modules():
            if hasattr(getattr(module, "config", None), "activation_checkpointing"):
                module.config.activation_checkpointing = False  # type: ignore[union-attr]

    def points(self, start: Start) -> Tensor:
        seen: list[Tensor] = []
        with torch.no_grad(), self._hooked([lambda style: seen.append(style) for _ in self.affines]):
            self.generator.synthesis(start.code, start.noise)
        return torch.cat(seen, dim=1)

    def images(self, start: Start, offsets: Tensor) -> Tensor:
        parts = offsets.split(self.widths, dim=1)
        with self._hooked([lambda style, part=part: style + part for part in parts]):
            return self.generator.synthesis(start.code, start.noise)

    def describe(self, place: int) -> str:
        for name, width in zip(self.names, self.widths, strict=True):
            if place < width:
                return f"{name}[{place}]"
            place -= width
        raise IndexError(place)

    @contextmanager
    def _hooked(self, changes: Sequence[Any]) -> Iterator[None]:
        """Inside the block each affine layer's output is what its change makes of it; None leaves it as it is."""
        with ExitStack() as stack:
            for affine, change in zip(self.affines, changes, strict=True):
                hook = affine.register_forward_hook(lambda _module, _inputs, style, change=change: change(style))
                stack.callback(hook.remove)
            yield


def space_of(generator: ImageGenerator, name: str | None) -> LatentSpace:
    """A space by name; None: w if there is one, else z. UserError for one that the generator does not have."""
    if name is None:
        name = "w" if generator.has_styles else "z"
    if name == "z":
        return LatentSpace(generator)
    styled = with_styles(generator, f"--space {name}")
    return StyleSpace(styled) if name == "w" else ChannelSpace(styled)
