"""The profile of training steps, `train.py --profile N`: time by phase, memory, and operators.

The same N steps are made twice from the same state, because torch.profiler slows them down: once
with a clock for the phases, once under the profiler. Afterwards the state is restored.
"""

import copy
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import profile, record_function, supported_activities

from duetgan.training.base.phases import UNMARKED, PhaseClock, listening, phase
from duetgan.training.base.task import Stateful
from duetgan.training.engine.loop import Callback, Loop
from duetgan.training.engine.signals import StopSignals
from duetgan.utils.checkpoint.writer import Snapshot
from duetgan.utils.distributed import collectives
from duetgan.utils.files import write_atomic
from duetgan.utils.machine import MIB, peak_bytes
from duetgan.utils.text import columns

WARM_UP = 3  # steps before the measured ones, to fill caches and allocate optimizer moments
TRACE, SUMMARY = "trace.json.gz", "summary.txt"  # file names in RUN/profile
TOP = 12  # number of rows in the table of operators


class Rewind:
    """A copy of the training state in main memory, to which training can go back.

    A profile and a learning-rate search train for a few steps and undo them.

    Args:
        registry: Name -> object with state_dict and load_state_dict.
    """

    def __init__(self, registry: Mapping[str, Stateful]) -> None:
        self._registry = registry
        states = {name: part.state_dict() for name, part in registry.items()}
        snapshot = Snapshot({"step": 0, **states}, copy_cpu=True)
        self._state = snapshot.content
        self.bytes = snapshot.size

    def rewind(self) -> None:
        """Restore the state from a copy of it, since objects may change what they have loaded."""
        for name, part in self._registry.items():
            part.load_state_dict(copy.deepcopy(self._state[name]))
            if isinstance(part, torch.nn.Module):
                part.zero_grad(set_to_none=True)


class Profiler(Callback):
    """Measures `count` steps after a few for warm-up."""

    def __init__(self, loop: Loop, count: int, signals: StopSignals) -> None:
        self.count = count
        self.first = loop.step + WARM_UP
        self.signals = signals

    def after_iteration(self, loop: Loop) -> None:
        if loop.step == self.first:
            loop.off_the_clock(lambda: profile_steps(loop, self.count, self.signals), "profiling")


def profile_steps(loop: Loop, count: int, signals: StopSignals) -> None:
    """Measure the next `count` steps, go back to the state before them, and write the files.

    After a signal nothing is written.
    """
    loop.window.fold()
    task, device = loop.task, loop.loader.device
    world = collectives.world_size()
    wait_seconds, first = loop.loader.wait_seconds, loop.step
    batches = loop.batches()

    def step() -> bool:
        loop.window.add(task.step(batches, loop.step))
        loop.step += 1
        return not signals.agreed()

    images = (task.images_at(first + count) - task.images_at(first)) / count
    heading = (
        f"{loop.config.task}: steps {first} to {first + count - 1}, {images:g} images a step on {world} "
        f"process{'es' * (world > 1)}, rank 0 measured ({device}, {torch.get_num_threads()} threads, "
        f"{loop.config.precision})"
    )
    folder = loop.folder.path / "profile" if collectives.is_main() else None
    measure(step, count, loop.registry(), device, folder, heading)
    loop.loader.wait_seconds = wait_seconds


def measure(
    step: Callable[[], bool],  # makes one training step; returns False if a signal was received
    count: int,
    registry: Mapping[str, Stateful],  # all objects that training changes
    device: torch.device,
    folder: Path | None,  # folder into which rank 0 writes; None on the other ranks
    heading: str,
) -> None:
    """Make the next `count` steps twice, restore the state, and write the trace and the summary.

    Nothing is written after a signal. Every rank must call this.
    """
    initial_peak = peak_bytes(device)
    state, one_step = Rewind(registry), record_function("step")(step)

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def run(instrument: AbstractContextManager[object]) -> tuple[bool, PhaseClock]:
        with instrument:
            wait()
            clock = PhaseClock(wait, time.perf_counter)
            with listening(clock), phase(UNMARKED):  # leaving the phase reads the clock at the end
                completed = all(one_step() for _ in range(count))
        state.rewind()
        return completed, clock

    completed, clock = run(nullcontext())
    peak = max(initial_peak, peak_bytes(device) - (state.bytes if device.type == "cpu" else 0))
    if not completed:
        return
    # Silence the profiler's errors about CUDA on machines without it.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    names = ("CPU", device.type.upper())
    activities = {kind for kind in supported_activities() if kind.name in names}
    profiler = profile(activities=activities, acc_events=True)
    completed, traced = run(profiler)
    if completed and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / TRACE))
        seconds = {name: time / count for name, time in clock.seconds.items()}
        overhead = sum(traced.seconds.values()) / sum(clock.seconds.values()) - 1
        key = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
        operators = profiler.key_averages().table(
            sort_by=key, row_limit=TOP, max_name_column_width=40
        )
        location = (
            f"trace of the steps: {folder / TRACE} (open it at https://ui.perfetto.dev or in "
            "chrome://tracing)"
        )
        table = summary(seconds, overhead, peak, device)
        text = "\n\n".join([heading, table, operators, location])
        write_atomic(folder / SUMMARY, f"{text}\n".encode())


def summary(seconds: Mapping[str, float], overhead: float, peak: int, device: torch.device) -> str:
    """Return the table of a profile as text.

    Args:
        seconds: Mean seconds of a step by phase.
        overhead: Time that torch.profiler added, as a fraction of the step.
        peak: Bytes of memory.
    """
    names = sorted(seconds, key=lambda name: (name == UNMARKED, name != "data", name))
    total = sum(seconds.values())
    rows = [["phase", "ms a step", "share"]]
    for name in names:
        percent = 100 * seconds[name] / total
        rows.append([name, f"{seconds[name] * 1e3:.2f}", f"{percent:.1f} %"])
    rows.append(["step", f"{total * 1e3:.2f}", "100.0 %"])
    data_wait = seconds.get("data", 0.0) / total
    memory = "resident" if device.type == "cpu" else "allocated on the accelerator"
    return (
        f"{columns(rows)}\n\ndata wait {100 * data_wait:.1f} % of the time; "
        f"memory: {peak / MIB:.0f} MiB {memory} at most; torch.profiler cost {100 * overhead:+.0f} %"
    )
