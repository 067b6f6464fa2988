"""Pack pictures into one file for training: `python -m data.pack SOURCE DEST.lmdb`. The rules are in docs/lmdb.md."""

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.format import ENCODINGS, Meta
from data.pictures import RESIZE_FILTERS, PictureError, decode_file, fit, to_channels
from data.sources import NAMED, Item, Problem, Source, open_source
from data.writer import LMDBWriter, check_target
from utils.cli import Parser
from utils.errors import UserError, run_cli

PAD_SHARE = 8  # resize "auto" pads data sets whose pictures are smaller than N by at most N / PAD_SHARE
LISTED = 10  # skipped and ignored names in the summary


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How every picture is brought into the file."""

    size: int  # px; 0: as it is
    channels: int
    encoding: str
    mode: str  # data.pictures.fit's

    @property
    def resize_filter(self) -> str:
        """Its name in the metadata."""
        return RESIZE_FILTERS[self.mode]


@dataclass
class Summary:
    """What was packed."""

    meta: Meta
    problems: list[Problem] = field(default_factory=list)  # skipped
    ignored: list[str] = field(default_factory=list)  # no pictures by their name
    enlarged: int = 0  # pictures that were smaller than --size and scaled up
    seconds: float = 0.0


def make_plan(
    source: Source,
    *,
    size: int | None,
    encoding: str,
    channels: int | None,
    resize: str,  # "auto", "crop" or "pad"
) -> Plan:
    """Decide what the user has left open.

    Channels: the source's own, else 3. Size: the source's own, else the first readable picture's, and then all must
    have it. Resize "auto": "pad" where all pictures have one known size that lies at most N/8 below N, else "crop".
    Raises UserError for options that do not fit together.
    """
    if encoding == "source":
        if size is not None:
            raise UserError("--encoding source keeps the files as they are: drop --size or choose raw, jpeg or png")
        if source.shape is not None:
            raise UserError(f"{source.name} has no files to keep: choose --encoding raw or png")
        return Plan(size=0, channels=channels or 3, encoding=encoding, mode="exact")
    channels = channels or source.channels or 3
    if size is None:
        height, width = source.shape or _first_shape(source, channels)
        if height != width:
            raise UserError(f"{source.name}: pictures are {width}x{height} px, not square: pass --size N")
        return Plan(size=height, channels=channels, encoding=encoding, mode="exact")
    if source.shape == (size, size):
        return Plan(size=size, channels=channels, encoding=encoding, mode="exact")
    if resize == "auto":
        near = source.shape is not None and 0 < size - max(source.shape) <= size // PAD_SHARE
        resize = "pad" if near else "crop"
    return Plan(size=size, channels=channels, encoding=encoding, mode=resize)


def _first_shape(source: Source, channels: int) -> tuple[int, int]:
    """Height and width of the first picture that can be read."""
    problems = []
    for index in range(len(source)):
        try:
            shape = _pixels(source.item(index), channels).shape
            return shape[0], shape[1]
        except PictureError as error:
            problems.append(Problem(source.item_name(index), str(error)))
    raise UserError(f"{source.name}: none of {len(source)} pictures can be read; the first: {problems[0]}")


def _pixels(item: Item, channels: int) -> np.ndarray:
    """A picture's pixels, uint8 [H, W, channels]. Raises PictureError."""
    if isinstance(item.content, bytes):
        return decode_file(item.content, channels)
    return to_channels(item.content, channels)


def _check_source(source: Source, on_error: str) -> None:
    """Raise UserError for an empty class, and for what listing the source has found unless it is to be skipped."""
    if source.problems and on_error == "stop":
        more = f" (and {len(source.problems) - 1} more)" if len(source.problems) > 1 else ""
        raise UserError(f"{source.problems[0]}{more}: put it right, or pass --on-error skip to leave it out")
    if source.classes:
        counts = np.bincount(source.labels(), minlength=len(source.classes))
        if not counts.all():
            raise UserError(f"{source.name}: class {source.classes[int(counts.argmin())]} has no pictures; add some")


def pack(
    source: Source,
    dest: str | Path,
    *,
    size: int | None = None,  # side of the square pictures in px
    encoding: str = "raw",
    channels: int | None = None,
    resize: str = "auto",
    on_error: str = "stop",  # or "skip"
    overwrite: bool = False,
) -> Summary:
    """Pack a source into the file `dest`.

    Raises UserError for anything that is wrong with source, pictures, options or target; then nothing is left behind
    and an existing file is as it was.
    """
    started = time.perf_counter()
    dest = Path(dest)
    check_target(dest, overwrite)
    _check_source(source, on_error)
    plan = make_plan(source, size=size, encoding=encoding, channels=channels, resize=resize)
    problems = list(source.problems)
    enlarged = 0
    with LMDBWriter(
        dest,
        classes=source.classes,
        channels=plan.channels,
        resolution=plan.size,
        encoding=plan.encoding,
        resize_filter=plan.resize_filter,
        source=source.name,
        overwrite=overwrite,
    ) as writer:
        for label, pixels, payload, small in _converted(source, plan, on_error, problems):
            writer.add(pixels, label, payload)
            enlarged += small
        _check_packed(source, writer.histogram, writer.count, problems)
        meta = writer.finish()
    return Summary(meta, problems, source.ignored, enlarged, time.perf_counter() - started)


