"""Pack images into one file for training: `python -m data.pack SOURCE DEST.lmdb`. The rules are in docs/lmdb.md."""

import sys

if __name__ == "__main__" and not __package__:  # the modules beside this file would then hide the standard library's
    print("error: start it as a module, in the folder that holds data/: python -m data.pack ...", file=sys.stderr)
    sys.exit(2)

import argparse
import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.duplicates import find
from data.duplicates import lines as report_lines
from data.lmdb.format import ENCODINGS, Meta
from data.lmdb.reader import LMDBReader
from data.lmdb.writer import LMDBWriter, check_target
from data.packing import make_plan
from data.packing_processes import KEPT_BYTES, Conversion
from data.sources import NAMED, SPLITS, Problem, Source, open_source
from utils.classes import require_same_classes
from utils.cli import Parser
from utils.errors import UserError, run_cli
from utils.heap import keep_freed_memory
from utils.text import columns

LISTED = 10  # names in the summary
SKIPPED_IMAGES, SKIPPED_SHARE = 100, 0.01  # what --on-error skip leaves out at most, whichever is more


@dataclass(kw_only=True)
class Summary:
    """What was packed."""

    meta: Meta
    problems: list[Problem] = field(default_factory=list)  # skipped
    ignored: list[str] = field(default_factory=list)  # no images by their name
    enlarged: int = 0  # images that were smaller than --size and scaled up
    workers: int = 0  # processes that converted images besides this one
    seconds: float = 0.0  # until the file was complete
    duplicates: list[str] | None = None  # the report's lines; None: not searched
    search_seconds: float = 0.0  # for them, afterwards


class _Skipped:
    """What is left out: nothing, or up to a cap."""

    def __init__(self, source: Source, on_error: str, cap: int | None) -> None:
        if cap is not None and on_error == "stop":
            raise UserError("--max-skipped is for --on-error skip: add it or drop --max-skipped")
        self._source, self._stop = source, on_error == "stop"
        self.cap = max(SKIPPED_IMAGES, int(SKIPPED_SHARE * len(source))) if cap is None else cap
        self.problems: list[Problem] = []
        listed = len(source.problems)
        for problem in source.problems:
            self.add(problem, listed)

    def add(self, problem: Problem, known: int = 1) -> None:
        """Count a problem. Raises UserError if it must not be skipped; so many are `known` of already."""
        self.problems.append(problem)
        if self._stop:
            more = f" (and {known - 1} more)" if known > 1 else ""
            raise UserError(f"{problem}{more}: fix it, or pass --on-error skip to leave it out")
        if max(known, len(self.problems)) > self.cap:
            raise UserError(
                f"{self._source.name}: {max(known, len(self.problems)):,} images or folders cannot be used,"
                f" --max-skipped is {self.cap:,}; the first: {self.problems[0]}: fix them or raise --max-skipped"
            )

    def check_packed(self, histogram: np.ndarray, count: int) -> None:
        """Raise UserError if so much was skipped that a class or everything is missing."""
        name, classes = self._source.name, self._source.classes
        what = f"could be used, {len(self.problems)} skipped"
        what += f"; the first: {self.problems[0]}" if self.problems else ""
        if not count:
            raise UserError(f"{name}: no image {what}")
        if classes and not histogram.all():
            raise UserError(f"{name}: no image of class {classes[int(histogram.argmin())]} {what}")


def _check_classes(source: Source, against: Path | None, dest: Path) -> None:
    """Raise UserError for an empty class, and for classes that differ from those of the file `against`."""
    if source.classes:
        counts = np.bincount(source.labels(), minlength=len(source.classes))
        if not counts.all():
            raise UserError(f"{source.name}: class {source.classes[int(counts.argmin())]} has no images; add some")
    if against is None:
        return
    if against.exists() and dest.exists() and against.samefile(dest):
        raise UserError(f"--against {against} is the file to be written: name another one")
    with LMDBReader(against) as reader:
        theirs = reader.classes
    if source.classes and theirs:  # unlabelled images contradict no classes
        require_same_classes(source.name, source.classes, str(against), theirs, "labels would not mean the same")


