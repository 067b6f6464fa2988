"""Which images are held out: by class, with look-alikes on one side, keyed by content (docs/lmdb.md has the rules);
and from one packed file two: the last part of `data.pack --val-share`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from data.duplicates import Name, Report, find
from data.lmdb.format import Meta, Split
from data.lmdb.reader import LMDBReader
from data.lmdb.record import Record
from data.lmdb.writer import LMDBWriter
from data.sources import Source
from utils.errors import UserError
from utils.runlog.progress import Bar

PARTS = ("train", "val")
LARGEST = Fraction(1, 2)  # share that may be held out


def val_path(dest: Path) -> Path:
    """Where the held-out images of `dest` go unless told: `x/photos.lmdb` -> `x/photos-val.lmdb`."""
    return dest.with_name(f"{dest.stem}-val{dest.suffix}")


def to_share(value: str | float) -> Fraction:
    """The share as it was written, so that 0.1 is a tenth. Raises UserError unless it lies in (0, 0.5]."""
    try:
        share = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= LARGEST:
        raise UserError(f"--val-share {value}: give a share above 0 and up to {float(LARGEST)}, for example 0.1")
    return share


def quotas(counts: Sequence[int], share: Fraction) -> list[int]:
    """How many of each class are held out, for `counts` images a class.

    Together they are `share` of all, rounded; each class gets its part rounded down, and what is left goes to the
    largest remainders (Hare's quota), the first class first where they are equal. Then every class of two or more
    images gets at least one and keeps at least one. A class of one image keeps it and does not count.
    """
    counts = [int(count) if count > 1 else 0 for count in counts]
    parts = [share * count for count in counts]
    wanted = [int(part) for part in parts]
    left = int(share * sum(counts) + Fraction(1, 2)) - sum(wanted)
    for label in sorted(range(len(counts)), key=lambda label: wanted[label] - parts[label])[:left]:
        wanted[label] += 1
    return [min(max(number, 1), count - 1) if count else 0 for number, count in zip(wanted, counts, strict=True)]


def look_alikes(count: int, report: Report) -> list[np.ndarray]:
    """The records of each group of images that look alike, ascending; a record that has none is a group of its own.

    Groups join what a chain of exact and near duplicates connects. They come in the order of their first records.
    """
    from scipy.sparse import coo_array  # slow to import
    from scipy.sparse.csgraph import connected_components

    edges = [(group.records[0], other) for group in report.exact for other in group.records[1:]]
    edges += [(pair.record, pair.other_record) for pair in report.near or []]
    rows, columns = np.array(edges, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(rows), bool), (rows, columns)), shape=(count, count))
    groups = connected_components(graph, directed=False)[1]
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    return sorted(members, key=lambda records: int(records[0]))


def draw(
    groups: Sequence[np.ndarray],  # records that stay together
    labels: np.ndarray,  # int64 [n]
    digests: Sequence[bytes],  # of each record's content
    share: Fraction,
    seed: int,
) -> np.ndarray:
    """Whether each record is held out, bool [n]; a function of contents, labels and seed alone.

    The groups are drawn in the order of their keys (seed, "split", smallest digest in hex). One is held out if all
    of it fits into what is left of its classes' quotas. A class that then has none gets the smallest group that
    leaves an image of each of its classes for training, if there is one.

    A record's key does not depend on the others: where images are added, few change sides.
    """
    from utils.seeding import seed_of  # imports PyTorch, which packing does without

    counts = np.bincount(labels, minlength=1)
    left = np.array(quotas(counts.tolist(), share))
    wanting = left > 0
    keys = [seed_of(seed, "split", min(digests[record] for record in group).hex()) for group in groups]
    drawn = sorted(range(len(groups)), key=lambda place: keys[place])
    held = np.zeros(len(labels), bool)

    def needs(place: int) -> np.ndarray:
        return np.bincount(labels[groups[place]], minlength=len(counts))

    for place in drawn:
        if left[labels[groups[place][0]]] > 0 and (needs(place) <= left).all():
            held[groups[place]] = True
            left -= needs(place)
    for label in np.flatnonzero(wanting).tolist():
        kept = counts - np.bincount(labels[held], minlength=len(counts))
        if kept[label] < counts[label]:
            continue
        of_class = [place for place in drawn if not held[groups[place][0]] and (labels[groups[place]] == label).any()]
        fitting = [place for place in of_class if ((needs(place) == 0) | (needs(place) < kept)).all()]
        if fitting:
            held[groups[min(fitting, key=lambda place: len(groups[place]))]] = True
    return held


def check_splittable(name: str, labels: np.ndarray, share: Fraction) -> None:
    """Raise UserError for too few images."""
    if len(labels) < 2 or np.bincount(labels).max() < 2:
        what = "1 image" if len(labels) == 1 else f"{len(labels):,} images, each of another class"
        raise UserError(f"{name}: --val-share {float(share)} needs two images of a class, there is {what}; add some")


def check_drawn(name: str, held: np.ndarray, groups: Sequence[np.ndarray]) -> None:
    """Raise UserError if nothing could be held out."""
    if not held.any():
        largest = max(map(len, groups))
        raise UserError(
            f"{name}: the images of each class look alike (the largest group has {largest:,} of {len(held):,}), so none"
            " can be held out; add others, or pack held-out images of their own"
        )


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

    Raises UserError if nothing can be held out.
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
        split = Split(part="train", share=float(share), seed=seed, whole=reader.meta.fingerprint, images=len(reader))
    metas = [
        writer.complete(split.model_copy(update={"part": part})) for part, writer in zip(PARTS, writers, strict=True)
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


def _payloads(level: LMDBReader) -> Iterator[bytes]:
    """The payload of each image at a resolution. Raises DamageError."""
    handle = level.handle()
    with handle.environment.begin(buffers=True) as transaction:
        for block in range(level.blocks):
            raw = level.raw_block(transaction, block) if level.meta.encoding == "raw" else None
            for row, record in enumerate(level.block_range(block)):
                yield bytes(level.encoded_record(transaction, record)[1]) if raw is None else raw[row].tobytes()
