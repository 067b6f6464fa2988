"""A network as programs of torch.export whose weights are inputs, so that a file of weights serves them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from duetgan.inference.export.subject import EXAMPLES, Drawing, Subject


def traced(network: nn.Module, inputs: tuple[Any, ...], shapes: Any) -> torch.export.ExportedProgram:
    """The network as a graph of torch's operators, `shapes` as torch.export has them. Neither the inputs, which may be
    someone's images, nor places on this machine are left in it.
    """
    program = torch.export.export(network, inputs, dynamic_shapes=shapes)
    program.example_inputs = None
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


class Program(nn.Module):
    """`forward(weights, *inputs)` of a network, without weights of its own: `names` are theirs in it, in order, and in
    the file. `inputs`: what it is traced with; `stored`: from a name in the network to that in the file, "" for none.
    """

    def __init__(self, network: nn.Module, inputs: tuple[Any, ...], stored: Callable[[str], str]) -> None:
        super().__init__()
        self.hidden = [network]  # in a list, torch does not see it
        self.names = {name: there for name in network.state_dict() if (there := stored(name))}
        self.inputs = inputs

    def forward(self, weights: list[Tensor], *inputs: Any) -> Tensor:
        return functional_call(self.hidden[0], dict(zip(self.names, weights, strict=True)), inputs)

    def write(self, path: Path) -> None:
        """Trace it, for any number of rows."""
        state = self.hidden[0].state_dict()
        weights = [state[name] for name in self.names]
        batch = torch.export.Dim("batch", min=1)
        rows = [[{0: batch} for _ in x] if isinstance(x, list) else {0: batch} for x in self.inputs]
        program = traced(self.eval(), (weights, *self.inputs), ([None] * len(weights), tuple(rows)))
        torch.export.save(program, path)


class Synthesis(nn.Module):
    """ws [N, num_ws, w_dim] and a noise map [N, 1, H, W] for each layer -> images."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, ws: Tensor, noise: list[Tensor]) -> Tensor:
        return self.generator.synthesis(ws, noise)


def programs(subject: Subject) -> dict[str, Program]:
    """The programs of a subject's network by their names; each name in the file is one of its checkpoint's state."""

    def of_synthesis(name: str) -> str:  # "": it has no use of this one
        stored = name.removeprefix("generator.")
        return "" if stored.startswith(("mapping.", "w_avg")) or stored.endswith("noise_const") else stored

    rows, network = subject.rows(EXAMPLES), subject.network
    if not isinstance(network, Drawing):
        return {"network": Program(network, rows, str)}
    generator: Any = network.generator
    if not generator.has_styles:  # one that still grows is in a network of its stage
        return {"generator": Program(network, rows, lambda name: name.rpartition("generator.")[2])}
    ws = torch.zeros(EXAMPLES, generator.num_ws, generator.w_dim)
    maps = [torch.zeros(EXAMPLES, *shape) for shape in generator.noise_shapes()]
    return {
        "mapping": Program(generator.mapping, rows, lambda name: f"mapping.{name}"),
        "synthesis": Program(Synthesis(generator), (ws, maps), of_synthesis),
    }
