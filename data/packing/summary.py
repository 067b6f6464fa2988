"""What data.pack says at its end."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.duplicates import write_lines
from data.lmdb.format import Meta
from data.sources import Problem
from utils.errors import UserError
from utils.text import columns, listed

LISTED = 10  # names in the summary


@dataclass(kw_only=True)
class Summary:
    """What was packed."""

    meta: Meta  # of a split the training file's
    held_out: Meta | None = None  # with a split
    held_out_path: Path | None = None
    problems: list[Problem] = field(default_factory=list)  # skipped
    listed: str = ""  # where all of them are
    ignored: list[str] = field(default_factory=list)  # no images by their name
    enlarged: int = 0  # images that were smaller than --size and scaled up
    dropped: int = 0  # exact duplicates that were left out
    dropped_otherwise: int = 0  # of those: with another label than the one that was kept
    workers: int = 0  # threads that converted images besides this one
    seconds: float = 0.0  # until the file was complete
    duplicates: list[str] | None = None  # the report's lines; None: not searched
    search_seconds: float = 0.0  # for them, afterwards


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
    """The table at the end."""
    meta, held_out = summary.meta, summary.held_out
    count = meta.count + (held_out.count if held_out else 0)
    sides = meta.resolutions
    search = "" if summary.duplicates is None else f"; search for duplicates {summary.search_seconds:.1f} s"
    side = f"{sides[-1]}x{sides[-1]}" if sides[-1] else "sizes of their own"
    rows = [
        ("packed", f"{dest} ({dest.stat().st_size:,} bytes)"),
        *([("", f"a link: {dest.resolve()} was written")] if dest.is_symlink() else []),
        *_held_out_rows(summary),
        ("source", meta.source),
        ("images", f"{meta.count:,}, {side}, {'grey' if meta.channels == 1 else 'RGB'}"),
        ("time", f"{summary.seconds:.1f} s, {count / summary.seconds:,.0f} images/s{search}"),
        ("workers", str(summary.workers) if summary.workers else "0, this thread alone"),
        ("encoding", f"{meta.encoding}, resize {meta.resize_filter}"),
        ("mean, std", f"{_numbers(meta.mean)}, {_numbers(meta.std)}"),
        ("content", meta.content_hash[:16]),
        ("fingerprint", meta.fingerprint[:16]),
    ]
    rows += [("pyramid", f"also at {', '.join(map(str, reversed(sides[:-1])))} px")] if len(sides) > 1 else []
    rows += [("enlarged", f"{summary.enlarged:,} images were smaller than asked for")] if summary.enlarged else []
    rows += [("classes", "none, unlabelled")] if not meta.classes else []
    if summary.dropped:
        other = f", {summary.dropped_otherwise:,} of them with another label" if summary.dropped_otherwise else ""
        rows.append(("dropped", f"{summary.dropped:,} exact duplicates of images that were kept{other}"))
    rows += [(f"  {name}", _of_class(summary, label)) for label, name in enumerate(meta.classes)]
    lines = ["not searched"] if summary.duplicates is None else summary.duplicates or ["none"]
    rows += [("" if index else "duplicates", line) for index, line in enumerate(lines)]
    for title, names in (("skipped", [str(problem) for problem in summary.problems]), ("ignored", summary.ignored)):
        if names:
            rows.append((title, f"{len(names):,}"))
            rows += [("", name) for name in itertools.islice(names, LISTED)]
            rows += [("", f"and {len(names) - LISTED:,} more")] if len(names) > LISTED else []
            rows += [("", summary.listed)] if title == "skipped" and summary.listed else []
    return columns(rows, "<").splitlines()


def _held_out_rows(summary: Summary) -> list[tuple[str, str]]:
    """Where the held-out images are, and how many."""
    meta, path = summary.held_out, summary.held_out_path
    if meta is None or path is None or meta.split is None:
        return []
    count = meta.count + summary.meta.count
    rows = [
        ("held out", f"{path} ({path.stat().st_size:,} bytes)"),
        ("", f"{meta.count:,} of {count:,} images, {meta.count / count:.1%}; seed {meta.split.seed}"),
    ]
    without = [name for name, number in zip(meta.classes, meta.histogram, strict=True) if not number]
    if without:
        why = "one image each, or all of a class look alike"
        rows.append(("", f"none of {len(without):,} classes ({why}): {listed(without)}"))
    return rows


def _of_class(summary: Summary, label: int) -> str:
    """Images of a class."""
    held_out = f", {summary.held_out.histogram[label]:,} held out" if summary.held_out else ""
    return f"{summary.meta.histogram[label]:,}{held_out}"


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)
