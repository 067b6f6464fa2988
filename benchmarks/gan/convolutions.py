"""The dense convolutions of a piece of work: recorded while it runs, counted in floating-point operations, run bare."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST_KERNEL = 3  # of the networks; autograd's derivatives use images of 4 px and more as kernels
SECOND_DERIVATIVE = "ConvolutionBackwardBackward0"  # autograd's node


class Layout(NamedTuple):
    """Of a tensor; the values do not matter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self, device: torch.device) -> Tensor:
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        numbers = torch.empty(extent, dtype=self.dtype, device=device).normal_()
        return numbers.as_strided(self.shape, self.stride)  # which may be an expanded one


class Call(NamedTuple):
    """A convolution, or its gradients; what it takes to run it again."""

    x: Layout
    weight: Layout
    grad: Layout | None  # of the output; None: the convolution itself
    wanted: tuple[bool, bool, bool]  # gradients of x, weight and bias; of a convolution itself: (_, _, has bias)
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    transposed: bool
    groups: int

    def output_shape(self) -> tuple[int, ...]:
        if self.grad is not None:
            return self.grad.shape
        kernel, pixels = self.weight.shape[2:], self.x.shape[2:]
        sides = zip(pixels, kernel, self.stride, self.padding, strict=True)
        if self.transposed:
            channels = self.weight.shape[1] * self.groups
            return (self.x.shape[0], channels, *((n - 1) * s - 2 * p + k for n, k, s, p in sides))
        return (self.x.shape[0], self.weight.shape[0], *((n + 2 * p - k) // s + 1 for n, k, s, p in sides))

    def flops(self) -> int:
        """Multiplications and additions: 2 x pixels of the strided side x weights, for each gradient wanted."""
        n, _, height, width = self.x.shape if self.transposed else self.output_shape()
        runs = 1 if self.grad is None else self.wanted[0] + self.wanted[1]
        return runs * 2 * n * height * width * torch.Size(self.weight.shape).numel()

    def runner(self, device: torch.device) -> Callable[[], Any]:
        """A function that does it on random numbers."""
        x, weight = self.x.make(device), self.weight.make(device)
        shape = (list(self.stride), list(self.padding), [1, 1], self.transposed, [0, 0], self.groups)
        if self.grad is None:
            bias = weight.new_zeros(self.output_shape()[1]) if self.wanted[2] else None
            return lambda: torch.ops.aten.convolution(x, weight, bias, *shape)
        grad, sizes = self.grad.make(device), [self.grad.shape[1]] if self.wanted[2] else None
        return lambda: torch.ops.aten.convolution_backward(grad, x, weight, sizes, *shape, list(self.wanted))


class Recorder(TorchDispatchMode):
    """While it is entered: every dense convolution and every gradient of one, in `calls` with how often it ran.

    Depthwise ones (the FIR filters) are none. Autograd's second derivative takes the gradient of a weight by a
    convolution with an image as its kernel: it counts as the gradient that it is, as a convolution's own backward
    would compute it.
    """

    def __init__(self, *, channels_last: bool) -> None:
        super().__init__()
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            x, weight, bias, stride, padding, dilation, transposed, _, groups = args
            if not _depthwise(weight, groups):
                wanted = (False, False, bias is not None)
                call = Call(
                    Layout.of(x), Layout.of(weight), None, wanted, tuple(stride), tuple(padding), transposed, groups
                )
                node = torch._C._current_autograd_node()
                if node is not None and node.name() == SECOND_DERIVATIVE and max(weight.shape[2:]) > LARGEST_KERNEL:
                    call = _weight_gradient(call, dilation, result, self.memory_format)
                self.calls[call] += 1
        elif func is torch.ops.aten.convolution_backward.default:
            grad, x, weight, _, stride, padding, _, transposed, _, groups, wanted = args
            if not _depthwise(weight, groups):
                layouts = (Layout.of(x), Layout.of(weight), Layout.of(grad))
                self.calls[Call(*layouts, tuple(wanted), tuple(stride), tuple(padding), transposed, groups)] += 1
        return result


def _depthwise(weight: Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[1] == 1


def _weight_gradient(call: Call, dilation: Sequence[int], result: Tensor, memory_format: torch.memory_format) -> Call:
    """The gradient of a weight [O, I, k, k] that was computed as convolution of x [I, N, H, W] with grad [O, N, h, w].

    A stride of the original appears as dilation, and may leave a row too many in the result, which is cut off later:
    k is odd.
    """
    (i, n, *pixels), (o, _, *outputs) = call.x.shape, call.weight.shape
    kernel = [size - 1 + size % 2 for size in result.shape[2:]]
    x, weight, grad = (
        Layout.of(torch.empty(shape, dtype=call.x.dtype, device="meta").to(memory_format=memory_format))
        for shape in ((n, i, *pixels), (o, i, *kernel), (n, o, *outputs))
    )
    return Call(x, weight, grad, (False, True, False), tuple(dilation), call.padding, transposed=False, groups=1)


def flops(calls: Mapping[Call, float]) -> float:
    return sum(call.flops() * count for call, count in calls.items())


def bare_seconds(calls: Mapping[Call, float], device: torch.device, runs: int = 3) -> float:
    """What the calls take with nothing around them: medians of `runs` runs of each, times its count."""
    total = 0.0
    for call, count in calls.items():
        run = call.runner(device)
        run()
        times = []
        for _ in range(runs):
            _synchronise(device)
            started = time.perf_counter()
            run()
            _synchronise(device)
            times.append(time.perf_counter() - started)
        total += statistics.median(times) * count
    return total


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