def pack(
    source: Source,
    dest: str | Path,
    *,
    size: int | None = None,  # side of the square images in px
    encoding: str = "raw",
    channels: int | None = None,
    resize: str = "auto",
    on_error: str = "stop",  # or "skip"
    overwrite: bool = False,
    workers: int | None = None,  # processes besides this one; None: measured
    smallest: int | None = None,  # px: also store the images at half their side, a quarter ... down to this
    max_skipped: int | None = None,  # with on_error "skip"; None: 100 or 1 % of the images, whichever is more
    against: Path | None = None,  # a packed file whose classes must be the same and whose images are searched here
    duplicates: bool = True,  # report equal images
    similar: bool = False,  # and those that look alike
) -> Summary:
    """Pack a source into the file `dest`; the file does not depend on `workers`.

    Raises UserError for anything that is wrong with source, images, options or target; then nothing is left behind
    and an existing file is as it was.
    """
    started = time.perf_counter()
    dest = Path(dest)
    check_target(dest, overwrite)
    skipped = _Skipped(source, on_error, max_skipped)
    _check_classes(source, against, dest)
    plan = make_plan(source, size=size, encoding=encoding, channels=channels, resize=resize, smallest=smallest)
    conversion = Conversion(source, plan, workers=workers, stop=on_error == "stop")
    with LMDBWriter(
        dest,
        plan.layout,
        classes=source.classes,
        resize_filter=plan.resize_filter,
        source=source.name,
        overwrite=overwrite,
    ) as writer:
        fingerprint, enlarged, left_out = _write(source, conversion, writer, skipped)
        skipped.check_packed(writer.histogram, writer.count)
        meta = writer.finish(fingerprint)
    packed = time.perf_counter()
    rows = np.delete(np.arange(len(source)), left_out)  # of the source, by record
    lines = None
    if duplicates or similar:
        lines = _find_duplicates(dest, against, similar, lambda record: source.item_name(int(rows[record])))
    return Summary(
        meta=meta,
        problems=skipped.problems,
        ignored=source.ignored,
        enlarged=enlarged,
        workers=conversion.workers or 0,
        seconds=packed - started,
        duplicates=lines,
        search_seconds=time.perf_counter() - packed,
    )


def _write(source: Source, conversion: Conversion, writer: LMDBWriter, skipped: _Skipped) -> tuple[str, int, list[int]]:
    """Write every usable image; returns the source's fingerprint, how many images were enlarged, and the indices of
    those that were left out.

    The fingerprint is the SHA-256 of label (int64, little-endian) and content digest of each image in order.
    """
    fingerprint = hashlib.sha256()
    enlarged, left_out = 0, []
    bar = tqdm(total=len(source), desc="packing", unit="image", disable=None)
    with bar, contextlib.closing(iter(conversion)) as parts:
        for found in parts:
            for index, reason in found.problems:
                skipped.add(Problem(source.item_name(index), reason))
                left_out.append(index)
            for record, digest in zip(found.records, found.digests, strict=True):
                writer.add_record(record)
                fingerprint.update(record.label.to_bytes(8, "little") + digest)
            enlarged += found.enlarged
            bar.update(len(found.records) + len(found.problems))
    return fingerprint.hexdigest(), enlarged, left_out


def _find_duplicates(dest: Path, against: Path | None, similar: bool, name: Callable[[int], str]) -> list[str]:
    """The report on equal images, and `similar` ones, within the file, and between it and `against`."""
    try:
        with LMDBReader(dest) as reader:
            lines = report_lines(find(reader, similar=similar, item_name=name))
            if against is not None:
                with LMDBReader(against) as other:
                    lines += report_lines(find(reader, other, similar=similar, item_name=name))
        return lines
    except Exception as error:  # the file is complete and good: a fault in the search must not look like the pack's
        return [f"the search failed ({type(error).__name__}: {error}); the file is complete"]


