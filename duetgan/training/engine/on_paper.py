"""A training on paper: memory, arithmetic and bytes of its steps, and what GPUs might make of them.

The task's own step runs on tensors that have shapes and no numbers (torch's fake tensors),
operation by operation as an accelerator would do it uncompiled. Counts are exact but for the
images' augmentation; times rest on published peaks and on two numbers fitted to published
trainings: docs/predictions.md. No GPU has confirmed them yet.
"""

import contextlib
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.config import RunConfig
from duetgan.training.base.phases import PhaseClock, listening
from duetgan.training.base.task import Task
from duetgan.training.engine.preflight import GIB, PeakBytes
from duetgan.training.engine.speed import Trial
from duetgan.training.gan.ada import Ada
from duetgan.utils.text import columns, duration

EFFICIENCY = 0.75  # share of the roofline that operations reach, and
OVERHEAD = 40e-6  # seconds that each takes besides: `python benchmarks/predictions.py --fit`
MEMORIES = (24, 80, 141)  # GiB of GPUs
# share of it that tensors may have; the rest: context, cuDNN's workspaces, gaps between blocks
USABLE = 0.9


class Gpu(NamedTuple):
    """Published peaks of dense arithmetic, in FLOP/s, and of the memory."""

    name: str
    half: float  # products in half precision
    convolution: float  # in fp32: TF32
    single: float  # other products in fp32
    bandwidth: float  # bytes/s
    gib: int = 80  # of memory


CONSUMER_GPUS = (  # NVIDIA's architecture papers: tensor cores without sparsity, sums in fp32
    Gpu("RTX 5090", 209.5e12, 104.8e12, 104.8e12, 1.792e12, 32),
    Gpu("RTX 4090", 165.2e12, 82.6e12, 82.6e12, 1.008e12, 24),
    Gpu("RTX 4070", 58.3e12, 29.1e12, 29.1e12, 0.504e12, 12),
    Gpu("RTX 4060", 30.2e12, 15.1e12, 15.1e12, 0.272e12, 8),
    Gpu("RTX 3090", 71.2e12, 35.6e12, 35.6e12, 0.936e12, 24),
    Gpu("RTX 3080", 59.5e12, 29.8e12, 29.8e12, 0.760e12, 10),
    Gpu("RTX 3060", 25.4e12, 12.7e12, 12.7e12, 0.360e12, 12),
)
# what the total time may be off by: docs/predictions.md
STATED_ERROR = (
    "predicted, not measured: on the one GPU that was tried, an H200, StyleGAN2 took up to 4 times as long and small "
    "networks two thirds of it; evaluations come on top"
)
GPUS = (  # SXM modules, by NVIDIA's data sheets
    Gpu("A100", 312e12, 156e12, 19.5e12, 2.039e12),
    Gpu("H100", 989e12, 494e12, 67e12, 3.35e12),
    Gpu("H200", 989e12, 494e12, 67e12, 4.8e12, 141),
)


class Operation(NamedTuple):
    """An operation's work; `kind` is the field of `Gpu` that limits its arithmetic."""

    phase: str
    kind: str
    flop: float  # of convolutions and matrix products; a multiply-add is two
    bytes: int  # read and written


class Ledger(PeakBytes):
    """Lists the block's operations as well, but for views and bare allocations; `phase`: where
    `peak` was reached.
    """

    def __init__(self) -> None:
        super().__init__(())
        self.operations: list[Operation] = []
        self.phase = ""
        self.clock = PhaseClock(lambda: None, lambda: 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, phase = self.peak, self.clock.open[-1]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.phase = phase if self.peak > before else self.phase
        if func.namespace == "aten" and not func.is_view and "empty" not in func.name():
            tensors = [
                leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)
            ]
            moved = sum(
                min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors
            )
            half = any(x.dtype in (torch.bfloat16, torch.float16) for x in tensors[:1])
            kind = "half" if half else "convolution" if "convolution" in func.name() else "single"
            self.operations.append(
                Operation(phase, kind, arithmetic(func, args, kwargs or {}, result), moved)
            )
        return result


