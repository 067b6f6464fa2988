"""Statistics of named layers to TensorBoard while training: `log.layers` and `log.layers_every`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from duetgan.models.hooks import LayerStatistics, matching_layers, merge
from duetgan.training.base.config import LogConfig
from duetgan.training.optim.updater import Precision
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, explained
from duetgan.utils.runlog.run_log import Events

FOLDER = "layers"  # in RUN/tensorboard: TensorBoard shows it as a run of its own


class LayerLog:
    """Watches the layers that `log.layers` names, `NETWORK.LAYER`, in every `log.layers_every`-th step; between these
    there is no hook. Raises UserError for a pattern that fits no layer, before the first step.
    """

    def __init__(self, config: LogConfig, registry: Mapping[str, Any], folder: Path) -> None:
        self._every = config.layers_every
        self._folder = folder / "tensorboard" / FOLDER
        self._events: Events | None = None
        self._precision = next((part for part in registry.values() if isinstance(part, Precision)), None)
        self._statistics: LayerStatistics | None = None
        if config.layers:
            networks = {name: part for name, part in registry.items() if isinstance(part, nn.Module)}
            with explained(UserError, lambda why: f"log.layers: {why}"):
                self._statistics = LayerStatistics(matching_layers(nn.ModuleDict(networks), config.layers))

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Around the step that makes `step` updates complete: at the cadence its layers are watched and written down.

        Waits for the device then, and only then. What torch.compile has compiled runs uncompiled in such a step.
        """
        if self._statistics is None or step % self._every:
            yield
            return
        scale = 1.0 if self._precision is None else self._precision.scale()
        with torch.compiler.set_stance("force_eager"), self._statistics.watching(scale):
            yield
        values = self._statistics.collect(over_ranks(self._statistics.packed()))
        if collectives.is_main():
            self._events = self._events or Events(self._folder, purge_step=step)  # what a run that died wrote beyond
            self._events.scalars(step, values)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


def over_ranks(packed: Tensor) -> Tensor:
    """The moments [layers, 2, 6] of all ranks together, in one collective."""
    world = collectives.world_size()
    if world == 1:
        return packed
    everyone = packed.new_zeros(world, *packed.shape)
    everyone[collectives.rank()] = packed
    return reduce(merge, collectives.all_reduce_sum_(everyone))
