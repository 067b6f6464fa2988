"""Duplicates in a packed data set, or between two: `python -m data.duplicates A.lmdb [B.lmdb] [--json] [--out X.png]`.

Exact duplicates have the same digest (data/signature.py). Near duplicates are searched for in two steps: `near` finds
candidates by their difference hash (Krawetz 2013, "Kind of Like That"), `confirm` compares their pixels.
"""

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data.images import fit
from data.lmdb.format import Meta
from data.lmdb.reader import LMDBReader
from data.near_duplicates import Candidates, Read, confirm, near
from data.signature import SIGNATURE, signature
from utils.cli import Parser
from utils.errors import UserError, run_cli
from utils.files import write_atomic

__all__ = ["SIGNATURE", "Candidates", "Report", "confirm", "exact", "find", "leaks", "lines", "near", "signature"]

QUICK = {"distance": 3, "limit": 200_000}  # of `near`, after packing: seconds for what costs seconds to pack

SHOWN = 20  # pairs in a PNG
CELL = 128  # px of an image there
DIFFERENT = ": different labels"


class Reader(Protocol):
    """What is needed of an LMDBReader."""

    @property
    def path(self) -> str | Path: ...
    @property
    def meta(self) -> Meta: ...
    @property
    def classes(self) -> list[str]: ...
    def signatures(self) -> np.ndarray: ...
    def labels(self) -> np.ndarray: ...
    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...
    def image(self, index: int) -> tuple[np.ndarray, int]: ...


def exact(signatures: np.ndarray) -> list[np.ndarray]:
    """Groups of images with the same pixels: ascending indices, at least two; in the order of their first."""
    _, group, counts = np.unique(signatures["digest"], return_inverse=True, return_counts=True)
    members = np.flatnonzero(counts[group] > 1)
    members = members[np.argsort(group[members], kind="stable")]
    groups = np.split(members, np.flatnonzero(np.diff(group[members])) + 1) if len(members) else []
    return sorted(groups, key=lambda indices: int(indices[0]))


@dataclass(frozen=True)
class File:
    """One of the files of a report."""

    path: str
    classes: list[str]
    labels: np.ndarray  # int64 [count]

    def class_of(self, record: int) -> str:
        """The name of a record's class; empty if the file is unlabelled."""
        return self.classes[self.labels[record]] if self.classes else ""

    def name(self, record: int) -> str:
        """A record for people."""
        return f"{record} ({self.class_of(record)})" if self.classes else str(record)


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


