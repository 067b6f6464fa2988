"""Hold images out: by class, with look-alikes on one side, keyed by content (docs/lmdb.md);
summarise a packing.

A packed file is split into two, which is the last part of `duet pack --val-share`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from duetgan.data.lmdb.format import Meta, Split
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.record import Record
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.duplicates import Name, Report, find, of_equal_number, shortened
from duetgan.data.sources import Problem
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.text import columns, listed

LISTED = 10  # names in the summary
LARGEST = Fraction(1, 2)  # share that may be held out


def val_path(dest: Path) -> Path:
    """Where the held-out images of `dest` go unless told: `x/photos.lmdb` -> `x/photos-val.lmdb`."""
    return dest.with_name(f"{dest.stem}-val{dest.suffix}")


def to_share(value: str | float) -> Fraction:
    """The share as it was written, so that 0.1 is a tenth. Raises UserError unless it lies in (0,
    0.5].
    """
    try:
        share = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= LARGEST:
        raise UserError(
            f"--val-share {value}: give a share above 0 and up to {float(LARGEST)}, for example 0.1"
        )
    return share


def quotas(counts: Sequence[int], share: Fraction) -> list[int]:
    """How many of each class are held out, for `counts` images a class.

    Together they are `share` of all, rounded; each class gets its part rounded down, and what is
    left goes to the largest remainders (Hare's quota), the first class first where they are equal.
    Then every class of two or more images gets at least one and keeps at least one. A class of one
    image keeps it and does not count.
    """
    counts = [int(count) if count > 1 else 0 for count in counts]
    parts = [share * count for count in counts]
    wanted = [int(part) for part in parts]
    left = int(share * sum(counts) + Fraction(1, 2)) - sum(wanted)
    for label in sorted(range(len(counts)), key=lambda label: wanted[label] - parts[label])[:left]:
        wanted[label] += 1
    return [
        min(max(number, 1), count - 1) if count else 0
        for number, count in zip(wanted, counts, strict=True)
    ]


def strata(labels: np.ndarray, sets: Sequence[Sequence[int]] | None, share: Fraction) -> np.ndarray:
    """What is held out evenly, int64 [n]: the classes; of sets of labels those with images enough
    for a held-out one, and the rarer sets as one.
    """
    if sets is None:
        return labels
    rare = np.bincount(labels, minlength=len(sets)) < float(1 / share)
    return np.where(rare[labels], len(sets), labels)


def look_alikes(count: int, report: Report) -> list[np.ndarray]:
    """The records of each group of images that look alike, ascending; a record that has none is a
    group of its own.

    Groups join what a chain of exact and near duplicates connects. They come in the order of their
    first records.
    """
    from scipy.sparse import coo_array  # slow to import
    from scipy.sparse.csgraph import connected_components

    edges = [(group.records[0], other) for group in report.exact for other in group.records[1:]]
    edges += [(pair.record, pair.other_record) for pair in report.near or []]
    rows, columns = np.array(edges, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(rows), bool), (rows, columns)), shape=(count, count))
    return of_equal_number(connected_components(graph, directed=False)[1])


def draw(
    groups: Sequence[np.ndarray],  # records that stay together
    labels: np.ndarray,  # int64 [n]
    digests: Sequence[bytes],  # of each record's content
    share: Fraction,
    seed: int,
) -> np.ndarray:
    """Whether each record is held out, bool [n]; a function of contents, labels and seed alone.

    The groups are drawn in the order of their keys (seed, "split", smallest digest in hex). One is
    held out if all of it fits into what is left of its classes' quotas. A class that then has none
    gets the smallest group that leaves an image of each of its classes for training, if there is
    one.

    A record's key does not depend on the others: where images are added, few change sides.
    """
    from duetgan.utils.seeding import seed_of  # imports PyTorch, which packing does without

    counts = np.bincount(labels, minlength=1)
    left = np.array(quotas(counts.tolist(), share))
    wanting = left > 0
    drawn = sorted(
        groups,
        key=lambda group: seed_of(seed, "split", min(digests[record] for record in group).hex()),
    )
    held = np.zeros(len(labels), bool)

    def needs(group: np.ndarray) -> np.ndarray:
        return np.bincount(labels[group], minlength=len(counts))

    for group in drawn:
        if (needs(group) <= left).all():
            held[group] = True
            left -= needs(group)
    for label in np.flatnonzero(wanting):
        kept = counts - np.bincount(labels[held], minlength=len(counts))
        if kept[label] == counts[label]:
            of_class = [group for group in drawn if not held[group[0]] and label in labels[group]]
            if fitting := [
                group for group in of_class if ((needs(group) == 0) | (needs(group) < kept)).all()
            ]:
                held[min(fitting, key=len)] = True
    return held


def write_parts(
    whole: Path,  # the packed file
    records: Sequence[Record],  # its records without their payloads
    writers: Sequence[LMDBWriter],  # for training and held-out images
    share: Fraction,
    seed: int,
    name: Name,  # of its records, for the report
) -> tuple[list[Meta], Report]:
    """Draw which images are held out, and copy each record to its file. Both files are complete
    afterwards and wait for `publish_both`. Returns their metadata, and the report on duplicates in
    the whole.

    Raises UserError if nothing can be held out.
    """
    with LMDBReader(whole) as reader:
        meta, report = reader.meta, find(reader, similar=True, item_name=name)
        groups = look_alikes(meta.count, report)
        labels = strata(reader.labels(), meta.sets, share)
        held = draw(groups, labels, [record.digest for record in records], share, seed)
        if not held.any():
            alike = f"(the largest group has {max(map(len, groups)):,} of {meta.count:,})"
            raise UserError(
                f"{meta.source}: the images of each class look alike {alike}, so none can be held out; add others, or"
                " pack held-out images of their own"
            )
        _copy(reader, records, writers, held)
    split = Split(
        part="train", share=float(share), seed=seed, whole=meta.fingerprint, images=meta.count
    )
    parts = (split, split.model_copy(update={"part": "val"}))
    return [writer.complete(part) for writer, part in zip(writers, parts, strict=True)], report


def write_apart(
    whole: Path, written: "Written", writer: LMDBWriter, apart: Path, check: Callable[..., None]
) -> Meta:
    """Copy the records but those that the file `apart` holds or that look like its, as far as
    `check` allows.
    """
    with LMDBReader(whole) as reader, LMDBReader(apart) as other:
        found, gone = find(reader, other, similar=True), np.zeros(len(reader), np.int64)
        gone[[record for group in found.exact for record in group.records]] = 1
        gone[[pair.record for pair in found.near or []]] = 1
        _copy(reader, written.records, [writer], gone)
    written.apart = int(gone.sum())
    check(writer, written.apart)
    return writer.finish()


def _copy(
    reader: LMDBReader, records: Sequence[Record], writers: Sequence[LMDBWriter], parts: np.ndarray
) -> None:
    """Copy each record to the writer of the number in `parts`; beyond the last it is left out."""
    for writer in writers:  # values of each mean what those of all do
        writer.layout = replace(writer.layout, spec=reader.meta.spec, ranged=True)
    levels = [LMDBReader(reader.path, resolution=side or None) for side in reader.meta.resolutions]
    copies = enumerate(zip(parts, records, reader.names(), strict=True))
    for index, (part, record, name) in Bar(copies, "splitting", len(records), unit="image"):
        if part < len(writers):
            payloads = tuple(_payload(level, index) for level in levels)
            writers[int(part)].add_record(replace(record, payloads=payloads), name)


def _payload(level: LMDBReader, index: int) -> bytes:
    if level.meta.encoding == "raw":
        return level.raw_image(index).transpose(2, 0, 1).tobytes()
    with level.encoded(index) as (_, payload, _):
        return bytes(payload)


def publish_both(writers: Sequence[LMDBWriter]) -> None:
    """Give both files their names, the training file last; an old one goes first, so that whatever
    ends this process between the two leaves no training file, and never one beside held-out images
    of another draw.
    """
    training, held_out = writers
    training.path.unlink(missing_ok=True)
    held_out.publish()
    training.publish()


@dataclass
class Written:
    """What is known of the records that were written, beyond what the file holds."""

    rows: list[int] = field(default_factory=list)  # their indices in the source
    # if the file is to be split: all but their payloads
    records: list[Record] = field(default_factory=list)
    enlarged: int = 0  # images that were smaller than asked for and scaled up
    cut: int = 0  # images of 16 bits a value
    bits: int = 0  # that their values use at most
    on_white: int = 0  # transparent images
    apart: int = 0  # left out because the file of --apart holds them, or images that they look like
    dropped: int = 0  # exact duplicates of earlier images that were left out
    dropped_otherwise: int = 0  # of those: with another label than the one that was kept


@dataclass(kw_only=True)
class Summary:
    meta: Meta  # of a split the training file's
    held_out: Meta | None  # with a split
    held_out_path: Path | None
    written: Written
    problems: list[Problem]  # skipped
    listed: list[str]  # what is told of them, and where all of them are
    ignored: list[str]  # no images by their name
    workers: int  # threads that converted images besides this one
    seconds: float  # until the file was complete
    duplicates: list[str] | None  # the report's lines; None: not searched
    search_seconds: float  # for them, afterwards


def list_skipped(problems: Sequence[Problem], dest: Path) -> list[str]:
    """What was skipped, as the summary tells it. The data set is complete by then: what goes wrong
    is told, no more.
    """
    text = list(map(str, problems))
    try:
        return shortened(first(text), text, dest.with_name(f"{dest.stem}.skipped.txt"))
    except (UserError, OSError) as error:
        return [*first(text), f"their list could not be written ({error})"]


def first(lines: list[str]) -> list[str]:
    """Those that the summary has room for."""
    return lines if len(lines) <= LISTED else [*lines[:LISTED], f"and {len(lines) - LISTED:,} more"]


def summary_lines(summary: Summary, dest: Path) -> list[str]:
    meta, held_out, written = summary.meta, summary.held_out, summary.written
    count = meta.count + (held_out.count if held_out else 0)
    image, smaller = meta.spec, meta.resolutions[:-1]
    side = f"{image.width}x{image.height}" if image.side else "sizes of their own"
    search = (
        ""
        if summary.duplicates is None
        else f"; search for duplicates {summary.search_seconds:.1f} s"
    )
    mean, std = (" ".join(f"{value:.4f}" for value in values) for values in (meta.mean, meta.std))
    rows = [("packed", f"{dest} ({dest.stat().st_size:,} bytes)")]
    rows += [("", f"a link: {dest.resolve()} was written")] if dest.is_symlink() else []
    if held_out and held_out.split and summary.held_out_path:
        rows.append(
            (
                "held out",
                f"{summary.held_out_path} ({summary.held_out_path.stat().st_size:,} bytes)",
            )
        )
        share = f"{held_out.count:,} of {count:,} images, {held_out.count / count:.1%}"
        rows.append(("", f"{share}; seed {held_out.split.seed}"))
        without = [
            name for name, number in zip(meta.classes, held_out.by_class, strict=True) if not number
        ]
        why = "one image each, or all of a class look alike"
        rows += (
            [("", f"none of {len(without):,} classes ({why}): {listed(without)}")]
            if without
            else []
        )
    rows += [
        ("source", meta.source),
        ("images", f"{meta.count:,}, {side}, {image.words}"),
        ("time", f"{summary.seconds:.1f} s, {count / summary.seconds:,.0f} images/s{search}"),
        ("workers", str(summary.workers) if summary.workers else "0, this thread alone"),
        ("encoding", f"{meta.encoding}, resize {meta.resize_filter}"),
        ("mean, std", f"{mean}, {std}"),
        ("content", meta.content_hash[:16]),
        ("fingerprint", meta.fingerprint[:16]),
    ]
    if smaller:
        rows.append(
            (
                "pyramid",
                f"also at {', '.join(str(image.at(side).resolution) for side in smaller[::-1])} px",
            )
        )
    rows += (
        [("enlarged", f"{written.enlarged:,} images were smaller than asked for")]
        if written.enlarged
        else []
    )
    if meta.channels == 3 and len({*zip(meta.mean, meta.std, strict=True)}) == 1:
        rows.append(("colour", "there is none: --channels 1 packs grey images as such"))
    dark, most = 0 < written.bits < 16, (1 << written.bits) - 1
    told = f"{written.cut:,} images have 16 bits a value: the high 8 are kept; --depth 16 keeps all"
    told += (
        f"; their values end at {most:,}, so they are dark: --depth 16 --range 0,{most} makes {most:,} white"
        * dark
    )
    rows += [("warning" if dark else "16 bits", told)] if written.cut else []
    if written.on_white:
        rows.append(
            (
                "alpha",
                f"{written.on_white:,} transparent images are put on white; --channels 4 keeps alpha",
            )
        )
    rows += [("classes", "none, unlabelled")] if not meta.classes else []
    told = f"{written.apart:,} images that the file of --apart holds, or that look like one of its"
    rows += [("left out", told)] if written.apart else []
    if written.dropped:
        other = (
            f", {written.dropped_otherwise:,} of them with another label"
            if written.dropped_otherwise
            else ""
        )
        rows.append(
            ("dropped", f"{written.dropped:,} exact duplicates of images that were kept{other}")
        )
    rows += (
        [("labels", f"several an image, {len(meta.sets):,} sets of them")]
        if meta.sets is not None
        else []
    )
    for label, name in enumerate(meta.classes):
        part = f", {held_out.by_class[label]:,} held out" if held_out else ""
        rows.append((f"  {name}", f"{meta.by_class[label]:,}{part}"))
    lines = ["not searched"] if summary.duplicates is None else summary.duplicates or ["none"]
    rows += [("" if index else "duplicates", line) for index, line in enumerate(lines)]
    for title, count, listed_lines in (
        ("skipped", len(summary.problems), summary.listed),
        ("ignored", len(summary.ignored), first(summary.ignored)),
    ):
        rows += [(title, f"{count:,}")] if count else []
        rows += [("", line) for line in listed_lines]
    return columns(rows, "<").splitlines()
