"""Write and load the export format `torch-export`, a program of torch.export."""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from duetgan.inference.export.subject import EXAMPLES, Runner, Subject, as_runner
from duetgan.inference.export.weights import contents, interface
from duetgan.models.restore import ENTRY


def write(subject: Subject, path: Path) -> None:
    """Write the network as a program of torch.export.

    The extra file `duet.json` in the program holds the results of `contents` and `interface`, and
    the truncation.
    """
    content = interface(subject.checkpoint) | subject.truncation | contents(subject.checkpoint)
    extra_files = {f"{ENTRY}.json": json.dumps(content)}
    with quiet(), torch.no_grad(), open(path, "wb") as file:
        torch.export.save(program(subject), file, extra_files=extra_files)


def load(_subject: Subject, path: Path) -> Runner:
    """Load the program and return it as a function of the inputs."""
    with quiet(), open(path, "rb") as file:
        return as_runner(torch.export.load(file).module())


def program(subject: Subject) -> torch.export.ExportedProgram:
    """Trace the network, with BatchNorm folded, for batches of any size."""
    batch = torch.export.Dim("batch", min=1)
    return traced(subject.fast(), subject.rows(EXAMPLES), tuple({0: batch} for _ in subject.names))


def traced(
    network: nn.Module, inputs: tuple[object, ...], shapes: Any
) -> torch.export.ExportedProgram:
    """Trace a network with torch.export; `shapes` is its argument `dynamic_shapes`.

    The inputs, which may be private images, and this machine's paths are removed from the program.
    """
    program = torch.export.export(network, inputs, dynamic_shapes=shapes)
    program.example_inputs = None
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and log messages of exporters, which are meant for developers."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(previous)