Found = TypeVar("Found", Group, Pair)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The duplicates within `first`, or the images that `first` and `second` share."""

    first: File
    second: File | None
    exact: list[Group]  # in the order of their first records
    near: list[Pair]  # most alike first
    comparable: bool  # exact duplicates can be found: both files have the same channels and size of images
    candidates: int  # pairs whose pixels were compared
    left_out: int  # pairs at most that were not compared because too many images look alike
    textureless: int  # images without texture, for which near duplicates were not searched

    @property
    def duplicates(self) -> int:
        """Exact duplicates: images that are there before, or images of the second file that are in the first."""
        return sum(len(group.other_records) if self.second else len(group.records) - 1 for group in self.exact)


def find(reader: Reader, *, quick: bool = False) -> Report:
    """Duplicates within a packed file; `quick` compares the likeliest candidates only. Raises DamageError."""
    return _search(reader, None, quick)


def leaks(reader: Reader, other: Reader, *, quick: bool = False) -> Report:
    """Images that two packed files share, for example training and validation data; `quick` as for `find`.

    Raises DamageError.
    """
    return _search(reader, other, quick)


def _search(reader: Reader, other: Reader | None, quick: bool) -> Report:
    signatures, first = reader.signatures(), _file(reader)
    others, second, reader_b = signatures[:0], first, reader
    if other is not None:
        others, second, reader_b = other.signatures(), _file(other), other
    count = len(signatures)
    groups = [
        _group(first, indices[indices < count], second, indices[indices >= count] - count)
        for indices in exact(np.concatenate([signatures, others]))
        if other is None or indices[0] < count <= indices[-1]
    ]
    candidates = near(signatures, None if other is None else others, **(QUICK if quick else {}))
    pairs = _confirmed(candidates, reader, first, reader_b, second)
    form, other_form = ((one.meta.channels, one.meta.resolutions[-1]) for one in (reader, reader_b))
    return Report(
        first=first,
        second=None if other is None else second,
        exact=groups,
        near=pairs,
        comparable=form == other_form,
        candidates=len(candidates.pairs),
        left_out=candidates.left_out,
        textureless=candidates.textureless,
    )


def _file(reader: Reader) -> File:
    return File(str(reader.path), reader.classes, reader.labels())


def _differ(names: set[str]) -> bool:
    """Whether there are several class names; an unlabelled image agrees with all."""
    return len(names - {""}) > 1


def _group(first: File, here: np.ndarray, second: File, there: np.ndarray) -> Group:
    names = {first.class_of(record) for record in here} | {second.class_of(record) for record in there}
    return Group(here.tolist(), there.tolist(), _differ(names))


def _confirmed(candidates: Candidates, reader: Reader, first: File, other: Reader, second: File) -> list[Pair]:
    """The near duplicates among the candidates, most alike first."""
    pairs, correlations = confirm(candidates.pairs, images_of(reader), images_of(other), candidates.crowd)
    order = np.argsort(-correlations, kind="stable")
    return [
        Pair(i, j, correlation, _differ({first.class_of(i), second.class_of(j)}))
        for (i, j), correlation in zip(pairs[order].tolist(), correlations[order].tolist(), strict=True)
    ]


def images_of(reader: Reader) -> Read:
    """A function that reads images uint8 [n, C, H, W] by their records; those with sizes of their own are scaled to
    64x64 px.
    """
    if reader.meta.resolutions != [0]:
        return lambda records: reader.read(records)[0]
    scaled = (64, 64)

    def read(records: np.ndarray) -> np.ndarray:
        images = [cv2.resize(reader.image(i)[0], scaled, interpolation=cv2.INTER_AREA) for i in records.tolist()]
        return np.stack(images).reshape(len(images), *scaled, -1).transpose(0, 3, 1, 2)

    return read


def lines(report: Report, limit: int = 10) -> list[str]:
    """The report for people: counts, then `limit` groups and pairs, those with different labels first."""
    first, second = report.first, report.second or report.first
    groups, pairs = _count(len(report.exact), "group"), _count(len(report.near), "pair")
    found = f"{_count(report.duplicates, 'exact duplicate')} in {groups}"
    if report.second:
        found = f"{_count(report.duplicates, 'image')} of {second.path} also in {first.path}, in {groups}"
    text = [found + _errors(report.exact)]
    for group in _errors_first(report.exact)[:limit]:
        names = " = ".join(filter(None, (_names(first, group.records), _names(second, group.other_records))))
        text.append(f"  {names}{DIFFERENT if group.labels_differ else ''}")
    text += _more(len(report.exact) - limit, "group")
    text.append(f"{pairs} of near duplicates{_errors(report.near)}")
    for pair in _errors_first(report.near)[:limit]:
        names = f"{first.name(pair.record)} ~ {second.name(pair.other_record)}"
        text.append(f"  {names}, correlation {pair.correlation:.3f}{DIFFERENT if pair.labels_differ else ''}")
    text += _more(len(report.near) - limit, "pair")
    if not report.comparable:
        text.append("exact duplicates cannot be found: the files differ in the channels or the size of their images")
    if report.textureless:
        text.append(f"near duplicates were not searched for {_count(report.textureless, 'image')} without texture")
    if report.left_out:
        text.append(f"up to {_count(report.left_out, 'pair')} not compared: too many images look alike")
    return text


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _errors(items: Sequence[Group | Pair]) -> str:
    """How many have different labels."""
    count = sum(item.labels_differ for item in items)
    return f", {count:,} of them with different labels" if count else ""


def _errors_first(items: list[Found]) -> list[Found]:
    return sorted(items, key=lambda item: not item.labels_differ)


def _names(file: File, records: list[int], most: int = 5) -> str:
    """A group's records in a file, the first few by name."""
    more = f" and {len(records) - most:,} more" if len(records) > most else ""
    return ", ".join(map(file.name, records[:most])) + more


