"""Draw one graph of all networks in TensorBoard, before the first step."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from duetgan.training.base.config import RunConfig
from duetgan.training.engine.loop import Callback, Loop
from duetgan.training.engine.run import CALLBACKS
from duetgan.utils.runlog.run_log import Events


class _SideBySide(nn.ModuleDict):
    """Several networks as one module, so that one graph shows them all."""

    def forward(self, *inputs: tuple[Tensor, ...]) -> tuple[object, ...]:
        return tuple(network(*args) for network, args in zip(self.values(), inputs, strict=True))


def draw(events: Events, networks: Mapping[str, tuple[nn.Module, tuple[Tensor, ...]]]) -> None:
    """Add one graph that shows all networks to TensorBoard.

    `networks` is a dict from the name of a network to the network and its example inputs.
    """
    together = _SideBySide({name: network for name, (network, _) in networks.items()})
    inputs = tuple(values for _, values in networks.values())
    modes = {module: module.training for module in together.modules()}
    # TensorBoard traces with torch.jit, which warns that it is deprecated and that shapes become
    # constants. Gradients are off, because activation checkpointing cannot be traced.
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        # A first pass fills caches of constants, which must not hold tensors of the trace.
        together(*inputs)
        events.add("graph", together, inputs, use_strict_trace=False)
    # The tracer sets all modules to the mode of the outermost one.
    for module, training in modes.items():
        module.training = training


class Graph(Callback):
    """A callback that adds the graph to the TensorBoard events of a new run."""

    def begin(self, loop: Loop) -> None:
        events = loop.log.events
        if events is not None and not events.refused:
            draw(events, loop.task.networks())


def callbacks(config: RunConfig, device: torch.device) -> list[Callback]:
    return [Graph()]


CALLBACKS.append(callbacks)
