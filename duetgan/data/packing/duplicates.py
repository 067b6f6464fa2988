"""Find duplicates within a packed file, or between two.

Exact duplicates have the same digest (data/lmdb/format.py); similar images are searched for on
demand (data/packing/near_duplicates.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.stored_image import visible_image
from duetgan.data.packing.near_duplicates import confirm, near
from duetgan.utils.text import listed

Name = Callable[[int], str]  # number of a record -> name of the record for the user


@dataclass(frozen=True)
class Group:
    """A group of exact duplicates: ascending numbers of records in the first file, and in the
    second file if there is one.
    """

    records: list[int]
    other_records: list[int]
    labels_differ: bool  # True for classes with different names, a labelling error


@dataclass(frozen=True)
class Pair:
    """Two near duplicates: the number of a record in the first file, and of one in the second file
    or, if there is none, in the first.
    """

    record: int
    other_record: int
    correlation: float  # of the pixels, at most 1
    labels_differ: bool


@dataclass(kw_only=True)
class Report:
    """Duplicates within a file, or images that are in two files."""

    file: str
    images: int
    other_file: str | None
    other_images: int | None
    # number of duplicates of an earlier image, or of images in the second file that the first has
    exact_duplicates: int
    # False if the two files differ in channels or size, so that no exact duplicates can be found
    exact_comparable: bool
    exact: list[Group]  # sorted by the first record
    near: list[Pair] | None = None  # in descending order of correlation; None: not searched
    candidates: int = 0  # pairs whose pixels were compared
    cut_short: bool = False  # True if the search ended early because too many images are similar
    textureless: int = 0  # images without texture, for which near duplicates were not searched
    names: tuple[Name, Name]  # for records of the first and the second file

    def document(self) -> dict[str, object]:
        """Return the report as JSON values, with the names of the reported records by number."""
        records: set[int] = set()
        second: set[int] = set()  # records of the second file
        for group in self.exact:
            records.update(group.records)
            second.update(group.other_records)
        for pair in self.near or []:
            records.add(pair.record)
            (second if self.other_file else records).add(pair.other_record)
        name, other_name = self.names
        return asdict(self) | {
            "names": {record: name(record) for record in sorted(records)},
            "other_names": {record: other_name(record) for record in sorted(second)},
        }


def group_equal(numbers: np.ndarray) -> list[np.ndarray]:
    """Return the ascending indices of each group of equal numbers, sorted by the first index."""
    order = np.argsort(numbers, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []
    return sorted(groups, key=lambda indices: int(indices[0]))


def find(
    reader: LMDBReader,
    second: LMDBReader | None = None,
    *,
    similar: bool = False,
    # names the records of `reader`; None: by the name in the file, or else the number
    item_name: Name | None = None,
) -> Report:
    """Find duplicates within a packed file, or images that are also in the file `second`.

    With `similar` near duplicates are searched for as well. Raises DamageError.
    """
    target = second or reader
    classes, target_classes = _record_classes(reader), _record_classes(target)

    def labels_differ(records: list[int], other_records: list[int]) -> bool:
        """Return True if class names of the records differ. Unlabelled images agree with all."""
        names = {*classes[records].tolist(), *target_classes[other_records].tolist()}
        return len(names - {""}) > 1

    count = len(reader)
    signatures = reader.signatures()
    other_signatures = None if second is None else second.signatures()
    digests = signatures["digest"]
    if other_signatures is not None:
        digests = np.concatenate([digests, other_signatures["digest"]])
    groups = []
    duplicates = 0
    for indices in group_equal(digests):
        records = indices[indices < count].tolist()
        other_records = (indices[indices >= count] - count).tolist()
        if len(records) > 1 and second is None:
            duplicates += len(records) - 1
        elif records and other_records:
            duplicates += len(other_records)
        else:
            continue
        groups.append(Group(records, other_records, labels_differ(records, other_records)))
    specs = (reader.meta.spec, target.meta.spec)
    report = Report(
        file=str(reader.path),
        images=count,
        other_file=str(second.path) if second else None,
        other_images=len(second) if second else None,
        exact_duplicates=duplicates,
        exact_comparable=specs[0] == specs[1],
        exact=groups,
        names=(
            _naming(reader, classes, item_name),
            _naming(target, target_classes, None if second else item_name),
        ),
    )
    if similar:
        candidates = near(signatures, other_signatures)
        size = min(spec.side or 64 for spec in specs)
        pairs, correlations = confirm(
            candidates, partial(visible_image, reader), partial(visible_image, target), size
        )
        report.near = []
        for row in np.argsort(-correlations, kind="stable"):
            i, j = pairs[row].tolist()
            report.near.append(Pair(i, j, float(correlations[row]), labels_differ([i], [j])))
        report.candidates = len(candidates.pairs)
        report.cut_short = candidates.cut_short
        report.textureless = candidates.textureless
    return report


def _record_classes(reader: LMDBReader) -> np.ndarray:
    """Return the class name of each record, "" for unlabelled images: str [n]."""
    return np.array(reader.meta.label_names or [""])[reader.labels()]


def _naming(reader: LMDBReader, classes: np.ndarray, item_name: Name | None) -> Name:
    """Return a function that names a record and its class."""
    stored = [] if item_name else reader.names()

    def name(record: int) -> str:
        text = item_name(record) if item_name else stored[record] or str(record)
        return f"{text} ({classes[record]})" if classes[record] else text

    return name


def look_alikes(count: int, report: Report, groups: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
    """Group `count` records that are exact or near duplicates or belong to one of `groups`,
    directly or through a chain of other records.

    Returns the ascending records of each group, sorted by the first record. A record without
    duplicates is a group.
    """
    from scipy.sparse import coo_array  # slow to import
    from scipy.sparse.csgraph import connected_components

    edges = [(pair.record, pair.other_record) for pair in report.near or []]
    for records in [*(np.array(group.records) for group in report.exact), *groups]:
        edges += [(records[0], record) for record in records[1:]]
    rows, columns = np.array(edges, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(rows), bool), (rows, columns)), shape=(count, count))
    return group_equal(connected_components(graph, directed=False)[1])


def lines(report: Report, limit: int | None = None) -> list[str]:
    """Return the text report: counts, then `limit` groups and pairs (default: all), those with
    different labels first.
    """
    name, other_name = report.names
    groups = []
    for group in report.exact:
        sides = (list(map(name, group.records)), list(map(other_name, group.other_records)))
        texts = [listed(side, limit or len(side)) for side in sides if side]
        groups.append((" = ".join(texts), group.labels_differ))
    head = _count(report.exact_duplicates, "exact duplicate")
    if report.other_file:
        head = f"{_count(report.exact_duplicates, 'image')} of {report.other_file} also in {report.file},"
    text = _listed(f"{head} in {_count(len(groups), 'group')}", groups, "group", limit)
    if not report.exact_comparable:
        text.append(
            "exact duplicates cannot be found: the files differ in the channels or the size of"
            " their images"
        )
    if report.near is None:
        return text
    pairs = []
    for pair in report.near:
        names = f"{name(pair.record)} ~ {other_name(pair.other_record)}"
        pairs.append((f"{names}, correlation {pair.correlation:.3f}", pair.labels_differ))
    text += _listed(f"{_count(len(pairs), 'pair')} of near duplicates", pairs, "pair", limit)
    if report.textureless:
        text.append(
            f"near duplicates were not searched for {_count(report.textureless, 'image')} without"
            " texture"
        )
    if report.cut_short:
        text.append("the search for near duplicates ended early: too many images look alike")
    return text


def _listed(head: str, items: list[tuple[str, bool]], noun: str, limit: int | None) -> list[str]:
    """Return a head line with the number of items with different labels, then `limit` items, those
    with different labels first.
    """
    wrong = sum(differ for _, differ in items)
    if wrong:
        head += f", {wrong:,} of them with different labels"
    text = [head]
    for item, differ in sorted(items, key=lambda item: not item[1])[:limit]:
        text.append(f"  {item}{': different labels' if differ else ''}")
    remaining = len(items) - (len(text) - 1)
    if remaining:
        text.append(f"  and {_count(remaining, noun)} more, see duet duplicates")
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
