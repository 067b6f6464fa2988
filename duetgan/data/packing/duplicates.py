"""Find duplicates within a packed file, or between two.

Exact duplicates have the same digest (data/lmdb/format.py); similar images are searched for on
demand (data/packing/near_duplicates.py).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from duetgan.data.decode import visible_image
from duetgan.data.images import thumbnail
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.near_duplicates import confirm, near
from duetgan.utils.files import write_atomic
from duetgan.utils.images import save_captioned
from duetgan.utils.text import listed

SHOWN = 20  # pairs in a PNG
CELL = 128  # px of an image there
LISTED = 5  # groups and pairs in the report for people, and members of a group there

Name = Callable[[int], str]  # of a record, for people


@dataclass(frozen=True)
class Group:
    """Exact duplicates: ascending records of the first file, and of the second (none within one
    file).
    """

    records: list[int]
    other_records: list[int]
    labels_differ: bool  # their classes have different names: a labelling error


@dataclass(frozen=True)
class Pair:
    """Near duplicates: a record of the first file and one of the second (within one file, of the
    first).
    """

    record: int
    other_record: int
    correlation: float  # of their pixels, at most 1
    labels_differ: bool


@dataclass(kw_only=True)
class Report:
    """The duplicates within a file, or the images that it and another one share."""

    file: str
    images: int
    other_file: str | None
    other_images: int | None
    # images that are there before, or images of the other file that are in the first
    exact_duplicates: int
    # they can be found: both files have the same channels and size of images
    exact_comparable: bool
    exact: list[Group]  # in the order of their first records
    near: list[Pair] | None = None  # most alike first; None: not searched
    candidates: int = 0  # pairs whose pixels were compared
    not_compared: int = 0  # pairs, because too many images look alike
    textureless: int = 0  # images without texture, for which near duplicates were not searched
    names: tuple[Name, Name]  # of the first file's records, and of the other's

    def document(self) -> dict[str, object]:
        """The report for programs; `names` are those of the records in it, by their numbers."""
        pairs, both = self.near or [], range(2)
        records = [
            {record for group in self.exact for record in (group.records, group.other_records)[i]}
            for i in both
        ]
        records[0].update(pair.record for pair in pairs)
        records[1 if self.other_file else 0].update(pair.other_record for pair in pairs)
        names, others = (
            {record: self.names[i](record) for record in sorted(records[i])} for i in both
        )
        return asdict(self) | {"names": names, "other_names": others}


def exact(signatures: np.ndarray) -> list[np.ndarray]:
    """Groups of images with the same pixels: ascending indices, at least two; in the order of their
    first.
    """
    _, group, counts = np.unique(signatures["digest"], return_inverse=True, return_counts=True)
    members = np.flatnonzero(counts[group] > 1)
    return [members[some] for some in of_equal_number(group[members])]


def of_equal_number(numbers: np.ndarray) -> list[np.ndarray]:
    """Ascending indices of the numbers that are equal; in the order of their first."""
    order = np.argsort(numbers, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []
    return sorted(groups, key=lambda indices: int(indices[0]))


def find(
    reader: LMDBReader,
    other: LMDBReader | None = None,
    *,
    similar: bool = False,
    # of `reader`'s records; None: what the file says, else their numbers
    item_name: Name | None = None,
) -> Report:
    """Duplicates within a packed file, or images that it and another one share, for example
    training and held-out data. Raises DamageError.
    """
    second = other or reader
    signatures, others = reader.signatures(), other.signatures() if other else None
    names = {one: one.meta.label_names for one in (reader, second)}

    def differ(here: Sequence[int], there: Sequence[int]) -> bool:
        """Whether records have several class names; an unlabelled image agrees with all."""
        sides = [
            (one, records) for one, records in ((reader, here), (second, there)) if one.classes
        ]
        return (
            len({names[one][one.labels()[record]] for one, records in sides for record in records})
            > 1
        )

    count, groups = len(signatures), []
    for indices in exact(signatures if others is None else np.concatenate([signatures, others])):
        here, there = (
            indices[indices < count].tolist(),
            (indices[indices >= count] - count).tolist(),
        )
        if other is None or (here and there):
            groups.append(Group(here, there, differ(here, there)))
    specs = [one.meta.spec for one in (reader, second)]
    report = Report(
        file=str(reader.path),
        images=count,
        other_file=str(other.path) if other else None,
        other_images=len(other) if other else None,
        exact_duplicates=sum(
            len(group.other_records) if other else len(group.records) - 1 for group in groups
        ),
        exact_comparable=specs[0] == specs[1],
        exact=groups,
        names=(_with_class(reader, item_name), _with_class(second, None if other else item_name)),
    )
    if similar:
        candidates = near(signatures, others)
        size = min(spec.side or 64 for spec in specs)
        pairs, correlations = confirm(
            candidates, partial(visible_image, reader), partial(visible_image, second), size
        )
        order = np.argsort(-correlations, kind="stable")
        alike = zip(pairs[order].tolist(), correlations[order].tolist(), strict=True)
        report.near = [Pair(i, j, correlation, differ([i], [j])) for (i, j), correlation in alike]
        report.candidates, report.not_compared = len(candidates.pairs), candidates.left_out
        report.textureless = candidates.textureless
    return report


def _with_class(reader: LMDBReader, item_name: Name | None) -> Name:
    """The names of records, with their classes."""
    labels, classes, stored = (
        reader.labels(),
        reader.meta.label_names,
        [] if item_name else reader.names(),
    )

    def name(record: int) -> str:
        text = item_name(record) if item_name else stored[record] or str(record)
        return text + (f" ({classes[labels[record]]})" if classes else "")

    return name


def lines(report: Report, limit: int | None = LISTED) -> list[str]:
    """The report for people: counts, then `limit` groups and pairs (None: all), those with
    different labels first.
    """
    name, other_name = report.names
    head = _count(report.exact_duplicates, "exact duplicate")
    if report.other_file:
        head = f"{_count(report.exact_duplicates, 'image')} of {report.other_file} also in {report.file},"
    groups, members = [], sys.maxsize if limit is None else LISTED
    for group in report.exact:
        sides = (list(map(name, group.records)), list(map(other_name, group.other_records)))
        groups.append(
            (" = ".join(listed(side, members) for side in sides if side), group.labels_differ)
        )
    text = _listed(f"{head} in {_count(len(groups), 'group')}", groups, "group", limit)
    if not report.exact_comparable:
        text.append(
            "exact duplicates cannot be found: the files differ in the channels or the size of their images"
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
            f"near duplicates were not searched for {_count(report.textureless, 'image')} without texture"
        )
    if report.not_compared:
        text.append(
            f"{_count(report.not_compared, 'pair')} not compared: too many images look alike"
        )
    return text


def write_lines(path: Path, text: Sequence[str]) -> None:
    """A text file; names that are not UTF-8 are escaped."""
    write_atomic(path, "".join(f"{line}\n" for line in text).encode(errors="backslashreplace"))


def shortened(shown: list[str], everything: list[str], path: Path) -> list[str]:
    """What is shown of a text, and where all of it is: in a file, if that is more. One of an
    earlier run goes.
    """
    if shown == everything:
        path.unlink(missing_ok=True)
        return shown
    write_lines(path, everything)
    return [*shown, f"all of them: {path}"]


def _listed(head: str, items: list[tuple[str, bool]], what: str, limit: int | None) -> list[str]:
    """A head line with the number of items with different labels, and the first items, those with
    different labels before the others.
    """
    wrong = sum(differ for _, differ in items)
    head += f", {wrong:,} of them with different labels" if wrong else ""
    shown = sorted(items, key=lambda item: not item[1])[:limit]
    more = (
        [f"  and {_count(len(items) - len(shown), what)} more"] if len(items) > len(shown) else []
    )
    return [
        head,
        *(f"  {text}{': different labels' if differ else ''}" for text, differ in shown),
        *more,
    ]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def save_sheet(report: Report, reader: LMDBReader, other: LMDBReader, path: Path) -> None:
    """Draw up to SHOWN pairs side by side with their records and classes: exact duplicates, those
    with different labels first, and near ones from the most to the least alike; there is at least
    one. Raises DamageError.
    """
    pairs = report.near or []
    groups = sorted(report.exact, key=lambda group: not group.labels_differ)[
        : max(SHOWN // 2, SHOWN - len(pairs))
    ]
    chosen = [
        (group.records[0], (group.other_records or group.records[1:])[0], "exact")
        for group in groups
    ]
    places = np.linspace(0, len(pairs) - 1, min(SHOWN - len(groups), len(pairs))).astype(int)
    for pair in (pairs[place] for place in places):
        chosen.append((pair.record, pair.other_record, f"{pair.correlation:.3f}"))
    images, captions = [], []
    gap = np.full((3, CELL, 8), 255, np.uint8)
    for record, other_record, kind in chosen:
        left, right = visible_image(reader, record), visible_image(other, other_record)
        images.append(np.concatenate([thumbnail(left, CELL), gap, thumbnail(right, CELL)], axis=2))
        captions.append(f"{kind}: {report.names[0](record)}\n{report.names[1](other_record)}")
    save_captioned(images, captions, path, columns=4)
