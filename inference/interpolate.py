"""Films that go from sample to sample, and through the classes, and come back to where they started."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from inference.samples import Sampler, with_styles
from inference.tables import default_count
from inference.video import check_film, enlargement, film
from metrics.precision import exact_float32
from models.gan import NoiseMode, one_hot
from models.sampling import to_uint8
from utils.errors import UserError

Space = Literal["z", "w"]


@dataclass(kw_only=True)
class FilmConfig:
    """What a film shows and how. Raises UserError for a film that cannot be made."""

    space: Space | None = None  # where the way between samples is straight; None: w if the generator has one, else z
    keyframes: int | None = None  # samples it goes through; None: 8, or one of each class up to 16
    frames: int = 30  # from one sample to the next
    fps: int = 30  # frames a second
    scale: int | None = None  # each pixel becomes scale x scale; None: to about 256 px

    def __post_init__(self) -> None:
        if self.keyframes is not None and self.keyframes < 2:
            raise UserError(f"--n {self.keyframes}: a film needs at least two keyframes; give 2 or more")
        if self.frames < 1 or self.fps < 1 or (self.scale is not None and self.scale < 1):
            raise UserError("--frames, --fps and --scale must be 1 or more")


def draw_film(sampler: Sampler, out: Path, config: FilmConfig) -> int:
    """Write the film to an .mp4 or .gif file; returns how many frames it has. Memory does not grow with their number.

    Frame k of a segment lies k / `frames` of the way from its sample to the next, and after the last sample comes the
    first. Noise maps are those of the first sample all through, so that nothing flickers. Raises UserError.
    """
    check_film(out, fps=config.fps)
    journey = Journey(sampler, config)
    scale = enlargement(sampler.generator.resolution, config.scale)
    bar = tqdm(total=len(journey), desc="frames", unit="frame", disable=None)
    with bar, film(out, fps=config.fps, scale=scale) as add:
        for frame in journey:
            add(frame)
            bar.update()
    return len(journey)


class Journey:
    """The frames of a film, uint8 [H, W, C] one after the other; made batch by batch, each time anew."""

    def __init__(self, sampler: Sampler, config: FilmConfig) -> None:
        self.sampler = sampler
        self.space: Space = config.space or ("w" if sampler.generator.has_styles else "z")
        self.keyframes = config.keyframes or default_count(sampler)
        self.frames = config.frames
        if self.space == "w":
            with_styles(sampler.generator, "interpolate --space w")

    def __len__(self) -> int:
        return self.keyframes * self.frames

    def __iter__(self) -> Iterator[np.ndarray]:
        noise = self.sampler.latents([0])[2]
        for start in range(0, len(self), self.sampler.batch_size):
            places = range(start, min(start + self.sampler.batch_size, len(self)))
            with torch.no_grad(), exact_float32(self.sampler.device):
                images = to_uint8(self._images(places, noise)).cpu()
            yield from (image.numpy().transpose(1, 2, 0) for image in images)

    def _images(self, places: range, noise: list[Tensor] | NoiseMode) -> Tensor:
        """Frames [n, C, H, W] in about [-1, 1]; `places` counts them from the film's start."""
        segments = [place // self.frames for place in places]
        needed = sorted({(segment + step) % self.keyframes for segment in segments for step in (0, 1)})
        row = {keyframe: index for index, keyframe in enumerate(needed)}
        before = [row[segment] for segment in segments]
        after = [row[(segment + 1) % self.keyframes] for segment in segments]
        z, labels, _ = self.sampler.latents(needed)
        t = z.new_tensor([place % self.frames / self.frames for place in places])[:, None]  # [n, 1]
        maps = noise if isinstance(noise, str) else [m.expand(len(t), -1, -1, -1) for m in noise]
        ends = (None, None) if labels is None else (labels[before], labels[after])
        sampler, between = self.sampler, slerp(z[before], z[after], t)
        if not sampler.generator.has_styles:
            return sampler.generator(between, _mixture(ends[0], ends[1], sampler.generator.classes, t), noise=maps)
        generator = with_styles(sampler.generator, "interpolate")
        if self.space == "w":
            w = generator.mapping(z, labels)
            w = torch.lerp(w[before], w[after], t)
        else:  # w on the way from one class to another: both classes', weighed
            w = generator.mapping(between, ends[0])
            w = w if labels is None else torch.lerp(w, generator.mapping(between, ends[1]), t)
        ws = w[:, None].expand(-1, generator.num_ws, -1)
        return generator.synthesis(generator.truncate(ws, sampler.truncation_psi, sampler.truncation_cutoff), maps)


def _mixture(first: Tensor | None, second: Tensor | None, classes: int, t: Tensor) -> Tensor | None:
    """Weights of the classes [n, classes] at t [n, 1] of the way from the first ones [n] to the second."""
    if first is None or second is None:
        return None
    return torch.lerp(one_hot(first, classes, t.dtype), one_hot(second, classes, t.dtype), t)


def slerp(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """From a to b [n, d] along the great circle, t [n, 1] of the way; lengths change evenly.

    Shoemake, "Animating rotation with quaternion curves" (1985): (sin((1 - t) u) a + sin(t u) b) / sin u for unit
    vectors at the angle u. Where a and b are parallel the way is straight; where they are opposite there is no single
    way, and it goes straight as well.
    """
    lengths = a.norm(dim=1, keepdim=True), b.norm(dim=1, keepdim=True)
    a_unit, b_unit = a / lengths[0], b / lengths[1]
    cosine = (a_unit * b_unit).sum(dim=1, keepdim=True).clamp(-1, 1)
    angle = torch.acos(cosine)
    sine = torch.sin(angle)
    straight = sine < 1e-6
    safe = torch.where(straight, torch.ones_like(sine), sine)
    share_a = torch.where(straight, 1 - t, torch.sin((1 - t) * angle) / safe)
    share_b = torch.where(straight, t, torch.sin(t * angle) / safe)
    return (share_a * a_unit + share_b * b_unit) * torch.lerp(lengths[0], lengths[1], t)
