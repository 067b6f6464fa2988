"""The export formats: a function that writes each, and one that loads it again for the check.

StyleGAN2 is also exported for other programs: with NVIDIA's names of weights in a .safetensors
file, and with rosinality's in a .pt file of plain tensors. `models.convert` reads both for the
check.
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
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.config.build import build
from duetgan.utils.config.model import Config
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.runlog.run_log import say

# channels of rosinality's networks at 4 to 32 px; above, they are halved with each resolution
WIDTHS = 512
# parts of a discriminator that other programs do not have
EXTRA_HEADS = ("auxiliary", "from_rgbs")


def networks(checkpoint: Checkpoint) -> Converted:
    """Return the checkpoint's networks with their complete configurations. Raises UserError unless
    they are a StyleGAN2 at its full resolution.
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
    configs = {}
    for name, config_class in sections.items():
        configs[name] = build(config_class, config.get(name, {}), source=name).model_dump()
    state = {}
    for name, weights in checkpoint["state"].items():
        if name.removesuffix("_ema") in sections:
            state[name] = weights
    if "discriminator" not in config:  # a file of weights has only the generator
        state.pop("discriminator", None)
    heads, discriminator = set(), {}
    for name, tensor in state.get("discriminator", {}).items():
        head = name.partition(".")[0]
        if head in EXTRA_HEADS:
            heads.add(head)
        else:
            discriminator[name] = tensor
    if heads:
        state["discriminator"] = discriminator
        parts = " and ".join(sorted(heads))
        say(f"note: without the discriminator's {parts}, which those programs do not have")
    return Converted("stylegan2", shape, configs["generator"], configs["discriminator"], state)


def write_nvidia(subject: Subject, path: Path) -> None:
    """Write a .safetensors file of NVIDIA's state dicts; the metadata entry `nvidia` holds the
    keyword arguments of NVIDIA's classes.
    """
    gan = networks(subject.checkpoint)
    for name in ("generator", "discriminator"):
        base = getattr(gan, name)["channel_base"]
        if base < gan.shape["resolution"]:
            raise UserError(
                f"channel_base {base} leaves NVIDIA's {name} no channels; choose safetensors"
            )
    tensors, arguments = nvidia.to_official(gan)
    if not gan.generator["clamp_always"] and gan.generator["conv_clamp"] is not None:
        say(
            "note: without conv_clamp and fp16, because NVIDIA's program also clamps in fp32; "
            "the images are those of fp32"
        )
    _note_group_difference(gan)
    classes = json.dumps(subject.checkpoint["classes"])
    write_tensors(path, tensors, {nvidia.ENTRY: json.dumps(arguments), "classes": classes})


def write_rosinality(subject: Subject, path: Path) -> None:
    """Write a checkpoint for rosinality's program, without the state of optimizers."""
    gan = networks(subject.checkpoint)
    with explained(Refused, lambda error: f"{error}; choose safetensors or nvidia"):
        content = rosinality.to_official(gan)
    config, side = gan.generator, gan.shape["resolution"]
    base, top = config["channel_base"], config["channel_max"]
    if top != WIDTHS or base % 16384:
        widths = {r: channels_at(r, base, top) for r in (2**k for k in range(2, side.bit_length()))}
        say(
            f"note: the widths are not rosinality's; put these in model.py as self.channels: {widths}"
        )
    if "discriminator" in gan.state and "d" not in content:
        say(
            "note: without the discriminator, which rosinality's class does not support (plain, or "
            "minibatch_std_group 1)"
        )
    elif "d" in content:
        _note_group_difference(gan, fixed_group=4)
    torch.save(content, path)


def _note_group_difference(gan: Converted, fixed_group: int | None = None) -> None:
    """Print a note if the other program groups samples differently for the minibatch standard
    deviation. `fixed_group` is its only group size, if it has only one.
    """
    group = gan.discriminator["minibatch_std_group"]
    order = gan.discriminator["minibatch_std_order"]
    if "discriminator" not in gan.state or group <= 1:
        return
    their_group = fixed_group or group
    if order != "strided" or their_group != group:
        theirs = f"{their_group} samples, N / {their_group} apart"
        say(
            f"note: D's minibatch standard deviation is over groups of {group} {order} samples; theirs of {theirs}"
        )


def open_official(subject: Subject, path: Path) -> Runner:
    """Convert the file with `models.convert` and return its generator."""
    content = checkpoint_of(read(path), list(subject.checkpoint["classes"]))
    return as_runner(Drawing(generator_from(content)))


@dataclass(frozen=True, kw_only=True)
class Format:
    """An export format: its writer, its reader, and the limits of its check."""

    write: Callable[[Subject, Path], None]
    open: Callable[[Subject, Path], Runner]
    # allowed difference of outputs, relative to their largest magnitude if that exceeds 1
    limit: float | None
    needs: tuple[str, ...] = ()  # optional packages
    # the only supported task, and the message for another one
    only: tuple[str, str] | None = None
    folder: bool = False  # True if the export is a folder
    suffix: str = ""  # required suffix, by which `models.convert` recognises the format


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and log messages of exporters, which are meant for developers."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(previous)


