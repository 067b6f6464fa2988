"""Find duplicate images within a packed file, or between two packed files.

Exact duplicates have the same digest (data/lmdb/format.py). On demand, similar images are searched
for too (data/packing/near_duplicates.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.stored_image import visible_image
from duetgan.data.packing import near_duplicates
from duetgan.utils.text import counted

Name = Callable[[int], str]  # number of a record -> name of the record for the user
DIFFER = ": different labels"


@dataclass(frozen=True)
class Group:
    """A group of images that are exact duplicates of each other.

    `records` are the numbers of their records in the first file. `other_records` are those in the
    second file, or empty if there is none. Both ascend.
    """

    records: list[int]
    other_records: list[int]
    labels_differ: bool  # True for classes with different names, a labelling error


@dataclass(frozen=True)
class Pair:
    """Two images that are near duplicates.

    `record` is a record of the first file. `other_record` is a record of the second file or, if
    there is no second file, another record of the first.
    """

    record: int
    other_record: int
    correlation: float  # of the pixels, at most 1
    labels_differ: bool


@dataclass(kw_only=True)
class Report:
    """The duplicates within a file, or the images that two files have in common."""

    file: str
    images: int
    other_file: str | None
    other_images: int | None
    # number of images that are duplicates of an earlier one; with a second file, number of its
    # images that the first file has too
    exact_duplicates: int
    exact: list[Group]  # sorted by the first record
    near: list[Pair] | None = None  # in descending order of correlation; None: not searched
    cut_short: bool = False  # True if the search ended early because too many images are similar


def group_equal(numbers: np.ndarray) -> list[np.ndarray]:
    """Return for each distinct number an array with all of its indices in `numbers`.

    The indices in an array ascend. The arrays are sorted by their first index.
    """
    order = np.argsort(numbers, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []
    return sorted(groups, key=lambda indices: int(indices[0]))


def find(reader: LMDBReader, second: LMDBReader | None = None, *, similar: bool = False) -> Report:
    """Find duplicates within a packed file, or images that are also in the file `second`.

    With `similar`, near duplicates are searched for as well. Raises DamageError for damaged
    records.
    """
    count = len(reader)
    readers = [reader] if second is None else [reader, second]
    signatures = np.concatenate([packed_file.signatures() for packed_file in readers])
    classes = np.concatenate([_record_classes(packed_file) for packed_file in readers])

    def labels_differ(records: np.ndarray) -> bool:
        """Return True if the records' class names differ. Unlabelled images agree with all."""
        return len({*classes[records].tolist()} - {""}) > 1

    report = Report(
        file=str(reader.path),
        images=count,
        other_file=str(second.path) if second else None,
        other_images=len(second) if second else None,
        exact_duplicates=0,
        exact=[],
    )
    for indices in group_equal(signatures["digest"]):
        records = indices[indices < count].tolist()
        other_records = (indices[indices >= count] - count).tolist()
        if second is None and len(records) > 1:
            report.exact_duplicates += len(records) - 1
        elif records and other_records:
            report.exact_duplicates += len(other_records)
        else:
            continue
        report.exact.append(Group(records, other_records, labels_differ(indices)))
    if similar:
        _find_similar(report, readers, signatures, labels_differ)
    return report


def _find_similar(
    report: Report,
    readers: Sequence[LMDBReader],
    signatures: np.ndarray,  # of the images of all readers
    labels_differ: Callable[[np.ndarray], bool],
) -> None:
    count = len(readers[0])

    def read(record: int) -> np.ndarray:
        return visible_image(readers[record >= count], record - count * (record >= count))

    pairs, is_crowded, report.cut_short = near_duplicates.near(signatures)
    if len(readers) > 1:
        between = (pairs[:, 0] < count) & (pairs[:, 1] >= count)
        pairs, is_crowded = pairs[between], is_crowded[between]
    correlations = near_duplicates.correlations(pairs, read)
    limits = np.where(
        is_crowded, near_duplicates.CROWD_CORRELATION, near_duplicates.LEAST_CORRELATION
    )
    report.near = []
    for row in np.argsort(-correlations, kind="stable"):
        if correlations[row] >= limits[row]:
            record, other_record = pairs[row].tolist()
            other_record -= count * (len(readers) - 1)
            differ = labels_differ(pairs[row])
            report.near.append(Pair(record, other_record, float(correlations[row]), differ))


def _record_classes(reader: LMDBReader) -> np.ndarray:
    """Return the class name of each record, "" for unlabelled images: str [n]."""
    return np.array(reader.meta.label_names or [""])[reader.labels()]


def naming(reader: LMDBReader) -> Name:
    """Return a function that maps a record's number to a text with the record's name and class.

    A record without a stored name is called by its number.
    """
    classes, stored = _record_classes(reader), reader.names()

    def name(record: int) -> str:
        text = stored[record] or str(record)
        return f"{text} ({classes[record]})" if classes[record] else text

    return name


def look_alikes(count: int, report: Report, groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Divide `count` records into groups of records that look alike.

    Two records are in the same group if they are exact or near duplicates, if one of `groups`
    contains both, or if a chain of such pairs connects them. A record without duplicates is a group
    too. The records of a group ascend. The groups are sorted by their first record.
    """
    from scipy.sparse import coo_array  # slow to import
    from scipy.sparse.csgraph import connected_components

    edges = [(pair.record, pair.other_record) for pair in report.near or []]
    for records in [*(np.array(group.records) for group in report.exact), *groups]:
        edges += [(records[0], record) for record in records[1:]]
    rows, columns = np.array(edges, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(rows), bool), (rows, columns)), shape=(count, count))
    return group_equal(connected_components(graph, directed=False)[1])


def count_text(report: Report) -> str:
    """Return one line with the numbers of exact duplicates, of groups, and of labelling errors."""
    count = report.exact_duplicates
    text, none = f"{counted(count, 'exact duplicate')} of other images", "no exact duplicates"
    if report.other_file:
        text = f"{counted(count, 'image')} of {report.other_file} also in {report.file}"
        none = f"no image of {report.other_file} is also in {report.file}"
    if not count:
        return none
    text += f", in {counted(len(report.exact), 'group')}"
    if wrong := sum(group.labels_differ for group in report.exact):
        text += f"; {counted(wrong, 'group')} with different labels"
    return text


def lines(report: Report, name: Name, other_name: Name) -> list[str]:
    """Return the lines of the text report: counts, groups of duplicates, pairs of near duplicates.

    The functions `name` and `other_name` return the name of a record in the first and in the second
    file (see `naming`). Groups and pairs with different labels come first.
    """
    text = [count_text(report)]
    for group in sorted(report.exact, key=lambda group: not group.labels_differ):
        sides = (map(name, group.records), map(other_name, group.other_records))
        names = " = ".join(filter(None, map(", ".join, sides)))
        text.append(f"  {names}{DIFFER * group.labels_differ}")
    if report.near is not None:
        text.append(f"{len(report.near):,} pairs of near duplicates")
        for pair in sorted(report.near, key=lambda pair: not pair.labels_differ):
            names = f"{name(pair.record)} ~ {other_name(pair.other_record)}"
            correlation = f"correlation {pair.correlation:.3f}"
            text.append(f"  {names}, {correlation}{DIFFER * pair.labels_differ}")
    if report.cut_short:
        text.append("the search for near duplicates ended early: too many images look alike")
    return text
