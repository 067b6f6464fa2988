"""The one thread in which models compute, and the bounded queue before it."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from typing import TypeVar

WAITING = 8  # requests that compute or wait, at most
LOOK = 0.2  # s between two looks at whether all is to end

T = TypeVar("T")


class Unavailable(Exception):
    """There is no place in the queue, or the explorer is ending; the message says which."""


class Worker:
    """Runs what it is given one after the other, in a thread of its own."""

    def __init__(self, waiting: int = WAITING) -> None:
        self._places = threading.Semaphore(waiting)
        self._thread = ThreadPoolExecutor(1, "models")
        self._ending = threading.Event()

    def run(self, work: Callable[[], T]) -> T:
        """What `work()` returns or raises. Raises Unavailable."""
        if not self._places.acquire(blocking=False):
            raise Unavailable("too many requests are waiting; try again in a moment")
        try:
            future = self._thread.submit(work)
        except RuntimeError:
            self._places.release()
            raise Unavailable("the explorer is ending") from None
        future.add_done_callback(lambda _: self._places.release())
        while not future.done():
            self.tick()
            wait([future], timeout=LOOK)
        try:
            return future.result()
        except CancelledError:
            raise Unavailable("the explorer is ending") from None

    def tick(self) -> None:
        """For work that takes long, to be called now and then: raises Unavailable where all is to end."""
        if self._ending.is_set():
            raise Unavailable("the explorer is ending")

    def end(self) -> None:
        """Let those who wait go at once, and start nothing more."""
        self._ending.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
