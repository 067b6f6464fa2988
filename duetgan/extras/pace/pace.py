"""The pace of a training: threads that follow other programs, and the causes of a drop in speed."""

import time
from statistics import median

import torch

from duetgan.training.base.config import RunConfig
from duetgan.training.base.monitors import MetricWindow
from duetgan.training.engine.loop import Callback, Loop
from duetgan.training.engine.run import CALLBACKS
from duetgan.training.engine.speed import ThreadCount
from duetgan.utils import machine
from duetgan.utils.distributed import collectives
from duetgan.utils.runlog.run_log import Metrics, say_main
from duetgan.utils.text import counted

CHECK_INTERVAL = 1.0  # seconds between two checks of the load of other programs
# seconds for which cores must be free before threads are added; doubled with each addition
PATIENCE = 5.0
MIN_ROW_SECONDS = 2.0  # shortest interval between rows whose speed is judged


class Adapt(Callback):
    """Sets as many threads as other programs leave cores free, for `threads: adapt` on a CPU."""

    def __init__(self, count: ThreadCount) -> None:
        self.count = count
        self.count.requested = None
        self._load = machine.ProgramLoad()
        self._checked = time.monotonic()
        self._patience = PATIENCE
        self._free_since: float | None = None

    def before_step(self, loop: Loop) -> None:
        now = time.monotonic()
        if now - self._checked < CHECK_INTERVAL:
            return
        self._checked = now
        busy, count = self._load.busy_cores(), self.count.at(loop.step)
        fitting = machine.fitting(busy)
        if fitting <= count:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        is_free = self._free_since is not None and now - self._free_since >= self._patience
        if fitting >= count and not is_free:
            return
        if fitting >= count:
            self._patience *= 2
        self._free_since = None
        self.count.record(loop.step, fitting)
        say_main(
            f"step {loop.step}: {count} -> {counted(fitting, 'thread')}: {machine.load_text(busy)} "
            "(threads: adapt)"
        )


class Slowdown(Callback):
    """Warns if the speed has fallen to half of its median for a known cause."""

    def __init__(self, *, watches_load: bool) -> None:
        self._watches_load = watches_load
        # the current part of the training; its speed depends on the size of its images
        self._span: object = None
        self._rates: list[float] = []
        self._warned = False
        self._load = machine.ProgramLoad()
        self._time = time.monotonic()

    def after_row(self, loop: Loop, row: Metrics, window: MetricWindow) -> None:
        spans = loop.config.spans(loop.task.shape["resolution"])
        span = [first for first, *_ in spans if first < loop.step][-1]
        if problem := self.check(span, row["images_per_second"], row["data_wait"]):
            say_main(f"warning: step {loop.step}: {problem}")

    def check(self, span: object, rate: float, data_wait: float) -> str:
        """Return a warning, or "".

        Args:
            span: Identifier of the part of the training; each part has a median of its own.
            rate: Images per second since the last row.
            data_wait: The fraction of this time that was spent waiting for images.
        """
        busy, now = self._load.busy_cores(), time.monotonic()
        seconds, self._time = now - self._time, now
        if seconds < MIN_ROW_SECONDS:
            return ""
        if span != self._span:  # This row's speed may be partly that of the previous part.
            self._span = span
            self._rates = []
            self._warned = False
            return ""
        usual = median(self._rates or [rate])
        if rate >= usual / 2:
            self._rates.append(rate)
            self._warned = self._warned and rate < 0.75 * usual
            return ""
        cause = ""
        if data_wait > 0.5:
            cause = (
                f"waiting for images took {data_wait:.0%} of the time (raw ones need no decoding: "
                "docs/lmdb.md)"
            )
        elif self._watches_load and busy > machine.TOLERATED_LOAD:
            cause = f"{machine.load_text(busy)} (stop them, or start again with --threads adapt)"
        if self._warned or not cause:
            return ""
        self._warned = True
        return f"{rate:,.3g} images/s instead of {usual:,.3g}: {cause}"


def callbacks(config: RunConfig, device: torch.device, count: ThreadCount) -> list[Callback]:
    """Return the callbacks of a run's pace. Their turn is before `count`, which `Adapt` sets."""
    is_cpu = device.type == "cpu"
    adapts = config.threads == "adapt" and is_cpu and collectives.world_size() == 1
    slowdown = Slowdown(watches_load=is_cpu and not adapts)
    return [Adapt(count), slowdown] if adapts else [slowdown]


CALLBACKS.append(callbacks)
