"""Mark the phases of a training step, which `train.py --profile N` and benchmarks time."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.profiler import record_function

UNMARKED = "other/host"  # time outside all phases
# phases to which the time of the phases nested in them counts
WHOLE = ("generator/path_length", "discriminator/penalty")

_clock: "PhaseClock | None" = None
_NOTHING: AbstractContextManager[None] = nullcontext()


def phase(name: str) -> AbstractContextManager[None]:
    """Return a context manager that marks its block as a phase, such as "generator/backward".

    Phases may be nested. Time counts for the innermost phase, but all time inside a penalty
    (`WHOLE`) counts for the penalty.
    """
    return _NOTHING if _clock is None else _clock.phase(name)


def is_listening() -> bool:
    """Return True if a clock measures the phases, which is so inside a block of `listening`."""
    return _clock is not None


class PhaseClock:
    """A clock that divides time among the phases, and marks them in torch.profiler's trace.

    Args:
        wait: Called before the clock is read, to wait for the queued work of an accelerator.
        now: Returns the time in seconds.
    """

    def __init__(self, wait: Callable[[], None], now: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self.open = [UNMARKED]  # the innermost phase last
        self._wait = wait
        self._now = now
        self.restart()

    def restart(self) -> None:
        """Count time from now on. The time since the last phase counts for no phase."""
        self._since = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        whole = self.open[-1] in WHOLE
        self._charge()
        self.open.append(self.open[-1] if whole else name)
        try:
            with nullcontext() if whole else record_function(name):
                yield
        finally:
            self._charge()
            self.open.pop()

    def _charge(self) -> None:
        self._wait()
        now = self._now()
        name = self.open[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


@contextmanager
def listening(clock: PhaseClock) -> Iterator[PhaseClock]:
    """Measure the phases inside the block with `clock`."""
    global _clock
    _clock = clock
    try:
        yield clock
    finally:
        _clock = None