def _converted(
    source: Source, plan: Plan, on_error: str, problems: list[Problem]
) -> Iterator[tuple[int, np.ndarray, bytes | None, bool]]:
    """Label, pixels, the file's own bytes where they are kept, and whether it was enlarged, of every usable picture."""
    for index in tqdm(range(len(source)), desc="packing", unit="picture", disable=None):
        try:
            item = source.item(index)
            found = _pixels(item, plan.channels)
            if plan.encoding == "source" and isinstance(item.content, bytes):
                yield item.label, found, item.content, False
                continue
            small = plan.mode == "crop" and min(found.shape[:2]) < plan.size
            yield item.label, fit(found, plan.size, plan.mode), None, small
        except PictureError as error:
            problem = Problem(source.item_name(index), str(error))
            if on_error == "stop":
                raise UserError(f"{problem}: put it right, or pass --on-error skip to leave it out") from None
            problems.append(problem)


def _check_packed(source: Source, histogram: np.ndarray, count: int, problems: list[Problem]) -> None:
    """Raise UserError if so much was skipped that a class or everything is missing."""
    first = f"; the first: {problems[0]}" if problems else ""
    if not count:
        raise UserError(f"{source.name}: no picture could be used, {len(problems)} skipped{first}")
    if source.classes and not histogram.all():
        name = source.classes[int(histogram.argmin())]
        raise UserError(f"{source.name}: no picture of class {name} could be used, {len(problems)} skipped{first}")


def summary_lines(summary: Summary, dest: Path) -> list[str]:
    """The table at the end."""
    meta = summary.meta
    side = f"{meta.resolutions[0]}x{meta.resolutions[0]}" if meta.resolutions[0] else "sizes of their own"
    rows = [
        ("packed", f"{dest} ({dest.stat().st_size:,} bytes, {summary.seconds:.1f} s)"),
        ("source", meta.source),
        ("pictures", f"{meta.count:,}, {side}, {'grey' if meta.channels == 1 else 'RGB'}"),
        ("encoding", f"{meta.encoding}, resize {meta.resize_filter}"),
        ("mean, std", f"{_numbers(meta.mean)}, {_numbers(meta.std)}"),
        ("content", meta.content_hash[:16]),
    ]
    rows += [("enlarged", f"{summary.enlarged:,} pictures were smaller than asked for")] if summary.enlarged else []
    rows += [("classes", "none, unlabelled")] if not meta.classes else []
    rows += [(f"  {name}", f"{count:,}") for name, count in zip(meta.classes, meta.histogram, strict=True)]
    for title, names in (("skipped", [str(problem) for problem in summary.problems]), ("ignored", summary.ignored)):
        if names:
            rows.append((title, f"{len(names):,}"))
            rows += [("", name) for name in itertools.islice(names, LISTED)]
            rows += [("", f"and {len(names) - LISTED:,} more")] if len(names) > LISTED else []
    width = max(len(title) for title, _ in rows)
    return [f"{title:<{width}}  {text}".rstrip() for title, text in rows]


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def make_parser() -> Parser:
    """The options."""
    parser = Parser(prog="python -m data.pack", description="Pack pictures into one file for training.")
    parser.add_argument("source", help=f"folder, zip file or one of: {', '.join(NAMED)}")
    parser.add_argument("dest", type=Path, metavar="DEST.lmdb", help="the file to make")
    parser.add_argument("--size", type=int, metavar="N", help="side of the square pictures in px; default: theirs")
    parser.add_argument("--encoding", choices=ENCODINGS, default="raw", help="how pictures are stored (default: raw)")
    parser.add_argument("--channels", type=int, choices=(1, 3), help="grey or RGB; default: as the data set, files 3")
    parser.add_argument("--split", choices=("train", "test"), default="train", help="default: train")
    parser.add_argument("--root", type=Path, metavar="DIR", help="where fashion-mnist, cifar10 or idx files lie")
    parser.add_argument("--resize", choices=("auto", "crop", "pad"), default="auto", help="see docs/lmdb.md")
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="for what cannot be read")
    parser.add_argument("--overwrite", action="store_true", help="replace DEST.lmdb if it exists")
    return parser


def main(argv: list[str]) -> None:
    """The command line."""
    args = make_parser().parse_args(argv)
    if args.size is not None and args.size < 4:
        raise UserError(f"--size {args.size}: must be at least 4 px")
    check_target(args.dest, args.overwrite)
    with open_source(args.source, split=args.split, root=args.root) as source:
        summary = pack(
            source,
            args.dest,
            size=args.size,
            encoding=args.encoding,
            channels=args.channels,
            resize=args.resize,
            on_error=args.on_error,
            overwrite=args.overwrite,
        )
    print("\n".join(summary_lines(summary, args.dest)))


if __name__ == "__main__":
    sys.exit(run_cli(main))
