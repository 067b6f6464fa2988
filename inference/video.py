"""Films written frame by frame through PyAV: MP4 (H.264) and GIF, atomically, in memory that does not grow."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UserError
from utils.files import building

LEAST_SIDE = 256  # px that smaller images are enlarged to, or a little more
FASTEST_GIF = 50  # frames a second: viewers show shorter delays than 2/100 s as 10/100 s
OPTIONS = {".mp4": {"movflags": "+faststart"}, ".gif": {"loop": "0"}}  # of the files
CRF = "18"  # x264's quality: hardly to be told from the original

AddFrame = Callable[[np.ndarray], None]
"""Takes the next frame, uint8 [H, W, C] with C 1 or 3; all of one size."""


def check_film(path: Path, *, fps: int) -> None:
    """Raise UserError unless a film of this name and speed can be written here."""
    if path.suffix.lower() not in OPTIONS:
        raise UserError(f"--out {path}: a film is an MP4 or a GIF; its name must end in .mp4 or .gif")
    if path.suffix.lower() == ".gif" and fps > FASTEST_GIF:
        raise UserError(f"--fps {fps}: a GIF shows at most {FASTEST_GIF} frames a second; write an .mp4 or go slower")


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
    repeats for ever. Raises UserError if the file cannot be written.
    """
    import av  # not at the start of every generate.py

    check_film(path, fps=fps)
    kind = path.suffix.lower()
    with building(path) as temporary, av.open(str(temporary), "w", format=kind[1:], options=OPTIONS[kind]) as container:
        encoder: _Mp4 | _Gif = (_Mp4 if kind == ".mp4" else _Gif)(container, fps)

        def add(frame: np.ndarray) -> None:
            pixels = np.ascontiguousarray(np.broadcast_to(frame, (*frame.shape[:2], 3)))
            pixels = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
            if not encoder.stream.codec_context.is_open:
                encoder.stream.height, encoder.stream.width = pixels.shape[:2]
            container.mux(encoder.stream.encode(encoder.convert(av.VideoFrame.from_ndarray(pixels, format="rgb24"))))

        yield add
        container.mux(encoder.stream.encode())  # the frames that the encoder still held back


class _Mp4:
    """H.264 in yuv420p, BT.709 and marked so, the index in front: what browsers play while it loads."""

    def __init__(self, container: Any, fps: int) -> None:
        self.stream = container.add_stream("libx264", rate=fps)
        self.stream.pix_fmt = "yuv420p"
        marks = "colorprim=bt709:transfer=bt709:colormatrix=bt709:range=tv"
        self.stream.options = {"crf": CRF, "preset": "medium", "x264-params": marks}

    def convert(self, frame: Any) -> Any:
        return frame.reformat(format="yuv420p", dst_colorspace="itu709")


class _Gif:
    """Each frame whole and with its own palette: lossless in grey, the nearest of 256 colours otherwise."""

    def __init__(self, container: Any, fps: int) -> None:
        self.stream = container.add_stream("gif", rate=fps)
        self.stream.pix_fmt = "pal8"
        self.stream.options = {"gifflags": "0"}  # no frame is written as what differs from the one before
        self._tick, self._count = Fraction(1, fps), 0
        self._graph: Any = None

    def convert(self, frame: Any) -> Any:
        if self._graph is None:
            from av.filter import Graph

            self._graph = graph = Graph()
            source = graph.add_buffer(width=frame.width, height=frame.height, format=frame.format, time_base=self._tick)
            split = graph.add("split")
            palette = graph.add("palettegen", "stats_mode=single:reserve_transparent=0")
            use, sink = graph.add("paletteuse", "new=1:dither=none"), graph.add("buffersink")
            source.link_to(split)
            split.link_to(palette, 0, 0)
            split.link_to(use, 1, 0)
            palette.link_to(use, 0, 1)
            use.link_to(sink)
            graph.configure()
        frame.pts, frame.time_base = self._count, self._tick
        self._graph.push(frame)
        shown = self._graph.pull()
        shown.pts, shown.time_base = self._count, self._tick
        self._count += 1
        return shown