ONNX = ("onnx", "onnxscript", "onnxruntime")


def import_extra(name: str) -> Any:
    """Import an optional package. Raises UserError, with the command to install it, if it is
    missing.
    """
    package = name.partition(".")[0]
    remedy = "onnx onnxruntime onnxscript" if package in ONNX else package
    with explained(
        ImportError, lambda error: f"this format needs {package} ({error}); `pip install {remedy}`"
    ):
        return importlib.import_module(name)


def open_safetensors(subject: Subject, path: Path) -> Runner:
    """Build the network from the file's weights and metadata alone."""
    checkpoint = read_weights(path)
    if subject.is_classifier:
        return as_runner(classifier_from(checkpoint, several=True))
    return as_runner(Drawing(generator_from(checkpoint, several=True)))


# --- torch.export


def _program(subject: Subject) -> torch.export.ExportedProgram:
    """Trace the network, with BatchNorm folded, for any number of rows."""
    batch = torch.export.Dim("batch", min=1)
    return traced(subject.fast(), subject.rows(EXAMPLES), tuple({0: batch} for _ in subject.names))


def write_torch_export(subject: Subject, path: Path) -> None:
    """Write a program of torch.export, with `contents` and `interface` as JSON in its extra file
    `duet.json`.
    """
    content = interface(subject.checkpoint) | subject.truncation | contents(subject.checkpoint)
    extra_files = {f"{ENTRY}.json": json.dumps(content)}
    with _quiet(), torch.no_grad(), open(path, "wb") as file:
        torch.export.save(_program(subject), file, extra_files=extra_files)


def open_torch_export(_subject: Subject, path: Path) -> Runner:
    with _quiet(), open(path, "rb") as file:
        return as_runner(torch.export.load(file).module())


# --- ONNX


def write_onnx(subject: Subject, path: Path) -> None:
    """Write an ONNX graph, with BatchNorm folded. Its metadata are `contents` as JSON in the entry
    `duet`, and the entries of `interface`.
    """
    with _quiet(), torch.no_grad():
        program: Any = torch.onnx.export(
            _program(subject),
            input_names=list(subject.names),
            output_names=[subject.output],
            dynamo=True,
            verbose=False,
            optimize=False,
        )
        optimizer = import_extra("onnxscript.optimizer")
        # Not `optimize`, whose rules treat 1e-8 in a sum as 0 (version 0.7.2).
        optimizer.fold_constants(program.model)
        optimizer.remove_unused_nodes(program.model)
        program.model.metadata_props[ENTRY] = json.dumps(contents(subject.checkpoint))
        program.model.metadata_props.update(interface(subject.checkpoint) | subject.truncation)
        program.save(str(path))


def open_onnx(subject: Subject, path: Path) -> Runner:
    """Open a session of onnxruntime on the CPU, with as many threads as torch has."""
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
    """Write an ONNX graph with static int8 quantization: weights by output channel, activations by
    their ranges for the calibration images. Weights use 7 of the 8 bits, because sums of two
    products must fit into 16 bits on CPUs without VNNI.
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
            # This has the interface of onnxruntime's CalibrationDataReader.
            SimpleNamespace(get_next=lambda: next(images, None)),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
        )


# --- ExecuTorch


def write_executorch(subject: Subject, path: Path) -> None:
    """Write a program of ExecuTorch, PyTorch's runtime for phones and small devices: float32, batch
    size 1, BatchNorm folded. XNNPACK computes the operators that it supports; if its partitioner
    fails on a network, all operators use portable kernels.
    """
    with _quiet(), torch.no_grad():
        lower = import_extra("executorch.exir").to_edge_transform_and_lower
        xnnpack = import_extra("executorch.backends.xnnpack.partition.xnnpack_partitioner")
        network = copy.deepcopy(subject.fast()).to(memory_format=torch.contiguous_format)
        row = tuple(map(_dense, subject.rows(1)))
        try:
            program = lower(traced(network, row, None), partitioner=[xnnpack.XnnpackPartitioner()])
        except Exception as error:  # The partitioner has no common class of exceptions.
            say(
                f"note: portable kernels only, which are slow: XNNPACK's partitioner failed ({str(error)[:80]})"
            )
            program = lower(traced(network, row, None))
        path.write_bytes(program.to_executorch().buffer)


def open_executorch(_subject: Subject, path: Path) -> Runner:
    """Load the program in ExecuTorch's runtime on the CPU; it runs row by row."""
    with _quiet():
        runtime = import_extra("executorch.runtime").Runtime.get()
        method = runtime.load_program(str(path)).load_method("forward")

    def run(inputs: Inputs) -> Tensor:
        rows = zip(*(_dense(x).split(1) for x in inputs), strict=True)
        return torch.cat([method.execute(row)[0].clone() for row in rows])

    return run


def _dense(x: Tensor) -> Tensor:
    """Return a contiguous copy; `contiguous()` keeps the channels_last strides of a single row."""
    return torch.empty(x.shape, dtype=x.dtype).copy_(x)


CHECKABLE = (
    "classifier",
    "is for classifiers, whose accuracy can be checked; for a generator choose safetensors, torch-export or onnx",
)
# formats that can include a generator's truncation
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
