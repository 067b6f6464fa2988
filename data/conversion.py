"""What data/pack.py does to every image: the plan for all of them, and from a source's images to records."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from data.errors import MOST_SIDE, ImageError
from data.images import RESIZE_FILTERS, decode_file, fit, to_channels
from data.lmdb.record import Layout, Record, halvings
from data.records import make_record, plain_codec
from data.sources.base import ArraySource, Item, Problem, Source
from utils.errors import UserError

PAD_SHARE = 8  # resize "auto" pads data sets whose images are smaller than N by at most N / PAD_SHARE

# A piece is what one process converts at a time: long enough that handing it over costs little, short enough that the
# pieces under way take little memory and that the last ones keep all processes busy.
PIECE_BYTES = 1 << 20  # of pixels
PIECE_IMAGES = 128
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


@dataclass
class Converted:
    """What became of some images of a source."""

    records: list[Record] = field(default_factory=list)  # of those that can be used, in order
    digests: list[bytes] = field(default_factory=list)  # theirs, see `content_digest`
    problems: list[tuple[int, str]] = field(default_factory=list)  # of the others: index in the source, reason
    enlarged: int = 0  # images that were smaller than asked for


def convert(source: Source, rows: range, plan: Plan, *, stop: bool, first: int = 0) -> Converted:
    """Make records of the images `rows`; with `stop` end at the first that cannot be used.

    `first` is the number of the source's first image, for a source that is a part of another.
    """
    found, layout = Converted(), plan.layout
    for row in rows:
        try:
            item = source.item(row - first)
            pixels = _pixels(item, layout.channels)
            if layout.encoding != "source":
                record = make_record(fit(pixels, plan.size, plan.mode), item.label, layout)
            elif isinstance(item.content, bytes):
                codec = plain_codec(item.content, layout.channels)
                record = make_record(pixels, item.label, layout, item.content, codec)
            else:
                raise UserError(f"{item.name} is no file that could be kept: choose --encoding raw or png")
        except ImageError as error:
            found.problems.append((row, str(error)))
            if stop:
                break
            continue
        found.records.append(record)
        found.digests.append(content_digest(item.content))
        found.enlarged += plan.mode == "crop" and min(pixels.shape[:2]) < plan.size
    return found


def content_digest(content: bytes | np.ndarray) -> bytes:
    """SHA-256 of an image as the source has it: a file's bytes, or "HxWxC" and the pixels."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).digest()
    return hashlib.sha256(b"%dx%dx%d" % content.shape + content.tobytes()).digest()


def piece_length(plan: Plan, count: int, processes: int) -> int:
    """Images per piece of `count` images that are left to `processes`."""
    pixels = plan.size * plan.size * plan.layout.channels
    fitting = PIECE_BYTES // pixels if pixels else PIECE_FILES
    return max(1, min(PIECE_IMAGES, fitting, count // (8 * processes)))


def pieces(rows: range, length: int) -> Iterator[range]:
    """Ranges of `length` images, the last one shorter."""
    for start in range(rows.start, rows.stop, length):
        yield range(start, min(rows.stop, start + length))


def part(source: Source, rows: range) -> Source | None:
    """A source of these images alone where it is cheap to send to another process; None: that process reads them."""
    if not isinstance(source, ArraySource):
        return None
    chosen = slice(rows.start, rows.stop)
    return ArraySource(source.name, source.images[chosen], source.labels()[chosen], source.classes)
