"""From a source's images to records, in threads and in order: what packing and the index of tar files do first."""

import dataclasses
import hashlib
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import NamedTuple

import numpy as np

from data.errors import MOST_SIDE, ImageError
from data.images import RESIZE_FILTERS, decode_file, fit, to_channels
from data.lmdb.record import Layout, Record, halvings
from data.records import make_record, plain_codec
from data.sources.base import ArraySource, Item, Problem, Source
from utils.errors import UserError
from utils.memory import cores

PAD_SHARE = 8  # resize "auto" pads data sets whose images are smaller than N by at most N / PAD_SHARE

MOST_WORKERS = 16  # that are started unasked: more than the one writer can keep up with
WINDOW = 4  # pieces per thread that may be under way or wait for an earlier one

# A piece is what a thread converts at a time: long enough that handing it over costs little, short enough that the
# pieces under way take little memory.
PIECE_BYTES = 1 << 20  # of pixels
PIECE_IMAGES = 64
PIECE_FILES = 4  # of images that keep sizes of their own


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How every image is brought into the file."""

    layout: Layout
    mode: str  # data.images.fit's

    @property
    def size(self) -> int:
        """Side of the images in px; 0: as they are."""
        return self.layout.resolutions[-1]

    @property
    def resize_filter(self) -> str:
        """Its name in the metadata."""
        return RESIZE_FILTERS[self.mode] + ("+2x2-mean" if len(self.layout.resolutions) > 1 else "")


def make_plan(
    source: Source,
    *,
    size: int | None,
    encoding: str,
    channels: int | None,
    resize: str,  # "auto", "crop" or "pad"
    smallest: int | None = None,  # px: side of a pyramid's smallest images; None: no pyramid
) -> Plan:
    """Decide what the user has left open.

    Channels: the source's own, else 3. Size: the source's own, else the first readable image's, and then all must
    have it. Resize "auto": "pad" where all images have one known size that lies at most N/8 below N, else "crop".
    Raises UserError for options that do not fit together.
    """
    if encoding == "source":
        if size is not None:
            raise UserError("--encoding source keeps the files as they are: drop --size or choose raw, jpeg or png")
        if smallest is not None:
            raise UserError("--encoding source keeps the files as they are: drop --pyramid or choose raw, jpeg or png")
        if source.shape is not None:
            raise UserError(f"{source.name} has no files to keep: choose --encoding raw or png")
        return Plan(layout=Layout(channels=channels or 3, resolutions=(0,), encoding=encoding), mode="exact")
    channels = channels or source.channels or 3
    if size is None:
        height, width = source.shape or _first_shape(source, channels)
        if height != width:
            raise UserError(f"{source.name}: images are {width}x{height} px, not square: pass --size N")
        size, mode = height, "exact"
    elif source.shape == (size, size):
        mode = "exact"
    elif resize == "auto":
        near = source.shape is not None and 0 < size - max(source.shape) <= size // PAD_SHARE
        mode = "pad" if near else "crop"
    else:
        mode = resize
    if size > MOST_SIDE:
        raise UserError(f"{source.name}: {size} px; a packed image has at most {MOST_SIDE} px: lower --size")
    try:
        sides = halvings(size, smallest)
    except ValueError:
        raise UserError(f"--pyramid {smallest}: {size} px must be {smallest} px times 2, 4, 8, ...") from None
    return Plan(layout=Layout(channels=channels, resolutions=sides, encoding=encoding), mode=mode)


def _first_shape(source: Source, channels: int) -> tuple[int, int]:
    """Height and width of the first image that can be read."""
    problems = []
    for index in range(len(source)):
        try:
            shape = _pixels(source.item(index), channels).shape
            return shape[0], shape[1]
        except ImageError as error:
            problems.append(Problem(source.item_name(index), str(error)))
    raise UserError(f"{source.name}: none of {len(source)} images can be read; the first: {problems[0]}")


def _pixels(item: Item, channels: int) -> np.ndarray:
    """An image's pixels, uint8 [H, W, channels]. Raises ImageError."""
    if isinstance(item.content, bytes):
        return decode_file(item.content, channels)
    return to_channels(item.content, channels)


class Converted(NamedTuple):
    """What became of an image of a source."""

    row: int  # its index there
    record: Record | None  # None: it cannot be used
    problem: str = ""  # why not
    enlarged: bool = False  # it was smaller than asked for


def _read(source: Source, row: int) -> Item | ImageError:
    try:
        return source.item(row)
    except ImageError as error:
        return error


def convert(rows: Iterable[int], items: Iterable[Item | ImageError], plan: Plan) -> list[Converted]:
    """Make records of images of a source."""
    return [_convert(row, item, plan) for row, item in zip(rows, items, strict=True)]


def _convert(row: int, item: Item | ImageError, plan: Plan) -> Converted:
    layout = plan.layout
    try:
        if isinstance(item, ImageError):
            raise item
        pixels = _pixels(item, layout.channels)
        if layout.encoding != "source":
            record = make_record(fit(pixels, plan.size, plan.mode), item.label, layout)
        elif isinstance(item.content, bytes):
            codec = plain_codec(item.content, layout.channels)
            record = make_record(pixels, item.label, layout, item.content, codec)
        else:
            raise UserError(f"{item.name} is no file that could be kept: choose --encoding raw or png")
    except ImageError as error:
        return Converted(row, None, str(error))
    record = dataclasses.replace(record, digest=content_digest(item.content))
    return Converted(row, record, enlarged=plan.mode == "crop" and min(pixels.shape[:2]) < plan.size)


def content_digest(content: bytes | np.ndarray) -> bytes:
    """SHA-256 of an image as the source has it: a file's bytes, or "HxWxC" and the pixels."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).digest()
    return hashlib.sha256(b"%dx%dx%d" % content.shape + content.tobytes()).digest()


def thread_count(source: Source, workers: int | None) -> int:
    """The threads that convert beside this one: `workers`; None: one a core where there are files to decode."""
    if workers is not None:
        return workers
    return 0 if isinstance(source, ArraySource) or cores() == 1 else min(MOST_WORKERS, cores())


def converted(source: Source, plan: Plan, workers: int) -> Generator[Converted]:
    """All images of a source in order, converted by so many threads beside this one.

    Close it after an error. It then waits for no thread: they are daemons, so that one that reads from a server that
    does not answer holds up neither Ctrl-C nor the end of the program.
    """
    pixels = plan.size * plan.size * plan.layout.channels
    length = max(1, min(PIECE_IMAGES, PIECE_BYTES // pixels if pixels else PIECE_FILES))
    pieces = [range(start, min(len(source), start + length)) for start in range(0, len(source), length)]
    if not workers:
        for row in range(len(source)):
            yield _convert(row, _read(source, row), plan)
        return
    pool = ThreadPool(workers)
    waiting: deque[AsyncResult[list[Converted]]] = deque()
    try:
        for piece in pieces:
            items: Iterable[Item | ImageError] = (_read(source, row) for row in piece)  # by the thread that converts
            items = list(items) if source.in_order else items
            waiting.append(pool.apply_async(convert, (piece, items, plan)))
            if len(waiting) == WINDOW * workers:
                yield from waiting.popleft().get()
        while waiting:
            yield from waiting.popleft().get()
    finally:
        pool.terminate()
