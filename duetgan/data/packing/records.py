"""Convert images to the records of packed files: single images, arrays, or a whole source.

Threads convert the images of a source. Their order is kept.
"""

import hashlib
import io
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np
from PIL import ExifTags, Image

from duetgan.data.errors import MOST_SIDE, ImageError
from duetgan.data.images import MEANS, RESIZE_FILTERS, encode, fit, formats, resized
from duetgan.data.images.decode import CODEC_JPEG, CODEC_PNG, CODEC_RULES
from duetgan.data.images.values import Content, Values, decode_image, kind
from duetgan.data.lmdb.format import (
    SIGNATURE,
    Meta,
    check_encoding,
    make_entry,
)
from duetgan.data.lmdb.record import Layout, Record, value_ends
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.sources.base import ArraySource, Problem, Source
from duetgan.utils.checkpoint.provenance import Provenance
from duetgan.utils.errors import UserError, explained, refuse
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.machine import cores

# codec by encoding; with "source" each file has its own
CODECS = {"raw": CODEC_RULES, "jpeg": CODEC_JPEG, "png": CODEC_PNG}
DEPTHS = {"8": "uint8", "16": "uint16", "float": "float32"}  # as --depth names them
SHORT = {depth: name for name, depth in DEPTHS.items()}
# Resize "auto" pads images that are smaller than N px by at most N / PAD_DIVISOR.
PAD_DIVISOR = 8

MOST_WORKERS = 16  # by default: the single writer cannot keep up with more
WINDOW = 8  # chunks per thread that are converted at a time

# A chunk, which one thread converts, is large enough to be passed at little cost, and small enough
# for the memory.
CHUNK_BYTES = 1 << 20  # of pixels
CHUNK_IMAGES = 64
CHUNK_FILES = 4  # if images have individual sizes


T = TypeVar("T")
Converted = Record | ImageError  # the error of an image that cannot be used


