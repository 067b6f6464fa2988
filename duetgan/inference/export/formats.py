"""The formats: how each is written, and how it is loaded again to be compared.

StyleGAN2 for other programs: by the names of NVIDIA's programs in a .safetensors file, and of
rosinality's in a .pt file of plain tensors. `models.convert` reads both, which is how they are
checked.
"""

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
from duetgan.inference.export.subject import (
    EXAMPLES,
    Drawing,
    Inputs,
    Runner,
    Subject,
    as_runner,
    contents,
    interface,
    write_tensors,
    write_weights,
)
from duetgan.models.convert import checkpoint_of, read
from duetgan.models.official import nvidia, rosinality
from duetgan.models.official.names import Converted
from duetgan.models.official.unpickle import Refused
from duetgan.models.registry import DEFAULT
from duetgan.models.restore import ENTRY, classifier_from, generator_from, read_weights
from duetgan.models.stylegan2 import DiscriminatorConfig, GeneratorConfig, channels_at
from duetgan.utils.config.build import build
from duetgan.utils.config.model import Config
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.runlog.run_log import say

# of rosinality's networks at 4 to 32 px; further up they are halved with each resolution
WIDTHS = 512


def networks(checkpoint: dict[str, Any]) -> Converted:
    """The checkpoint's networks with their whole configurations. Raises UserError for what is no
    grown StyleGAN2.
    """
    config, shape = checkpoint["config"], dict(checkpoint["shape"])
    if (name := config.get("architecture", DEFAULT)) != "stylegan2":
        raise UserError(
            f"this format is for stylegan2, the checkpoint has {name}; choose safetensors"
        )
    if isinstance(size := shape["resolution"], str):
        raise UserError(
            f"this format is for squares, the checkpoint draws {size} px; choose safetensors"
        )
    if size & (size - 1):
        raise UserError(
            f"this format is for sides of 8, 16, 32, ... px, not {size}; choose safetensors"
        )
    ImageSpec.read(shape).need_plain("this format")
    if tuple(checkpoint.get("stage", (size, 1.0))) != (size, 1.0):
        raise UserError(
            "this format is for networks at their full resolution, this one still grows; train it on"
        )
    sections: dict[str, type[Config]] = {
        "generator": GeneratorConfig,
        "discriminator": DiscriminatorConfig,
    }
    whole = {
        name: build(kind, config.get(name, {}), source=name).model_dump()
        for name, kind in sections.items()
    }
    state = {
        name: part
        for name, part in checkpoint["state"].items()
        if name.removesuffix("_ema") in sections
    }
    if "discriminator" not in config:  # a file of weights: of the generator alone
        state.pop("discriminator", None)
    if heads := {name.partition(".")[0] for name in state.get("discriminator", {})} & {
        "auxiliary",
        "from_rgbs",
    }:
        part = state["discriminator"]
        state["discriminator"] = {
            name: x for name, x in part.items() if name.partition(".")[0] not in heads
        }
        say(
            f"note: without the discriminator's {' and '.join(sorted(heads))}, which those programs have not"
        )
    return Converted("stylegan2", shape, whole["generator"], whole["discriminator"], state)


def write_nvidia(subject: Subject, path: Path) -> None:
    """Their state dicts, and in the metadata's entry `nvidia` the keyword arguments of their
    classes.
    """
    gan = networks(subject.checkpoint)
    for name in ("generator", "discriminator"):
        base = getattr(gan, name)["channel_base"]
        if base < gan.shape["resolution"]:
            raise UserError(
                f"channel_base {base} leaves NVIDIA's {name} no channels; choose safetensors"
            )
    tensors, arguments = nvidia.theirs(gan)
    if not gan.generator["clamp_always"] and gan.generator["conv_clamp"] is not None:
        say(
            "note: without conv_clamp and fp16, which here act together and there apart: the images are fp32's"
        )
    _tell_of_groups(gan)
    classes = json.dumps(subject.checkpoint["classes"])
    write_tensors(path, tensors, {nvidia.ENTRY: json.dumps(arguments), "classes": classes})


