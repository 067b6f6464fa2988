"""Describe a packed file, verify its records, and draw a grid of its images."""

import hashlib
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from duetgan.data.errors import ImageError
from duetgan.data.images import thumbnail
from duetgan.data.images.decode import decode
from duetgan.data.lmdb.format import Meta
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.stored_image import visible_image
from duetgan.utils.errors import DamageError, UserError
from duetgan.utils.images import save_table
from duetgan.utils.machine import cores
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.text import columns

COLUMNS = 10
MAX_ROWS = 20
# px: smaller images are enlarged by an integer factor, those above 2 * CELL are scaled down to it
CELL = 64


def lines(document: dict[str, object], meta: Meta) -> list[str]:
    """Return the lines of a packed file's description: its properties, then its classes.

    `document` holds the properties by name.
    """
    document = document | ({} if meta.passport else {"passport": "none, real images"})
    rows = [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in document.items()
        if key not in ("classes", "histogram", "label_sets")
    ]
    rows.append(("classes", str(len(meta.classes) or "none, unlabelled")))
    for name, count in zip(meta.classes, meta.by_class, strict=True):
        rows.append((f"  {name}", f"{count:,}"))
    return columns(rows, "<").splitlines()


def labels_document(label_sets: list[list[int]] | None, meta: Meta) -> dict[str, object]:
    """Return the numbers of images by number of labels (0, 1, more), by label set and by class.

    The dict is a part of the JSON document of `duet inspect`. It is empty for a file without label
    sets.
    """
    if label_sets is None:
        return {}
    sizes = np.minimum(list(map(len, label_sets)), 2)
    none, one, several = np.bincount(sizes, meta.histogram, minlength=3).astype(int).tolist()
    documents = []
    for label_set, count in zip(label_sets, meta.histogram, strict=True):
        names = [meta.classes[label] for label in label_set]
        documents.append({"labels": names, "count": count})
    return {
        "labels_an_image": {"none": none, "one": one, "several": several},
        "label_sets": documents,
        "histogram": meta.by_class,
    }


def save_grid(reader: LMDBReader, path: Path) -> None:
    """Save a picture at `path` with a row of images for each of the first MAX_ROWS classes.

    The images of a row are evenly spaced in the class. The picture of an unlabelled file shows its
    first images.
    """
    side = min(reader.resolution or 2 * CELL, 2 * CELL)
    cell = side * max(1, -(-CELL // side))
    first = np.arange(min(len(reader), COLUMNS * 8))
    rows = np.split(first, np.arange(COLUMNS, len(first), COLUMNS))
    if heads := reader.classes[:MAX_ROWS]:
        rows = []
        for has_class in reader.meta.multi_hot.T[: len(heads)]:
            members = np.flatnonzero(has_class[reader.labels()])
            count = min(COLUMNS, len(members))
            rows.append(members[np.linspace(0, len(members) - 1, count).astype(int)])
    images = []
    for row in rows:
        images.append([thumbnail(visible_image(reader, index), cell) for index in row.tolist()])
    save_table(images, path, row_heads=heads, cell=cell, gap=2)


@dataclass
class Damage:
    """The damage found in a packed file. As a bool it is True if there is any."""

    records: dict[int, str] = field(default_factory=dict)  # damaged record -> reason
    content: str = ""  # contradiction between intact records and the metadata

    def __bool__(self) -> bool:
        return bool(self.records or self.content)


def verify(reader: LMDBReader, workers: int | None = None) -> Damage:
    """Check every index, block and record of a packed file, and return the damage found.

    This is done at every resolution. Encoded images are decoded. Labels and content hash are
    compared with the metadata. `workers` is the number of threads (default: one per core).
    """
    damage, sides = Damage(), reader.meta.resolutions
    levels = [LMDBReader(reader.path, resolution=side or None) for side in sides]
    jobs = [(level, block) for level in levels for block in range(level.blocks)]
    labels: dict[int, list[np.ndarray]] = {side: [] for side in sides}
    digests: dict[int, list[bytes]] = {side: [] for side in sides}
    with ThreadPoolExecutor(workers or cores()) as pool:
        progress = Bar(
            pool.map(check_block, *zip(*jobs, strict=True)), "verifying", len(jobs), unit="block"
        )
        for (level, _), (block_labels, digest, damaged) in zip(jobs, progress, strict=True):
            damage.records |= damaged
            labels[level.resolution].append(block_labels)
            digests[level.resolution].append(digest)
    try:
        reader.signatures()
        reader.names()
    except DamageError as error:
        damage.records |= dict.fromkeys(error.records, error.reason)
    if not damage.records:
        damage.content = _contradiction(
            reader.meta, [np.concatenate(labels[side]) for side in sides], digests
        )
    return damage


def _contradiction(meta: Meta, labels: list[np.ndarray], digests: dict[int, list[bytes]]) -> str:
    if any((part != labels[0]).any() for part in labels):
        return "the labels differ between the resolutions"
    valid = labels[0][(labels[0] >= 0) & (labels[0] < meta.labels)]
    if np.bincount(valid, minlength=meta.labels).tolist() != meta.histogram:
        return "the labels do not give the histogram in the metadata"
    if meta.hash_of(digests) != meta.content_hash:
        return "the content hash does not match"
    return ""


def check_block(reader: LMDBReader, block: int) -> tuple[np.ndarray, bytes, dict[int, str]]:
    """Check a block at the reader's resolution.

    Returns the labels of the block (empty if its index is damaged), the SHA-256 of its payloads and
    entries, and a dict from each damaged record to the reason.
    """
    labels = np.empty(0, np.int64)
    digest = hashlib.sha256()
    damaged: dict[int, str] = {}
    with reader.handle().environment.begin(buffers=True) as transaction:
        try:
            head, entries = reader.index_record(transaction, block)
            labels = entries["label"].astype(np.int64)
            if reader.meta.encoding == "raw":
                pixels = reader.raw_block(transaction, block)
                damaged = dict.fromkeys(
                    reader.damaged_in_raw_block(transaction, block), "its checksum does not match"
                )
                if not damaged and zlib.crc32(pixels.data) != head["block_checksum"]:
                    raise reader.damage(
                        reader.block_range(block), "the checksum of its block does not match"
                    )
                digest.update(pixels.data)
            else:
                for record, expected in zip(reader.block_range(block), entries, strict=True):
                    try:
                        with reader.encoded(record) as (entry, payload, size):
                            if entry != expected:
                                raise ImageError("it differs from its index")
                            height, width = decode(
                                payload, entry["codec"], reader.meta.spec, size
                            ).shape[:2]
                            if (height, width) != size:
                                raise ImageError(f"it is {width}x{height} px when decoded")
                            digest.update(payload)
                    except DamageError as error:
                        damaged[record] = error.reason
            digest.update(entries.tobytes())
        except DamageError as error:
            damaged |= dict.fromkeys(error.records, error.reason)
    return labels, digest.digest(), damaged


def report(damage: Damage, reader: LMDBReader) -> None:
    """Raise UserError if there is damage. The message names only the first damaged record."""
    if not damage:
        return
    if not damage.records:
        raise UserError(
            f"{reader.path}: {damage.content}, although every record is whole: pack the file again"
        )
    first = min(damage.records)
    raise UserError(
        f"{reader.path}: {len(damage.records):,} of {len(reader):,} records are damaged, the first"
        f" is record {first} ({damage.records[first]}): copy or pack the file again; --json lists"
        " all"
    )