def arithmetic(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """FLOP of a convolution or matrix product, 0 of all else. (torch's FlopCounterMode cannot be
    taken: its module tracker refuses `autograd.grad` with respect to a leaf.)
    """
    if func is torch.ops.aten.convolution_backward.default and args[9] > 1:
        # torch's formula forgets the groups in the weight's gradient
        grad, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        strided = x if transposed else grad
        return (
            2.0
            * strided.shape[0]
            * strided.shape[2:].numel()
            * weight.numel()
            * (wanted[0] + wanted[1])
        )
    formula = flop_registry.get(func._overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


@contextlib.contextmanager
def fakes() -> Iterator[None]:
    """Tensors have shapes and no numbers; modules can be copied and need not be moved, images are
    not augmented.
    """
    with (
        mock.patch.object(nn.Module, "to", lambda network, *_args, **_options: network),
        mock.patch.object(FakeTensor, "__deepcopy__", _copy),
        mock.patch("duetgan.training.classifier.network.fit_first_filters"),  # there are no images
        # it looks at numbers
        mock.patch.object(Ada, "apply", lambda _ada, images, _draws, _rows: images),
        FakeTensorMode(allow_non_fake_inputs=True),  # constants that are kept between calls
    ):
        yield


def _copy(tensor: FakeTensor, _memo: dict[int, Any]) -> Tensor:
    """Of the same mode, which deepcopy would copy as well."""
    copy = tensor.detach().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


class Count(NamedTuple):
    """What a step of so many samples takes on one device."""

    samples: int
    task: Task  # of fake tensors
    held: int  # bytes between steps: weights, averages, moments, gradients
    peak: int  # bytes at most, these included
    phase: str  # where that is reached
    kinds: list[tuple[float, list[Operation]]]  # of steps: the share of all, and what one does

    def mean(self, of: Callable[[Operation], float]) -> float:
        """The sum over a step's operations, as the mean over the kinds of steps."""
        return sum(share * sum(map(of, operations)) for share, operations in self.kinds)

    def seconds(
        self, gpu: Gpu, efficiency: float = EFFICIENCY, overhead: float = OVERHEAD
    ) -> float:
        """What a step may take, uncompiled: an operation what its arithmetic or its bytes take, and
        the overhead.
        """
        roof = self.mean(
            lambda each: max(each.flop / getattr(gpu, each.kind), each.bytes / gpu.bandwidth)
        )
        return roof / efficiency + overhead * self.mean(lambda _: 1.0)


def count(config: RunConfig, reader: Dataset, samples: int) -> Count:
    """Count a process's steps of so many samples when all trains; `precision: auto` is bf16, no
    image is read.
    """
    config = config.changed(augment=type(vars(config)["augment"])())
    precision, kinds = "bf16" if config.precision == "auto" else config.precision, []
    with fakes(), Ledger() as ledger, listening(ledger.clock):
        trial = Trial(config, samples, reader, torch.device("cpu"))
        trial.seconds(precision)  # the optimizer makes its moments
        ledger.peak = held = ledger.live
        for step, share in trial.shares.items():
            ledger.operations = []
            trial.seconds(precision, step)
            kinds.append((share, ledger.operations))
        return Count(samples, trial.task, held, ledger.peak, ledger.phase, kinds)


def largest(small: Count, large: Count, gib: float, multiple: int = 1) -> int:
    """The most samples a pass that a GPU of so much memory holds, by a line through two counts of
    one pass each.
    """
    slope = (large.peak - small.peak) / (large.samples - small.samples)
    return (
        max(0, int(small.samples + (gib * USABLE * GIB - small.peak) / slope))
        // multiple
        * multiple
    )


def told(config: RunConfig, reader: Dataset, world_size: int) -> str:
    """Return what `--dry-run gpu` prints: a recipe's memory, speed and time on each of so many
    GPUs, without messages between them.
    """
    share, micro = config.share(world_size), config.micro(world_size)
    step = count(config, reader, share)
    one, two = (
        count(config.changed(micro_batch=None), reader, samples) for samples in (micro, 2 * micro)
    )
    work = [step.mean(attrgetter(of)) / share / 1e9 for of in ("flop", "bytes")]
    rows = {
        "memory": f"{step.peak / GIB:.2f} GiB, {step.held / GIB:.2f} of it between steps too",
        "work": f"{work[0]:,.3g} GFLOP and {work[1]:,.3g} GB an image",
    }
    table = [["GPU", "memory", "largest micro-batch", "images/s", f"all {config.steps:,} steps"]]
    for gpu in (*CONSUMER_GPUS, *GPUS):
        seconds, most = step.seconds(gpu), largest(one, two, gpu.gib, config.smallest_batch)
        speed = [f"{share / seconds:,.3g}", duration(config.steps * seconds)]
        speed = (
            speed
            if most >= micro
            else ["too little memory", f"--micro-batch {most}" if most else ""]
        )
        table.append([gpu.name, f"{gpu.gib} GiB", f"{most:,}", *speed])
    head = f"on paper, {share} samples a GPU, uncompiled (docs/predictions.md):"
    return "\n".join([head, columns(rows.items(), "<"), columns(table), STATED_ERROR])
