"""Define the record format of a packed data set, version 1: keys, entries, metadata.

docs/lmdb.md describes the format.
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
from duetgan.utils.checkpoint.provenance import Generated
from duetgan.utils.config.model import Count, PositiveInt, Probability, Stored, Whole
from duetgan.utils.image_spec import MOST_CHANNELS, ImageSpec, PixelFormat, Rectangle
from duetgan.utils.text import set_names

FORMAT = "duet-lmdb"
VERSION = 1
FORMAT_KEY = b"format"
META_KEY = b"meta"
COMPLETE_KEY = b"complete"
SIGNATURES = 4096  # images whose signatures, or names, are in one LMDB record
Encoding = Literal["raw", "jpeg", "png", "source"]
ENCODINGS = get_args(Encoding)

BLOCK_IMAGES = 4096  # images per block at most
# bytes of pixels per raw block at most (an image larger than this has a block of its own)
BLOCK_BYTES = 8 << 20

# One image's label and shape. `size` is the payload's length in bytes; `checksum` is the CRC-32 of
# the entry's other 24 bytes followed by the payload. An entry is stored in the index of its block,
# and before the payload of an encoded image.
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
# At the start of an index record: CRC-32 of the entries that follow, CRC-32 of the raw block (0:
# there is none).
INDEX_HEAD = np.dtype([("checksum", "<u4"), ("block_checksum", "<u4")])
# An image's signature, by which duplicates are found: `digest` is the same only for equal pixels;
# `dhash`, a difference hash, differs in few bits for similar images.
SIGNATURE = np.dtype([("digest", "<u8"), ("dhash", "<u8")])

# Keys. The first number is the index of a block, a group of SIGNATURES images, or an image; the
# second is a resolution.
PIXELS_KEY = b"pixels/%08d/%05d"  # a raw block of images: uint8 [n, C, H, W]
IMAGE_KEY = b"picture/%010d/%05d"  # an encoded image: its entry, then the file's bytes
INDEX_KEY = b"index/%08d/%05d"  # a block's index: INDEX_HEAD, then an ENTRY per image
SIGNATURE_KEY = b"hash/%08d"  # the CRC-32 (u32) of the rest, an array of SIGNATURE
NAME_KEY = b"name/%08d"  # the CRC-32 (u32) of the rest, a JSON list of strings

Side = Annotated[int, Interval(ge=0, le=MOST_SIDE)]  # px


class Split(Stored):
    """A file's part of a larger data set, and how the data set was split (data/packing)."""

    part: Literal["train", "val"]
    share: Probability  # held-out fraction
    seed: Whole
    whole: str  # fingerprint of the larger data set
    images: PositiveInt  # in the larger data set
    # command-line option that defines groups, which the split kept whole; None: no groups
    group_by: str | None = None
    groups: PositiveInt | None = None  # number of groups in this part


class Completion(Stored):
    """The LMDB record that is written last and marks a complete file."""

    meta_checksum: Annotated[int, Interval(ge=0, lt=2**32)]
    count: Any = None
    content_hash: Any = None