def _more(count: int, what: str) -> list[str]:
    return [f"  and {_count(count, what)} more"] if count > 0 else []


def document(report: Report) -> dict[str, object]:
    """The report for programs."""
    second = report.second
    return {
        "file": report.first.path,
        "images": len(report.first.labels),
        "other_file": second.path if second else None,
        "other_images": len(second.labels) if second else None,
        "exact_duplicates": report.duplicates,
        "exact_comparable": report.comparable,
        "exact": [asdict(group) for group in report.exact],
        "near": [asdict(pair) for pair in report.near],
        "candidates": report.candidates,
        "not_compared": report.left_out,
        "textureless": report.textureless,
    }


def sheet(report: Report, reader: Reader, other: Reader) -> Image.Image:
    """Up to SHOWN pairs side by side with their records and classes: exact duplicates, those with different labels
    first, and near ones from the most to the least alike. Raises ValueError if there are none, DamageError.
    """
    first, second = report.first, report.second or report.first
    shown = _shown(report)
    if not shown:
        raise ValueError("there are no pairs")
    across, width, height = min(len(shown), 4), 2 * CELL + 12, CELL + 26
    image = Image.new("RGB", (across * width, -(-len(shown) // across) * height), "white")
    for place, (record, other_record, caption) in enumerate(shown):
        cell = Image.new("RGB", (width, height), "white")  # of its own: a long name ends at its edge
        cell.paste(_tile(reader.image(record)[0]), (4, 0))
        cell.paste(_tile(other.image(other_record)[0]), (CELL + 8, 0))
        names = f"{caption}: {first.name(record)}, {second.name(other_record)}"
        ImageDraw.Draw(cell).text((4, CELL + 4), names, fill="black", font=ImageFont.load_default(size=12))
        image.paste(cell, (place % across * width, place // across * height))
    return image


def _shown(report: Report) -> list[tuple[int, int, str]]:
    """The records of the pairs to show, and what they are."""
    groups = _errors_first(report.exact)[: max(SHOWN // 2, SHOWN - len(report.near))]
    shown = [(group.records[0], (group.other_records or group.records[1:])[0], "exact") for group in groups]
    count = min(SHOWN - len(groups), len(report.near))
    for place in np.linspace(0, len(report.near) - 1, count).astype(int):
        pair = report.near[place]
        shown.append((pair.record, pair.other_record, f"{pair.correlation:.3f}"))
    return shown


def _tile(pixels: np.ndarray) -> Image.Image:
    """An image uint8 [H, W, C] as CELL x CELL px, small ones with their pixels enlarged."""
    pixels = fit(pixels, min(CELL, *pixels.shape[:2]), "crop")
    tile = Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
    return tile.resize((CELL, CELL), Image.Resampling.NEAREST)


def make_parser() -> Parser:
    """The options."""
    parser = Parser(
        prog="python -m data.duplicates",
        description="Report exact and near duplicates within a packed file, or images that two packed files share.",
    )
    parser.add_argument("path", type=Path, metavar="A.lmdb")
    parser.add_argument("other", type=Path, metavar="B.lmdb", nargs="?")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--out", type=Path, metavar="PNG", help=f"draw up to {SHOWN} pairs side by side")
    return parser


def main(argv: list[str]) -> None:
    """The command line."""
    args = make_parser().parse_args(argv)
    if args.out and args.out.suffix.lower() != ".png":
        raise UserError(f"--out {args.out}: its name must end in .png")
    with LMDBReader(args.path) as reader, LMDBReader(args.other or args.path) as other:
        if args.other and args.other.samefile(args.path):
            raise UserError(f"{args.other} and {args.path} are the same file: give it once to search within it")
        report = leaks(reader, other) if args.other else find(reader)
        print(json.dumps(document(report), indent=2) if args.json else "\n".join(lines(report)))
        if args.out and (report.exact or report.near):
            content = io.BytesIO()
            sheet(report, reader, other).save(content, format="PNG")
            write_atomic(args.out, content.getvalue())
            print(f"pairs: {args.out}", file=sys.stderr if args.json else sys.stdout)
        elif args.out:
            print(f"no pairs, so {args.out} was not written", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_cli(main))
