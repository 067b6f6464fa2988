"""The parts of a training step that `train.py --profile N` tells apart.

The tasks put `with phase("generator/forward"):` around their parts; what is in no phase is `other/host`. How a profile
is made is in `training/profile/measure.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

from torch.autograd.profiler import record_function

OTHER = "other/host"  # in no phase
WHOLE = ("generator/path_length", "discriminator/penalty")  # keep what is inside them, their backward pass too


class Listener(Protocol):
    """What is told of phases while it listens."""

    def enter(self, name: str) -> None: ...

    def leave(self) -> None: ...


L = TypeVar("L", bound=Listener)
_listener: Listener | None = None
_NOTHING: AbstractContextManager[None] = nullcontext()


class _Phase:
    """A phase that somebody listens to."""

    __slots__ = ("listener", "name")

    def __init__(self, listener: Listener, name: str) -> None:
        self.listener, self.name = listener, name

    def __enter__(self) -> None:
        self.listener.enter(self.name)

    def __exit__(self, *_: object) -> None:
        self.listener.leave()


def phase(name: str) -> AbstractContextManager[None]:
    """Mark a part of a training step: "data", "forward", "generator/backward", ... (docs/training.md lists them).

    Phases may be nested: time belongs to the innermost one, but a penalty ("discriminator/penalty",
    "generator/path_length") keeps what is inside it, its backward pass too. Costs less than a microsecond while
    nobody profiles.
    """
    return _NOTHING if _listener is None else _Phase(_listener, name)


@contextmanager
def listening(listener: L) -> Iterator[L]:
    """Tell `listener` of all phases inside the block."""
    global _listener
    _listener = listener
    try:
        yield listener
    finally:
        _listener = None


class PhaseClock:
    """Divides time among the phases; every moment belongs to exactly one, so they add up to the whole.

    `wait` is called before the clock is read: on an accelerator it waits for the work that has been queued.
    """

    def __init__(self, wait: Callable[[], None], now: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._open = [OTHER]
        self._wait, self._now = wait, now
        self._since = now()

    def enter(self, name: str) -> None:
        self._charge()
        self._open.append(self._open[-1] if self._open[-1] in WHOLE else name)

    def leave(self) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        self._wait()
        now = self._now()
        name = self._open[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


class Ranges:
    """Draws the phases into torch.profiler's trace."""

    def __init__(self) -> None:
        self._open: list[tuple[str, AbstractContextManager[Any]]] = []

    def enter(self, name: str) -> None:
        whole = bool(self._open) and self._open[-1][0] in WHOLE
        entry = (self._open[-1][0], nullcontext()) if whole else (name, record_function(name))
        entry[1].__enter__()
        self._open.append(entry)

    def leave(self) -> None:
        self._open.pop()[1].__exit__(None, None, None)
