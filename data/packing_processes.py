"""Images to records in several processes, in order: what makes packing as fast as the cores allow.

The worker processes (data/packing_worker.py) are spawned: nothing that the parent has open reaches them. Each has a
pipe of its own, over which it gets pieces and returns records. Losing a worker ends packing. Only the parent writes.
"""

import multiprocessing
import pickle
import signal
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker

from data.packing import Converted, Plan, convert, part, piece_length, pieces
from data.packing_worker import Failure, Warned, serve
from data.sources.base import ArraySource, Source
from utils.errors import UserError
from utils.memory import cores

MEASURED_SECONDS = 0.3  # of conversion in this process before it is decided whether more processes pay
WORTH_SECONDS = 3.0  # of conversion that must be left for that: starting them takes about half a second of each core
MOST_WORKERS = 16  # that are started unasked: more than the one writer can keep up with
WINDOW = 4  # pieces per worker that may be under way or wait for an earlier one
END_SECONDS = 5.0  # for a worker to end by itself when there is nothing left to do


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
            with Processes(self.source, self.plan, self.workers, stop=self.stop) as processes:
                yield from processes.convert(rows)

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


class Processes:
    """Worker processes; leave the `with` block to end them."""

    def __init__(self, source: Source, plan: Plan, count: int, *, stop: bool) -> None:
        self.source = source
        self.workers: list[_Worker] = []
        # Images in memory travel with each piece. Two pieces lie in a worker's pipe then only if they are small:
        # this process must never wait for a worker that waits for it.
        in_memory = isinstance(source, ArraySource)
        self.ahead = 1 if in_memory else 2
        self.window = WINDOW * count
        self._registry: dict[str | tuple[str, type[Warning], int], int] = {}  # warnings that were shown
        setup = pickle.dumps((None if in_memory else source, plan, stop))
        try:
            self._start(count, setup)
        except OSError as error:
            self.kill()
            raise UserError(f"cannot start {count} worker processes ({error.strerror}): pass --workers 0") from None
        except BaseException:
            self.kill()
            raise

    def _start(self, count: int, setup: bytes) -> None:
        resource_tracker.ensure_running()  # first: older versions of Python unblock signals when it starts
        # Ctrl-C reaches the whole process group: with SIGINT blocked from birth the workers leave it to this process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(count):
                self.workers.append(_Worker())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for worker in self.workers:  # while they all start
            worker.set_up(setup)

    def convert(self, rows: Iterable[range]) -> Iterator[Converted]:
        """Convert pieces; their results come in the same order."""
        left = enumerate(rows)
        done: dict[int, Converted] = {}
        sent = returned = 0
        while True:
            sent += self._hand_out(left, returned + self.window - sent)
            if returned == sent:
                return
            for worker in self._answering():
                number, answer, warned = worker.receive()
                self._warn(warned)
                if isinstance(answer, Failure):
                    raise UserError(answer.text) if answer.user else RuntimeError(f"in a worker:\n{answer.text}")
                done[number] = answer
            # Before the results are written, so that no worker waits meanwhile.
            sent += self._hand_out(left, returned + self.window - sent)
            while returned in done:
                yield done.pop(returned)
                returned += 1

    def _hand_out(self, left: Iterator[tuple[int, range]], most: int) -> int:
        """Send at most so many pieces to the workers that have few; returns their number."""
        sent = 0
        for ahead in range(self.ahead):
            for worker in self.workers:
                if len(worker.pending) > ahead or sent == most:
                    continue
                number, rows = next(left, (-1, range(0)))
                if number < 0:
                    return sent
                worker.send(number, rows, part(self.source, rows))
                sent += 1
        return sent

    def _answering(self) -> "list[_Worker]":
        """The workers that have sent something, or have died; waits for one."""
        ready = pipes.wait([worker.pipe for worker in self.workers])
        return [worker for worker in self.workers if worker.pipe in ready]

    def _warn(self, warned: list[Warned]) -> None:
        """Show the workers' warnings as if they had been raised here, each once."""
        for text, category, file, line in warned:
            warnings.warn_explicit(text, category, file, line, registry=self._registry)

    def kill(self) -> None:
        """End the workers at once: they hold nothing that could be damaged."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.end(0.0)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.kill()
            return
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.end(END_SECONDS)


class _Worker:
    """A worker process as its parent sees it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.pending: deque[int] = deque()  # numbers of the pieces that it has
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        try:
            self.process.start()
        except BaseException:
            self.pipe.close()
            raise
        finally:
            theirs.close()  # the worker's copy is then the only one: its death closes the pipe

    def set_up(self, pickled: bytes) -> None:
        """Send source, plan and `stop`. Raises UserError if the process is dead."""
        try:
            self.pipe.send_bytes(pickled)
        except OSError:
            raise self._death() from None

    def send(self, number: int, rows: range, images: Source | None) -> None:
        """Hand over a piece. Raises UserError if the process is dead."""
        try:
            self.pipe.send((rows, images))
        except OSError:
            raise self._death() from None
        self.pending.append(number)

    def receive(self) -> tuple[int, Converted | Failure, list[Warned]]:
        """The number of a piece, what became of it, and the warnings. Raises UserError if the process is dead."""
        try:
            answer, warned = self.pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        return self.pending.popleft(), answer, warned

    def _death(self) -> UserError:
        self.process.join(END_SECONDS)
        code = self.process.exitcode
        how = f"ended with exit code {code}" if code is None or code >= 0 else f"was killed by {_signal_name(-code)}"
        memory = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        return UserError(f"a worker process of packing {how}{memory}: pass fewer --workers, or --workers 0")

    def end(self, seconds: float) -> None:
        """Wait for the process to end, and kill it if it does not."""
        self.pipe.close()
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        self.process.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
