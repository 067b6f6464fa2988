"""The formats: how each is written, and how it is loaded again to be compared."""

import contextlib
import copy
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.inference.export.folder import open_folder, traced, write_folder
from duetgan.inference.export.official import open_official, write_nvidia, write_rosinality
from duetgan.inference.export.subject import EXAMPLES, Drawing, Inputs, Runner, Subject, as_runner
from duetgan.inference.export.weights_file import contents, interface, write_weights
from duetgan.models.ready_made import ENTRY, read_weights
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_log import say


@dataclass(frozen=True, kw_only=True)
class Format:
    write: Callable[[Subject, Path], None]
    open: Callable[[Subject, Path], Runner]
    limit: float | None  # largest difference that is allowed, as a share of the outputs' largest magnitude above 1
    needs: tuple[str, ...] = ()  # packages beyond the ordinary ones
    only: tuple[str, str] | None = None  # a task, if it is for that one alone, and what to tell of the other one
    folder: bool = False  # it is a folder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters have to tell their own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


ONNX = ("onnx", "onnxscript", "onnxruntime")


def import_extra(name: str) -> Any:
    """An optional package. Raises UserError, with what to install, where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        remedy = "onnx onnxruntime onnxscript" if package in ONNX else package
        raise UserError(f"this format needs {package} ({error}); `pip install {remedy}`") from error


def open_safetensors(subject: Subject, path: Path) -> Runner:
    """The network built from the file alone."""
    checkpoint = read_weights(path)
    return as_runner(classifier_from(checkpoint) if subject.is_classifier else Drawing(generator_from(checkpoint)))


# --- torch.export


def _program(subject: Subject) -> torch.export.ExportedProgram:
    """The network as a graph of torch's operators, BatchNorm folded, for any number of rows."""
    batch = torch.export.Dim("batch", min=1)
    return traced(subject.fast(), subject.rows(EXAMPLES), tuple({0: batch} for _ in subject.names))


def write_torch_export(subject: Subject, path: Path) -> None:
    """A program of torch.export; `contents` and `interface` as JSON in its extra file `duet.json`."""
    about = {f"{ENTRY}.json": json.dumps(interface(subject.checkpoint) | contents(subject.checkpoint))}
    with _quiet(), torch.no_grad(), open(path, "wb") as file:
        torch.export.save(_program(subject), file, extra_files=about)


def open_torch_export(_subject: Subject, path: Path) -> Runner:
    with _quiet(), open(path, "rb") as file:
        return as_runner(torch.export.load(file).module())


# --- ONNX


def write_onnx(subject: Subject, path: Path) -> None:
    """An ONNX graph, BatchNorm folded; `contents` as JSON in its metadata entry `duet`, `interface` beside it."""
    names: dict[str, Any] = {"input_names": list(subject.names), "output_names": [subject.output]}
    with _quiet(), torch.no_grad():
        program: Any = torch.onnx.export(_program(subject), **names, dynamo=True, verbose=False)
        program.model.metadata_props[ENTRY] = json.dumps(contents(subject.checkpoint))
        program.model.metadata_props.update(interface(subject.checkpoint))
        program.save(str(path))


def open_onnx(subject: Subject, path: Path) -> Runner:
    """A session of onnxruntime on the CPU, with as many threads as torch has."""
    runtime = import_extra("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run([subject.output], _arrays(subject, inputs))[0])


def _arrays(subject: Subject, inputs: Inputs) -> dict[str, np.ndarray]:
    return {name: x.contiguous().numpy() for name, x in zip(subject.names, inputs, strict=True)}


def write_int8(subject: Subject, path: Path) -> None:
    """An ONNX graph in 8-bit integers: weights by output channel, activations by the ranges of the calibration
    images, static. Weights use 7 of the 8 bits: sums of two products fill 16 bits on a CPU without VNNI.
    """
    assert subject.is_classifier  # a generator was refused before
    quantization = import_extra("onnxruntime.quantization")
    prepare = import_extra("onnxruntime.quantization.shape_inference").quant_pre_process
    images = iter([_arrays(subject, batch) for batch in subject.calibration])
    exact, prepared = path.with_name("fp32.onnx"), path.with_name("prepared.onnx")
    write_onnx(subject, exact)
    with _quiet():
        prepare(str(exact), str(prepared), skip_symbolic_shape=True)
        quantization.quantize_static(
            str(prepared),
            str(path),
            SimpleNamespace(get_next=lambda: next(images, None)),  # onnxruntime's CalibrationDataReader
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
        )


# --- ExecuTorch


def write_executorch(subject: Subject, path: Path) -> None:
    """A program of ExecuTorch, PyTorch's runtime for phones and small devices: float32, one row at a time, BatchNorm
    folded. XNNPACK computes what it can; a network that its partitioner fails on has portable kernels throughout.
    """
    with _quiet(), torch.no_grad():
        lower = import_extra("executorch.exir").to_edge_transform_and_lower
        delegate = import_extra("executorch.backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner
        network = copy.deepcopy(subject.fast()).to(memory_format=torch.contiguous_format)
        row = tuple(map(_dense, subject.rows(1)))
        try:
            program = lower(traced(network, row, None), partitioner=[delegate()])
        except Exception as error:  # its passes raise whatever they meet
            say(f"note: portable kernels alone, which are slow: XNNPACK's partitioner failed ({str(error)[:80]})")
            program = lower(traced(network, row, None))
        path.write_bytes(program.to_executorch().buffer)


def open_executorch(_subject: Subject, path: Path) -> Runner:
    """The program in ExecuTorch's runtime on the CPU, row by row."""
    with _quiet():
        method = import_extra("executorch.runtime").Runtime.get().load_program(str(path)).load_method("forward")

    def run(inputs: Inputs) -> Tensor:
        rows = zip(*(_dense(x).split(1) for x in inputs), strict=True)
        return torch.cat([method.execute(row)[0].clone() for row in rows])

    return run


def _dense(x: Tensor) -> Tensor:
    """A copy whose strides say contiguous, also of a single row."""
    return torch.empty(x.shape, dtype=x.dtype).copy_(x)


CHECKABLE = (
    "classifier",
    "is for classifiers, whose accuracy can be checked; for a generator choose safetensors, torch-export or onnx",
)
STYLEGAN2 = ("gan", "is for StyleGAN2; for a classifier choose safetensors, torch-export, onnx or int8")
FORMATS = {
    "safetensors": Format(
        write=lambda subject, path: write_weights(path, subject.checkpoint), open=open_safetensors, limit=0.0
    ),
    "torch-export": Format(write=write_torch_export, open=open_torch_export, limit=1e-4),
    "onnx": Format(write=write_onnx, open=open_onnx, limit=1e-4, needs=ONNX),
    "int8": Format(write=write_int8, open=open_onnx, limit=None, needs=ONNX, only=CHECKABLE),
    "nvidia": Format(write=write_nvidia, open=open_official, limit=0.0, only=STYLEGAN2),
    "rosinality": Format(write=write_rosinality, open=open_official, limit=0.0, only=STYLEGAN2),
    "executorch": Format(write=write_executorch, open=open_executorch, limit=1e-4, needs=("executorch",)),
    "folder": Format(write=write_folder, open=open_folder, limit=1e-4, folder=True),
}
