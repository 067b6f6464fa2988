"""The profile of training steps, `train.py --profile N`: the time of phases and of operators.

After a warm-up, torch.profiler traces N steps, while a clock measures their phases.
"""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch.profiler import profile, record_function, supported_activities

from duetgan.training.base.phases import UNMARKED, PhaseClock, listening, phase
from duetgan.training.engine.loop import Callback, Loop
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.files import write_atomic
from duetgan.utils.text import columns

WARM_UP = 3  # steps before the measured ones, to fill caches and allocate optimizer moments
TRACE, SUMMARY = "trace.json.gz", "summary.txt"  # file names in RUN/profile
TOP = 12  # number of rows in the table of operators


class Profiler(Callback):
    """A callback that traces `count` steps of rank 0 after a warm-up, and writes RUN/profile/.

    Raises UserError if fewer steps are left than the warm-up and the trace need.
    """

    def __init__(self, loop: Loop, count: int) -> None:
        self.count = count
        self.first = loop.step + WARM_UP
        self.last = self.first + count
        if self.last > loop.config.steps:
            remaining = loop.config.steps - loop.step
            raise UserError(
                f"--profile {count}: needs {WARM_UP} steps to warm up and {count} to trace, but "
                f"{remaining} of {loop.config.steps} are left; give a smaller N, a larger --steps, or another "
                "--run-dir"
            )
        self.device = loop.loader.device
        # Silence the profiler's errors about CUDA on machines without it.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        names = ("CPU", self.device.type.upper())
        activities = {kind for kind in supported_activities() if kind.name in names}
        self.profiler = profile(activities=activities, acc_events=True)
        self.clock: PhaseClock | None = None
        self._step = ExitStack()

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def before_step(self, loop: Loop) -> None:
        if loop.step < self.first:
            return
        if self.clock is None:
            self.profiler.start()
            self.clock = PhaseClock(self._wait, time.perf_counter)
        self.clock.restart()
        self._step.enter_context(listening(self.clock))
        self._step.enter_context(record_function("step"))
        self._step.enter_context(phase(UNMARKED))

    def after_step(self, loop: Loop, metrics: Mapping[str, object]) -> None:
        if loop.step <= self.first:
            return
        self._step.close()
        if loop.step == self.last:
            self.profiler.stop()
            self._write(loop)

    def _write(self, loop: Loop) -> None:
        assert self.clock is not None
        folder, processes = loop.folder.path / "profile", collectives.world_size()
        folder.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(folder / TRACE))
        images = loop.task.images_at(self.last) - loop.task.images_at(self.first)
        heading = (
            f"{loop.config.task}: steps {self.first} to {self.last - 1}, "
            f"{images / self.count:g} images a step, {processes} processes, rank 0 measured "
            f"({self.device}, {torch.get_num_threads()} threads, {loop.config.precision})"
        )
        seconds = {name: total / self.count for name, total in self.clock.seconds.items()}
        key = "self_cpu_time_total" if self.device.type == "cpu" else "self_device_time_total"
        operators = self.profiler.key_averages().table(
            sort_by=key, row_limit=TOP, max_name_column_width=40
        )
        location = f"trace: {folder / TRACE} (open it at https://ui.perfetto.dev)"
        text = "\n\n".join([heading, phase_table(seconds), operators, location])
        write_atomic(folder / SUMMARY, f"{text}\n".encode())
        print(text)


def phase_table(seconds: Mapping[str, float]) -> str:
    """Return a text table of phases, with the milliseconds and the share of each in a step.

    `seconds` has the mean seconds per step of each phase.
    """
    names = sorted(seconds, key=lambda name: (name == UNMARKED, name != "data", name))
    total = sum(seconds.values())
    rows = [["phase", "ms a step", "share"]]
    for name in names:
        percent = 100 * seconds[name] / total
        rows.append([name, f"{seconds[name] * 1e3:.2f}", f"{percent:.1f} %"])
    rows.append(["step", f"{total * 1e3:.2f}", "100.0 %"])
    return columns(rows)
