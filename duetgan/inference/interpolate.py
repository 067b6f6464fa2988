"""Films that pass from sample to sample and back to the first, as MP4 (H.264) or GIF files.

PyAV writes the files.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from duetgan.inference.samples import (
    Sampler,
    default_count,
    seeded,
    truncated_styles,
    with_styles,
)
from duetgan.inference.settings import check_film
from duetgan.metrics.features.precision import full_float32
from duetgan.models.gan import NoiseMode, one_hot
from duetgan.utils.config.cli import entry
from duetgan.utils.errors import UserError
from duetgan.utils.files import building
from duetgan.utils.images import visible
from duetgan.utils.runlog.progress import Bar


def draw_film(journey: "Journey", out: Path, *, fps: int, scale: int | None = None) -> int:
    """Write the film to an .mp4 or .gif file and return its number of frames.

    `fps` is the number of frames a second. `scale` is the factor by which frames are enlarged; for
    the default see `enlargement`. The memory needed does not depend on the number of frames. Raises
    UserError if `scale` gives the frames an odd side.
    """
    scale = enlargement(journey.sampler.generator.spec.size, scale)
    with film(out, fps=fps, scale=scale) as add:
        for frame in Bar(journey, "frames", unit="frame"):
            add(frame)
    return len(journey)


class Journey:
    """Iterable of the frames of a film, uint8 [H, W, C]. Each iteration generates them again.

    The film passes from sample to sample and back to the first. Frame i * `frames` is sample i; the
    frames in between interpolate to the next sample. All frames have the noise maps of sample 0, so
    that nothing flickers.
    """

    def __init__(
        self,
        sampler: Sampler,
        # the space of the interpolation; None: w if the generator has one, else z
        space: Literal["z", "w"] | None,
        # number of samples, at least two, of a sampler without sources; None: 8, or one of each
        # class up to 16
        keyframes: int | None,
        frames: int,  # number of frames from one sample to the next
    ) -> None:
        self.sampler = seeded(sampler, keyframes or default_count(sampler))
        self.frames = frames
        self.space = space or ("w" if sampler.generator.has_styles else "z")
        self.keyframes = len(self.sampler.sources)
        if self.space == "w":
            with_styles(sampler.generator, "interpolate --space w")
        else:
            self.sampler.refuse_latents("leave out --space z")

    def __len__(self) -> int:
        return self.keyframes * self.frames

    def __iter__(self) -> Iterator[np.ndarray]:
        spec = self.sampler.generator.spec
        start = truncated_styles if self.space == "w" else Sampler.latents
        noise = start(self.sampler, [0]).noise
        for places in self.sampler.batches(len(self)):
            with torch.no_grad(), full_float32(self.sampler.device):
                images = spec.from_float(self._images(places, noise)).cpu()
            images = visible(images, spec)
            yield from (image.numpy().transpose(1, 2, 0) for image in images)

    def _images(self, numbers: range, noise: list[Tensor] | NoiseMode) -> Tensor:
        """Generate the frames with these numbers, all with the same `noise`.

        Returns images [n, C, H, W] in about [-1, 1].
        """
        previous = [number // self.frames for number in numbers]  # keyframe of each frame
        following = [(keyframe + 1) % self.keyframes for keyframe in previous]
        keyframes = sorted({*previous, *following})
        row = {keyframe: index for index, keyframe in enumerate(keyframes)}
        a = [row[keyframe] for keyframe in previous]
        b = [row[keyframe] for keyframe in following]
        sampler = self.sampler
        fractions = [number % self.frames / self.frames for number in numbers]
        t = torch.tensor(fractions, device=sampler.device)[:, None]
        maps = noise if isinstance(noise, str) else [m.expand(len(t), -1, -1, -1) for m in noise]
        if self.space == "w":
            generator = with_styles(sampler.generator, "interpolate")
            ws = truncated_styles(sampler, keyframes).code
            return generator.synthesis(torch.lerp(ws[a], ws[b], t[:, None].to(ws)), maps)
        start = sampler.latents(keyframes)
        z = start.code
        labels = start.labels
        t = t.to(start.code)
        z_between = slerp(z[a], z[b], t)
        if not sampler.generator.has_styles:
            mixture = None
            if labels is not None:
                hot = one_hot(labels, sampler.generator.classes, t.dtype)
                mixture = torch.lerp(hot[a], hot[b], t)
            return sampler.generator(z_between, mixture, noise=maps)
        generator = with_styles(sampler.generator, "interpolate")
        # The mapping network takes no mixed labels, so the styles of both labels are mixed.
        first_labels, last_labels = (None if labels is None else labels[rows] for rows in (a, b))
        first = sampler.styles(z_between, first_labels)
        last = sampler.styles(z_between, last_labels)
        return generator.synthesis(torch.lerp(first, last, t[:, None]), maps)


def slerp(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Interpolate between vectors a and b [n, d] along the great circle, at fractions t [n, 1].

    The lengths of the vectors are interpolated linearly. Shoemake, "Animating rotation with
    quaternion curves" (1985): (sin((1 - t) u) a + sin(t u) b) / sin u for unit vectors at the angle
    u. If a and b are parallel or opposite, the great circle is not unique, and the interpolation is
    linear.
    """
    lengths = a.norm(dim=1, keepdim=True), b.norm(dim=1, keepdim=True)
    a_unit, b_unit = a / lengths[0], b / lengths[1]
    angle = torch.acos((a_unit * b_unit).sum(dim=1, keepdim=True).clamp(-1, 1))
    sine = torch.sin(angle)
    is_linear = sine < 1e-6
    divisor = sine.masked_fill(is_linear, 1)
    weight_a = torch.where(is_linear, 1 - t, torch.sin((1 - t) * angle) / divisor)
    weight_b = torch.where(is_linear, t, torch.sin(t * angle) / divisor)
    return (weight_a * a_unit + weight_b * b_unit) * torch.lerp(lengths[0], lengths[1], t)


