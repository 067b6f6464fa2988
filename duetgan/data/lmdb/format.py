"""The record format of a packed data set, version 1: keys, entries, metadata. docs/lmdb.md is its
description.
"""

import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import numpy as np
from annotated_types import Interval, MinLen

from duetgan.data.errors import MOST_SIDE
from duetgan.utils.config.model import Count, PositiveInt, Probability, Stored, Whole
from duetgan.utils.image_spec import MOST_CHANNELS, ImageSpec, PixelFormat, Rectangle
from duetgan.utils.provenance import Generated
from duetgan.utils.text import set_names

FORMAT = "duet-lmdb"
VERSION = 1
FORMAT_KEY, META_KEY, COMPLETE_KEY = b"format", b"meta", b"complete"
SIGNATURES = 4096  # per record, as of names
Encoding = Literal["raw", "jpeg", "png", "source"]
ENCODINGS = get_args(Encoding)

BLOCK_IMAGES = 4096  # images per block at most
# bytes of pixels per raw block at most (an image larger than this has a block of its own)
BLOCK_BYTES = 8 << 20

# How a payload is decoded: by the rules of data/values.py, or faster because nothing in the file
# needs them.
CODEC_RULES, CODEC_JPEG, CODEC_PNG = 0, 1, 2

# One image's label and shape. `size` is the payload's length in bytes; `checksum` is the CRC-32 of
# the entry's other 24 bytes followed by the payload. Entries stand in the index of their block and
# in front of an encoded image.
ENTRY = np.dtype(
    [
        ("checksum", "<u4"),
        ("size", "<u4"),
        ("label", "<i8"),
        ("height", "<u4"),
        ("width", "<u4"),
        ("codec", "<u4"),
    ]
)
# In front of an index record: CRC-32 of the entries that follow, CRC-32 of the raw block beside it
# (0: no raw block).
INDEX_HEAD = np.dtype([("checksum", "<u4"), ("block_checksum", "<u4")])
# An image's signature, what duplicates are found by: `digest` is the same for equal pixels only;
# `dhash`, a difference hash, is nearly the same for images that look alike.
SIGNATURE = np.dtype([("digest", "<u8"), ("dhash", "<u8")])

# In place of an image's bytes, where a file is an index of tar files: the tar's number in `shards`,
# the first byte.
LINK = np.dtype([("shard", "<u4"), ("start", "<u8")])

# Keys: of a block (of images, or of SIGNATURES images) or an image, and where there are two numbers
# of a resolution.
PIXELS_KEY = b"pixels/%08d/%05d"  # a raw block of images: uint8 [n, C, H, W]
IMAGE_KEY = b"picture/%010d/%05d"  # an encoded image: its entry, then the file's bytes
INDEX_KEY = b"index/%08d/%05d"  # a block's index: INDEX_HEAD, then an ENTRY per image
SIGNATURE_KEY = b"hash/%08d"  # the CRC-32 (u32) of the rest, an array of SIGNATURE
NAME_KEY = b"name/%08d"  # the CRC-32 (u32) of the rest, a JSON list of strings

Side = Annotated[int, Interval(ge=0, le=MOST_SIDE)]  # px


class Split(Stored):
    """How a file was drawn from a larger set (data/packing)."""

    part: Literal["train", "val"]
    share: Probability
    seed: Whole
    whole: str  # fingerprint of all images
    images: PositiveInt  # of the larger set


class Shard(Stored):
    """A tar file that holds images, as it was when it was indexed."""

    path: str
    size: Count  # bytes
    changed: Whole  # ns since 1970


class Completion(Stored):
    """The record that is written last."""

    meta_checksum: Annotated[int, Interval(ge=0, lt=2**32)]
    count: Any = None
    content_hash: Any = None


