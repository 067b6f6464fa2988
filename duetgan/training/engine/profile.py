"""Where a step's time and memory go: what `train.py --profile N` measures, with torch.profiler.

The same N steps are run twice from the same state, because the profiler costs time of its own: once
with a clock at the phases, once under the profiler. Afterwards the state is restored.
"""

import copy
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import profile, record_function, supported_activities

from duetgan.training.base.phases import OTHER, PhaseClock, listening, phase
from duetgan.utils.checkpoint.writer import Snapshot
from duetgan.utils.distributed import collectives
from duetgan.utils.files import write_atomic
from duetgan.utils.memory import MIB, peak_bytes
from duetgan.utils.text import columns

if TYPE_CHECKING:
    from duetgan.training.engine.loop import Loop

WARM_UP = 3  # steps before the measured ones: caches fill, optimizers make their moments
TRACE, SUMMARY = "trace.json.gz", "summary.txt"  # in RUN/profile
TOP = 12  # rows of the table of operators


class Rewind:
    """The state at one moment, kept in main memory: a profile and a search of the learning rate
    train for a few steps and undo them. `registry`: name -> state_dict, load_state_dict.
    """

    def __init__(self, registry: Mapping[str, Any]) -> None:
        self._registry = registry
        state = Snapshot(
            {"step": 0, **{name: part.state_dict() for name, part in registry.items()}}, own=True
        )
        self._state, self.bytes = state.content, state.size

    def rewind(self) -> None:
        """Go back. A copy is loaded: what is loaded may be kept, and trained on."""
        for name, part in self._registry.items():
            part.load_state_dict(copy.deepcopy(self._state[name]))
            if isinstance(part, torch.nn.Module):
                part.zero_grad(set_to_none=True)


def profile_steps(loop: "Loop", count: int) -> None:
    """Measure the next `count` steps and go back to where they begin (rank 0 writes); nothing after
    a signal.
    """
    loop.window.fold()
    task, device, world = loop.task, loop.loader.device, collectives.world_size()
    waited, batches, first = loop.loader.wait_seconds, loop.batches(), loop.step

    def step() -> bool:
        loop.window.add(task.step(batches, loop.step))
        loop.step += 1
        return not loop.agreed_signal()

    images = (task.images_at(first + count) - task.images_at(first)) / count
    heading = (
        f"{loop.config.task}: steps {first} to {first + count - 1}, {images:g} images a step on {world} "
        f"process{'es' * (world > 1)}, rank 0 measured ({device}, {torch.get_num_threads()} threads, "
        f"{loop.config.precision})"
    )
    folder = loop.folder.path / "profile" if collectives.is_main() else None
    measure(step, count, loop.registry(), device, folder, heading)
    loop.loader.wait_seconds = waited


def measure(
    step: Callable[[], bool],  # does one training step; False: stop here, a signal has come
    count: int,
    registry: Mapping[str, Any],  # all that changes: name -> state_dict, load_state_dict
    device: torch.device,
    folder: Path | None,
    heading: str,
) -> None:
    """Run the next `count` steps twice, write the trace and the summary, and leave the state as it
    was before.

    Writes nothing after a signal. Collective: every rank takes part, those without a `folder` write
    nothing.
    """
    before = peak_bytes(device)
    state, one_step = Rewind(registry), record_function("step")(step)

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def run(instrument: AbstractContextManager[Any]) -> tuple[bool, PhaseClock]:
        with instrument:
            wait()
            # its end is on the clock
            with listening(PhaseClock(wait, time.perf_counter)) as clock, phase(OTHER):
                went_on = all(one_step() for _ in range(count))
        state.rewind()
        return went_on, clock

    went_on, clock = run(nullcontext())
    peak = max(before, peak_bytes(device) - (state.bytes if device.type == "cpu" else 0))
    if not went_on:
        return
    # its errors about CUDA on machines without it are none
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = {
        kind for kind in supported_activities() if kind.name in ("CPU", device.type.upper())
    }
    profiler = profile(activities=activities, acc_events=True)
    went_on, traced = run(profiler)
    if went_on and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / TRACE))
        seconds = {name: time / count for name, time in clock.seconds.items()}
        overhead = sum(traced.seconds.values()) / sum(clock.seconds.values()) - 1
        by = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
        operators = profiler.key_averages().table(
            sort_by=by, row_limit=TOP, max_name_column_width=40
        )
        where = f"trace of the steps: {folder / TRACE} (open it at https://ui.perfetto.dev or in chrome://tracing)"
        text = "\n\n".join([heading, summary(seconds, overhead, peak, device), operators, where])
        write_atomic(folder / SUMMARY, f"{text}\n".encode())


def summary(seconds: Mapping[str, float], overhead: float, peak: int, device: torch.device) -> str:
    """A profile as text. `seconds`: of a step, by phase; `overhead`: what the profiler cost, as a
    share of it.
    """
    names = sorted(seconds, key=lambda name: (name == OTHER, name != "data", name))
    whole = sum(seconds.values())
    rows = [
        [name, f"{seconds[name] * 1e3:.2f}", f"{100 * seconds[name] / whole:.1f} %"]
        for name in names
    ]
    table = columns(
        [["phase", "ms a step", "share"], *rows, ["step", f"{whole * 1e3:.2f}", "100.0 %"]]
    )
    waited, memory = (
        seconds.get("data", 0.0),
        "resident" if device.type == "cpu" else "allocated on the accelerator",
    )
    return (
        f"{table}\n\ndata wait {100 * waited / whole:.1f} % of the time; memory: {peak / MIB:.0f} MiB {memory} at "
        f"most; torch.profiler cost {100 * overhead:+.0f} %"
    )
