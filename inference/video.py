"""Films written frame by frame: MP4 (H.264 through PyAV) and GIF (Pillow), atomically, in memory that does not grow."""

import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from utils.errors import UserError
from utils.files import building

LEAST_SIDE = 256  # px that smaller images are enlarged to, or a little more
FASTEST_GIF = 50  # frames a second: viewers show shorter delays than 2/100 s as 10/100 s
CRF = "18"  # x264's quality: hardly to be told from the original

AddFrame = Callable[[np.ndarray], None]
"""Takes the next frame, uint8 [H, W, C] with C 1 or 3; all of one size."""


def check_film(path: Path, *, fps: int) -> None:
    """Raise UserError unless a film of this name and speed can be written here."""
    if path.suffix.lower() not in ENCODERS:
        raise UserError(f"--out {path}: a film is an MP4 or a GIF; its name must end in .mp4 or .gif")
    if path.suffix.lower() == ".gif" and fps > FASTEST_GIF:
        raise UserError(f"--fps {fps}: a GIF shows at most {FASTEST_GIF} frames a second; write an .mp4 or go slower")
    if path.suffix.lower() == ".mp4":
        _pyav()


def enlargement(side: int, asked: int | None = None) -> int:
    """How much frames of so many pixels are enlarged: as asked, else to LEAST_SIDE or a little more, to an even side.

    Raises UserError if the enlarged side would be odd, which yuv420p cannot hold.
    """
    if asked is not None:
        if side * asked % 2:
            raise UserError(
                f"--scale {asked}: {side * asked} px is an odd size, films have even ones; take {asked + 1}"
            )
        return asked
    scale = max(1, -(-LEAST_SIDE // side))
    return scale + (side * scale % 2)


@contextmanager
def film(path: Path, *, fps: int, scale: int) -> Iterator[AddFrame]:
    """Write a film: the context hands out what takes its frames, and puts the file in place when it is left whole.

    Each pixel becomes scale x scale. After an exception nothing is left behind and an older file is as it was. A GIF
    repeats for ever. Raises UserError if the file cannot be written, and for an .mp4 without PyAV.
    """
    check_film(path, fps=fps)
    encoder = ENCODERS[path.suffix.lower()]
    with building(path) as temporary, encoder(temporary, fps=fps, scale=scale) as add:
        yield add


def _pyav() -> Any:
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise UserError("an .mp4 needs PyAV: `pip install av`, or let --out end in .gif") from error


@contextmanager
def _mp4(path: Path, *, fps: int, scale: int) -> Iterator[AddFrame]:
    """H.264 in yuv420p, BT.709 and marked so, the index in front: what browsers play while it loads."""
    av = _pyav()
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.pix_fmt = "yuv420p"
        marks = "colorprim=bt709:transfer=bt709:colormatrix=bt709:range=tv"
        stream.options = {"crf": CRF, "preset": "medium", "x264-params": marks}

        def add(frame: np.ndarray) -> None:
            pixels = np.ascontiguousarray(np.broadcast_to(frame, (*frame.shape[:2], 3)))
            pixels = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
            if not stream.codec_context.is_open:
                stream.height, stream.width = pixels.shape[:2]
            image = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(image.reformat(format="yuv420p", dst_colorspace="itu709")))

        yield add
        container.mux(stream.encode())  # the frames that the encoder still held back


@contextmanager
def _gif(path: Path, *, fps: int, scale: int) -> Iterator[AddFrame]:
    """GIF89a, each frame with its own palette: lossless in grey, the nearest of 256 colours otherwise."""
    count = 0
    with path.open("wb") as file:

        def add(frame: np.ndarray) -> None:
            nonlocal count
            image = Image.fromarray(frame[:, :, 0] if frame.shape[2] == 1 else frame)
            if image.mode == "RGB":
                image = image.quantize(256)  # before it is enlarged: as many colours in fewer pixels
            image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
            if count == 0:
                _write_gif_head(file, image.size)
            # in hundredths of a second, rounded so that the film as a whole keeps its speed
            delay = round((count + 1) * 100 / fps) - round(count * 100 / fps)
            _write_gif_frame(file, image, delay)
            count += 1

        yield add
        file.write(b";")


def _write_gif_head(file: BinaryIO, size: tuple[int, int]) -> None:
    """Signature, screen descriptor without a palette, and the extension that repeats the film for ever."""
    file.write(b"GIF89a" + size[0].to_bytes(2, "little") + size[1].to_bytes(2, "little") + bytes([0x70, 0, 0]))
    file.write(b"!\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")


def _write_gif_frame(file: BinaryIO, image: Image.Image, delay: int) -> None:
    """One frame: Pillow encodes it as a GIF of its own, whose palette and pixels are taken over.

    Pillow's own writer of several frames keeps all of them in memory until the last one.
    """
    buffer = io.BytesIO()
    image.save(buffer, format="GIF", optimize=False, interlace=False)
    single = buffer.getvalue()
    flags = single[10]  # of the screen descriptor: bit 7 a palette follows, bits 0 to 2 its size
    colours = 3 * 2 ** ((flags & 7) + 1)
    palette, rest = single[13 : 13 + colours], single[13 + colours :]
    if not flags & 0x80 or rest[:1] != b"," or rest[-1:] != b";":
        raise RuntimeError("Pillow wrote a GIF in a form that is not understood here")
    place, pixels = rest[:9], rest[10:-1]  # image descriptor without its flags; code size and compressed pixels
    control = b"!\xf9\x04\x04" + delay.to_bytes(2, "little") + b"\x00\x00"  # the frame stays when the next one comes
    file.write(control + place + bytes([0x80 | (flags & 7)]) + palette + pixels)


ENCODERS: dict[str, Callable[..., AbstractContextManager[AddFrame]]] = {".mp4": _mp4, ".gif": _gif}
