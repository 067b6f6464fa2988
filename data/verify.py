"""Check every record of a packed file."""

import hashlib
import zlib
from dataclasses import dataclass, field

import lmdb
import numpy as np
from tqdm import tqdm

from data.format import content_hasher
from data.pictures import PictureError, decode_packed
from data.store import DamageError, LMDBReader


@dataclass
class Damage:
    """Damaged records and why; `content` says what does not fit the metadata although every record is whole."""

    records: dict[int, str] = field(default_factory=dict)
    content: str = ""

    def __bool__(self) -> bool:
        return bool(self.records or self.content)


def verify(reader: LMDBReader) -> Damage:
    """Check every index, block and record, decode encoded pictures, compare labels and hash with the metadata."""
    meta, damage = reader.meta, Damage()
    content = content_hasher(meta.classes, meta.channels, meta.encoding, reader.resolution)
    labels = []
    check = _check_raw if meta.encoding == "raw" else _check_encoded
    with reader.handle().environment.begin(buffers=True) as transaction:
        for block in tqdm(range(reader.blocks), desc="verifying", unit="block", disable=None):
            try:
                head, entries = reader.index_record(transaction, block)
                labels.append(entries["label"])
                check(reader, transaction, block, head, entries, content, damage)
            except DamageError as error:
                damage.records |= dict.fromkeys(error.records, error.reason)
    if damage.records:
        return damage
    counts = np.bincount(np.concatenate(labels), minlength=len(meta.classes))
    if meta.classes and counts.tolist() != meta.histogram:
        damage.content = "the labels do not give the histogram in the metadata"
    elif content.hexdigest() != meta.content_hash:
        damage.content = "the content hash does not match"
    return damage


def _check_raw(
    reader: LMDBReader,
    transaction: lmdb.Transaction,
    block: int,
    head: np.void,
    entries: np.ndarray,
    content: "hashlib._Hash",
    damage: Damage,
) -> None:
    pixels = reader.raw_block(transaction, block)
    bad = list(reader.damaged_in_raw_block(transaction, block))
    damage.records |= dict.fromkeys(bad, "its checksum does not match")
    if not bad and zlib.crc32(pixels.data) != head["block_checksum"]:
        raise reader.damage(reader.block_range(block), "the checksum of its block does not match")
    for entry, picture in zip(entries, pixels, strict=True):
        content.update(entry.tobytes())
        content.update(picture.data)


def _check_encoded(
    reader: LMDBReader,
    transaction: lmdb.Transaction,
    block: int,
    head: np.void,
    entries: np.ndarray,
    content: "hashlib._Hash",
    damage: Damage,
) -> None:
    for record, expected in zip(reader.block_range(block), entries, strict=True):
        try:
            entry, payload = reader.encoded_record(transaction, record)
            if entry != expected:
                raise reader.damage(record, "it differs from its index")
            shape = decode_packed(payload, reader.meta.encoding, reader.meta.channels).shape
            if shape[:2] != (entry["height"], entry["width"]):
                raise reader.damage(record, f"it is {shape[1]}x{shape[0]} px when decoded")
            content.update(entry.tobytes())
            content.update(payload)
        except DamageError as error:
            damage.records[record] = error.reason
        except PictureError as error:
            damage.records[record] = str(error)
