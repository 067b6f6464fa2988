"""Duplicates in a packed data set, or between two: `python -m data.duplicates A.lmdb [B.lmdb] [--similar] [--json]`.

Exact duplicates have the same digest (data/lmdb/format.py). Similar images are searched for when that is asked for:
data/near_duplicates.py.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from data.decode import stored_image
from data.images import thumbnail
from data.lmdb.reader import LMDBReader
from data.near_duplicates import Candidates, confirm, near
from utils.config.cli import Parser
from utils.errors import UserError
from utils.files import write_atomic
from utils.images import save_captioned
from utils.script import run_cli
from utils.text import listed

SHOWN = 20  # pairs in a PNG
CELL = 128  # px of an image there
LISTED = 5  # groups and pairs in the report for people
MEMBERS = 5  # of a group there


Name = Callable[[int], str]  # of a record, for people


@dataclass(frozen=True)
class Group:
    """Exact duplicates: ascending records of the first file, and of the second (none within one file)."""

    records: list[int]
    other_records: list[int]
    labels_differ: bool  # their classes have different names: a labelling error


@dataclass(frozen=True)
class Pair:
    """Near duplicates: a record of the first file and one of the second (within one file, of the first)."""

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
    exact_duplicates: int  # images that are there before, or images of the other file that are in the first
    exact_comparable: bool  # they can be found: both files have the same channels and size of images
    exact: list[Group]  # in the order of their first records
    near: list[Pair] | None = None  # most alike first; None: not searched
    candidates: int = 0  # pairs whose pixels were compared
    not_compared: int = 0  # pairs, because too many images look alike
    textureless: int = 0  # images without texture, for which near duplicates were not searched
    names: tuple[Name, Name]  # of the first file's records, and of the other's

    def document(self) -> dict[str, object]:
        """The report for programs; `names` are those of the records in it, by their numbers."""
        records: tuple[set[int], set[int]] = (set(), set())
        for group in self.exact:
            records[0].update(group.records)
            records[1].update(group.other_records)
        for pair in self.near or []:
            records[0].add(pair.record)
            records[1 if self.other_file else 0].add(pair.other_record)
        names = [
            {record: name(record) for record in sorted(some)} for name, some in zip(self.names, records, strict=True)
        ]
        return asdict(self) | {"names": names[0], "other_names": names[1]}


def exact(signatures: np.ndarray) -> list[np.ndarray]:
    """Groups of images with the same pixels: ascending indices, at least two; in the order of their first."""
    _, group, counts = np.unique(signatures["digest"], return_inverse=True, return_counts=True)
    members = np.flatnonzero(counts[group] > 1)
    members = members[np.argsort(group[members], kind="stable")]
    groups = np.split(members, np.flatnonzero(np.diff(group[members])) + 1) if len(members) else []
    return sorted(groups, key=lambda indices: int(indices[0]))


def find(
    reader: LMDBReader,
    other: LMDBReader | None = None,
    *,
    similar: bool = False,
    item_name: Name | None = None,  # of `reader`'s records; None: what the file says, else their numbers
) -> Report:
    """Duplicates within a packed file, or images that it and another one share, for example training and held-out
    data. Raises DamageError.
    """
    second = other or reader
    signatures, others = reader.signatures(), other.signatures() if other else None
    count = len(signatures)
    groups = []
    for indices in exact(signatures if others is None else np.concatenate([signatures, others])):
        here, there = indices[indices < count], indices[indices >= count] - count
        if other is None or (len(here) and len(there)):
            groups.append(Group(here.tolist(), there.tolist(), _differ(reader, here, second, there)))
    report = Report(
        file=str(reader.path),
        images=count,
        other_file=str(other.path) if other else None,
        other_images=len(other) if other else None,
        exact_duplicates=sum(len(group.other_records) if other else len(group.records) - 1 for group in groups),
        exact_comparable=_form(reader) == _form(second),
        exact=groups,
        names=(_named(reader, item_name), _named(second, None if other else item_name)),
    )
    if similar:
        candidates = near(signatures, others)
        report.near = _confirmed(candidates, reader, second)
        report.candidates, report.not_compared = len(candidates.pairs), candidates.left_out
        report.textureless = candidates.textureless
    return report


def _form(reader: LMDBReader) -> tuple[int, int]:
    return reader.meta.channels, reader.meta.resolutions[-1]


def _named(reader: LMDBReader, item_name: Name | None) -> Name:
    """Records with their classes."""
    labels, classes, stored = reader.labels(), reader.classes, [] if item_name else reader.names()

    def name(record: int) -> str:
        text = item_name(record) if item_name else stored[record] or str(record)
        return text + (f" ({classes[labels[record]]})" if classes else "")

    return name


def _differ(reader: LMDBReader, here: np.ndarray, other: LMDBReader, there: np.ndarray) -> bool:
    """Whether records have several class names; an unlabelled image agrees with all."""
    sides = ((reader, here), (other, there))
    return len({one.classes[label] for one, records in sides if one.classes for label in one.labels()[records]}) > 1


def _confirmed(candidates: Candidates, reader: LMDBReader, other: LMDBReader) -> list[Pair]:
    """The near duplicates among the candidates, most alike first."""
    size = min(one.meta.resolutions[-1] or 64 for one in (reader, other))
    pairs, correlations = confirm(
        candidates, lambda i: stored_image(reader, i)[0], lambda j: stored_image(other, j)[0], size
    )
    order = np.argsort(-correlations, kind="stable")
    return [
        Pair(int(pair[0]), int(pair[1]), float(correlation), _differ(reader, pair[:1], other, pair[1:]))
        for pair, correlation in zip(pairs[order], correlations[order], strict=True)
    ]


def lines(report: Report, limit: int | None = LISTED) -> list[str]:
    """The report for people: counts, then `limit` groups and pairs (None: all), those with different labels first."""
    name, other_name = report.names
    found = _count(report.exact_duplicates, "exact duplicate")
    if report.other_file:
        found = f"{_count(report.exact_duplicates, 'image')} of {report.other_file} also in {report.file},"
    groups = []
    most = report.images + (report.other_images or 0) if limit is None else MEMBERS
    for group in report.exact:
        sides = (list(map(name, group.records)), list(map(other_name, group.other_records)))
        groups.append((" = ".join(listed(side, most) for side in sides if side), group.labels_differ))
    text = _listed(f"{found} in {_count(len(groups), 'group')}", groups, "group", limit)
    if not report.exact_comparable:
        text.append("exact duplicates cannot be found: the files differ in the channels or the size of their images")
    if report.near is None:
        return text
    pairs = []
    for pair in report.near:
        names = f"{name(pair.record)} ~ {other_name(pair.other_record)}"
        pairs.append((f"{names}, correlation {pair.correlation:.3f}", pair.labels_differ))
    text += _listed(f"{_count(len(pairs), 'pair')} of near duplicates", pairs, "pair", limit)
    if report.textureless:
        text.append(f"near duplicates were not searched for {_count(report.textureless, 'image')} without texture")
    if report.not_compared:
        text.append(f"{_count(report.not_compared, 'pair')} not compared: too many images look alike")
    return text


def brief(reports: Sequence[Report], everything: Path) -> list[str]:
    """The reports for people. Where they leave something out, all of it goes into the file `everything`; else one of
    that name, which an earlier run left, is removed. Raises UserError if it cannot be written.
    """
    text = [line for report in reports for line in lines(report)]
    all_of_it = [line for report in reports for line in lines(report, None)]
    if text == all_of_it:
        everything.unlink(missing_ok=True)
        return text
    write_lines(everything, all_of_it)
    return [*text, f"all of them: {everything}"]


def write_lines(path: Path, text: Sequence[str]) -> None:
    """A text file; names that are not UTF-8 are escaped."""
    write_atomic(path, "".join(f"{line}\n" for line in text).encode(errors="backslashreplace"))


def _listed(head: str, items: list[tuple[str, bool]], what: str, limit: int | None) -> list[str]:
    """A head line with the number of items with different labels, and the first items, those with different labels
    before the others.
    """
    wrong = sum(differ for _, differ in items)
    head += f", {wrong:,} of them with different labels" if wrong else ""
    shown = sorted(items, key=lambda item: not item[1])[:limit]
    more = [f"  and {_count(len(items) - len(shown), what)} more"] if len(items) > len(shown) else []
    return [head, *(f"  {text}{': different labels' if differ else ''}" for text, differ in shown), *more]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def save_sheet(report: Report, reader: LMDBReader, other: LMDBReader, path: Path) -> None:
    """Draw up to SHOWN pairs side by side with their records and classes: exact duplicates, those with different labels
    first, and near ones from the most to the least alike; there is at least one. Raises DamageError.
    """
    pairs, captions = [], []
    gap = np.full((3, CELL, 8), 255, np.uint8)
    for record, other_record, kind in _shown(report.exact, report.near or []):
        left, right = stored_image(reader, record)[0], stored_image(other, other_record)[0]
        pairs.append(np.concatenate([thumbnail(left, CELL), gap, thumbnail(right, CELL)], axis=2))
        captions.append(f"{kind}: {report.names[0](record)}\n{report.names[1](other_record)}")
    save_captioned(pairs, captions, path, columns=4)


def _shown(groups: list[Group], pairs: Sequence[Pair]) -> list[tuple[int, int, str]]:
    """The records of the pairs to show, and what they are."""
    groups = sorted(groups, key=lambda group: not group.labels_differ)[: max(SHOWN // 2, SHOWN - len(pairs))]
    shown = [(group.records[0], (group.other_records or group.records[1:])[0], "exact") for group in groups]
    for place in np.linspace(0, len(pairs) - 1, min(SHOWN - len(groups), len(pairs))).astype(int):
        pair = pairs[place]
        shown.append((pair.record, pair.other_record, f"{pair.correlation:.3f}"))
    return shown


def main(argv: list[str]) -> None:
    """The command line."""
    parser = Parser(
        prog="python -m data.duplicates",
        description="Report duplicates within a packed file, or images that two packed files share.",
    )
    parser.add_argument("path", type=Path, metavar="A.lmdb")
    parser.add_argument("other", type=Path, metavar="B.lmdb", nargs="?")
    parser.add_argument("--similar", action="store_true", help="also search for images that look alike")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--list", type=Path, metavar="FILE", help="write all groups and pairs into a text file")
    parser.add_argument("--out", type=Path, metavar="PNG", help=f"draw up to {SHOWN} pairs side by side")
    args = parser.parse_args(argv)
    if args.out and args.out.suffix.lower() != ".png":
        raise UserError(f"--out {args.out}: its name must end in .png")
    with LMDBReader(args.path) as reader, LMDBReader(args.other or args.path) as other:
        if args.other and args.other.samefile(args.path):
            raise UserError(f"{args.other} and {args.path} are the same file: give it once to search within it")
        report = find(reader, other if args.other else None, similar=args.similar)
        if args.list:
            write_lines(args.list, lines(report, None))
        text = lines(report)
        hint = [] if args.list or text == lines(report, None) else ["all of them: add --list FILE"]
        print(json.dumps(report.document(), indent=2) if args.json else "\n".join(text + hint))
        if args.out and (report.exact or report.near):
            save_sheet(report, reader, other, args.out)
            print(f"pairs: {args.out}", file=sys.stderr if args.json else sys.stdout)
        elif args.out:
            print(f"no pairs, so {args.out} was not written", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_cli(main))