class Meta(Stored):
    """What a packed data set says about itself.

    `mean` and `std` are per channel in units of [0, 1], from the pixel format's low to its high,
    over all pixels of all images at the largest resolution. `resolutions` holds the images' shorter
    sides in ascending order (several: a pyramid), or 0 where the images have sizes of their own
    (encoding "source"); `size` is that of the largest where they are no squares. A record's label
    is the number of a class, or of one of `sets` where an image may have several classes or none:
    each lists its classes, ascending. `split` says how the file was drawn from a larger set
    (data/packing), `passport` which generator drew the images (utils/provenance.py), `shards` which
    tar files hold the images' bytes (data/reading/several_files.py).
    """

    version: Annotated[int, Interval(ge=VERSION, le=VERSION)] = VERSION
    count: Annotated[int, Interval(ge=1, lt=10**10)]  # images; as many digits as a key has
    classes: list[str]  # names by label; empty: unlabelled
    channels: Annotated[int, Interval(ge=1, le=MOST_CHANNELS)]
    resolutions: Annotated[list[Side], MinLen(1)]
    size: Rectangle | None = None
    pixel_format: PixelFormat | None = None  # None: 8-bit values without transparency
    encoding: Encoding
    histogram: list[Count]  # images per label; empty: unlabelled
    mean: list[float]
    std: list[float]
    resize_filter: str  # how images were brought to size: "none", "zero-pad", "centre-crop+lanczos"
    source: str  # what was packed, for people
    fingerprint: str  # empty if the source was not asked
    content_hash: str
    # images per block, one number for each resolution
    blocks: list[Annotated[int, Interval(ge=1, le=2**31)]]
    sets: Annotated[list[list[Count]], MinLen(1)] | None = None
    split: Split | None = None
    passport: dict[str, Any] | None = None
    shards: Annotated[list[Shard], MinLen(1)] | None = None

    def to_json(self) -> bytes:
        return json.dumps(self.model_dump(exclude_none=True), sort_keys=True).encode()

    @classmethod
    def from_json(cls, record: bytes) -> "Meta":
        """Read a metadata record; keys of later minor changes are ignored. Raises ValueError if it
        contradicts itself, RecursionError if it is too deep.
        """
        meta = cls.read(json.loads(record))
        if "version" not in meta.model_fields_set:
            raise ValueError("version is missing")
        if meta.passport is not None:
            Generated.read(meta.passport, "passport")
        meta.check()
        return meta

    def check(self) -> None:
        """Raise ValueError for fields that contradict one another."""
        for name, wanted in (
            ("histogram", self.labels),
            ("mean", self.channels),
            ("std", self.channels),
            ("blocks", len(self.resolutions)),
        ):
            if len(getattr(self, name)) != wanted:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} values, but must have {wanted}"
                )
        if self.classes and sum(self.histogram) != self.count:
            raise ValueError(
                f"histogram counts {sum(self.histogram)} images, but count is {self.count}"
            )
        for labels in self.sets or ():
            if not all(a < b for a, b in itertools.pairwise([-1, *labels, len(self.classes)])):
                raise ValueError(
                    f"sets has {labels[:20]}, no ascending labels of {len(self.classes)} classes"
                )
        for name in ("mean", "std"):
            for value in () if self.spec.deep else getattr(self, name):
                if not 0 <= value <= 1:
                    raise ValueError(f"{name} has {value}, but must lie in [0, 1]")
        check_sides(self.resolutions, self.encoding, self.spec)
        check_encoding(self.spec, self.encoding)

    def hash_of(self, digests: Mapping[int, Iterable[bytes]]) -> str:
        """SHA-256 of a data set: of its head, then of the digest of every block, resolution by
        resolution.

        A block's digest is the SHA-256 of its payloads in order, then its entries: blocks can be
        checked side by side.
        """
        head: dict[str, Any] = {
            "channels": self.channels,
            "classes": self.classes,
            "encoding": self.encoding,
        }
        more = {"sets": self.sets, "pixel_format": self.spec.pixel_format}
        head |= {
            "resolutions": list(digests),
            **{name: value for name, value in more.items() if value is not None},
        }
        content = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
        for digest in itertools.chain.from_iterable(digests.values()):
            content.update(digest)
        return content.hexdigest()

    @property
    def spec(self) -> ImageSpec:
        """The images at the largest resolution."""
        pixels = None if self.pixel_format is None else self.pixel_format.model_dump()
        return ImageSpec.of(self.channels, self.size or self.resolutions[-1], pixels)

    @property
    def labels(self) -> int:
        """How many labels a record may have: classes, or sets of them; 0: unlabelled."""
        return len(self.classes if self.sets is None else self.sets)

    @property
    def multi_hot(self) -> np.ndarray:
        """Which classes each label stands for: bool [labels, classes]."""
        return (
            np.eye(self.labels, dtype=bool)
            if self.sets is None
            else multi_hot(self.sets, len(self.classes))
        )

    def conditions(self, labels: np.ndarray | Sequence[int]) -> np.ndarray:
        """What networks are conditioned on for labels int64 [n]: themselves; of `sets` multi-hot,
        float32 [n, K].
        """
        return (
            np.asarray(labels) if self.sets is None else self.multi_hot[labels].astype(np.float32)
        )

    @property
    def by_class(self) -> list[int]:
        """Images of each class; an image of several counts for each of them."""
        return (
            self.histogram
            if self.sets is None
            else (np.array(self.histogram) @ self.multi_hot).tolist()
        )

    @property
    def label_names(self) -> list[str]:
        """What each label is called: the class, or the set's classes, joined."""
        return self.classes if self.sets is None else set_names(self.classes, self.sets)

    def check_room(self, size: int, entries: int) -> None:
        """Raise ValueError for a count of images that a file of `size` bytes and `entries` records
        cannot hold.

        Half of them may be missing: single damaged records can be skipped.
        """
        raw = self.encoding == "raw"
        records, least = 0, 0
        for side, block in zip(self.resolutions, self.blocks, strict=True):
            blocks = -(-self.count // block)
            records += 2 * blocks if raw else blocks + self.count
            least += self.count * (
                ENTRY.itemsize + (self.spec.at(side).nbytes if raw else ENTRY.itemsize)
            )
        if records > 2 * entries or least > 2 * size:
            raise ValueError(
                f"count is {self.count}, more than a file of {size:,} bytes and {entries:,} records holds"
            )


def multi_hot(sets: Sequence[Sequence[int]], classes: int) -> np.ndarray:
    """Which classes are in each set: bool [sets, classes]."""
    hot = np.zeros((len(sets), classes), bool)
    for row, labels in enumerate(sets):
        hot[row, labels] = True
    return hot


def check_sides(sides: Sequence[int], encoding: str, image: ImageSpec) -> None:
    """Raise ValueError unless each side is twice the one before, or the only one is 0 for encoding
    "source", and the largest that of the images.
    """
    doubled = all(larger == 2 * smaller > 0 for smaller, larger in itertools.pairwise(sides))
    if not doubled or (sides[0] == 0) != (encoding == "source") or image.side != sides[-1]:
        raise ValueError(
            f"resolutions {list(sides)[:20]} do not fit encoding {encoding!r} and images of {image}"
        )
    image.at(sides[0])


def check_encoding(image: ImageSpec, encoding: str) -> None:
    """Raise ValueError for an encoding that does not keep such values."""
    png = encoding == "png" and image.channels in (1, 3, 4) and image.depth != "float32"
    if encoding not in ENCODINGS or not (image.plain or encoding == "raw" or png):
        raise ValueError(f"encoding {encoding} does not keep images of {image.title}: take raw")


def make_entry(
    payload: bytes, label: int, height: int, width: int, codec: int = CODEC_RULES
) -> np.ndarray:
    """The entry of an image, as an array of shape [1] and type ENTRY."""
    entry = np.array([(0, len(payload), label, height, width, codec)], ENTRY)
    entry["checksum"] = entry_checksum(entry[0], payload)
    return entry


def entry_checksum(entry: np.void, payload: bytes | memoryview) -> int:
    """CRC-32 of label, shape, size and codec, then the payload."""
    return zlib.crc32(payload, zlib.crc32(entry.tobytes()[4:]))
