"""Streams and events of the device, and who may touch which memory when.

Every stream counts the operations it was given, and knows up to where it has waited for each other stream: a vector
clock. Kernels run at once, so that numbers are always right; what the clocks find is the order that a real device would
not have kept. The host is one more clock: it advances where the host waits.
"""

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict["Line", int]


class OrderError(RuntimeError):
    """Two operations touch the same memory, and nothing says which comes first."""


class Line:
    """What a stream has been given: `clock[self]` operations, each after what the clock knows of other streams."""

    _numbers = itertools.count(1)

    def __init__(self, index: int, default: bool = False) -> None:
        self.index, self.number = index, 0 if default else next(self._numbers)
        self.clock: Clock = {self: 0}
        lines.add(self)

    def __repr__(self) -> str:
        return f"stream {self.number} of sim:{self.index}"

    def tick(self) -> int:
        self.clock[self] += 1
        return self.clock[self]

    def wait(self, seen: Clock) -> None:
        _merge(self.clock, seen)


lines: weakref.WeakSet[Line] = weakref.WeakSet()
defaults: dict[int, Line] = {}
host: Clock = {}
on_their_way: list[tuple[Line, int, Callable[[], Any]]] = []  # copies to main memory, and what lets them arrive
faults: list[str] = []  # found where nothing can be raised
_current = threading.local()
chosen: set[int] = set()  # devices that a thread has made its own: on CUDA each of them takes memory for that


def _merge(clock: Clock, seen: Clock) -> None:
    for line, count in list(seen.items()):
        if count > clock.get(line, 0):
            clock[line] = count


def current(index: int) -> Line:
    found = getattr(_current, "lines", {}).get(index)
    return found or defaults.setdefault(index, Line(index, True))


def device_index() -> int:
    return getattr(_current, "index", 0)


def choose(index: int) -> None:
    _current.index = index
    chosen.add(index)


def host_waits(seen: Clock) -> None:
    _merge(host, seen)
    for each in [one for one in on_their_way if host.get(one[0], 0) >= one[1]]:
        on_their_way.remove(each)
        each[2]()
    pinned.look()


def everything(index: int) -> Clock:
    return {line: line.clock[line] for line in list(lines) if line.index == index}


class Use:
    """Of a block of device memory: who wrote it last, who has read it since, for whom it is kept when it is freed."""

    def __init__(self, index: int) -> None:
        self.home = current(index)
        self.written: tuple[Line, int] = (self.home, self.home.clock[self.home])
        self.read: Clock = {}
        self.kept_for: set[Line] = set()  # record_stream

    def note(self, line: Line, *, write: bool) -> None:
        """An operation of a stream. Raises OrderError where another stream may still be at work."""
        other, count = self.written
        if line.clock.get(other, 0) < count:
            what = "written" if write else "read"
            raise OrderError(f"memory is {what} by {line} while {other} still writes it: wait for an event of it first")
        if not write:
            self.read[line] = line.clock[line]
            return
        for other, count in self.read.items():
            if line.clock.get(other, 0) < count:
                raise OrderError(f"memory is written by {line} while {other} still reads it")
        self.written, self.read = (line, line.clock[line]), {}

    def freed(self) -> None:
        """The next who asks for memory on the stream it came from gets it: note a fault where another still uses it."""
        for line, count in [self.written, *self.read.items()]:
            # The memory is kept until each of these streams has done what it was given up to now.
            clocks = [host, self.home.clock, *(kept.clock for kept in self.kept_for)]
            safe = line in self.kept_for or max(clock.get(line, 0) for clock in clocks) >= count
            if not safe:
                faults.append(f"memory of {self.home} was freed while {line} uses it: call tensor.record_stream")


class Pinned:
    """Pinned memory of the host, and copies out of it that the host has not waited for."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}  # by address
        self._under_way: list[tuple[Line, int, StorageWeakRef, torch.Tensor]] = []
        self._lock = threading.Lock()

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._storages = {key: one for key, one in self._storages.items() if not one.expired()}
            self._storages[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        one = self._storages.get(tensor.untyped_storage()._cdata) if tensor.device.type == "cpu" else None
        return one is not None and not one.expired()

    def copy(self, tensor: torch.Tensor, line: Line) -> None:
        """A copy out of this memory begins, on a stream."""
        self.look()
        storage = tensor.untyped_storage()
        with self._lock:
            self._under_way.append((line, line.clock[line], StorageWeakRef(storage), _bytes(storage).clone()))

    def look(self) -> None:
        """Raise OrderError where memory was written before its copy had ended; what is freed torch itself keeps."""
        with self._lock:
            kept, self._under_way = self._under_way, []
            for line, count, alive, before in kept:
                storage = torch.UntypedStorage._new_with_weak_ptr(alive.cdata)
                if storage is not None and not torch.equal(_bytes(storage), before):
                    raise OrderError(f"pinned memory was written while {line} copies it: wait for an event of it first")
                if storage is not None and host.get(line, 0) < count:
                    self._under_way.append((line, count, alive, before))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


pinned = Pinned()


class Stream:
    """In place of torch.Stream."""

    waited: Callable[[str], None] = staticmethod(lambda what: None)  # told of every wait of the host

    def __init__(self, device: Any = None, *, line: Line | None = None) -> None:
        self.line = line or Line(0 if device is None else torch.device(device).index or 0)
        self._before: list[tuple[Line | None, int]] = []

    def __enter__(self) -> "Stream":
        lines = _current.__dict__.setdefault("lines", {})
        self._before.append((lines.get(self.line.index), device_index()))
        choose(self.line.index)
        lines[self.line.index] = self.line
        return self

    def __exit__(self, *_: object) -> None:
        _current.lines[self.line.index], index = self._before.pop()
        choose(index)

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.line.wait(event.seen)

    def wait_stream(self, other: "Stream") -> None:
        self.line.wait(other.line.clock)

    def synchronize(self) -> None:
        self.waited("stream.synchronize")
        host_waits(self.line.clock)


class Event:
    """In place of torch.Event."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.index, self.seen = 0 if device is None else torch.device(device).index or 0, Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.seen = dict((stream.line if stream else current(self.index)).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream.line if stream else current(self.index)).wait(self.seen)

    def synchronize(self) -> None:
        Stream.waited("event.synchronize")
        host_waits(self.seen)
