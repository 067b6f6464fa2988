"""Predict the memory and the speed of a training on GPUs, without using a GPU.

The training step runs on tensors that have shapes but no values (torch's fake tensors). Its
operations are counted one by one, as an accelerator would run them uncompiled, with the fused
kernels. Counts are exact except for the augmentation of images. Times follow from the published
peak rates of a GPU and from four numbers that were measured on an H200
(docs/extras/predictions.md).
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from duetgan.data.reading.dataset import Dataset
from duetgan.models import layers
from duetgan.models.layers import fused
from duetgan.training.base.config import RunConfig
from duetgan.training.base.phases import PhaseClock, listening
from duetgan.training.base.task import Task
from duetgan.training.engine.preflight import GIB
from duetgan.training.engine.speed import Trial
from duetgan.training.gan.ada import Ada
from duetgan.utils.text import columns, duration

# `python benchmarks/predictions.py --fit` compares these numbers with measured and published steps.
CONVOLUTIONS = 0.2  # fraction of the roofline that convolutions and matrix products reach
POINTWISE = 0.5  # fraction that all other operations reach
LAUNCH = 3e-6  # seconds between the kernels of two operations, also in a CUDA graph
HOST = 45e-6  # seconds of Python for each operation without a CUDA graph
MEMORIES = (24, 80, 141)  # memory sizes of GPUs in GiB
# fraction of the memory for tensors, without context, cuDNN workspaces and fragmentation
USABLE = 0.9


class Gpu(NamedTuple):
    """A GPU's published peak rates and memory size.

    The rates are those of dense arithmetic, in FLOP/s, and of the memory, in bytes/s.
    """

    name: str
    half: float  # matrix products and convolutions in half precision
    convolution: float  # convolutions in fp32, computed in TF32
    single: float  # matrix products in fp32
    bandwidth: float  # memory, bytes/s
    gib: int = 80  # memory size


CONSUMER_GPUS = (  # by NVIDIA's architecture papers: tensor cores, no sparsity, sums in fp32
    Gpu("RTX 5090", 209.5e12, 104.8e12, 104.8e12, 1.792e12, 32),
    Gpu("RTX 4090", 165.2e12, 82.6e12, 82.6e12, 1.008e12, 24),
    Gpu("RTX 4070", 58.3e12, 29.1e12, 29.1e12, 0.504e12, 12),
    Gpu("RTX 4060", 30.2e12, 15.1e12, 15.1e12, 0.272e12, 8),
    Gpu("RTX 3090", 71.2e12, 35.6e12, 35.6e12, 0.936e12, 24),
    Gpu("RTX 3080", 59.5e12, 29.8e12, 29.8e12, 0.760e12, 10),
    Gpu("RTX 3060", 25.4e12, 12.7e12, 12.7e12, 0.360e12, 12),
)
# error of the predicted total time (docs/extras/predictions.md)
STATED_ERROR = (
    "predicted, not measured: within a factor of 1.5 of an H200's steps without graphs and kernels; "
    "graphs and kernels have run on no GPU; evaluations take additional time"
)
GPUS = (  # SXM modules, by NVIDIA's data sheets
    Gpu("A100", 312e12, 156e12, 19.5e12, 2.039e12),
    Gpu("H100", 989e12, 494e12, 67e12, 3.35e12),
    Gpu("H200", 989e12, 494e12, 67e12, 4.8e12, 141),
)


class Operation(NamedTuple):
    """The work of one operation on tensors.

    `kind` names the field of `Gpu` that has the peak rate of its arithmetic.
    """

    phase: str
    kind: str
    flop: float  # of convolutions and matrix products; a multiply-add counts as two
    bytes: int  # bytes read and written

    def roofline(self, gpu: Gpu) -> float:
        """Return the seconds for the arithmetic or for moving the bytes, whichever is longer.

        Both are computed from the peak rates of `gpu`.
        """
        peak: float = getattr(gpu, self.kind)
        return max(self.flop / peak, self.bytes / gpu.bandwidth)


class PeakBytes(TorchDispatchMode):
    """A context manager that counts the bytes of the tensors that are created inside its block.

    `live` is the current number of bytes, `peak` the largest number so far. Tensors that share a
    storage count once. Tensors in the storage of one of `existing` do not count.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: WeakIdKeyDictionary = WeakIdKeyDictionary(
            {tensor.untyped_storage(): 0 for tensor in existing}
        )

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage in self._storages:
                continue
            self._storages[storage] = size = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, size)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


