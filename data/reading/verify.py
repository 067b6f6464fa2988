"""Check every record of a packed file, blocks side by side in threads."""

import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import lmdb
import numpy as np

from data.decode import decode
from data.errors import DamageError, ImageError
from data.lmdb.format import content_hash
from data.lmdb.reader import LMDBReader
from utils.memory import cores
from utils.runlog.progress import Bar


@dataclass
class Damage:
    """Damaged records and why; `content` says what contradicts the metadata although every record is intact."""

    records: dict[int, str] = field(default_factory=dict)
    content: str = ""

    def __bool__(self) -> bool:
        return bool(self.records or self.content)


@dataclass
class Block:
    """What one block turned out to be."""

    labels: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # empty if its index is damaged
    digest: bytes = b""  # SHA-256 of payloads and entries
    damaged: dict[int, str] = field(default_factory=dict)  # record -> reason


def verify(reader: LMDBReader, workers: int | None = None) -> Damage:
    """Check every index, block and record at every resolution, decode encoded images, compare labels and hash with
    the metadata. `workers`: threads, default one per core.
    """
    meta, damage = reader.meta, Damage()
    levels = [LMDBReader(reader.path, resolution=side or None) for side in meta.resolutions]
    jobs = [(number, block) for number, level in enumerate(levels) for block in range(level.blocks)]
    labels: list[list[np.ndarray]] = [[] for _ in levels]
    digests: dict[int, list[bytes]] = {side: [] for side in meta.resolutions}
    with ThreadPoolExecutor(workers or cores()) as pool:
        found = pool.map(lambda job: check_block(levels[job[0]], job[1]), jobs)
        progress = Bar(found, "verifying", len(jobs), unit="block")
        for (number, _), block in zip(jobs, progress, strict=True):
            damage.records |= block.damaged
            labels[number].append(block.labels)
            digests[meta.resolutions[number]].append(block.digest)
    try:
        reader.signatures()
        reader.names()
    except DamageError as error:
        damage.records |= dict.fromkeys(error.records, error.reason)
    if not damage.records:
        content = content_hash(meta.classes, meta.channels, meta.encoding, digests)
        damage.content = _contradiction(reader, [np.concatenate(parts) for parts in labels], content)
    return damage


def _contradiction(reader: LMDBReader, labels: list[np.ndarray], content: str) -> str:
    """What does not fit the metadata, if anything."""
    meta = reader.meta
    if any((part != labels[0]).any() for part in labels):
        return "the labels differ between the resolutions"
    known = (labels[0] >= 0) & (labels[0] < len(meta.classes))
    counts = np.bincount(labels[0][known], minlength=len(meta.classes)).tolist()
    if meta.classes and counts != meta.histogram:
        return "the labels do not give the histogram in the metadata"
    if content != meta.content_hash:
        return "the content hash does not match"
    return ""


def check_block(reader: LMDBReader, block: int) -> Block:
    """Check one block at the reader's resolution."""
    found, digest = Block(), hashlib.sha256()
    with reader.handle().environment.begin(buffers=True) as transaction:
        try:
            head, entries = reader.index_record(transaction, block)
            found.labels = entries["label"].astype(np.int64)
            if reader.meta.encoding == "raw":
                pixels = reader.raw_block(transaction, block)
                damaged = reader.damaged_in_raw_block(transaction, block)
                found.damaged |= dict.fromkeys(damaged, "its checksum does not match")
                if not found.damaged and zlib.crc32(pixels.data) != head["block_checksum"]:
                    raise reader.damage(reader.block_range(block), "the checksum of its block does not match")
                digest.update(pixels.data)
            else:
                for record, expected in zip(reader.block_range(block), entries, strict=True):
                    try:
                        digest.update(_checked_payload(reader, transaction, record, expected))
                    except DamageError as error:
                        found.damaged[record] = error.reason
            digest.update(entries.tobytes())
            found.digest = digest.digest()
        except DamageError as error:
            found.damaged |= dict.fromkeys(error.records, error.reason)
    return found


def _checked_payload(reader: LMDBReader, transaction: lmdb.Transaction, record: int, expected: np.void) -> memoryview:
    """An encoded image's file. Raises DamageError if it differs from its entry in the index, or cannot be decoded."""
    entry, payload = reader.encoded_record(transaction, record)
    if entry != expected:
        raise reader.damage(record, "it differs from its index")
    try:
        size = (int(entry["height"]), int(entry["width"]))
        height, width = decode(payload, int(entry["codec"]), reader.meta.channels, size).shape[:2]
    except ImageError as error:
        raise reader.damage(record, str(error)) from None
    if (height, width) != (entry["height"], entry["width"]):
        raise reader.damage(record, f"it is {width}x{height} px when decoded")
    return payload
