"""Where a step's time and memory go: what `train.py --profile N` measures.

The same N steps are run several times from the same state, each time measured in another way, because every instrument
disturbs the others; afterwards the state is put back and training goes on as if nothing had been measured.
"""

import copy
import cProfile
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.autograd.profiler import record_function

from training.profile import trace as profile_trace
from training.profile.ranges import OTHER, PhaseClock, Ranges, listening
from utils.provenance import ROOT

WARM_UP = 3  # steps before the measured ones: caches fill, optimizers make their moments
TRACE = "trace.json.gz"
SUMMARY = "summary.txt"
NOTHING, CLOCKS, TRACER, COUNTER = "nothing", "clocks at the phases", "torch.profiler", "cProfile"


@dataclass
class Operator:
    """One of torch's operators; figures of a step."""

    name: str
    calls: float
    seconds: float  # its own, on the accelerator where there is one
    share: float  # of all operators' seconds


@dataclass
class Function:
    """A Python function of ours; figures of a step, under cProfile."""

    place: str  # file:line
    name: str
    calls: float
    own_seconds: float  # without what it calls
    seconds: float


@dataclass(kw_only=True)
class Profile:
    """What was measured. Seconds are those of a step."""

    steps: int
    phases: dict[str, float]  # seconds by phase, in order of appearance, OTHER included
    plain: float  # seconds without any instrument
    overhead: dict[str, float]  # what "clocks", "torch.profiler" and "cProfile" cost, as a share of the plain time
    python_share: float  # of the traced steps' time: no operator was running
    operators: list[Operator]
    functions: list[Function]
    python: dict[str, float] = field(default_factory=dict)  # own seconds under cProfile: ours, libraries', built-in
    memory: dict[str, profile_trace.PhaseMemory] = field(default_factory=dict)
    peak: int = 0  # bytes that a step holds at most, above what is held between steps
    process_peak: int = 0  # bytes: the process's resident set, or what the accelerator had allocated
    accelerator: bool = False


Step = Callable[[], bool]  # does one training step; False: stop here, a signal has come


def measure(step: Step, count: int, registry: Mapping[str, Any], device: torch.device, trace: Path) -> Profile | None:
    """Run the next `count` steps once for every instrument, from the same state; leaves the state as it was before.

    `registry` holds everything that changes (name -> state_dict, load_state_dict). Writes the trace. None after a
    signal. Collective: every rank takes part with `step`; those without a `trace` to write use `accompany`.
    """
    state = Rewind(registry)
    wait = _waiting(device)
    seconds: dict[str, list[float]] = {}
    _reset_peak(device)
    process_peak = 0
    clock: PhaseClock | None = None
    tracer, counter = profile_trace.tracer(device), cProfile.Profile()
    for instrument in (NOTHING, CLOCKS, TRACER, COUNTER):
        with ExitStack() as stack:
            if instrument == CLOCKS:
                clock = stack.enter_context(listening(PhaseClock(wait, time.perf_counter)))
            elif instrument == TRACER:
                stack.enter_context(profile_trace.quiet())
                stack.enter_context(tracer)
                stack.enter_context(listening(Ranges()))
            went_on, seconds[instrument] = _run(step, count, wait, counter if instrument == COUNTER else None)
        if instrument == NOTHING:
            process_peak = max(0, _peak(device) - (state.bytes if device.type == "cpu" else 0))
        state.rewind()
        if not went_on:
            return None
    assert clock is not None
    return _collect(clock, tracer, counter, seconds, process_peak, device, trace)


def accompany(step: Step, count: int, registry: Mapping[str, Any]) -> None:
    """What the other ranks do while rank 0 measures: the same steps as often."""
    state, went_on = Rewind(registry), True
    for _ in range(4):
        if went_on:
            went_on = all(step() for _ in range(count))
            state.rewind()