class Ledger(PeakBytes):
    """A counter of bytes that also records every operation in `operations`.

    Views and bare allocations are not recorded. `phase` is the training phase in which the memory
    peak was reached.
    """

    def __init__(self) -> None:
        super().__init__(())
        self.operations: list[Operation] = []
        self.phase = ""
        self.clock = PhaseClock(lambda: None, lambda: 0.0)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        previous_peak, phase = self.peak, self.clock.open[-1]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak > previous_peak:
            self.phase = phase
        if func.namespace == "aten" and not func.is_view and "empty" not in func.name():
            flop = arithmetic(func, args, kwargs or {}, result)
            kind = "convolution" if "convolution" in func.name() else "single"
            self.add(tree_leaves((args, kwargs, result)), flop, kind)
        return result

    def add(self, leaves: Iterable[object], flop: float = 0.0, kind: str = "single") -> None:
        """Record an operation that reads or writes each tensor among `leaves` once.

        `flop` and `kind` are those of the `Operation`. If the first tensor has 16 bits, the kind is
        "half" instead.
        """
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        moved = 0
        for x in tensors:
            moved += min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
        if tensors and tensors[0].dtype in (torch.bfloat16, torch.float16):
            kind = "half"
        self.operations.append(Operation(self.clock.open[-1], kind, flop, moved))


class Kernels:
    """A replacement for the module `triton_kernels` that computes nothing.

    Its functions record each call in a ledger and return empty tensors.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def fir(self, x: Tensor, kind: str, gain: float, padding: int) -> Tensor:
        sides = {"blur": [side + 2 * padding - 3 for side in x.shape[2:]]}
        sides["down"] = [side // 2 for side in x.shape[2:]]
        sides["up"] = [2 * side for side in x.shape[2:]]
        y = x.new_empty((*x.shape[:2], *sides[kind]))
        self.ledger.add((x, y))
        return y

    def activation(
        self,
        x: Tensor | None,
        scale: Tensor | None,
        bias: Tensor | None,
        noise: Tensor | None,
        limit: float | None,
        *,
        out: Tensor | None = None,
        second: Tensor | None = None,
        second_scale: Tensor | None = None,
        y: Tensor | None = None,
        sums: tuple[bool, ...] = (False, False, False),
    ) -> tuple[Tensor | None, ...]:
        image = x if y is None else y
        assert image is not None
        result = torch.empty_like(image) if out is None else out
        self.ledger.add((result, x, second, y, noise))
        n, channels, height, width = image.shape
        shapes = ((n, channels, 1, 1), (channels,), (n, 1, height, width))
        totals = [
            image.new_empty(shape, dtype=torch.float32) if is_needed else None
            for shape, is_needed in zip(shapes, sums, strict=True)
        ]
        return result, *totals


def arithmetic(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, object], result: object
) -> float:
    """Return the number of floating-point operations of a convolution or matrix product, else 0.

    torch's FlopCounterMode cannot be used: its module tracker refuses `autograd.grad` with respect
    to a leaf.
    """
    if func is torch.ops.aten.convolution_backward.default and args[9] > 1:
        # torch's formula ignores a convolution's groups in the gradient of its weight.
        grad, x, weight = args[:3]
        transposed, output_mask = args[7], args[10]
        strided = x if transposed else grad
        multiply_adds = strided.shape[0] * strided.shape[2:].numel() * weight.numel()
        return 2.0 * multiply_adds * (output_mask[0] + output_mask[1])
    formula = flop_registry.get(func._overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


@contextlib.contextmanager
def fakes() -> Iterator[None]:
    """Give all tensors shapes but no values inside the block (FakeTensorMode).

    Inside the block, modules can be copied, `Module.to` does nothing, and ADA leaves images
    unchanged.
    """
    with (
        mock.patch.object(nn.Module, "to", lambda network, *_args, **_options: network),
        mock.patch.object(FakeTensor, "__deepcopy__", _copy),
        mock.patch("duetgan.training.classifier.network.fit_first_filters"),  # reads images
        # The operations of this augmentation depend on values.
        mock.patch.object(Ada, "apply", lambda _ada, images, _draws, _rows: images),
        FakeTensorMode(allow_non_fake_inputs=True),  # modules cache constants between calls
    ):
        yield


def _copy(tensor: FakeTensor, _memo: dict[int, object]) -> Tensor:
    """Copy a tensor within its fake mode; the original `__deepcopy__` would copy the mode too."""
    copy = tensor.detach().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


class Count(NamedTuple):
    """The memory and the operations of a training step with `samples` samples on one device."""

    samples: int
    task: Task  # built of fake tensors
    held: int  # bytes between steps: weights, averages, moments, gradients
    peak: int  # largest number of bytes, including `held`
    phase: str  # training phase in which the peak is reached
    # for each kind of step: its fraction of all steps, and the operations of one
    kinds: list[tuple[float, list[Operation]]]

    def mean(self, value: Callable[[Operation], float]) -> float:
        """Sum `value` over the operations of a step, and return the mean over all steps."""
        total = 0.0
        for fraction, operations in self.kinds:
            total += fraction * sum(map(value, operations))
        return total

    def roofline(self, gpu: Gpu) -> float:
        """Return the mean seconds of a step at the GPU's peak rates."""
        return self.mean(lambda operation: operation.roofline(gpu))

    def seconds(self, gpu: Gpu, *, graphs: bool = False) -> float:
        """Predict the mean seconds of an uncompiled step, in CUDA graphs or launched by Python.

        An operation takes its roofline time, divided by the fraction of the roofline that
        operations of its kind reach in practice, plus LAUNCH. Without graphs, a step takes at least
        the time that Python needs to launch its operations.
        """

        def kernel(operation: Operation) -> float:
            reached = CONVOLUTIONS if operation.flop else POINTWISE
            return operation.roofline(gpu) / reached + LAUNCH

        device = self.mean(kernel)
        return device if graphs else max(device, HOST * self.mean(lambda _: 1.0))