class Meta(Stored):
    """The metadata of a packed data set.

    `mean` and `std` have a value for each channel, over all pixels of all images at the largest
    resolution. They are scaled so that the pixel format's range, low to high, becomes [0, 1].
    `resolutions` has the shorter sides of the images in px, ascending. If there are several, each
    image is stored at all of them. For images of individual sizes (encoding "source") it is [0].
    `size` is set for images that are not square: it is their size at the largest resolution.

    An image's label is the index of a class. If images may have several classes or none, the label
    is an index into `sets`, and each set is an ascending list of class indices.

    `split` is set for a part of a larger data set (data/packing). For generated images, `passport`
    describes the generator (utils/checkpoint/provenance.py).
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
    resize_filter: str  # how images were resized: "none", "zero-pad", "centre-crop+lanczos"
    source: str  # name of the packed source, for people
    fingerprint: str  # hash of the source's images and labels; empty: not computed
    content_hash: str
    # images per block, one number for each resolution
    blocks: list[Annotated[int, Interval(ge=1, le=2**31)]]
    sets: Annotated[list[list[Count]], MinLen(1)] | None = None
    split: Split | None = None
    passport: dict[str, Any] | None = None

    def to_json(self) -> bytes:
        return json.dumps(self.model_dump(exclude_none=True), sort_keys=True).encode()

    @classmethod
    def from_json(cls, record: bytes) -> "Meta":
        """Parse a metadata record. Unknown keys, from later minor changes, are ignored.

        Raises ValueError for contradictory fields, and RecursionError for deep nesting.
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
        for name, expected in (
            ("histogram", self.labels),
            ("mean", self.channels),
            ("std", self.channels),
            ("blocks", len(self.resolutions)),
        ):
            if len(getattr(self, name)) != expected:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} values, but must have {expected}"
                )
        if self.classes and sum(self.histogram) != self.count:
            raise ValueError(
                f"histogram counts {sum(self.histogram)} images, but count is {self.count}"
            )
        for label_set in self.sets or ():
            bounded = [-1, *label_set, len(self.classes)]
            if bounded != sorted(set(bounded)):
                raise ValueError(
                    f"sets has {label_set[:20]}, no ascending labels of {len(self.classes)} classes"
                )
        for name in ("mean", "std"):
            for value in () if self.spec.deep else getattr(self, name):
                if not 0 <= value <= 1:
                    raise ValueError(f"{name} has {value}, but must lie in [0, 1]")
        check_sides(self.resolutions, self.encoding, self.spec)
        check_encoding(self.spec, self.encoding)

    def hash_of(self, digests: Mapping[int, Iterable[bytes]]) -> str:
        """Return the SHA-256 of a data set's classes, format and blocks.

        Args:
            digests: digests of the blocks by resolution. A block's digest is the SHA-256 of its
                payloads in order, then its entries, so that blocks can be checked in parallel.
        """
        head: dict[str, object] = {
            "channels": self.channels,
            "classes": self.classes,
            "encoding": self.encoding,
            "resolutions": list(digests),
        }
        if self.sets is not None:
            head["sets"] = self.sets
        if self.spec.pixel_format is not None:
            head["pixel_format"] = self.spec.pixel_format
        content = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
        for digest in itertools.chain.from_iterable(digests.values()):
            content.update(digest)
        return content.hexdigest()

    @property
    def spec(self) -> ImageSpec:
        """Size, channels and pixel format of the images at the largest resolution."""
        pixels = None if self.pixel_format is None else self.pixel_format.model_dump()
        return ImageSpec.of(self.channels, self.size or self.resolutions[-1], pixels)

    @property
    def labels(self) -> int:
        """Number of different labels, which are label sets if there are `sets`, else classes.

        It is 0 if the data set is unlabelled.
        """
        return len(self.classes if self.sets is None else self.sets)

    @property
    def multi_hot(self) -> np.ndarray:
        """Classes of each label: bool [labels, classes]."""
        if self.sets is None:
            return np.eye(self.labels, dtype=bool)
        return multi_hot(self.sets, len(self.classes))

    def conditions(self, labels: np.ndarray | Sequence[int]) -> np.ndarray:
        """Convert labels, int64 [n], to the input of conditional networks.

        Without label sets (`sets`), the result is the labels themselves. With label sets, the
        result is multi-hot vectors, float32 [n, classes].
        """
        if self.sets is None:
            return np.asarray(labels)
        return self.multi_hot[labels].astype(np.float32)

    @property
    def by_class(self) -> list[int]:
        """Number of images of each class. An image of several classes counts for all of them."""
        if self.sets is None:
            return self.histogram
        counts: list[int] = (np.array(self.histogram) @ self.multi_hot).tolist()
        return counts

    @property
    def label_names(self) -> list[str]:
        """Name of each label: the name of its class, or the joined names of its classes."""
        return self.classes if self.sets is None else set_names(self.classes, self.sets)

    def check_room(self, size: int, entries: int) -> None:
        """Raise ValueError if a file is too small to hold `count` images.

        The file has `size` bytes and `entries` records. Up to half of the records may be missing,
        because damaged records can be skipped.
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
                f"count is {self.count}, more than a file of {size:,} bytes and {entries:,} records"
                " holds"
            )


def multi_hot(label_sets: Sequence[Sequence[int]], classes: int) -> np.ndarray:
    """Return the classes of each label set: bool [label sets, classes]."""
    hot = np.zeros((len(label_sets), classes), bool)
    for row, label_set in enumerate(label_sets):
        hot[row, label_set] = True
    return hot


def check_sides(sides: Sequence[int], encoding: str, image: ImageSpec) -> None:
    """Raise ValueError for a wrong list of resolutions.

    Each side must be twice the previous one, and the largest must be the shorter side of `image`.
    For encoding "source", the only side is 0.
    """
    doubled = all(larger == 2 * smaller > 0 for smaller, larger in itertools.pairwise(sides))
    if not doubled or (sides[0] == 0) != (encoding == "source") or image.side != sides[-1]:
        raise ValueError(
            f"resolutions {list(sides)[:20]} do not fit encoding {encoding!r} and images of {image}"
        )
    image.at(sides[0])


def check_encoding(image: ImageSpec, encoding: str) -> None:
    """Raise ValueError if `encoding` cannot store images of this format."""
    png = encoding == "png" and image.channels in (1, 3, 4) and image.depth != "float32"
    if encoding not in ENCODINGS or not (image.plain or encoding == "raw" or png):
        raise ValueError(f"encoding {encoding} does not keep images of {image.title}: take raw")


def make_entry(payload: bytes, label: int, height: int, width: int, codec: int) -> np.ndarray:
    """Return the entry of an image, an array of shape [1] and type ENTRY."""
    entry = np.array([(0, len(payload), label, height, width, codec)], ENTRY)
    entry["checksum"] = entry_checksum(entry[0], payload)
    return entry


def entry_checksum(entry: np.void, payload: bytes | memoryview) -> int:
    """Return the CRC-32 of an entry's size, label, shape and codec, followed by the payload."""
    return zlib.crc32(payload, zlib.crc32(entry.tobytes()[4:]))