def _run(
    step: Step, count: int, wait: Callable[[], None], counter: cProfile.Profile | None
) -> tuple[bool, list[float]]:
    """Whether all steps were done, and the seconds of each; on an accelerator only their sum is meaningful."""
    went_on, marks = True, [_now(wait)]
    if counter is not None:
        counter.enable()
    for _ in range(count):
        with record_function(profile_trace.STEP):
            went_on = went_on and step()
        marks.append(time.perf_counter())
    if counter is not None:
        counter.disable()
    marks[-1] = _now(wait)
    return went_on, [end - start for start, end in pairwise(marks)]


def _now(wait: Callable[[], None]) -> float:
    wait()
    return time.perf_counter()


def overhead(plain: Sequence[float], measured: Sequence[float], *, by_step: bool) -> float:
    """What an instrument costs, as a share of the plain time; `by_step`: the median over the steps, each against the
    same step, which a disturbance of a few steps does not reach.
    """
    if by_step:
        return statistics.median(b / a for a, b in zip(plain, measured, strict=True)) - 1
    return sum(measured) / sum(plain) - 1


class Rewind:
    """The state at one moment, kept in main memory, to go back to."""

    def __init__(self, registry: Mapping[str, Any]) -> None:
        self._registry = registry
        self._state = {name: _kept(part.state_dict()) for name, part in registry.items()}
        self.bytes = _bytes(self._state)

    def rewind(self) -> None:
        """Go back. A copy is loaded: what is loaded may be kept, and trained on."""
        for name, part in self._registry.items():
            part.load_state_dict(copy.deepcopy(self._state[name]))
            if isinstance(part, torch.nn.Module):
                part.zero_grad(set_to_none=True)


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _kept(item) for key, item in value.items()}
    return type(value)(_kept(item) for item in value) if isinstance(value, (list, tuple)) else value


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _waiting(device: torch.device) -> Callable[[], None]:
    return (lambda: None) if device.type == "cpu" else (lambda: torch.accelerator.synchronize(device))


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set, see proc(5)


def _peak(device: torch.device) -> int:
    """Bytes at most since `_reset_peak`: of the accelerator's memory, or of this process's resident set."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def _collect(
    clock: PhaseClock,
    tracer: torch.profiler.profile,
    counter: cProfile.Profile,
    seconds: Mapping[str, Sequence[float]],
    process_peak: int,
    device: torch.device,
    trace: Path,
) -> Profile:
    plain, by_step = seconds[NOTHING], device.type == "cpu"
    count = len(plain)
    phases = dict(clock.seconds)
    phases[OTHER] = sum(seconds[CLOCKS]) - sum(time for name, time in phases.items() if name != OTHER)
    timeline = profile_trace.export(tracer, trace, device, set(phases) - {OTHER})
    functions, python = python_functions(counter, count)
    return Profile(
        steps=count,
        phases={name: total / count for name, total in phases.items()},
        plain=sum(plain) / count,
        overhead={name: overhead(plain, seconds[name], by_step=by_step) for name in (CLOCKS, TRACER, COUNTER)},
        python_share=timeline.python_share,
        operators=[Operator(*row) for row in profile_trace.operators(tracer, count, device)],
        functions=functions,
        python=python,
        memory=timeline.memory,
        peak=timeline.peak,
        process_peak=process_peak,
        accelerator=device.type != "cpu",
    )


def python_functions(counter: cProfile.Profile, count: int) -> tuple[list[Function], dict[str, float]]:
    """Our own functions by own time, and the own time of our Python code, of libraries' and of built-ins (operators
    among them); seconds of a step.
    """
    found, sums = [], {"ours": 0.0, "libraries": 0.0, "built-in": 0.0}
    for entry in counter.getstats():
        if not isinstance(entry.code, CodeType):
            sums["built-in"] += entry.inlinetime / count
            continue
        file = Path(entry.code.co_filename)
        ours = file.is_relative_to(ROOT) and "site-packages" not in file.parts
        sums["ours" if ours else "libraries"] += entry.inlinetime / count
        if ours:
            place = f"{file.relative_to(ROOT)}:{entry.code.co_firstlineno}"
            times = (entry.callcount / count, entry.inlinetime / count, entry.totaltime / count)
            found.append(Function(place, entry.code.co_qualname, *times))
    return sorted(found, key=lambda function: function.own_seconds, reverse=True), sums
