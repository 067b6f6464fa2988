"""The phases of a training step, which `train.py --profile N` and the benchmarks tell apart."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.profiler import record_function

OTHER = "other/host"  # in no phase
# keep what is inside them, their backward pass too
WHOLE = ("generator/path_length", "discriminator/penalty")

_clock: "PhaseClock | None" = None
_NOTHING: AbstractContextManager[None] = nullcontext()


def phase(name: str) -> AbstractContextManager[None]:
    """Mark a part of a training step: "data", "forward", "generator/backward", ...
    (docs/training.md lists them).

    Phases may be nested: time belongs to the innermost one, but a penalty keeps what is inside it
    (`WHOLE`).
    """
    return _NOTHING if _clock is None else _clock.phase(name)


class PhaseClock:
    """Divides time among the phases, each moment to one, and draws them into torch.profiler's
    trace. `wait` is called before the clock is read: on an accelerator for the work that has been
    queued.
    """

    def __init__(self, wait: Callable[[], None], now: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self.open = [OTHER]  # the innermost phase last
        self._wait, self._now = wait, now
        self._since = now()

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
    """Have `clock` divide the time of the block."""
    global _clock
    _clock = clock
    try:
        yield clock
    finally:
        _clock = None
