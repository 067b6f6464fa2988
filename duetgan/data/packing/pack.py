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
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.duplicates import LISTED, Name, Report, find, lines, shortened
from duetgan.data.packing.split import (
    Summary,
    Written,
    list_skipped,
    publish_both,
    strata,
    to_share,
    val_path,
    write_apart,
    write_parts,
)
from duetgan.data.records import Converted, Plan, converted, make_plan, thread_count
from duetgan.data.sources import Problem, Source
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.runlog.progress import Bar

KEPT_BYTES = 128 << 20  # of freed memory
# what --on-error skip leaves out at most, whichever is more
SKIPPED_IMAGES, SKIPPED_SHARE = 100, 0.01


class _Skipped:
    """What is left out: nothing, or up to a cap."""

    def __init__(self, source: Source, on_error: str, cap: int | None, remedy: str) -> None:
        if cap is not None and on_error == "stop":
            raise UserError("--max-skipped is for --on-error skip: add it or drop --max-skipped")
        self._source, self._stop, self._remedy = source, on_error == "stop", remedy
        self.cap = max(SKIPPED_IMAGES, int(SKIPPED_SHARE * len(source))) if cap is None else cap
        self.problems: list[Problem] = []
        self.add(*source.problems)

    def add(self, *problems: Problem) -> None:
        """Count problems. Raises UserError if they must not be skipped."""
        self.problems += problems
        if self._stop and problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise UserError(f"{problems[0]}{more}: fix it, or {self._remedy}")
        if len(self.problems) > self.cap:
            over = f"{len(self.problems):,} images or folders cannot be used, --max-skipped is {self.cap:,}"
            raise UserError(
                f"{self._source.name}: {over}; the first: {self.problems[0]}: fix them or raise --max-skipped"
            )

    def check(self, writer: LMDBWriter, dropped: int) -> None:
        """Raise UserError if so much was left out that a class or everything is missing."""
        name, classes = self._source.name, self._source.classes
        count, histogram = writer.count, self._source.by_class(writer.histogram)
        what = f"could be used, {len(self.problems)} skipped"
        what += f", {dropped} dropped as duplicates" if dropped else ""
        what += f"; the first: {self.problems[0]}" if self.problems else ""
        given = self._source.by_class(
            np.bincount(self._source.labels(), minlength=len(writer.histogram))
        )
        if not count or (lost := (given > 0) & (histogram == 0)).any():
            of_class = f" of class {classes[int(lost.argmax())]}" if count else ""
            raise UserError(f"{name}: no image{of_class} {what}")


def _check_classes(source: Source, against: Path | None, targets: Sequence[Path]) -> None:
    """Raise UserError for an empty class, or for one that the file `against` does not have; what it
    has besides, the source takes: held-out images may have none of a class.
    """
    if against is None:
        source.check_classes()
        return
    if against.exists() and any(target.exists() and against.samefile(target) for target in targets):
        raise UserError(f"{against} is the file to be written: name another one to compare with")
    with LMDBReader(against) as reader:
        theirs = reader.classes
    if source.classes and theirs:  # unlabelled images contradict no classes
        source.fill_classes(theirs)
        require_same_classes(
            source.name, source.classes, str(against), theirs, "labels would not mean the same"
        )


def pack(
    source: Source,
    dest: str | Path,
    *,
    on_error: str = "stop",  # or "skip"
    overwrite: bool = False,
    workers: int | None = None,  # threads besides this one; None: one a core
    # with on_error "skip"; None: 100 or 1 % of the images, whichever is more
    max_skipped: int | None = None,
    # a packed file whose classes must be the same and whose images are searched here
    against: Path | None = None,
    duplicates: bool = True,  # report equal images
    similar: bool = False,  # and those that look alike
    drop_duplicates: bool = False,  # keep only the first of equal images
    # a packed file of the same classes: what it holds or looks like it is left out
    apart: Path | None = None,
    # hold this share of the images out, into a file of its own
    val_share: str | float | None = None,
    val_dest: str | Path | None = None,  # that file; None: `val_path`
    seed: int = 0,  # of the draw of held-out images
    remedy: str = "pass --on-error skip to leave it out",  # for an image that cannot be used
    **how: Any,  # the images are brought into the file: data.records.make_plan
) -> Summary:
    """Pack a source into the file `dest`, or with `val_share` into two; the files do not depend on
    `workers`.

    Raises UserError for anything that is wrong with source, images, options or target; then nothing
    is left behind and existing files are as they were.
    """
    started = time.perf_counter()
    share = None if val_share is None else to_share(val_share)
    targets = _targets(source, Path(dest), share, val_dest)
    skipped = _Skipped(source, on_error, max_skipped, remedy)
    _check_classes(source, against or apart, targets)
    plan = make_plan(source, **how)
    workers = thread_count(source, workers)
    with contextlib.ExitStack() as stack:
        *writers, whole = _open_writers(stack, source, plan, targets, overwrite, apart is not None)
        written = _write(
            source, converted(source, plan, workers), whole, skipped, drop_duplicates, bool(writers)
        )
        metas, report = [whole.finish()], None

        def name(record: int) -> str:
            return source.item_name(written.rows[record])

        if share is not None:
            metas, report = write_parts(whole.path, written.records, writers, share, seed, name)
            publish_both(writers)
        elif apart is not None:
            metas = [write_apart(whole.path, written, writers[0], apart, skipped.check)]
        packed = time.perf_counter()
        search = duplicates or similar
        text = (
            _find_duplicates(whole.path, targets[0], against, similar, name, report)
            if search
            else None
        )
    return Summary(
        meta=metas[0],
        held_out=metas[1] if len(metas) > 1 else None,
        held_out_path=targets[-1] if len(targets) > 1 else None,
        written=written,
        problems=skipped.problems,
        listed=list_skipped(skipped.problems, targets[0]),
        ignored=source.ignored,
        workers=workers,
        seconds=packed - started,
        duplicates=text,
        search_seconds=time.perf_counter() - packed,
    )


