"""From images to records: the pixels of one, packed files of images that are in memory, and all
images of a source, in threads and in order: what packing and the index of tar files do first.
"""

import hashlib
import io
import itertools
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Any, TypeVar

import cv2
import numpy as np
from PIL import ExifTags, Image

from duetgan.data.errors import MOST_SIDE, ImageError
from duetgan.data.images import RESIZE_FILTERS, encode, fit, formats, resized
from duetgan.data.lmdb.format import (
    CODEC_JPEG,
    CODEC_PNG,
    CODEC_RULES,
    SIGNATURE,
    Meta,
    check_encoding,
    make_entry,
)
from duetgan.data.lmdb.record import Layout, Record, value_ends
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.sources.base import ArraySource, Problem, Source
from duetgan.data.values import Content, Values, bits_of, decode_image, kind
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.memory import cores
from duetgan.utils.provenance import Provenance

# of images that are encoded here
CODECS = {"raw": CODEC_RULES, "jpeg": CODEC_JPEG, "png": CODEC_PNG}
DEPTHS = {"8": "uint8", "16": "uint16", "float": "float32"}  # as --depth names them
SHORT = {depth: name for name, depth in DEPTHS.items()}
# resize "auto" pads data sets whose images are smaller than N by at most N / PAD_SHARE
PAD_SHARE = 8

MOST_WORKERS = 16  # that are started unasked: more than the one writer can keep up with
WINDOW = 4  # pieces per thread that may be under way or wait for an earlier one

# A piece is what a thread converts at a time: long enough that handing it over costs little, short
# enough that the pieces under way take little memory.
PIECE_BYTES = 1 << 20  # of pixels
PIECE_IMAGES = 64
PIECE_FILES = 4  # of images that keep sizes of their own


T = TypeVar("T")
Converted = Record | ImageError  # an image of a source, or why it cannot be used


def make_record(
    image: np.ndarray,  # [H, W, C] of the layout's depth and largest resolution
    label: int,
    layout: Layout,
    payload: bytes | None = None,  # the file to keep, for encoding "source" only
    codec: int = CODEC_RULES,  # of that file
) -> Record:
    """Encode an image at every resolution. Raises ValueError for a wrong shape or type."""
    wanted = layout.spec
    if image.dtype != wanted.depth or image.ndim != 3 or image.shape[2] != wanted.channels:
        raise ValueError(
            f"image {image.dtype} {image.shape}, expected {wanted.depth} [H, W, {wanted.channels}]"
        )
    if wanted.side and image.shape[:2] != wanted.size:
        raise ValueError(
            f"image of {image.shape[1]}x{image.shape[0]} px, expected {wanted.width}x{wanted.height}"
        )
    assert (payload is None) == (layout.encoding != "source")
    levels = pyramid(image, layout)
    if payload is not None:
        payloads = [payload]
    elif layout.encoding == "raw":
        payloads = [level.transpose(2, 0, 1).tobytes() for level in levels]
    else:
        payloads = [encode(level, layout.encoding) for level in levels]
    codec = CODECS.get(layout.encoding, codec)
    sizes = [level.shape[:2] for level in levels]
    entries = [
        make_entry(content, label, h, w, codec)
        for content, (h, w) in zip(payloads, sizes, strict=True)
    ]
    pixels = image.shape[0] * image.shape[1]
    record = Record(
        label, np.concatenate(entries), tuple(payloads), pixel_sums(image), pixels, signature(image)
    )
    return replace(record, ends=value_ends(image)) if wanted.deep else record


def add_image(
    writer: LMDBWriter, image: np.ndarray, label: int = 0, payload: bytes | None = None
) -> None:
    """Append an image [H, W, C] of the largest resolution to a file; see `make_record`."""
    writer.add_record(make_record(image, label, writer.layout, payload))


