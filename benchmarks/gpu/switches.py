"""Parts that switch one thing: CUDA graphs off and on, kernels off and on, and FIR and activation by themselves."""

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import scaling
from benchmarks.gpu import expected
from benchmarks.gpu.book import Book, Missed, NotThere, Setting, Value, first_line
from benchmarks.gpu.steps import BLOCK, GIB, device_name, mean_seconds, precision_of, trial_seconds
from duetgan.models import layers
from duetgan.models.layers import fused
from duetgan.training.base.config import RunConfig
from duetgan.training.engine.speed import Trial

SMALL_PICTURES = {"cifar10_classifier_gpu": 256, "cifar10_gan_gpu": 64}  # recipe -> samples
PRESETS = {"stylegan2_256": 32, "stylegan2_1024": 32, "r3gan_256": 16, "finetune_resnet50": 32}
SMALL = {"quickstart_classifier": 8, "quickstart_gan": 8}
UNCOUNTED = ("empty", "new_empty", "_unsafe_view")  # allocations and views launch nothing
WARM_UP = 4  # steps of each kind, the first of which compile kernels and the last of which capture graphs


class Operators(TorchDispatchMode):
    """Counts the operators that a block dispatches, views and allocations left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        is_allocation = func._schema.name.removeprefix("aten::").startswith(UNCOUNTED)
        self.count += not (func.is_view or is_allocation)
        return func(*args, **(kwargs or {}))


def options(config: RunConfig, **switches: str) -> RunConfig:
    """The recipe with those of the switches that its task has."""
    return config.changed(**{name: value for name, value in switches.items() if name in type(config).model_fields})


def timed(config: RunConfig, name: str, samples: int, setting: Setting) -> dict[str, Value]:
    """Speed and peak memory of a recipe's steps, lazy penalties by their share, on images that lie on the device."""
    device = setting.torch_device
    if device.type != "cpu":
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    reader: Any = scaling.Reader(scaling.PRESETS[name])
    trial = Trial(config, samples, reader, device)
    precision = precision_of(config, device)
    trial.precision.switch(precision)
    seconds_of = trial_seconds(setting, trial)
    begun = time.perf_counter()
    for step in trial.step_fractions:
        seconds_of(step, 1 if setting.small else WARM_UP)
    warming = time.perf_counter() - begun
    seconds = mean_seconds(seconds_of, trial.step_fractions, 0.0 if setting.small else BLOCK / 2)
    found: dict[str, Value] = {"ms": 1000 * seconds, "images_per_second": samples / seconds, "warm_up_s": warming}
    if device.type != "cpu":
        found["peak_gib"] = torch.accelerator.max_memory_allocated(device) / GIB
    obstacle = trial.task.graphs.obstacle  # type: ignore[attr-defined]
    return found | {"precision": precision, "steps": f"eager, because {obstacle}" if obstacle else "captured"}


def operators(config: RunConfig, name: str, samples: int, setting: Setting) -> float:
    """Operators of a step without graphs, lazy penalties by their share."""
    reader: Any = scaling.Reader(scaling.PRESETS[name])
    trial = Trial(config, samples, reader, setting.torch_device)
    trial.precision.switch(precision_of(config, setting.torch_device))
    total = 0.0
    for step, share in trial.step_fractions.items():
        trial.task.step(iter([trial.batch] * 2), step)
        with Operators() as mode:
            trial.task.step(iter([trial.batch] * 2), step)
        total += share * mode.count
    return total


def compare(setting: Setting, book: Book, recipes: dict[str, int], variants: dict[str, dict[str, str]]) -> None:
    """Every recipe in every variant, the ratios to the first one, and what was written down before."""
    missed = []
    for name, full in recipes.items():
        samples = 8 if setting.small else full
        config = scaling.recipe(name).changed(micro_batch=None)
        first = next(iter(variants))
        for variant, switches in variants.items():
            changed = options(config, **switches)
            if variant != first and changed == options(config, **variants[first]):
                continue  # a classifier has no kernels to switch
            row = f"{name}, {variant}"
            try:
                found = timed(changed, name, samples, setting)
                if variant == first or "kernels" in switches:
                    found["operators"] = operators(options(changed, graphs="off"), name, samples, setting)
            except Exception as error:  # one variant's fault leaves the others their figures
                traceback.print_exc()
                missed.append(row)
                book.row(row, failed=first_line(error))
                continue
            book.row(row, samples=samples, **found)
            before = book.rows.get(f"{name}, {first}", {}).get("ms")
            if variant != first and before:
                book.row(row, vs_first_ratio=float(before) / float(found["ms"]))
            said = expected.of(name, variant, device_name(setting.torch_device))
            book.row(row, **said)
            if "roofline_ms" in said:
                book.row(row, roofline_share=float(said["roofline_ms"]) / float(found["ms"]))
    if missed:
        raise Missed(f"did not run: {', '.join(missed)}")