# --- the file

LEAST_SIDE = 256  # px; smaller images are enlarged to at least this side
BT709 = "colorprim=bt709:transfer=bt709:colormatrix=bt709:range=tv"  # colour metadata for H.264
FORMATS = {  # suffix -> codec, pixel format, options of the codec, options of the file
    # visually lossless; the index is at the beginning, so that players can stream the file
    ".mp4": (
        "libx264",
        "yuv420p",
        {"crf": "18", "preset": "medium", "x264-params": BT709},
        {"movflags": "+faststart"},
    ),
    # stores complete frames instead of differences, and repeats for ever
    ".gif": ("gif", "pal8", {"gifflags": "0"}, {"loop": "0"}),
}


def enlargement(size: Sequence[int], scale: int | None) -> int:
    """Return the factor by which frames of `size` (height, width) are enlarged.

    This is `scale` or, if `scale` is None, the smallest factor that gives even sides of at least
    LEAST_SIDE px. Raises UserError if `scale` gives an odd side, which yuv420p does not support.
    """
    odd = [side for side in size if side % 2]
    if scale:
        if scale % 2 and odd:
            raise UserError(
                f"--scale {scale}: {odd[0] * scale} px is an odd size, films have even ones; take {scale + 1}"
            )
        return scale
    scale = max(1, -(-LEAST_SIDE // min(size)))
    return scale + scale % 2 if odd else scale


@contextmanager
def film(path: Path, *, fps: int, scale: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Yield a function that appends a frame to a film.

    Frames are uint8 [H, W, 1 or 3], all of one size. Each pixel becomes `scale` x `scale` pixels.
    The file appears when the block ends without an exception. Raises UserError if the file cannot
    be written.
    """
    import av  # slow to import; most of generate.py does not need it

    check_film(path, fps=fps)
    kind = path.suffix.lower()
    codec, pixel_format, codec_options, file_options = entry(FORMATS, kind, f"{path}: format")
    with (
        building(path) as temporary,
        av.open(str(temporary), "w", format=kind[1:], options=file_options) as container,
    ):
        stream: Any = container.add_stream(codec, rate=fps)
        stream.pix_fmt, stream.options = pixel_format, codec_options

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
        container.mux(stream.encode())  # flushes the encoder


def _with_palette(pixels: np.ndarray) -> Any:
    """Return a frame, uint8 [H, W, 3], as indices [H, W] into a palette, and the palette [256, 4].

    The conversion is lossless for frames of at most 256 colours, such as grey ones.
    """
    image = Image.fromarray(pixels).quantize(256, dither=Image.Dither.NONE)
    palette = np.full((256, 4), 255, np.uint8)  # alpha, red, green, blue
    colours = np.asarray(image.getpalette(), np.uint8).reshape(-1, 3)
    palette[: len(colours), 1:] = colours
    return np.asarray(image), palette