def pyramid(image: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """The image at every resolution, ascending; each is the mean of 2x2 pixels of the next larger
    one, rounded half up, as in the progressive growing of GANs (Karras et al. 2018, section 2:
    average pooling).
    """
    levels = [image]
    for side in reversed(layout.resolutions[:-1]):
        height, width = layout.spec.at(side).size
        levels.append(resized(levels[-1], (height, width), cv2.INTER_AREA, layout.spec.alpha))
    return levels[::-1]


def signature(pixels: np.ndarray) -> np.ndarray:
    """The signature of an image [H, W, C], as an array of shape [1] and type SIGNATURE."""
    pixels = np.ascontiguousarray(pixels)
    digest = hashlib.blake2b(pixels.data, digest_size=8, person=b"%dx%d" % pixels.shape[:2])
    if pixels.shape[2] in (1, 3):
        grey = pixels if pixels.shape[2] == 1 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    else:
        grey = pixels.mean(axis=2, dtype=np.float32)
    small = cv2.resize(grey, (9, 8), interpolation=cv2.INTER_AREA)
    bits = np.packbits(small[:, :-1] < small[:, 1:])
    numbers = (int.from_bytes(digest.digest(), "little"), int.from_bytes(bits.tobytes(), "big"))
    return np.array([numbers], SIGNATURE)


def pixel_sums(image: np.ndarray) -> np.ndarray:
    """Sums of the values and of their squares of an image [H, W, C]: [2, C], int64 of 8 bits, else
    float64.
    """
    channels = image.shape[2]
    if image.dtype != np.uint8 or channels > 4:
        flat = image.reshape(-1, channels)
        sums = [
            flat.sum(0, np.float64),
            np.einsum("nc,nc->c", flat, flat, dtype=np.float64, casting="unsafe"),
        ]
        return np.array(sums).astype(np.int64 if image.dtype == np.uint8 else np.float64)
    # at most 255**2: exact, as are the float64 sums
    squares = cv2.multiply(image, image, dtype=cv2.CV_32F)
    sums = [cv2.sumElems(values)[:channels] for values in (image, squares)]
    return np.array(sums).astype(np.int64)


def plain_codec(content: bytes, channels: int) -> int:
    """The decoder that reads this file as `decode_image` does: CODEC_JPEG or CODEC_PNG where no
    rule applies to it (8 bits, no transparency, no orientation, no change from colour to grey),
    else CODEC_RULES.
    """
    with Image.open(io.BytesIO(content), formats=formats(content)) as image:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        if (
            turned
            or image.has_transparency_data
            or image.mode not in (("L",) if channels == 1 else ("L", "RGB"))
        ):
            return CODEC_RULES
        if image.format == "PNG" and content[24] == 8:  # bits, in the header
            return CODEC_PNG
        return CODEC_JPEG if image.format == "JPEG" else CODEC_RULES


def pack_arrays(
    path: str | Path,
    images: np.ndarray,  # [n, C, H, W] uint8; uint16 and float32, of a range that is found
    labels: Sequence[int] | np.ndarray | None = None,  # [n]
    classes: Sequence[str] = (),
    *,
    sets: Sequence[Sequence[int]] | None = None,  # of classes, by label; None: a label is a class
    encoding: str = "raw",
    source: str = "arrays",
    passport: Provenance | None = None,  # of generated images
    # px: also store the images at half their side, a quarter and so on down to this
    smallest: int | None = None,
    overwrite: bool = False,
) -> Meta:
    """Pack images that are in memory. Raises UserError and ValueError as LMDBWriter does."""
    channels, height, width = images.shape[1:]
    image = replace(
        ImageSpec.of(channels, 0, {"depth": images.dtype.name}), height=height, width=width
    )
    layout = Layout.of(image, encoding, smallest, ranged=not image.deep)
    about: Any = {"classes": classes, "sets": sets, "source": source, "passport": passport}
    with LMDBWriter(path, layout, **about, overwrite=overwrite) as writer:
        for index, image in enumerate(images):
            add_image(writer, image.transpose(1, 2, 0), 0 if labels is None else int(labels[index]))
        return writer.finish()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How every image is brought into the file."""

    layout: Layout
    mode: str  # data.images.fit's

    @property
    def resize_filter(self) -> str:
        return RESIZE_FILTERS[self.mode] + ("+2x2-mean" if len(self.layout.resolutions) > 1 else "")


def make_plan(
    source: Source,
    *,
    size: int | str | None = None,  # side in px, or width x height: 96x64
    encoding: str = "raw",
    channels: int | str | None = None,  # "auto": those of all images
    depth: str | None = None,  # "8", "16", "float"; "auto": that of all images
    # of 16 bits and floats; None: found while packing
    value_range: tuple[float, float] | None = None,
    resize: str = "auto",  # "crop" or "pad"
    smallest: int | None = None,  # px: side of a pyramid's smallest images; None: no pyramid
) -> Plan:
    """Decide what the user has left open.

    Channels and depth: the source's own; of files 3 and 8 bits, of arrays as they are. Size: the
    source's own, else the first readable image's, and then all must have it. Resize "auto": "pad"
    where all images have one known size that lies within both sides, at most 1/8 below the shorter
    one, else "crop".
    Raises UserError for options that do not fit together.
    """
    own = source.spec
    shape = own.size if own is not None and own.side else None
    if encoding == "source":
        for option, value in (("--size", size), ("--pyramid", smallest)):
            if value is not None:
                raise UserError(
                    f"--encoding source keeps the files as they are: drop {option} or choose raw, jpeg or png"
                )
        if shape is not None or source.as_is:
            raise UserError(f"{source.name} has no files to keep: choose --encoding raw or png")
        with explained(ValueError, lambda why: f"{source.name}: {why}"):
            return Plan(
                layout=Layout.of(_form(source, channels or 3, depth or "8"), encoding), mode="exact"
            )
    form, ranged = _form(source, channels, depth), True
    if value_range is not None:
        with explained(
            ValueError, lambda why: f"--range {value_range[0]:g},{value_range[1]:g}: {why}"
        ):
            known = dict(zip(("low", "high"), value_range, strict=True))
            form = ImageSpec.of(form.channels, 0, {**(form.pixel_format or {}), **known})
    elif form.deep and not form.alpha:
        ranged = source.ranged and own is not None and form.words == own.words
    with explained(ValueError, lambda why: f"{source.name}: {why}"):
        check_encoding(form, encoding)
    if size is None:
        height, width = shape or next(
            _of_images(source, lambda it: decode_image(it, form).shape[:2])
        )
        image, mode = replace(form, height=height, width=width), "exact"
        if height != width:
            example = "x".join(
                str(max(1, round(side / image.side * 4)) * 16) for side in (width, height)
            )
            raise UserError(
                f"{source.name}: images are {width}x{height} px, not square: pass --size N, or {example}"
            )
    elif shape == (image := ImageSpec.of(form.channels, size, form.pixel_format)).size:
        mode = "exact"
    elif resize == "auto":
        room = min(there - here for there, here in zip(image.size, shape or (0, 0), strict=True))
        mode = "pad" if shape is not None and 0 < room <= image.side // PAD_SHARE else "crop"
    else:
        mode = resize
    if max(image.size) > MOST_SIDE:
        raise UserError(
            f"{source.name}: {image}; a packed image has at most {MOST_SIDE} px: lower --size"
        )
    with explained(
        ValueError, f"--pyramid {smallest}: {image} must be {smallest} px times 2, 4, 8, ..."
    ):
        return Plan(layout=Layout.of(image, encoding, smallest, ranged), mode=mode)


def _form(source: Source, channels: int | str | None, depth: str | None) -> ImageSpec:
    """The channels, alpha and depth that a source's images are packed with; without a size.

    "auto": colours where an image has some, alpha where one has it, the largest depth. Two channels
    are grey and alpha, four RGB and alpha, unless the first image has so many without alpha. Raises
    UserError where "auto" finds floats beside whole numbers, or numbers of channels that do not go
    together.
    """
    own = source.spec
    usual = (
        (own.channels, SHORT[own.depth]) if own else ("auto", "auto") if source.as_is else (3, "8")
    )
    channels, depth = channels or usual[0], depth or usual[1]
    if (
        own is not None
        and channels in ("auto", own.channels)
        and depth in ("auto", SHORT[own.depth])
    ):
        return replace(own, height=0, width=0)
    deepest = DEPTHS.get(depth, "uint8")
    if channels in (1, 3) and depth != "auto":
        return ImageSpec.of(int(channels), 0, {"depth": deepest})
    found = Counter(
        itertools.islice(_of_images(source, kind), None if "auto" in (channels, depth) else 1)
    )
    first, depths = next(iter(found)), {form.depth for form in found}
    kinds = ", ".join(f"{count:,} of {form.title}" for form, count in found.items())
    if depth == "auto":
        if "float32" in depths and len(depths) > 1:
            raise UserError(
                f"{source.name}: {kinds}: floats and whole numbers have no range in common: pass --depth"
            )
        deepest = max(depths, key=list(DEPTHS.values()).index)
    if channels == "auto":
        colours = {form.colours for form in found}
        if len(colours) > 1 and colours != {1, 3}:
            raise UserError(
                f"{source.name}: {kinds}: these do not go together: pass --channels, or pack them apart"
            )
        alpha = any(form.alpha for form in found)
        channels = max(colours) + alpha
    else:
        alpha = channels in (2, 4) and (first.channels, first.alpha) != (channels, False)
    form = ImageSpec.of(int(channels), 0, {"depth": deepest, "alpha": alpha})
    if source.as_is or depth == "auto" or len(found) > 1:
        print(f"{source.name}: {kinds}: taken as {form.title}", file=sys.stderr)
    return form


def _of_images(source: Source, found: Callable[[Content], T]) -> Iterator[T]:
    """What is `found` in each image that can be read. Raises UserError if none can."""
    problem, readable = None, False
    for index in range(len(source)):
        try:
            yield found(source.content(index))
            readable = True
        except ImageError as error:
            problem = problem or Problem(source.item_name(index), str(error))
    if not readable:
        raise UserError(
            f"{source.name}: none of {len(source)} images can be read; the first: {problem}"
        )


# how files begin that may be transparent: PNG, WebP, GIF
WITH_ALPHA = (b"\x89PNG", b"RIFF", b"GIF8")


def _convert(source: Source, row: int, read: Callable[[], Content], plan: Plan) -> Converted:
    layout, payload, codec = plan.layout, None, CODEC_RULES
    try:
        content = read()
        image = pixels = decode_image(content, layout.spec)
        if layout.encoding != "source":
            image = fit(pixels, layout.spec.size, plan.mode, layout.spec.alpha)
        elif isinstance(content, bytes):
            payload, codec = content, plain_codec(content, layout.spec.channels)
        else:
            raise UserError(
                f"{source.item_name(row)} is no file that could be kept: choose --encoding raw or png"
            )
        record = make_record(image, int(source.labels()[row]), layout, payload, codec)
    except ImageError as error:
        return error
    pure = content.pixels if isinstance(content, Values) else content
    as_had = pure if isinstance(pure, bytes) else b"%dx%dx%d" % pure.shape + pure.tobytes()
    enlarged = plan.mode == "crop" and any(map(int.__lt__, pixels.shape[:2], layout.spec.size))
    cut = 0
    with suppress(ImageError):  # of files that only Pillow reads
        cut = bits_of(content) if payload is None and layout.spec.plain else 0
    if isinstance(content, bytes):
        transparent = content[:4] in WITH_ALPHA and kind(content).alpha
    else:
        transparent = isinstance(content, Values) and content.alpha
    on_white = payload is None and not layout.spec.alpha and transparent
    return replace(
        record,
        digest=hashlib.sha256(as_had).digest(),
        enlarged=enlarged,
        cut=cut,
        on_white=on_white,
    )


def thread_count(source: Source, workers: int | None) -> int:
    """The threads that convert beside this one: `workers`; None: one a core where there are files
    to decode.
    """
    if workers is not None:
        return workers
    return 0 if isinstance(source, ArraySource) or cores() == 1 else min(MOST_WORKERS, cores())


def converted(source: Source, plan: Plan, workers: int) -> Generator[Converted]:
    """All images of a source in order, converted by so many threads beside this one.

    Close it after an error. It then waits for no thread: they are daemons, so that one that reads
    from a server that does not answer holds up neither Ctrl-C nor the end of the program.
    """
    if not workers:
        for row in range(len(source)):
            yield _convert(source, row, source.later(row), plan)
        return
    pixels = plan.layout.spec.values
    length = max(1, min(PIECE_IMAGES, PIECE_BYTES // pixels if pixels else PIECE_FILES))
    pool = ThreadPool(workers)
    waiting: deque[AsyncResult[list[Converted]]] = deque()
    try:
        for start in range(0, len(source), length):
            piece = range(start, min(len(source), start + length))
            reads = list(map(source.later, piece))
            images = map(_convert, itertools.repeat(source), piece, reads, itertools.repeat(plan))
            waiting.append(pool.apply_async(list, (images,)))
            if len(waiting) == WINDOW * workers:
                yield from waiting.popleft().get()
        while waiting:
            yield from waiting.popleft().get()
    finally:
        pool.terminate()