def write_rosinality(subject: Subject, path: Path) -> None:
    """What their torch.save would hold, without optimizers."""
    gan = networks(subject.checkpoint)
    with explained(Refused, lambda why: f"{why}; choose safetensors or nvidia"):
        content = rosinality.theirs(gan)
    config, side = gan.generator, gan.shape["resolution"]
    base, top = config["channel_base"], config["channel_max"]
    if top != WIDTHS or base % 16384:
        widths = {r: channels_at(r, base, top) for r in (2**k for k in range(2, side.bit_length()))}
        say(
            f"note: the widths are not rosinality's; put these in model.py as self.channels: {widths}"
        )
    if "discriminator" in gan.state and "d" not in content:
        say(
            "note: without the discriminator, which rosinality's class cannot be (plain, or minibatch_std_group 1)"
        )
    elif "d" in content:
        _tell_of_groups(gan, only=4)
    torch.save(content, path)


def _tell_of_groups(gan: Converted, only: int | None = None) -> None:
    group, order = (
        gan.discriminator["minibatch_std_group"],
        gan.discriminator["minibatch_std_order"],
    )
    if (
        "discriminator" in gan.state
        and group > 1
        and (order != "strided" or only not in (None, group))
    ):
        theirs = f"{only or group} samples, N / {only or group} apart"
        say(
            f"note: D's minibatch standard deviation is over groups of {group} {order} samples; theirs of {theirs}"
        )


def open_official(subject: Subject, path: Path) -> Runner:
    """The generator that `models.convert` makes of the file, as a function of its inputs."""
    content = checkpoint_of(read(path), list(subject.checkpoint["classes"]))
    return as_runner(Drawing(generator_from(content)))


@dataclass(frozen=True, kw_only=True)
class Format:
    write: Callable[[Subject, Path], None]
    open: Callable[[Subject, Path], Runner]
    # largest difference that is allowed, as a share of the outputs' largest magnitude above 1
    limit: float | None
    needs: tuple[str, ...] = ()  # packages beyond the ordinary ones
    # a task, if it is for that one alone, and what to tell of the other one
    only: tuple[str, str] | None = None
    folder: bool = False  # it is a folder
    suffix: str = ""  # that its name ends with: by it `models.convert` tells what it is


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters have to tell their own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


ONNX = ("onnx", "onnxscript", "onnxruntime")


def import_extra(name: str) -> Any:
    """An optional package. Raises UserError, with what to install, where it is missing."""
    package = name.partition(".")[0]
    remedy = "onnx onnxruntime onnxscript" if package in ONNX else package
    with explained(
        ImportError, lambda why: f"this format needs {package} ({why}); `pip install {remedy}`"
    ):
        return importlib.import_module(name)


def open_safetensors(subject: Subject, path: Path) -> Runner:
    """The network built from the file alone."""
    checkpoint = read_weights(path)
    if subject.is_classifier:
        return as_runner(classifier_from(checkpoint, several=True))
    return as_runner(Drawing(generator_from(checkpoint, several=True)))


# --- torch.export


def _program(subject: Subject) -> torch.export.ExportedProgram:
    """The network as a graph of torch's operators, BatchNorm folded, for any number of rows."""
    batch = torch.export.Dim("batch", min=1)
    return traced(subject.fast(), subject.rows(EXAMPLES), tuple({0: batch} for _ in subject.names))


def write_torch_export(subject: Subject, path: Path) -> None:
    """A program of torch.export; `contents` and `interface` as JSON in its extra file `duet.json`."""
    content = interface(subject.checkpoint) | subject.truncation | contents(subject.checkpoint)
    about = {f"{ENTRY}.json": json.dumps(content)}
    with _quiet(), torch.no_grad(), open(path, "wb") as file:
        torch.export.save(_program(subject), file, extra_files=about)


def open_torch_export(_subject: Subject, path: Path) -> Runner:
    with _quiet(), open(path, "rb") as file:
        return as_runner(torch.export.load(file).module())


# --- ONNX


