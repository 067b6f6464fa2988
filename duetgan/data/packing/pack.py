"""Pack the images of a source into one file for training. The rules are in docs/lmdb.md."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Generator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.errors import ImageError
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.record import Record
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.duplicates import count_text, find
from duetgan.data.packing.records import Converted, Plan, converted, make_plan, thread_count
from duetgan.data.packing.sources import Problem, Source
from duetgan.data.packing.split import (
    publish_both,
    to_fraction,
    val_path,
    write_parts,
)
from duetgan.data.packing.summary import Summary
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.runlog.progress import Bar, showing


class _Skipped:
    """A record of the images that packing skips, with the reasons.

    With `on_error` "stop", an image that would be skipped raises UserError instead.
    """

    def __init__(self, source: Source, on_error: str, remedy: str) -> None:
        self._source = source
        self._stop = on_error == "stop"
        self._remedy = remedy
        self.problems: list[Problem] = []
        self.add(*source.problems)

    def add(self, *problems: Problem) -> None:
        """Record problems. Raises UserError with the first one if no image may be skipped."""
        self.problems += problems
        if self._stop and problems:
            remaining = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise UserError(f"{problems[0]}{remaining}: fix it, or {self._remedy}")

    def check(self, writer: LMDBWriter) -> None:
        """Raise UserError if no image was written, or if a class of the source lost all images."""
        source = self._source
        counts = np.bincount(source.labels(), minlength=len(writer.histogram))
        lost = (source.by_class(counts) > 0) & (source.by_class(writer.histogram) == 0)
        if writer.count and not lost.any():
            return
        of_class = f" of class {source.classes[int(lost.argmax())]}" if writer.count else ""
        first = f"; the first: {self.problems[0]}" if self.problems else ""
        raise UserError(
            f"{source.name}: no image{of_class} could be used, {len(self.problems)} skipped{first}"
        )


def _check_classes(source: Source, against: Path | None) -> None:
    """Raise UserError if the source's classes cannot be packed.

    Without `against`, every class must have images. With it, the source must have the classes of
    the packed file `against`. The source's images may lack some of these classes, which are then
    added to the source.
    """
    if against is None:
        source.check_classes()
        return
    with LMDBReader(against) as reader:
        classes = reader.classes
    if source.classes and classes:  # Unlabelled images fit all classes.
        source.fill_classes(classes)
        require_same_classes(
            source.name, source.classes, str(against), classes, "labels would not mean the same"
        )


def pack(
    source: Source,
    dest: str | Path,
    *,
    on_error: str = "stop",  # or "skip"
    overwrite: bool = False,
    workers: int | None = None,  # threads besides this one; None: one per core
    against: Path | None = None,  # a packed file with the same classes
    duplicates: bool = True,  # report equal images
    val_share: str | float | None = None,  # fraction of the images to hold out, in a second file
    val_dest: str | Path | None = None,  # the second file; None: `val_path`
    seed: int = 0,  # for drawing the held-out images
    progress: bool = True,  # show progress bars on stderr
    # advice in the message about an image that cannot be used
    remedy: str = "pass --on-error skip to leave it out",
    **plan_options: Any,  # see data.packing.records.make_plan
) -> Summary:
    """Pack a source into the file `dest`, or with `val_share` into two files.

    The files do not depend on `workers`. Raises UserError for invalid sources, images, options or
    targets. In this case existing files stay unchanged, and new files are removed.
    """
    started = time.perf_counter()
    fraction = None if val_share is None else to_fraction(val_share)
    targets = _targets(source, Path(dest), fraction, val_dest)
    skipped = _Skipped(source, on_error, remedy)
    _check_classes(source, against)
    plan = make_plan(source, **plan_options)
    workers = thread_count(source, workers)
    with contextlib.ExitStack() as stack:
        stack.enter_context(showing(progress))
        *writers, whole = _open_writers(stack, source, plan, targets, overwrite)
        rows, records = _write(
            source, converted(source, plan, workers), whole, skipped, keep=fraction is not None
        )
        metas, report = [whole.finish()], None
        if fraction is not None:
            grouping = source.grouping and source.grouping._replace(
                names=[source.grouping.names[row] for row in rows]
            )
            metas, report = write_parts(whole.path, records, writers, fraction, seed, grouping)
            publish_both(writers)
        seconds = time.perf_counter() - started
        text = "not searched"
        if duplicates:
            with LMDBReader(whole.path) as reader:
                text = count_text(report or find(reader))
    return Summary(
        meta=metas[0],
        held_out=metas[1] if len(metas) > 1 else None,
        held_out_path=targets[-1] if len(targets) > 1 else None,
        problems=skipped.problems,
        ignored=source.ignored,
        seconds=seconds,
        duplicates=text,
    )


def _targets(
    source: Source, dest: Path, fraction: Fraction | None, val_dest: str | Path | None
) -> list[Path]:
    """Return the paths of the files to write.

    The first is `dest`. With `fraction`, the second is the file of held-out images. Raises
    UserError if `val_dest` or groups are given without `fraction`.
    """
    if source.grouping is not None and fraction is None:
        option = source.grouping.option
        raise UserError(f"{option} is for --val-share: add --val-share or drop {option.split()[0]}")
    targets = [dest]
    if fraction is not None:
        targets.append(val_path(dest) if val_dest is None else Path(val_dest))
    elif val_dest is not None:
        raise UserError("--val-dest is for --val-share: add it or drop --val-dest")
    return targets


def _open_writers(
    stack: contextlib.ExitStack,
    source: Source,
    plan: Plan,
    targets: Sequence[Path],
    overwrite: bool,
) -> list[LMDBWriter]:
    """Open a writer for each target. When `stack` ends, it closes them.

    With two targets, a third writer comes last. It writes all images to a hidden file, which
    `stack` deletes.
    """
    new_writer = functools.partial(
        LMDBWriter,
        layout=plan.layout,
        classes=source.classes,
        label_sets=source.label_sets,
        resize_filter=plan.resize_filter,
        source=source.name,
        passport=source.passport,
        split=source.split,
    )
    writers = [stack.enter_context(new_writer(target, overwrite=overwrite)) for target in targets]
    if len(targets) > 1:
        whole = targets[0].with_name(f".{targets[0].name}.whole")
        writers.append(stack.enter_context(new_writer(whole, overwrite=True)))
        stack.callback(whole.unlink, missing_ok=True)
    return writers


def _write(
    source: Source,
    images: Generator[Converted],
    writer: LMDBWriter,
    skipped: _Skipped,
    keep: bool,
) -> tuple[list[int], list[Record]]:
    """Write every usable image among `images`, the results of `converted` for the source.

    All other images are added to `skipped`. Returns the indices of the written images in the source
    and, if `keep` is true, their records without payloads (else an empty list).
    """
    rows = []
    records = []
    with contextlib.closing(images):
        for row, record in enumerate(Bar(images, "packing", len(source), unit="image")):
            if isinstance(record, ImageError):
                skipped.add(Problem(source.item_name(row), str(record)))
                continue
            writer.add_record(record, source.stored_name(row))
            rows.append(row)
            if keep:
                records.append(dataclasses.replace(record, payloads=()))
    skipped.check(writer)
    return rows, records