def summary_lines(summary: Summary, dest: Path) -> list[str]:
    """The table at the end."""
    meta = summary.meta
    sides = meta.resolutions
    search = "" if summary.duplicates is None else f"; search for duplicates {summary.search_seconds:.1f} s"
    side = f"{sides[-1]}x{sides[-1]}" if sides[-1] else "sizes of their own"
    rows = [
        ("packed", f"{dest} ({dest.stat().st_size:,} bytes)"),
        ("source", meta.source),
        ("images", f"{meta.count:,}, {side}, {'grey' if meta.channels == 1 else 'RGB'}"),
        ("time", f"{summary.seconds:.1f} s, {meta.count / summary.seconds:,.0f} images/s{search}"),
        ("workers", str(summary.workers) if summary.workers else "0, this process alone"),
        ("encoding", f"{meta.encoding}, resize {meta.resize_filter}"),
        ("mean, std", f"{_numbers(meta.mean)}, {_numbers(meta.std)}"),
        ("content", meta.content_hash[:16]),
        ("fingerprint", meta.fingerprint[:16]),
    ]
    rows += [("pyramid", f"also at {', '.join(map(str, reversed(sides[:-1])))} px")] if len(sides) > 1 else []
    rows += [("enlarged", f"{summary.enlarged:,} images were smaller than asked for")] if summary.enlarged else []
    rows += [("classes", "none, unlabelled")] if not meta.classes else []
    rows += [(f"  {name}", f"{count:,}") for name, count in zip(meta.classes, meta.histogram, strict=True)]
    lines = ["not searched"] if summary.duplicates is None else summary.duplicates or ["none"]
    rows += [("" if index else "duplicates", line) for index, line in enumerate(lines)]
    for title, names in (("skipped", [str(problem) for problem in summary.problems]), ("ignored", summary.ignored)):
        if names:
            rows.append((title, f"{len(names):,}"))
            rows += [("", name) for name in itertools.islice(names, LISTED)]
            rows += [("", f"and {len(names) - LISTED:,} more")] if len(names) > LISTED else []
    return columns(rows, "<").splitlines()


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def _workers(text: str) -> int | None:
    """`--workers`: "auto" is None."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number from 0")
    return int(text)


def make_parser() -> Parser:
    """The options."""
    parser = Parser(prog="python -m data.pack", description="Pack images into one file for training.")
    add = parser.add_argument
    add("source", help=f"folder, .zip, .csv, .parquet or LMDB file, URL, or one of: {', '.join(NAMED)}")
    add("dest", type=Path, metavar="DEST.lmdb", help="the file to make")
    add("--size", type=int, metavar="N", help="side of the square images in px; default: their own")
    add("--pyramid", type=int, metavar="M", dest="smallest", help="also store the images at N/2, N/4, ... down to M px")
    add("--encoding", choices=ENCODINGS, default="raw", help="how images are stored (default: raw)")
    add("--channels", type=int, choices=(1, 3), help="grey or RGB; default: the data set's own, 3 for image files")
    add("--split", choices=tuple(dict.fromkeys([*SPLITS, "val"])), default="train", help="default: train")
    add("--root", type=Path, metavar="DIR", help="folder of the fashion-mnist, cifar10 or idx files")
    add("--resize", choices=("auto", "crop", "pad"), default="auto", help="see docs/lmdb.md")
    add("--on-error", choices=("stop", "skip"), default="stop", help="for images that cannot be read")
    add("--max-skipped", type=int, metavar="N", help="what skip leaves out at most; default: 100 or 1 %%, if more")
    add("--against", type=Path, metavar="OTHER.lmdb", help="refuse other classes than its; report images in both")
    add("--similar", action="store_true", help="also report images that look alike")
    add("--no-duplicates", action="store_false", dest="duplicates", help="do not report equal images")
    add("--workers", type=_workers, metavar="N", help="processes besides this one; default: auto, measured")
    add("--overwrite", action="store_true", help="replace DEST.lmdb if it exists")
    return parser


def main(argv: list[str]) -> None:
    """The command line."""
    args = make_parser().parse_args(argv)
    if args.size is not None and args.size < 4:
        raise UserError(f"--size {args.size}: must be at least 4 px")
    if args.max_skipped is not None and args.max_skipped < 0:
        raise UserError(f"--max-skipped {args.max_skipped}: must be 0 or more")
    check_target(args.dest, args.overwrite)
    keep_freed_memory(KEPT_BYTES)
    options = {name: value for name, value in vars(args).items() if name not in ("source", "split", "root", "debug")}
    split = args.split if args.split in SPLITS else "test"
    with open_source(args.source, split=split, root=args.root, size=args.size) as source:
        summary = pack(source, **options)
    print("\n".join(summary_lines(summary, args.dest)))


if __name__ == "__main__":
    sys.exit(run_cli(main))
