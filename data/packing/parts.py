"""From one packed file two, one of training and one of held-out images: the last part of `data.pack --val-share`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

from data.duplicates import Name, Report, find
from data.lmdb.format import Meta
from data.lmdb.reader import LMDBReader
from data.lmdb.record import Record
from data.lmdb.writer import LMDBWriter
from data.packing.split import check_drawn, draw, look_alikes
from data.sources import Source
from utils.runlog.progress import Bar

PARTS = ("train", "val")


@dataclass
class Written:
    """What is known of the records that were written, beyond what the file holds."""

    rows: list[int] = field(default_factory=list)  # their indices in the source
    records: list[Record] = field(default_factory=list)  # if the file is to be split: all but their payloads
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
        held = draw(groups, reader.labels(), [record.digest for record in written.records], share, seed)
        check_drawn(reader.meta.source, held, groups)
        levels = [LMDBReader(whole, resolution=side or None) for side in reader.meta.resolutions]
        payloads = zip(*map(_payloads, levels), strict=True)
        images = zip(held, written.records, reader.names(), payloads, strict=True)
        for part, record, record_name, stored in Bar(images, "splitting", len(reader), unit="image"):
            writers[int(part)].add_record(replace(record, payloads=stored), record_name)
        known = {"share": float(share), "seed": seed, "whole": reader.meta.fingerprint, "images": len(reader)}
    metas = [writer.complete({"part": part, **known}) for part, writer in zip(PARTS, writers, strict=True)]
    return metas, report


def publish_both(writers: Sequence[LMDBWriter]) -> None:
    """Give both files their names, the training file last; an old one goes first, so that whatever ends this process
    between the two leaves no training file, and never one beside held-out images of another draw.
    """
    training, held_out = writers
    training.path.unlink(missing_ok=True)
    held_out.publish()
    training.publish()


def _payloads(level: LMDBReader) -> Iterator[bytes]:
    """The payload of each image at a resolution. Raises DamageError."""
    handle = level.handle()
    with handle.environment.begin(buffers=True) as transaction:
        for block in range(level.blocks):
            raw = level.raw_block(transaction, block) if level.meta.encoding == "raw" else None
            for row, record in enumerate(level.block_range(block)):
                yield bytes(level.encoded_record(transaction, record)[1]) if raw is None else raw[row].tobytes()