def count(config: RunConfig, dataset: Dataset, samples: int, *, kernels: bool = True) -> Count:
    """Count the memory and the operations of one process's steps with `samples` samples.

    No image is read. If `kernels` is True, FIR resampling and activations count as fused kernels.
    Layers are frozen as in the last step of the run. If the image size changes during the run, they
    are frozen as in the last step of each size. The key `augment` counts as its default, and
    `precision: auto` as bf16.
    """
    config = config.changed(augment=type(vars(config)["augment"])())
    precision = "bf16" if config.precision == "auto" else config.precision
    kinds = []
    with fakes(), Ledger() as ledger, listening(ledger.clock), contextlib.ExitStack() as stack:
        if kernels:
            # A mock in the place of is_tensor would keep every image that it is called with.
            stack.enter_context(mock.patch.object(layers, "uses_kernels", torch.is_tensor))
            stack.enter_context(mock.patch.object(fused, "kernels", return_value=Kernels(ledger)))
        trial = Trial(config, samples, dataset, torch.device("cpu"))
        trial.seconds(precision)  # The optimizer allocates its moments.
        ledger.peak = held = ledger.live
        for step, fraction in trial.step_fractions.items():
            ledger.operations = []
            trial.seconds(precision, step)
            kinds.append((fraction, ledger.operations))
        return Count(samples, trial.task, held, ledger.peak, ledger.phase, kinds)


def largest(small: Count, large: Count, gib: float, multiple: int) -> int:
    """Return the largest number of samples that fit a GPU of `gib` GiB in one pass.

    The result is a multiple of `multiple`. The peak memory is assumed to be a linear function of
    the number of samples. Two counts determine this function: `small` with few samples, `large`
    with more.
    """
    slope = (large.peak - small.peak) / (large.samples - small.samples)
    samples = small.samples + (gib * USABLE * GIB - small.peak) / slope
    return max(0, int(samples)) // multiple * multiple


def predictions(config: RunConfig, dataset: Dataset, world_size: int) -> str:
    """Return the text of `--dry-run gpu`: memory, speed and duration of a training on each GPU.

    The training uses `world_size` GPUs. The exchange of gradients between them is left out.
    """
    rank_batch, micro = config.rank_batch(world_size), config.micro(world_size)
    step = count(config, dataset, rank_batch)
    one_pass = config.changed(micro_batch=None)
    small, large = count(one_pass, dataset, micro), count(one_pass, dataset, 2 * micro)
    gflop = step.mean(lambda operation: operation.flop) / rank_batch / 1e9
    gigabytes = step.mean(lambda operation: operation.bytes) / rank_batch / 1e9
    rows = {
        "memory": f"{step.peak / GIB:.2f} GiB, {step.held / GIB:.2f} of it between steps too",
        "work": f"{gflop:,.3g} GFLOP and {gigabytes:,.3g} GB an image",
    }
    heads = ["GPU", "memory", "largest micro-batch", "images/s", "in CUDA graphs"]
    table = [[*heads, f"all {config.steps:,} steps"]]
    for gpu in (*CONSUMER_GPUS, *GPUS):
        fits = largest(small, large, gpu.gib, config.smallest_batch)
        if fits >= micro:
            eager, seconds = step.seconds(gpu), step.seconds(gpu, graphs=True)
            speed = [f"{rank_batch / eager:,.3g}", f"{rank_batch / seconds:,.3g}"]
            speed.append(duration(config.steps * seconds))
        else:
            speed = ["too little memory", f"--micro-batch {fits}" if fits else ""]
        table.append([gpu.name, f"{gpu.gib} GiB", f"{fits:,}", *speed])
    head = f"on paper, {rank_batch} samples a GPU, uncompiled (docs/extras/predictions.md):"
    return "\n".join([head, columns(rows.items(), "<"), columns(table), STATED_ERROR])
