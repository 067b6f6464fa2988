"""Callbacks for a run's status file, additional metrics, sample grids, and statistics of layers."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import reduce

import torch
from torch import Tensor, nn

from duetgan.models.hooks import LayerStatistics, matching_layers, merge
from duetgan.training.base.config import LogConfig
from duetgan.training.base.monitors import MetricWindow, State
from duetgan.training.base.task import Stateful, Task
from duetgan.training.engine.loop import Callback, Loop
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, explained
from duetgan.utils.images import save_png
from duetgan.utils.machine import peak_bytes
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import Events, Metrics, say


class StatusFile(Callback):
    """A callback that writes status.json before each checkpoint is saved.

    If the file cannot be written, it only prints a warning.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def before_save(self, loop: Loop) -> None:
        self.write(loop, "running")

    def write(self, loop: Loop, state: str, reason: str = "", exit_code: int | None = None) -> None:
        if not collectives.is_main():
            return
        try:
            self.folder.write_status(state, loop.step, reason, exit_code)
        except OSError as error:
            path = self.folder.path / "status.json"
            say(f"warning: {path}: cannot be written ({error.strerror})")


class Columns(Callback):
    """A callback that adds the learning rates and the peak memory to each row of metrics."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task = task
        self.device = device

    def columns(self, window: MetricWindow) -> Metrics:
        # peak of the process with the highest one
        row: Metrics = {"memory_mib": collectives.all_reduce_max(peak_bytes(self.device) >> 20)}
        for name, part in self.task.registry().items():
            if isinstance(part, Updater):
                row[f"lr/{name}"] = max(group["lr"] for group in part.optimizer.param_groups)
        return row


class SampleGrids(Callback):
    """A callback that saves a grid of samples every `log.samples_every` steps.

    It also saves a grid before the first step and after the last one. With `log.samples_every` 0
    it saves none.
    """

    def begin(self, loop: Loop) -> None:
        self._save(loop)

    def after_iteration(self, loop: Loop) -> None:
        if loop.is_due(loop.config.log.samples_every):
            loop.off_the_clock(lambda: self._save(loop))

    def _save(self, loop: Loop) -> None:
        if not collectives.is_main() or not loop.config.log.samples_every:
            return
        image = loop.task.sample_grid(loop.step)
        if image is None:
            return
        path = loop.folder.samples / f"step-{loop.step:08d}.png"
        try:
            save_png(image, path)
        except UserError as error:  # raised if the disk is full
            loop.log.refused(path, error, "sample grids")
        loop.log.image(loop.step, "samples", image)


class LayerLog(Callback):
    """A callback that writes statistics of layers to TensorBoard every `log.layers_every` steps.

    The patterns in `log.layers` choose the layers by their names, `NETWORK.LAYER`. Hooks are
    registered only for the steps whose statistics are written. Raises UserError before the first
    step if a pattern matches no layer.
    """

    FOLDER = "layers"  # in RUN/tensorboard; TensorBoard shows it as a separate run

    def __init__(
        self, config: LogConfig, registry: Mapping[str, Stateful], folder: RunFolder
    ) -> None:
        self._config = config
        self._folder = folder.path / "tensorboard" / self.FOLDER
        self._events: Events | None = None
        precisions = [part for part in registry.values() if isinstance(part, Precision)]
        self._precision = precisions[0] if precisions else None
        networks = {name: part for name, part in registry.items() if isinstance(part, nn.Module)}
        with explained(UserError, lambda reason: f"log.layers: {reason}"):
            layers = matching_layers(nn.ModuleDict(networks), config.layers)
        self._statistics = LayerStatistics(layers)
        self._watching = ExitStack()

    def before_step(self, loop: Loop) -> None:
        if self._config.layers_due(loop.step):
            scale = 1.0 if self._precision is None else self._precision.scale()
            self._watching.enter_context(torch.compiler.set_stance("force_eager"))
            self._watching.enter_context(self._statistics.watching(scale))

    def after_step(self, loop: Loop, metrics: Mapping[str, object]) -> None:
        """Write the statistics to TensorBoard if they are due in this step.

        The host waits for the device only in these steps.
        """
        if not self._config.layers_due(loop.step - 1):
            return
        self._watching.close()
        values = self._statistics.collect(over_ranks(self._statistics.packed()))
        if collectives.is_main():
            # `purge_step` removes later steps of a run that was killed.
            self._events = self._events or Events(self._folder, purge_step=loop.step)
            self._events.scalars(loop.step, values)

    def load_state_dict(self, state: State) -> None:
        """Close the file of events: after a roll-back the next one removes the later steps."""
        self.close()

    def close(self) -> None:
        self._watching.close()
        if self._events is not None:
            self._events.close()
            self._events = None


def over_ranks(packed: Tensor) -> Tensor:
    """Merge the moments of the layers, `packed` [layers, 2, 6], over all ranks.

    Returns a tensor of the same shape on the CPU. See `LayerStatistics.packed`.
    """
    return reduce(merge, collectives.gather_objects(packed.cpu(), patient=False))
