"""Images to records in several processes, in order: what makes packing as fast as the cores allow.

The processes are a ProcessPoolExecutor's. They are spawned: nothing that the parent has open reaches them. Losing one
ends packing. Only the parent writes.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

import cv2

from data.conversion import Converted, Plan, convert, part, piece_length, pieces
from data.sources.base import ArraySource, Source
from utils.errors import UserError
from utils.heap import keep_freed_memory
from utils.memory import cores
from utils.processes import die_with_parent

MEASURED_SECONDS = 0.3  # of conversion in this process before it is decided whether more processes pay
WORTH_SECONDS = 3.0  # of conversion that must be left for that: starting them takes about half a second of each core
MOST_WORKERS = 16  # that are started unasked: more than the one writer can keep up with
WINDOW = 4  # pieces per worker that may be under way or wait for an earlier one
KEPT_BYTES = 128 << 20  # of freed memory, in each process
POLL_SECONDS = 1.0  # between two looks at whether the workers live

Warned = tuple[str, type[Warning], str, int]  # text, category, file, line
Answer = tuple[Converted, list[Warned]]


class Conversion:
    """All images of a source as `Converted`, piece by piece in order.

    `workers` is the number of processes besides this one; None: as many as there are cores, once it has been measured
    that they are worth starting. Afterwards it is the number that took part. Iterating raises UserError if a worker
    process is killed. Close the iterator, or the processes outlive an error.
    """

    def __init__(self, source: Source, plan: Plan, *, workers: int | None, stop: bool) -> None:
        self.source, self.plan, self.workers, self.stop = source, plan, workers, stop

    def __iter__(self) -> Generator[Converted, None, None]:
        count = len(self.source)
        start = 0
        if not self.workers:
            start = yield from self._convert_here(count)
        if self.workers and start < count:
            rows = pieces(range(start, count), piece_length(self.plan, count - start, self.workers))
            yield from convert_in_processes(self.source, self.plan, self.workers, rows, stop=self.stop)

    def _convert_here(self, count: int) -> Generator[Converted, None, int]:
        """Convert in this process; returns the first image that is left to others, for which `workers` is set."""
        spent = 0.0
        limit = allowed_workers() if self.workers is None else 0
        for rows in pieces(range(count), piece_length(self.plan, count, 1)):
            started = time.perf_counter()
            found = convert(self.source, rows, self.plan, stop=self.stop)
            spent += time.perf_counter() - started
            yield found
            left = spent / rows.stop * (count - rows.stop)
            if limit > 1 and spent > MEASURED_SECONDS and left > WORTH_SECONDS:
                self.workers = limit
                return rows.stop
        self.workers = 0
        return count


def allowed_workers() -> int:
    """How many worker processes may be started unasked."""
    if multiprocessing.current_process().daemon:  # it may have no children
        return 0
    return min(MOST_WORKERS, cores())


def convert_in_processes(
    source: Source, plan: Plan, count: int, rows: Iterable[range], *, stop: bool
) -> Generator[Converted, None, None]:
    """Convert pieces in `count` processes; their results come in the same order. Closing it ends the processes.

    Raises UserError if a process cannot be started or is killed, and for what the source raises as one; RuntimeError
    with the worker's traceback for anything else.
    """
    travels = None if isinstance(source, ArraySource) else source  # images in memory come with each piece instead
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, _begin, (os.getpid(), travels, plan, stop))
    workers: list[BaseProcess] = []
    try:
        _start(pool, count, workers)
        yield from _in_order(pool, source, iter(rows), workers, WINDOW * count)
    except BrokenProcessPool:
        pool.shutdown()  # it ends the others itself
        raise _death(workers) from None
    except BaseException:
        _kill(pool, workers)
        raise
    pool.shutdown()


def _start(pool: ProcessPoolExecutor, count: int, workers: list[BaseProcess]) -> None:
    """Start all processes, before the pool has work: what is submitted later makes it watch every one of them."""
    before = multiprocessing.active_children()
    resource_tracker.ensure_running()  # first: older versions of Python unblock signals when it starts
    # Ctrl-C reaches the whole process group: with SIGINT blocked from birth the workers leave it to this process.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(count):
            pool.submit(int)
    except OSError as error:
        raise UserError(f"cannot start {count} worker processes ({error.strerror}): pass --workers 0") from None
    finally:
        workers += [child for child in multiprocessing.active_children() if child not in before]
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_order(
    pool: ProcessPoolExecutor, source: Source, rows: Iterator[range], workers: list[BaseProcess], window: int
) -> Iterator[Converted]:
    """Hand out pieces, at most `window` ahead, and return their results; show each of the workers' warnings once."""
    waiting: deque[Future[Answer]] = deque()
    registry: dict[str | tuple[str, type[Warning], int], int] = {}  # warnings that were shown
    while True:
        for piece in itertools.islice(rows, window - len(waiting)):
            waiting.append(pool.submit(_convert_piece, piece, part(source, piece)))
        if not waiting:
            return
        found, warned = _result(waiting.popleft(), workers)
        for text, category, file, line in warned:
            warnings.warn_explicit(text, category, file, line, registry=registry)
        yield found


def _result(future: Future[Answer], workers: list[BaseProcess]) -> Answer:
    """What became of a piece. The pool does not notice a worker that dies while it sends: this does."""
    while True:
        with contextlib.suppress(TimeoutError):
            return future.result(POLL_SECONDS)
        if not all(worker.is_alive() for worker in workers):
            raise _death(workers)


def _death(workers: list[BaseProcess]) -> UserError:
    """The error for the worker that has died, not those that the pool has ended because of it."""
    codes = sorted((worker.exitcode for worker in workers if worker.exitcode), key=lambda code: code == -signal.SIGTERM)
    code = codes[0] if codes else 0
    names = {member.value: member.name for member in signal.Signals}
    how = f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
    memory = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
    return UserError(f"a worker process of packing {how}{memory}: pass fewer --workers, or --workers 0")


def _kill(pool: ProcessPoolExecutor, workers: list[BaseProcess]) -> None:
    """End the workers at once: they hold nothing that could be damaged."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
    # One that was killed while it sent has left half a result. The pool's thread would wait for the other half for
    # ever, since this process has the sending end of the pipe open as well.
    pool._result_queue._writer.close()  # type: ignore[attr-defined]
    pool.shutdown(cancel_futures=True)


# --- in a worker

_setup: tuple[Source | None, Plan, bool]  # of this process: the source (None: its images come), the plan, `stop`


def _begin(parent: int, source: Source | None, plan: Plan, stop: bool) -> None:
    """What a worker does first."""
    global _setup
    die_with_parent(parent)
    cv2.setNumThreads(1)
    keep_freed_memory(KEPT_BYTES)
    _setup = (source, plan, stop)


def _convert_piece(rows: range, images: Source | None) -> Answer:
    """Convert the images `rows` of the worker's source, or of `images`, which holds these alone."""
    source, plan, stop = _setup
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # what is shown is for the parent to decide
        try:
            if images is not None:
                found = convert(images, rows, plan, stop=stop, first=rows.start)
            else:
                assert source is not None
                found = convert(source, rows, plan, stop=stop)
        except UserError as error:
            raise UserError(str(error)) from None  # other exceptions may be of kinds that cannot be sent
        except Exception:
            raise RuntimeError(f"in a worker:\n{traceback.format_exc()}") from None
    warned = dict.fromkeys((str(item.message), item.category, item.filename, item.lineno) for item in caught)
    return found, list(warned)