def make_record(
    image: np.ndarray,  # [H, W, C] of the layout's depth and largest resolution
    label: int,
    layout: Layout,
    payload: bytes | None,  # the file to keep, for encoding "source" only
    codec: int = CODEC_RULES,  # decoder of `payload`
) -> Record:
    """Encode an image at every resolution, and return its record.

    Raises ValueError for an image of a wrong shape or type.
    """
    spec = layout.spec
    shape = spec.shape[1:] if spec.side else image.shape[:2]
    if image.dtype != spec.depth or image.shape != (*shape, spec.channels):
        raise ValueError(
            f"image {image.dtype} {image.shape}, expected {spec.depth} {(*shape, spec.channels)}"
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
    entries = []
    for level, content in zip(levels, payloads, strict=True):
        height, width, _ = level.shape
        entries.append(make_entry(content, label, height, width, codec))
    pixels = image.shape[0] * image.shape[1]
    record = Record(
        label, np.concatenate(entries), tuple(payloads), pixel_sums(image), pixels, signature(image)
    )
    return replace(record, ends=value_ends(image)) if spec.deep else record


def add_image(
    writer: LMDBWriter, image: np.ndarray, label: int, payload: bytes | None = None
) -> None:
    """Append an image [H, W, C] of the largest resolution to the writer's file.

    `payload` is the image file to store, for encoding "source" only.
    """
    writer.add_record(make_record(image, label, writer.layout, payload))


def pyramid(image: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """Return the image at every resolution of the layout, in ascending order.

    Each image has the means of 2x2 pixels of the next larger one, rounded half up (average pooling;
    Karras et al. 2018, "Progressive Growing of GANs", section 2).
    """
    levels = [image]
    for side in reversed(layout.resolutions[:-1]):
        height, width = layout.spec.at(side).size
        levels.append(resized(levels[-1], (height, width), cv2.INTER_AREA, layout.spec.alpha))
    return levels[::-1]


def signature(pixels: np.ndarray) -> np.ndarray:
    """Return the signature of an image [H, W, C], by which duplicates are found.

    The result is an array [1] of type SIGNATURE (data/lmdb/format.py).
    """
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
    """Return for each channel the sum of an image's values, and the sum of their squares.

    The image is [H, W, C]. The result is [2, C], int64 for 8 bits, else float64.
    """
    channels = image.shape[2]
    if image.dtype != np.uint8 or channels > 4:
        flat = image.reshape(-1, channels)
        sums = [
            flat.sum(0, np.float64),
            np.einsum("nc,nc->c", flat, flat, dtype=np.float64, casting="unsafe"),
        ]
        return np.array(sums).astype(np.int64 if image.dtype == np.uint8 else np.float64)
    # Squares of at most 255**2 are exact in float32, and so are the float64 sums.
    squares = cv2.multiply(image, image, dtype=cv2.CV_32F)
    sums = [cv2.sumElems(values)[:channels] for values in (image, squares)]
    return np.array(sums).astype(np.int64)


def plain_codec(content: bytes, channels: int) -> int:
    """Return the constant of the fastest decoder with the same result as `decode_image`.

    `content` is an image file. The constant is CODEC_JPEG or CODEC_PNG for 8-bit files without
    transparency or rotation, except for colours that must be converted to grey (`channels` 1). It
    is CODEC_RULES for all other files.
    """
    modes = ("L",) if channels == 1 else ("L", "RGB")
    with Image.open(io.BytesIO(content), formats=formats(content)) as image:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        if turned or image.has_transparency_data or image.mode not in modes:
            return CODEC_RULES
        if image.format == "PNG" and content[24] == 8:  # bits per value
            return CODEC_PNG
        return CODEC_JPEG if image.format == "JPEG" else CODEC_RULES


def pack_arrays(
    path: str | Path,
    images: np.ndarray,  # [n, C, H, W]; uint8, or uint16 or float32 with the range of their values
    labels: Sequence[int] | np.ndarray | None = None,  # [n]
    classes: Sequence[str] = (),
    *,
    # class indices of each label; None: a label is a class
    label_sets: Sequence[Sequence[int]] | None = None,
    encoding: str = "raw",
    source: str = "arrays",
    passport: Provenance | None = None,  # origin of generated images
    # px: also store the images at half their side, a quarter and so on down to this
    smallest: int | None = None,
    overwrite: bool = False,
) -> Meta:
    """Pack arrays into a file, and return its metadata.

    Raises UserError if the file cannot be written, ValueError for wrong arrays.
    """
    channels, height, width = images.shape[1:]
    image = replace(
        ImageSpec.of(channels, 0, {"depth": images.dtype.name}), height=height, width=width
    )
    layout = Layout.of(image, encoding, smallest, ranged=not image.deep)
    with LMDBWriter(
        path,
        layout,
        classes=classes,
        label_sets=label_sets,
        source=source,
        passport=passport,
        overwrite=overwrite,
    ) as writer:
        for index, image in enumerate(images):
            add_image(writer, image.transpose(1, 2, 0), 0 if labels is None else int(labels[index]))
        return writer.finish()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings with which a source's images are converted to records."""

    layout: Layout
    mode: str  # how data.images.fit resizes them
    resized: str = "none"  # `resize_filter` of the source

    @property
    def resize_filter(self) -> str:
        name = self.resized if self.mode == "exact" else RESIZE_FILTERS[self.mode]
        return name.removesuffix(MEANS) + MEANS if len(self.layout.resolutions) > 1 else name


def make_plan(
    source: Source,
    *,
    size: int | str | None = None,  # side in px, or width x height: 96x64
    encoding: str = "raw",
    channels: int | str | None = None,  # "auto": found from all images
    depth: str | None = None,  # "8", "16", "float"; "auto": found from all images
    # low and high of images of 16 bits or floats; None: found from the values while packing
    value_range: tuple[float, float] | None = None,
    resize: str = "auto",  # "crop" or "pad"
    smallest: int | None = None,  # px: side of a pyramid's smallest images; None: no pyramid
) -> Plan:
    """Return the settings for converting a source's images, as the options require.

    The default channels and depth are those of `source.spec`. If `source.spec` is None, they are 3
    channels of 8 bits, or the images' own ones if `source.as_is` is true. The default size is that
    of `source.spec`, or else of the first readable image; all images must then have this size.

    Resize "auto" means "pad" if all images have one known size that is slightly smaller than
    `size`: on both sides, and on one of them by at most 1/8 of the shorter side of `size`.
    Otherwise it means "crop".

    Raises UserError for options that do not fit together.
    """
    source_spec = source.spec
    shape = source_spec.size if source_spec is not None and source_spec.side else None
    if encoding == "source":
        refuse(
            (
                size is not None or smallest is not None,
                "--encoding source keeps the files as they are: drop --size and --pyramid or choose"
                " raw, jpeg or png",
            ),
            (
                source_spec is not None or source.as_is,
                f"{source.name} has no files to keep: choose --encoding raw or png",
            ),
        )
        with explained(ValueError, lambda error: f"{source.name}: {error}"):
            return Plan(
                layout=Layout.of(_form(source, channels or 3, depth or "8"), encoding), mode="exact"
            )
    form, ranged = _form(source, channels, depth), True
    if value_range is not None:
        with explained(
            ValueError, lambda error: f"--range {value_range[0]:g},{value_range[1]:g}: {error}"
        ):
            low, high = value_range
            pixel_format = {**(form.pixel_format or {}), "low": low, "high": high}
            form = ImageSpec.of(form.channels, 0, pixel_format)
    elif form.deep and not form.alpha:
        same = source_spec is not None and form.words == source_spec.words
        ranged = source.ranged and same
    with explained(ValueError, lambda error: f"{source.name}: {error}"):
        check_encoding(form, encoding)
    if size is None:
        height, width = shape or next(
            _map_images(source, lambda content: decode_image(content, form).shape[:2])
        )
        image, mode = replace(form, height=height, width=width), "exact"
        if height != width:
            raise UserError(
                f"{source.name}: images are {width}x{height} px, not square: pass --size N, or"
                f" {width}x{height}"
            )
    elif shape == (image := ImageSpec.of(form.channels, size, form.pixel_format)).size:
        mode = "exact"
    elif resize == "auto":
        height, width = shape or (0, 0)
        margin = min(image.height - height, image.width - width)
        mode = "pad" if shape is not None and 0 < margin <= image.side // PAD_DIVISOR else "crop"
    else:
        mode = resize
    if max(image.size) > MOST_SIDE:
        raise UserError(
            f"{source.name}: {image}; a packed image has at most {MOST_SIDE} px: lower --size"
        )
    with explained(
        ValueError, f"--pyramid {smallest}: {image} must be {smallest} px times 2, 4, 8, ..."
    ):
        layout = Layout.of(image, encoding, smallest, ranged)
        return Plan(layout=layout, mode=mode, resized=source.resize_filter)


def _form(source: Source, channels: int | str | None, depth: str | None) -> ImageSpec:
    """Return the channels, alpha and depth with which a source's images are packed.

    The result is an ImageSpec whose sizes are 0. "auto" looks at all images: it means RGB if one
    has colours, alpha if one has alpha, and the largest depth. With 2 or 4 channels the last one is
    alpha, except if the first image has as many channels and no alpha. Raises UserError if "auto"
    meets floats and integers, or numbers of channels that cannot be combined.
    """
    spec = source.spec
    if spec is not None:
        default_channels, default_depth = spec.channels, SHORT[spec.depth]
        channels, depth = channels or default_channels, depth or default_depth
        if channels in ("auto", default_channels) and depth in ("auto", default_depth):
            return replace(spec, height=0, width=0)
    elif source.as_is:
        channels, depth = channels or "auto", depth or "auto"
    else:
        channels, depth = channels or 3, depth or "8"
    alpha = channels in (2, 4)
    if spec is not None:
        alpha = spec.alpha and channels == spec.channels
    elif alpha:
        first = next(_map_images(source, kind))
        alpha = first.alpha or first.channels != channels
    if "auto" not in (channels, depth):
        return ImageSpec.of(int(channels), 0, {"depth": DEPTHS[depth], "alpha": alpha})
    forms = Counter(_map_images(source, kind))
    kinds = ", ".join(f"{count:,} of {form.title}" for form, count in forms.items())
    deepest = DEPTHS.get(depth, "uint8")
    if depth == "auto":
        depths = {form.depth for form in forms}
        if "float32" in depths and len(depths) > 1:
            raise UserError(
                f"{source.name}: {kinds}: floats and whole numbers have no range in common: pass"
                " --depth"
            )
        deepest = max(depths, key=list(DEPTHS.values()).index)
    if channels == "auto":
        colours = {form.colours for form in forms}
        if len(colours) > 1 and colours != {1, 3}:
            raise UserError(
                f"{source.name}: {kinds}: these do not go together: pass --channels, or pack them"
                " apart"
            )
        alpha = any(form.alpha for form in forms)
        channels = max(colours) + alpha
    form = ImageSpec.of(int(channels), 0, {"depth": deepest, "alpha": alpha})
    print(f"{source.name}: {kinds}: taken as {form.title}", file=sys.stderr)
    return form


def _map_images(source: Source, function: Callable[[Content], T]) -> Iterator[T]:
    """Yield `function(content)` of each readable image. Raises UserError if none can be read."""
    problem, readable = None, False
    for index in range(len(source)):
        try:
            yield function(source.content(index))
            readable = True
        except ImageError as error:
            problem = problem or Problem(source.item_name(index), str(error))
    if not readable:
        raise UserError(
            f"{source.name}: none of {len(source)} images can be read; the first: {problem}"
        )


def _convert(source: Source, plan: Plan, row: int, read: Callable[[], Content]) -> Converted:
    layout = plan.layout
    payload: bytes | None = None
    codec = CODEC_RULES
    try:
        content = read()
        image = decode_image(content, layout.spec)
        if layout.encoding != "source":
            image = fit(image, layout.spec.size, plan.mode, layout.spec.alpha)
        else:
            assert isinstance(content, bytes)  # `make_plan` refuses other sources
            payload, codec = content, plain_codec(content, layout.spec.channels)
        record = make_record(image, int(source.labels()[row]), layout, payload, codec)
    except ImageError as error:
        return error
    original = content.pixels if isinstance(content, Values) else content
    if not isinstance(original, bytes):
        original = b"%dx%dx%d" % original.shape + original.tobytes()
    return replace(record, digest=hashlib.sha256(original).digest())


def thread_count(source: Source, workers: int | None) -> int:
    """Return the number of threads that convert images, in addition to the calling thread.

    This is `workers`, unless it is None. The default is one thread per core, up to MOST_WORKERS. It
    is 0 for arrays, which need no decoding, and on a single core.
    """
    if workers is None:
        is_decoded = not isinstance(source, ArraySource) and cores() > 1
        workers = min(MOST_WORKERS, cores()) if is_decoded else 0
    return workers


def converted(source: Source, plan: Plan, workers: int) -> Generator[Converted]:
    """Convert all images of a source, and yield the results in the order of the source.

    A result is the image's Record, or an ImageError if the image cannot be used. `workers` threads
    convert the images; 0 means the calling thread.

    Close the generator after an error. Closing does not wait for the threads, because a thread that
    waits for a server must not delay Ctrl-C or the end of the program.
    """
    if not workers:
        for row in range(len(source)):
            yield _convert(source, plan, row, source.later(row))
        return
    pixels = plan.layout.spec.values
    chunk = max(1, min(CHUNK_IMAGES, CHUNK_BYTES // pixels if pixels else CHUNK_FILES))
    window = WINDOW * workers * chunk
    pool = ThreadPool(workers)
    try:
        for start in range(0, len(source), window):
            rows = range(start, min(len(source), start + window))
            jobs = [(source, plan, row, source.later(row)) for row in rows]
            yield from pool.imap(_convert_job, jobs, chunk)
    finally:
        pool.terminate()


def _convert_job(job: tuple[Source, Plan, int, Callable[[], Content]]) -> Converted:
    return _convert(*job)
