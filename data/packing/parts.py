"""From one packed file two, one of training and one of held-out images: the last part of `data.pack --val-share`."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np

from data.duplicates import Name, Report, find
from data.lmdb.format import Meta
from data.lmdb.reader import LMDBReader
from data.lmdb.record import Record
from data.lmdb.writer import LMDBWriter
from data.packing.split import check_drawn, draw, look_alikes
from data.sources import Source
from utils.progress import Bar

PARTS = ("train", "val")


@dataclass
class Fingerprint:
    """SHA-256 of label (int64, little-endian) and content digest of each image in order."""

    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def add(self, label: int, digest: bytes) -> None:
        self.digest.update(label.to_bytes(8, "little") + digest)

    def __str__(self) -> str:
        return self.digest.hexdigest()


@dataclass
class Written:
    """What is known of the records that were written, beyond what the file holds."""

    rows: list[int] = field(default_factory=list)  # their indices in the source
    digests: list[bytes] = field(default_factory=list)  # data.conversion.content_digest's
    sums: list[np.ndarray] = field(default_factory=list)  # data.records.pixel_sums', if the file is to be split
    pixels: list[int] = field(default_factory=list)  # likewise
    enlarged: int = 0  # images that were smaller than asked for
    dropped: int = 0  # exact duplicates of earlier images that were left out
    dropped_otherwise: int = 0  # of those: with another label than the one that was kept

    def names(self, source: Source) -> Name:
        """The records' names, as the source calls its images."""
        return lambda record: source.item_name(self.rows[record])


def write_parts(
    whole: Path,  # the packed file
    written: Written,
    writers: Sequence[LMDBWriter],  # for training and held-out images
    share: Fraction,
    seed: int,
    name: Name,  # of its records, for the report
) -> tuple[list[Meta], Report]:
    """Draw which images are held out, and copy each record to its file. Both files are complete afterwards and wait
    for `publish_both`. Returns their metadata, and the report on duplicates in the whole.

    Their metadata's `split` holds `part` ("train" or "val"), `share`, `seed`, `whole` (the fingerprint of all images)
    and `images` (their number). Raises UserError if nothing can be held out.
    """
    with LMDBReader(whole) as reader:
        report = find(reader, similar=True, item_name=name)
        groups = look_alikes(len(reader), report)
        held = draw(groups, reader.labels(), written.digests, share, seed)
        check_drawn(reader.meta.source, held, groups)
        names, prints = reader.names(), (Fingerprint(), Fingerprint())
        for index, record in enumerate(Bar(_records(reader, written), "splitting", len(reader), unit="image")):
            part = int(held[index])
            writers[part].add_record(record, names[index])
            prints[part].add(record.label, written.digests[index])
        known = {"share": float(share), "seed": seed, "whole": reader.meta.fingerprint, "images": len(reader)}
    metas = [
        writer.complete(str(fingerprint), {"part": part, **known})
        for part, writer, fingerprint in zip(PARTS, writers, prints, strict=True)
    ]
    return metas, report


def publish_both(writers: Sequence[LMDBWriter]) -> None:
    """Give both files their names, the training file last; an old one goes first, so that whatever ends this process
    between the two leaves no training file, and never one beside held-out images of another draw.
    """
    training, held_out = writers
    training.path.unlink(missing_ok=True)
    held_out.publish()
    training.publish()


def _records(reader: LMDBReader, written: Written) -> Iterator[Record]:
    """The file's records as they were written."""
    levels = [LMDBReader(reader.path, resolution=side or None) for side in reader.meta.resolutions]
    signatures, labels = reader.signatures(), reader.labels().tolist()
    for index, stored in enumerate(zip(*map(_stored, levels), strict=True)):
        entries, payloads = zip(*stored, strict=True)
        yield Record(
            labels[index],
            np.concatenate(entries),
            payloads,
            written.sums[index],
            written.pixels[index],
            signatures[index : index + 1],
        )


def _stored(level: LMDBReader) -> Iterator[tuple[np.ndarray, bytes]]:
    """The entry, ENTRY [1], and the payload of each image at a resolution. Raises DamageError."""
    handle = level.handle()
    with handle.environment.begin(buffers=True) as transaction:
        for block in range(level.blocks):
            entries = level.index_record(transaction, block)[1]
            raw = level.raw_block(transaction, block) if level.meta.encoding == "raw" else None
            for row, record in enumerate(level.block_range(block)):
                if raw is not None:
                    payload = raw[row].tobytes()
                else:
                    payload = bytes(level.encoded_record(transaction, record)[1])
                yield entries[row : row + 1], payload
