"""What data.pack says at its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from duetgan.data.duplicates import write_lines
from duetgan.data.lmdb.format import Meta
from duetgan.data.lmdb.record import Record
from duetgan.data.sources import Problem
from duetgan.utils.errors import UserError
from duetgan.utils.text import columns, listed

LISTED = 10  # names in the summary


@dataclass
class Written:
    """What is known of the records that were written, beyond what the file holds."""

    rows: list[int] = field(default_factory=list)  # their indices in the source
    records: list[Record] = field(default_factory=list)  # if the file is to be split: all but their payloads
    enlarged: int = 0  # images that were smaller than asked for and scaled up
    cut: int = 0  # images of 16 bits a value
    dropped: int = 0  # exact duplicates of earlier images that were left out
    dropped_otherwise: int = 0  # of those: with another label than the one that was kept


@dataclass(kw_only=True)
class Summary:
    meta: Meta  # of a split the training file's
    held_out: Meta | None  # with a split
    held_out_path: Path | None
    written: Written
    problems: list[Problem]  # skipped
    listed: str  # where all of them are
    ignored: list[str]  # no images by their name
    workers: int  # threads that converted images besides this one
    seconds: float  # until the file was complete
    duplicates: list[str] | None  # the report's lines; None: not searched
    search_seconds: float  # for them, afterwards


def list_skipped(problems: Sequence[Problem], dest: Path) -> str:
    """Write what was skipped into a file beside `dest` if it is more than the summary names, and say where; else
    remove one that an earlier run left. The data set is complete by then: what goes wrong is told, and no more.
    """
    path = dest.with_name(f"{dest.stem}.skipped.txt")
    try:
        if len(problems) > LISTED:
            write_lines(path, list(map(str, problems)))
            return f"all of them: {path}"
        path.unlink(missing_ok=True)
    except (UserError, OSError) as error:
        return f"their list could not be written ({error})"
    return ""


def summary_lines(summary: Summary, dest: Path) -> list[str]:
    meta, held_out, written = summary.meta, summary.held_out, summary.written
    count = meta.count + (held_out.count if held_out else 0)
    smaller, largest = meta.resolutions[:-1], meta.resolutions[-1]
    side = f"{largest}x{largest}" if largest else "sizes of their own"
    search = "" if summary.duplicates is None else f"; search for duplicates {summary.search_seconds:.1f} s"
    mean, std = (" ".join(f"{value:.4f}" for value in values) for values in (meta.mean, meta.std))
    rows = [("packed", f"{dest} ({dest.stat().st_size:,} bytes)")]
    rows += [("", f"a link: {dest.resolve()} was written")] if dest.is_symlink() else []
    if held_out and held_out.split and summary.held_out_path:
        rows.append(("held out", f"{summary.held_out_path} ({summary.held_out_path.stat().st_size:,} bytes)"))
        share = f"{held_out.count:,} of {count:,} images, {held_out.count / count:.1%}"
        rows.append(("", f"{share}; seed {held_out.split.seed}"))
        without = [name for name, number in zip(meta.classes, held_out.histogram, strict=True) if not number]
        why = "one image each, or all of a class look alike"
        rows += [("", f"none of {len(without):,} classes ({why}): {listed(without)}")] if without else []
    rows += [
        ("source", meta.source),
        ("images", f"{meta.count:,}, {side}, {'grey' if meta.channels == 1 else 'RGB'}"),
        ("time", f"{summary.seconds:.1f} s, {count / summary.seconds:,.0f} images/s{search}"),
        ("workers", str(summary.workers) if summary.workers else "0, this thread alone"),
        ("encoding", f"{meta.encoding}, resize {meta.resize_filter}"),
        ("mean, std", f"{mean}, {std}"),
        ("content", meta.content_hash[:16]),
        ("fingerprint", meta.fingerprint[:16]),
    ]
    rows += [("pyramid", f"also at {', '.join(map(str, reversed(smaller)))} px")] if smaller else []
    rows += [("enlarged", f"{written.enlarged:,} images were smaller than asked for")] if written.enlarged else []
    if meta.channels == 3 and len({*zip(meta.mean, meta.std, strict=True)}) == 1:
        rows.append(("colour", "there is none: --channels 1 packs grey images as such"))
    rows += [("16 bits", f"{written.cut:,} images have 16 bits a value: the high 8 are kept")] if written.cut else []
    rows += [("classes", "none, unlabelled")] if not meta.classes else []
    if written.dropped:
        other = f", {written.dropped_otherwise:,} of them with another label" if written.dropped_otherwise else ""
        rows.append(("dropped", f"{written.dropped:,} exact duplicates of images that were kept{other}"))
    for label, name in enumerate(meta.classes):
        part = f", {held_out.histogram[label]:,} held out" if held_out else ""
        rows.append((f"  {name}", f"{meta.histogram[label]:,}{part}"))
    lines = ["not searched"] if summary.duplicates is None else summary.duplicates or ["none"]
    rows += [("" if index else "duplicates", line) for index, line in enumerate(lines)]
    for title, names, where in (
        ("skipped", [str(problem) for problem in summary.problems], summary.listed),
        ("ignored", summary.ignored, ""),
    ):
        more = f"and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
        rows += [(title, f"{len(names):,}")] if names else []
        rows += [("", line) for line in (*names[:LISTED], more, where) if line]
    return columns(rows, "<").splitlines()
