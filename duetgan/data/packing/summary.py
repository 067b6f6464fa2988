"""The summary of packing as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duetgan.data.lmdb.format import Meta
from duetgan.data.packing.sources import Problem
from duetgan.utils.errors import UserError
from duetgan.utils.files import write_atomic
from duetgan.utils.text import columns

LISTED = 10  # most names in the summary


@dataclass(kw_only=True)
class Summary:
    """The result of packing."""

    meta: Meta  # of the training file
    held_out: Meta | None  # of the file of held-out images
    held_out_path: Path | None
    problems: list[Problem]  # of skipped images
    listed: list[str]  # lines about the skipped images
    ignored: list[str]  # files that are no images by their name
    workers: int  # converting threads besides this one
    seconds: float  # until the file was complete
    duplicates: list[str] | None  # lines of the report; None: not searched

    def lines(self, dest: Path) -> list[str]:
        """Return the summary as aligned lines."""
        meta, held_out = self.meta, self.held_out
        image = meta.spec
        count = meta.count
        rows = [("packed", f"{dest} ({dest.stat().st_size:,} bytes)")]
        if held_out is not None:
            count += held_out.count
            text = f"{held_out.count:,} of {count:,} images, {held_out.count / count:.1%}"
            rows.append(("held out", f"{self.held_out_path}: {text}"))
            rows += _groups(meta, held_out)
        side = f"{image.width}x{image.height}" if image.side else "sizes of their own"
        mean, std = (
            " ".join(f"{value:.4f}" for value in values) for values in (meta.mean, meta.std)
        )
        rows += [
            ("source", meta.source),
            ("images", f"{meta.count:,}, {side}, {image.words}"),
            ("time", f"{self.seconds:.1f} s, {count / self.seconds:,.0f} images/s"),
            ("workers", str(self.workers)),
            ("encoding", f"{meta.encoding}, resize {meta.resize_filter}"),
            ("mean, std", f"{mean}, {std}"),
            ("content", meta.content_hash[:16]),
        ]
        if smaller := meta.resolutions[:-1]:
            sizes = ", ".join(str(image.at(side).resolution) for side in smaller[::-1])
            rows.append(("pyramid", f"also at {sizes} px"))
        if not meta.classes:
            rows.append(("classes", "none, unlabelled"))
        if meta.sets is not None:
            rows.append(("labels", f"several an image, {len(meta.sets):,} sets of them"))
        for label, name in enumerate(meta.classes):
            part = f", {held_out.by_class[label]:,} held out" if held_out else ""
            rows.append((f"  {name}", f"{meta.by_class[label]:,}{part}"))
        rows += _list(
            "duplicates", ["not searched"] if self.duplicates is None else self.duplicates
        )
        if self.problems:
            rows += _list("skipped", [f"{len(self.problems):,}", *self.listed])
        if self.ignored:
            rows += _list("ignored", [f"{len(self.ignored):,}", *_first(self.ignored)])
        return columns(rows, "<").splitlines()


def _groups(meta: Meta, held_out: Meta) -> list[tuple[str, str]]:
    """Return the lines about groups that the split kept whole, and about classes that only one of
    both files has.
    """
    if meta.split is None or held_out.split is None or held_out.split.groups is None:
        return []
    total = (meta.split.groups or 0) + held_out.split.groups
    rows = [
        (
            "groups",
            f"{held_out.split.groups:,} of {total:,} held out whole ({meta.split.group_by})",
        )
    ]
    counts = zip(meta.classes, meta.by_class, held_out.by_class, strict=True)
    if lacking := [name for name, *parts in counts if 0 in parts]:
        rows.append(("", f"warning: in one of the files alone: {', '.join(_first(lacking))}"))
    return rows


def _list(title: str, lines: list[str]) -> list[tuple[str, str]]:
    return [("" if index else title, line) for index, line in enumerate(lines)]


def _first(lines: list[str]) -> list[str]:
    """Return the first LISTED lines, and one with the number of the remaining lines."""
    return lines if len(lines) <= LISTED else [*lines[:LISTED], f"and {len(lines) - LISTED:,} more"]


def list_skipped(problems: Sequence[Problem], dest: Path) -> list[str]:
    """Return the summary's lines about skipped images.

    A long list is written to a file next to `dest`; the file of an earlier run is removed. An error
    becomes a line, because the data set is already complete.
    """
    text = list(map(str, problems))
    path = dest.with_name(f"{dest.stem}.skipped.txt")
    try:
        path.unlink(missing_ok=True)
        if len(text) <= LISTED:
            return text
        # Names that are not UTF-8 are escaped.
        write_atomic(path, "".join(f"{line}\n" for line in text).encode(errors="backslashreplace"))
        return [*_first(text), f"all of them: {path}"]
    except (UserError, OSError) as error:
        return [*_first(text), f"their list could not be written ({error})"]
