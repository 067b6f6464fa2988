"""Films from sample to sample and back, written frame by frame through PyAV: MP4 (H.264) and GIF."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from duetgan.inference.samples import Sampler, default_count, with_styles
from duetgan.inference.settings import FPS, FRAMES, check_film
from duetgan.metrics.features.precision import full_float32
from duetgan.models.gan import NoiseMode, one_hot
from duetgan.utils.config.cli import entry
from duetgan.utils.errors import UserError
from duetgan.utils.files import building
from duetgan.utils.images import visible
from duetgan.utils.runlog.progress import Bar


def draw_film(journey: "Journey", out: Path, *, fps: int = FPS, scale: int | None = None) -> int:
    """Write the film to an .mp4 or .gif file; returns how many frames it has. Memory does not grow
    with their number.

    `scale`: see `enlargement`. Raises UserError.
    """
    scale = enlargement(journey.sampler.generator.spec.size, scale)
    with film(out, fps=fps, scale=scale) as add:
        for frame in Bar(journey, "frames", unit="frame"):
            add(frame)
    return len(journey)


class Journey:
    """The frames of a film, uint8 [H, W, C] one after the other; made batch by batch, each time
    anew.

    Frame k of a segment lies k / `frames` of the way from its sample to the next, and after the
    last sample comes the first. Noise maps are those of the first sample all through, so that
    nothing flickers.
    """

    def __init__(
        self,
        sampler: Sampler,
        # where the way is straight; None: w if the generator has one, else z
        space: Literal["z", "w"] | None = None,
        # samples it goes through, two at least; None: 8, or one of each class up to 16
        keyframes: int | None = None,
        frames: int = FRAMES,  # from one sample to the next
    ) -> None:
        self.sampler, self.frames = sampler, frames
        self.space = space or ("w" if sampler.generator.has_styles else "z")
        self.keyframes = keyframes or default_count(sampler)
        if self.space == "w":
            with_styles(sampler.generator, "interpolate --space w")

    def __len__(self) -> int:
        return self.keyframes * self.frames

    def __iter__(self) -> Iterator[np.ndarray]:
        noise, spec = self.sampler.latents([0]).noise, self.sampler.generator.spec
        for places in self.sampler.batches(len(self)):
            with torch.no_grad(), full_float32(self.sampler.device):
                images = spec.from_float(self._images(places, noise)).cpu()
            images = visible(images, spec)
            yield from (image.numpy().transpose(1, 2, 0) for image in images)

    def _images(self, places: range, noise: list[Tensor] | NoiseMode) -> Tensor:
        """Frames [n, C, H, W] in about [-1, 1]; `places` counts them from the film's start."""
        segments = [place // self.frames for place in places]
        needed = sorted(
            {(segment + step) % self.keyframes for segment in segments for step in (0, 1)}
        )
        row = {keyframe: index for index, keyframe in enumerate(needed)}
        before = [row[segment] for segment in segments]
        after = [row[(segment + 1) % self.keyframes] for segment in segments]
        start = self.sampler.latents(needed)
        z, labels = start.code, start.labels
        t = z.new_tensor([place % self.frames / self.frames for place in places])[:, None]  # [n, 1]
        maps = noise if isinstance(noise, str) else [m.expand(len(t), -1, -1, -1) for m in noise]
        ends = (None, None) if labels is None else (labels[before], labels[after])
        sampler, between = self.sampler, slerp(z[before], z[after], t)
        if not sampler.generator.has_styles:
            mixed = [
                one_hot(end, sampler.generator.classes, t.dtype) for end in ends if end is not None
            ]
            return sampler.generator(
                between, torch.lerp(mixed[0], mixed[1], t) if mixed else None, noise=maps
            )
        generator, t = with_styles(sampler.generator, "interpolate"), t[:, None]
        if self.space == "w":
            ws = sampler.styles(z, labels)
            ws = torch.lerp(ws[before], ws[after], t)
        else:  # w on the way from one class to another: both classes', weighed
            ws = sampler.styles(between, ends[0])
            ws = ws if labels is None else torch.lerp(ws, sampler.styles(between, ends[1]), t)
        return generator.synthesis(ws, maps)


def slerp(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """From a to b [n, d] along the great circle, t [n, 1] of the way; lengths change evenly.

    Shoemake, "Animating rotation with quaternion curves" (1985): (sin((1 - t) u) a + sin(t u) b) /
    sin u for unit vectors at the angle u. Where a and b are parallel the way is straight; where
    they are opposite there is no single way, and it goes straight as well.
    """
    lengths = a.norm(dim=1, keepdim=True), b.norm(dim=1, keepdim=True)
    a_unit, b_unit = a / lengths[0], b / lengths[1]
    angle = torch.acos((a_unit * b_unit).sum(dim=1, keepdim=True).clamp(-1, 1))
    sine = torch.sin(angle)
    straight = sine < 1e-6
    safe = sine.masked_fill(straight, 1)
    share_a = torch.where(straight, 1 - t, torch.sin((1 - t) * angle) / safe)
    share_b = torch.where(straight, t, torch.sin(t * angle) / safe)
    return (share_a * a_unit + share_b * b_unit) * torch.lerp(lengths[0], lengths[1], t)


# --- the file

LEAST_SIDE = 256  # px that smaller images are enlarged to, or a little more
BT709 = "colorprim=bt709:transfer=bt709:colormatrix=bt709:range=tv"  # what H.264 is marked with
FORMATS = {  # codec, pixels, options of the codec and of the file
    # hardly to be told from the original; the index in front
    ".mp4": (
        "libx264",
        "yuv420p",
        {"crf": "18", "preset": "medium", "x264-params": BT709},
        {"movflags": "+faststart"},
    ),
    # each frame whole, not what differs; repeats for ever
    ".gif": ("gif", "pal8", {"gifflags": "0"}, {"loop": "0"}),
}


def enlargement(size: Sequence[int], asked: int | None = None) -> int:
    """How much frames of such sides are enlarged: as asked, else to LEAST_SIDE or a little more, to
    even sides.

    Raises UserError if an enlarged side would be odd, which yuv420p cannot hold.
    """
    odd = [side for side in size if side % 2]
    if asked and asked % 2 and odd:
        raise UserError(
            f"--scale {asked}: {odd[0] * asked} px is an odd size, films have even ones; take {asked + 1}"
        )
    scale = max(1, -(-LEAST_SIDE // min(size)))
    return asked or scale + (scale % 2 if odd else 0)


@contextmanager
def film(path: Path, *, fps: int, scale: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Write a film, as `building` does: the context hands out what takes its frames, uint8 [H, W,
    C] with C 1 or 3, all of one size; each pixel becomes scale x scale. Raises UserError if the
    file cannot be written.
    """
    import av  # not at the start of every generate.py

    check_film(path, fps=fps)
    kind = path.suffix.lower()
    codec, pixel_format, options, of_file = entry(FORMATS, kind, f"{path}: format")
    with (
        building(path) as temporary,
        av.open(str(temporary), "w", format=kind[1:], options=of_file) as container,
    ):
        stream: Any = container.add_stream(codec, rate=fps)
        stream.pix_fmt, stream.options = pixel_format, options

        def add(frame: np.ndarray) -> None:
            pixels = np.ascontiguousarray(np.broadcast_to(frame, (*frame.shape[:2], 3)))
            pixels = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
            if not stream.codec_context.is_open:
                stream.height, stream.width = pixels.shape[:2]
            if kind == ".gif":
                picture = av.VideoFrame.from_ndarray(_with_palette(pixels), format="pal8")
            else:
                picture = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                picture = picture.reformat(format="yuv420p", dst_colorspace="itu709")
            container.mux(stream.encode(picture))

        yield add
        container.mux(stream.encode())  # the frames that the encoder still held back


def _with_palette(pixels: np.ndarray) -> Any:
    """A frame as places in a palette of its own, and that, [256, 4]: lossless in up to 256 colours,
    as grey is.
    """
    image = Image.fromarray(pixels).quantize(256, dither=Image.Dither.NONE)
    palette = np.full((256, 4), 255, np.uint8)  # alpha, red, green, blue
    colours = np.asarray(image.getpalette(), np.uint8).reshape(-1, 3)
    palette[: len(colours), 1:] = colours
    return np.asarray(image), palette