def _targets(
    source: Source, dest: Path, share: Fraction | None, val_dest: str | Path | None
) -> list[Path]:
    """The files to be written: one, or of training and held-out images. Raises UserError if that
    cannot be.
    """
    targets = [dest]
    if share is not None:
        labels = strata(source.labels(), source.sets, share)
        if len(labels) < 2 or np.bincount(labels).max() < 2:
            what = (
                "1 image" if len(labels) == 1 else f"{len(labels):,} images, each of another class"
            )
            raise UserError(
                f"{source.name}: --val-share {float(share)} needs two images of a class, there is {what}; add some"
            )
        targets.append(val_path(dest) if val_dest is None else Path(val_dest))
        if targets[0].absolute() == targets[1].absolute():
            raise UserError(
                f"--val-dest {val_dest} is the file of the training images: name another one"
            )
    elif val_dest is not None:
        raise UserError("--val-dest is for --val-share: add it or drop --val-dest")
    return targets


def _open_writers(
    stack: contextlib.ExitStack,
    source: Source,
    plan: Plan,
    targets: Sequence[Path],
    overwrite: bool,
    hidden: bool,
) -> list[LMDBWriter]:
    """Writers of the targets, which the stack closes; of two, or `hidden`, the last one is of a
    hidden file for all.
    """
    new_writer = functools.partial(
        LMDBWriter,
        layout=plan.layout,
        classes=source.classes,
        sets=source.sets,
        resize_filter=plan.resize_filter,
        source=source.name,
        passport=source.passport,
        split=source.split,
        shards=source.shard_states,
    )
    if hidden and len(targets) > 1:
        raise UserError("--apart and --val-share: pack one after the other; drop one")
    writers = [stack.enter_context(new_writer(target, overwrite=overwrite)) for target in targets]
    if hidden or len(targets) > 1:
        whole = targets[0].with_name(f".{targets[0].name}.whole")
        writers.append(stack.enter_context(new_writer(whole, overwrite=True)))
        stack.callback(whole.unlink, missing_ok=True)
    return writers


def _write(
    source: Source,
    images: Generator[Converted],
    writer: LMDBWriter,
    skipped: _Skipped,
    drop: bool,
    keep: bool,
) -> Written:
    """Write every usable image, with `drop` without exact duplicates; `keep` what a split needs."""
    written = Written()
    labels: dict[int, int] = {}  # by the digest of their pixels, for `drop`
    with contextlib.closing(images):
        for row, record in enumerate(Bar(images, "packing", len(source), unit="image")):
            if isinstance(record, ImageError):
                skipped.add(Problem(source.item_name(row), str(record)))
                continue
            written.enlarged += record.enlarged
            written.cut += record.cut > 0
            written.bits = max(written.bits, record.cut)
            written.on_white += record.on_white
            pixels = int(record.signature["digest"][0])
            if drop and pixels in labels:
                written.dropped += 1
                written.dropped_otherwise += labels[pixels] != record.label
                continue
            if drop:
                labels[pixels] = record.label
            writer.add_record(record, source.stored_name(row), source.place(row))
            written.rows.append(row)
            if keep:
                written.records.append(dataclasses.replace(record, payloads=()))
    skipped.check(writer, written.dropped)
    return written


def _find_duplicates(
    path: Path,  # of all images
    dest: Path,
    against: Path | None,
    similar: bool,
    name: Name,  # of its records
    known: Report | None,  # what was found within the file, look-alikes included
) -> list[str]:
    """The report on equal images, and `similar` ones, within the file, and between it and
    `against`. What is too long for people goes into a file beside `dest`; one that an earlier run
    left is removed.
    """
    try:
        with LMDBReader(path) as reader:
            report = known or find(reader, similar=similar, item_name=name)
            reports = [dataclasses.replace(report, near=report.near if similar else None)]
            if against is not None:
                with LMDBReader(against) as other:
                    reports.append(find(reader, other, similar=similar, item_name=name))
        reports = [dataclasses.replace(report, file=str(dest)) for report in reports]
        text, all_of_it = (
            [line for report in reports for line in lines(report, most)] for most in (LISTED, None)
        )
        return shortened(text, all_of_it, dest.with_name(f"{dest.stem}.duplicates.txt"))
    except Exception as error:  # the file is complete and good: a fault in the search must not look like the pack's
        return [f"the search failed ({type(error).__name__}: {error}); the file is complete"]