def write_onnx(subject: Subject, path: Path) -> None:
    """An ONNX graph, BatchNorm folded; `contents` as JSON in its metadata entry `duet`, `interface`
    beside it.
    """
    names: dict[str, Any] = {"input_names": list(subject.names), "output_names": [subject.output]}
    with _quiet(), torch.no_grad():
        program: Any = torch.onnx.export(
            _program(subject), **names, dynamo=True, verbose=False, optimize=False
        )
        optimizer = import_extra("onnxscript.optimizer")
        # not `optimize`, whose rules take 1e-8 in a sum for 0 (0.7.2)
        optimizer.fold_constants(program.model)
        optimizer.remove_unused_nodes(program.model)
        program.model.metadata_props[ENTRY] = json.dumps(contents(subject.checkpoint))
        program.model.metadata_props.update(interface(subject.checkpoint) | subject.truncation)
        program.save(str(path))


def open_onnx(subject: Subject, path: Path) -> Runner:
    """A session of onnxruntime on the CPU, with as many threads as torch has."""
    runtime = import_extra("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(
        session.run([subject.output], _arrays(subject, inputs))[0]
    )


def _arrays(subject: Subject, inputs: Inputs) -> dict[str, np.ndarray]:
    return {name: x.contiguous().numpy() for name, x in zip(subject.names, inputs, strict=True)}


def write_int8(subject: Subject, path: Path) -> None:
    """An ONNX graph in 8-bit integers: weights by output channel, activations by the ranges of the
    calibration images, static. Weights use 7 of the 8 bits: sums of two products fill 16 bits on a
    CPU without VNNI.
    """
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
            # onnxruntime's CalibrationDataReader
            SimpleNamespace(get_next=lambda: next(images, None)),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
        )


# --- ExecuTorch


def write_executorch(subject: Subject, path: Path) -> None:
    """A program of ExecuTorch, PyTorch's runtime for phones and small devices: float32, one row at
    a time, BatchNorm folded. XNNPACK computes what it can; a network that its partitioner fails on
    has portable kernels throughout.
    """
    with _quiet(), torch.no_grad():
        lower = import_extra("executorch.exir").to_edge_transform_and_lower
        delegate = import_extra(
            "executorch.backends.xnnpack.partition.xnnpack_partitioner"
        ).XnnpackPartitioner
        network = copy.deepcopy(subject.fast()).to(memory_format=torch.contiguous_format)
        row = tuple(map(_dense, subject.rows(1)))
        try:
            program = lower(traced(network, row, None), partitioner=[delegate()])
        except Exception as error:  # its passes raise whatever they meet
            say(
                f"note: portable kernels alone, which are slow: XNNPACK's partitioner failed ({str(error)[:80]})"
            )
            program = lower(traced(network, row, None))
        path.write_bytes(program.to_executorch().buffer)


def open_executorch(_subject: Subject, path: Path) -> Runner:
    """The program in ExecuTorch's runtime on the CPU, row by row."""
    with _quiet():
        method = (
            import_extra("executorch.runtime")
            .Runtime.get()
            .load_program(str(path))
            .load_method("forward")
        )

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
# formats that a generator's truncation is built into
PROGRAMS = ("onnx", "torch-export", "executorch")
STYLEGAN2 = (
    "gan",
    "is for StyleGAN2; for a classifier choose safetensors, torch-export, onnx or int8",
)
FORMATS = {
    "safetensors": Format(
        write=lambda subject, path: write_weights(path, subject.checkpoint),
        open=open_safetensors,
        limit=0.0,
    ),
    "torch-export": Format(write=write_torch_export, open=open_torch_export, limit=1e-4),
    "onnx": Format(write=write_onnx, open=open_onnx, limit=1e-4, needs=ONNX),
    "int8": Format(write=write_int8, open=open_onnx, limit=None, needs=ONNX, only=CHECKABLE),
    "nvidia": Format(
        write=write_nvidia, open=open_official, limit=0.0, only=STYLEGAN2, suffix=".safetensors"
    ),
    "rosinality": Format(write=write_rosinality, open=open_official, limit=0.0, only=STYLEGAN2),
    "executorch": Format(
        write=write_executorch, open=open_executorch, limit=1e-4, needs=("executorch",)
    ),
    "folder": Format(write=write_folder, open=open_folder, limit=1e-4, folder=True),
}