def graphs(setting: Setting, book: Book) -> None:
    """Both tasks at 32 px: eager, with CUDA graphs, and with graphs of compiled networks."""
    variants = {"eager": {"graphs": "off", "kernels": "off"}, "graphs": {"graphs": "auto"}}
    compare(setting, book, SMALL if setting.small else SMALL_PICTURES, variants)


def kernels(setting: Setting, book: Book) -> None:
    """The presets of large images: kernels off, kernels on, and kernels on in graphs."""
    variants = {
        "plain": {"graphs": "off", "kernels": "off"},
        "kernels": {"graphs": "off", "kernels": "auto"},
        "kernels and graphs": {"graphs": "auto", "kernels": "auto"},
    }
    compare(setting, book, {"quickstart_gan": 8} if setting.small else PRESETS, variants)


# --- FIR and activation by themselves


def blocks(x: Tensor) -> Iterable[tuple[str, Callable[[Tensor], Tensor], int]]:
    """Names, functions of an image, and the bytes that a single pass reads and writes."""
    size = x.numel() * x.element_size()
    yield "blur", lambda image: layers.blur_fir(image, padding=1), 2 * size
    yield "down", layers.downsample_fir, size * 5 // 4
    yield "up", layers.upsample_fir, 5 * size
    n, c, h, w = x.shape
    scale = torch.ones(n, c, 1, 1, device=x.device, dtype=x.dtype)
    bias, noise = scale[0].flatten(), torch.ones(n, 1, h, w, device=x.device, dtype=x.dtype)
    yield "activation", lambda image: layers.scaled_activation(image, scale, bias, noise, 256.0), 2 * size


def micro(setting: Setting, book: Book) -> None:
    """FIR and activation on [32, 64, 256, 256] in fp16, channels last: Triton, compiled, plain, and a convolution.

    On the CPU, in the small form, Triton's interpreter runs the kernels.
    """
    device = setting.torch_device
    is_cuda = device.type == "cuda"
    if not is_cuda:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        fused.kernels()
    except ImportError as error:
        raise NotThere(f"Triton ({error})") from None
    shape = (1, 2, 6, 6) if setting.small else (32, 64, 256, 256)
    dtype = torch.float16 if is_cuda else torch.float32
    x = torch.ones(shape, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    backend = "inductor" if is_cuda else "eager"
    wrong = []
    for name, function, moved in blocks(x):
        values: dict[str, Tensor] = {}
        for variant, uses_kernels, uses_sums in (
            ("convolution", False, False),
            ("plain", False, True),
            ("compiled", False, True),
            ("triton", True, True),
        ):
            if variant == "convolution" and name in ("up", "activation"):
                continue
            layers.uses_kernels = lambda _, on=uses_kernels: on  # type: ignore[misc]
            layers.uses_sums = lambda _, on=uses_sums: on  # type: ignore[misc]
            run = torch.compile(function, dynamic=False, backend=backend) if variant == "compiled" else function
            try:
                for is_backward in (False, True):
                    seconds, values[variant] = one_pass(setting, run, x, is_backward)
                    key = f"{variant}_{'both_' if is_backward else ''}ms"
                    book.row(name, **{key: 1000 * seconds})
                    if not is_backward:
                        book.row(name, **{f"{variant}_gb_per_second": moved / seconds / 1e9})
            except Exception as error:
                traceback.print_exc()
                wrong.append(f"{name} {variant}: {first_line(error)}")
        for variant, value in values.items():
            if not torch.allclose(value, values["plain"], rtol=0.01, atol=0.01):
                wrong.append(f"{name}: {variant} differs from plain code")
    if wrong:
        raise Missed("; ".join(wrong))


def one_pass(
    setting: Setting, run: Callable[[Tensor], Tensor], x: Tensor, is_backward: bool
) -> tuple[float, Tensor]:
    """Mean seconds of a forward pass, or of it with its backward pass; the output, or the gradient."""
    leaf = x.detach().requires_grad_(is_backward)
    begun, count = 0.0, 1 if setting.small else 30
    for number in range(-2 if setting.small else -5, count):
        if number == 0:
            setting.synchronize()
            begun = time.perf_counter()
        value = run(leaf)
        if is_backward:
            (value,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    setting.synchronize()
    return (time.perf_counter() - begun) / count, value.detach()
