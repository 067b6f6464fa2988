"""Webdataset's shards as a data set: an index of them, which is a packed file without the images' bytes.

Making it reads and decodes every image once, as packing does. Afterwards an image's bytes are read from their place in
the tar and compared with the checksum in the index (docs/data-at-scale.md).
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from data.errors import ImageError
from data.lmdb.format import Shard
from data.lmdb.reader import LMDBReader
from data.lmdb.writer import LMDBWriter
from data.records import converted, make_plan, thread_count
from data.sources.base import Problem, SourceOptions
from data.sources.named import CACHE, cache_folder
from data.sources.tars import TarSource
from data.tar_files import state_of
from utils import bounded
from utils.errors import UserError
from utils.runlog.progress import Bar
from utils.runlog.run_log import say


def index_of(shards: Sequence[Path]) -> Path:
    """The index of tar files, which is made if there is none that fits them. Processes that want it at the same time
    wait for the one that makes it. Raises UserError for shards that cannot be trained from as they are.
    """
    known = [_state(shard) for shard in shards]
    names = json.dumps([shard.path for shard in known])
    path = cache_folder() / "shards" / f"{hashlib.sha256(names.encode()).hexdigest()[:20]}.lmdb"
    if _fits(path, known):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("ab")
    except OSError as error:
        raise UserError(
            f"{path.parent}: {error.strerror}; the index of shards is kept there: set {CACHE} to another folder"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _fits(path, known):
            _make(path, shards, known)
    return path


def _state(shard: Path) -> Shard:
    with bounded.reading(shard, "give tar files of images"):
        size, changed = state_of(bounded.check(shard, bounded.ARCHIVE))
    return Shard(path=str(shard.absolute()), size=size, changed=changed)


def _fits(path: Path, known: Sequence[Shard]) -> bool:
    """Whether there is an index of shards in this state."""
    try:
        with LMDBReader(path) as reader:
            return reader.meta.shards == known
    except UserError:  # none, or a damaged one
        return False


def _make(path: Path, shards: Sequence[Path], known: list[Shard]) -> None:
    where = shards[0] if len(shards) == 1 else shards[0].parent
    source = TarSource(where, SourceOptions(), shards)
    with source:
        _check(source)
        plan = make_plan(source, encoding="source")
        writer = LMDBWriter(path, plan.layout, classes=source.classes, source=source.name, shards=known, overwrite=True)
        images = converted(source, plan, thread_count(source, None))
        with writer, contextlib.closing(images), Bar(total=len(source), desc="indexing", unit="image") as bar:
            for row, record in enumerate(images):
                if isinstance(record, ImageError):
                    _refuse(Problem(source.item_name(row), str(record)))
                writer.add_record(record, source.stored_name(row), source.place(row))
                bar.update()
            writer.finish()


def _check(source: TarSource) -> None:
    """Raise UserError for shards that only packing, which has options for it, can make a data set of."""
    if source.problems:
        _refuse(source.problems[0], len(source.problems))
    if source.splits:
        raise UserError(f"{source.path} holds the splits {' and '.join(source.splits)}: pack one of them, with --split")
    for remark in source.remarks:
        if remark.startswith("warning: "):
            told = remark.removeprefix("warning: ").replace("packed without", "read without")
            raise UserError(f"{told}: only data.pack has that option: pack the shards, and train from the packed file")
        say(remark)
    source.check_classes()


def _refuse(problem: Problem, count: int = 1) -> NoReturn:
    raise problem.error("pack the shards with data.pack --on-error skip, which leaves it out", count)
