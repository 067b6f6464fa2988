"""The record format of a packed data set, version 1: keys, entries, metadata. docs/lmdb.md is its description."""

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass, fields

import numpy as np

FORMAT = "duet-lmdb"
VERSION = 1
FORMAT_KEY, META_KEY, COMPLETE_KEY = b"format", b"meta", b"complete"
ENCODINGS = ("raw", "jpeg", "png", "source")

BLOCK_PICTURES = 4096  # pictures per block at most
BLOCK_BYTES = 8 << 20  # bytes of pixels per raw block at most (a picture larger than this has a block of its own)

# One picture's label and shape. `size` is the payload's length in bytes; `checksum` is the CRC-32 of the entry's other
# 20 bytes followed by the payload. Entries stand in the index of their block and in front of an encoded picture.
ENTRY = np.dtype([("checksum", "<u4"), ("size", "<u4"), ("label", "<i8"), ("height", "<u4"), ("width", "<u4")])
# In front of an index record: CRC-32 of the entries that follow, CRC-32 of the raw block beside it (0: no raw block).
INDEX_HEAD = np.dtype([("checksum", "<u4"), ("block_checksum", "<u4")])


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What a packed data set says about itself.

    `mean` and `std` are per channel in units of [0, 1], over all pixels of all pictures. `resolutions` holds the side
    of the square pictures, or 0 where the pictures have sizes of their own (encoding "source"). `content_hash` is the
    SHA-256 of classes, labels, shapes and payloads: the same pictures packed the same way give the same hash.
    """

    version: int = VERSION
    count: int  # pictures
    classes: list[str]  # names by label; empty: unlabelled
    channels: int  # 1 or 3
    resolutions: list[int]  # px
    encoding: str  # one of ENCODINGS
    histogram: list[int]  # pictures per class; empty: unlabelled
    mean: list[float]
    std: list[float]
    resize_filter: str  # how pictures were brought to size: "none", "zero-pad", "centre-crop+lanczos"
    source: str  # what was packed, for people
    content_hash: str
    block: int = 1  # pictures per block

    def to_json(self) -> bytes:
        """The metadata record."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, record: bytes) -> "Meta":
        """Read a metadata record; keys of later minor changes are ignored. Raises ValueError or TypeError if unfit."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in json.loads(record).items() if key in known})


def block_length(channels: int, resolution: int, encoding: str) -> int:
    """Pictures per block: for raw pictures as many as fit into BLOCK_BYTES, else BLOCK_PICTURES per index record."""
    if encoding != "raw":
        return BLOCK_PICTURES
    return max(1, min(BLOCK_PICTURES, BLOCK_BYTES // (channels * resolution * resolution)))


def content_hasher(classes: list[str], channels: int, encoding: str, resolution: int) -> "hashlib._Hash":
    """The content hash at its start; then each record's entry and payload are added in order."""
    head = {"channels": channels, "classes": classes, "encoding": encoding, "resolution": resolution}
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode())


def pixels_key(block: int, resolution: int) -> bytes:
    """Key of a raw block of pictures: uint8 [n, C, H, W]."""
    return b"pixels/%08d/%05d" % (block, resolution)


def picture_key(index: int, resolution: int) -> bytes:
    """Key of an encoded picture: its entry, then the file's bytes."""
    return b"picture/%010d/%05d" % (index, resolution)


def index_key(block: int, resolution: int) -> bytes:
    """Key of a block's index: INDEX_HEAD, then an ENTRY per picture."""
    return b"index/%08d/%05d" % (block, resolution)


def make_entry(payload: bytes, label: int, height: int, width: int) -> np.ndarray:
    """The entry of a picture, as an array of shape [1] and type ENTRY."""
    entry = np.zeros(1, ENTRY)
    entry[0] = (0, len(payload), label, height, width)
    entry["checksum"] = entry_checksum(entry[0], payload)
    return entry


def entry_checksum(entry: np.void, payload: bytes | memoryview) -> int:
    """CRC-32 of label, shape and size, then the payload."""
    return zlib.crc32(payload, zlib.crc32(entry.tobytes()[4:]))
