"""Write and load the export format `onnx`, an ONNX graph."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from duetgan.inference.export.subject import Inputs, Runner, Subject
from duetgan.inference.export.torch_export import program, quiet
from duetgan.inference.export.weights import contents, interface
from duetgan.models.restore import ENTRY


def write(subject: Subject, path: Path) -> None:
    """Write the network as an ONNX graph, with BatchNorm folded into the convolutions.

    The entry `duet` of the graph's metadata holds the result of `contents` as JSON. The other
    entries are those of `interface` and of the truncation.
    """
    from onnxscript import optimizer  # an optional package

    with quiet(), torch.no_grad():
        graph: Any = torch.onnx.export(
            program(subject),
            input_names=list(subject.names),
            output_names=[subject.output],
            dynamo=True,
            verbose=False,
            optimize=False,
        )
        # Not `optimize`, whose rules treat 1e-8 in a sum as 0 (version 0.7.2).
        optimizer.fold_constants(graph.model)
        optimizer.remove_unused_nodes(graph.model)
        graph.model.metadata_props[ENTRY] = json.dumps(contents(subject.checkpoint))
        graph.model.metadata_props.update(interface(subject.checkpoint) | subject.truncation)
        graph.save(str(path))


def load(subject: Subject, path: Path) -> Runner:
    """Load a graph into onnxruntime on the CPU and return it as a function.

    onnxruntime uses as many threads as torch.
    """
    import onnxruntime  # an optional package

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(
        session.run([subject.output], arrays(subject, inputs))[0]
    )


def arrays(subject: Subject, inputs: Inputs) -> dict[str, np.ndarray]:
    """Return inputs as onnxruntime takes them: a dict from input name to array."""
    return {name: x.contiguous().numpy() for name, x in zip(subject.names, inputs, strict=True)}
