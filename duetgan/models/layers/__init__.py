"""Layers that several GANs use: equalised learning rate, scaled activation, FIR resampling.

Formulas: Karras et al., StyleGAN (1812.04948) and StyleGAN2 (1912.04958).
"""

import contextlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.models.layers import fused
from duetgan.models.layers.convolution import Context, Geometry, convolve
from duetgan.models.layers.convolution import compute_dtype as compute_dtype
from duetgan.models.layers.fp16 import LayerPrecision
from duetgan.models.layers.scaling import scaled, twice
from duetgan.utils.distributed import collectives

LEAKY_SLOPE = 0.2
ACTIVATION_GAIN = math.sqrt(2)


def normalize_second_moment(x: Tensor) -> Tensor:
    """Scale `x` [N, F, ...] to unit mean square over F, as StyleGAN2 does with its input z."""
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-8)


Parameters = dict[str, Tensor]  # parameters of a layer by name, times their gains


class Equalized(nn.Module):
    """Base class of layers with equalised learning rate: each pass scales parameters by `gains`."""

    gains: dict[str, float]  # names of the parameters, and their gains
    precision: LayerPrecision | None = None  # None: the layer runs without autocast
    # Inside `scaled_together`: the products that calls of `scaled_parameters` return alternately.
    ready: deque[Parameters] | None = None

    def scaled_parameters(self, dtype: torch.dtype) -> Parameters:
        """Return the parameters times their gains, as `dtype`."""
        if self.ready is None:
            return _by_layer([self], _scaled([self], dtype))[0]
        self.ready.rotate()
        return self.ready[0]


def _scaled(layers: Sequence[Equalized], dtype: torch.dtype) -> list[Tensor]:
    tensors = [getattr(layer, name) for layer in layers for name in layer.gains]
    return scaled(tensors, [gain for layer in layers for gain in layer.gains.values()], dtype)


def _by_layer(layers: Sequence[Equalized], tensors: Iterable[Tensor]) -> list[Parameters]:
    results = iter(tensors)
    return [{name: next(results) for name in layer.gains} for layer in layers]


@contextlib.contextmanager
def scaled_together(network: nn.Module) -> Iterator[None]:
    """Multiply all layers' parameters by their gains once, for all passes inside the block.

    The parameters must not change inside the block. Passes use two copies of the products
    alternately, so that one operator adds the gradients of two passes. With several processes, the
    parameters of each child of the network (or entry of a list of children) are multiplied
    separately, so that their gradients can be sent while the backward pass goes on. If blocks are
    nested, layers of the outer block keep its products in the inner one.
    """
    is_single = collectives.world_size() == 1
    groups: dict[object, tuple[torch.dtype, list[Equalized]]] = {}
    for name, layer in network.named_modules():
        if isinstance(layer, Equalized) and layer.ready is None:
            weight = next(layer.parameters())
            dtype = weight.dtype if layer.precision is None else layer.precision.dtype(weight)
            child = "" if is_single else ".".join(name.split(".")[:2])
            key = (dtype, weight.requires_grad, child)
            groups.setdefault(key, (dtype, []))[1].append(layer)
    try:
        for dtype, group in groups.values():
            copies = [_by_layer(group, tensors) for tensors in twice(_scaled(group, dtype))]
            for layer, *pair in zip(group, *copies, strict=True):
                layer.ready = deque(pair)
        yield
    finally:
        for _, group in groups.values():
            for layer in group:
                layer.ready = None


class EqualizedLinear(Equalized):
    """Fully connected layer with equalised learning rate, [N, in_features] -> [N, out_features].

    The weight starts as N(0, 1) / lr_multiplier. Each pass multiplies it by lr_multiplier /
    sqrt(in_features), and the bias by lr_multiplier. If `activation` is True, a leaky ReLU follows,
    and its output is multiplied by sqrt(2). `gain` scales the output.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias_init: float = 0.0,
        lr_multiplier: float = 1.0,
        activation: bool = False,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / lr_multiplier)
        self.bias = nn.Parameter(torch.full([out_features], bias_init / lr_multiplier))
        # leaky ReLU is positively homogeneous, so its gain goes into the product
        bias_gain = lr_multiplier * gain * (ACTIVATION_GAIN if activation else 1.0)
        self.gains = {"weight": bias_gain / math.sqrt(in_features), "bias": bias_gain}
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, **self.scaled_parameters(x.dtype))
        return F.leaky_relu(x, LEAKY_SLOPE, inplace=True) if self.activation else x


class EqualizedConv2d(Equalized):
    """Convolution with equalised learning rate, optionally with downsampling before it.

    The input is [N, in_channels, H, W]; the output is [N, out_channels, H, W]. If `downsample` is
    True, H and W are halved by FIR downsampling. A bias follows if `bias` is True, and a leaky ReLU
    times sqrt(2) if `activation` is True. `gain` also scales the output (sqrt(0.5) on residual
    branches). To save an operation, both factors are multiplied into weights and bias. Without
    `precision` the layer must run without autocast.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        precision: LayerPrecision | None = None,
        *,
        downsample: bool = False,
        bias: bool = True,
        activation: bool = True,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        self.downsample = downsample
        self.activation = activation
        bias_gain = gain * (ACTIVATION_GAIN if activation else 1.0)
        self.gains = {"weight": bias_gain / math.sqrt(in_channels * kernel_size**2)}
        if bias:
            self.gains["bias"] = bias_gain

    def forward(self, x: Tensor, limit: float | None = None) -> Tensor:
        """Return the output, clamped to +-limit if a limit is given and there is an activation."""
        parameters = self.scaled_parameters(compute_dtype(x))
        weight, bias = parameters["weight"], parameters.get("bias")
        kernel_size = weight.shape[-1]
        geometry = Geometry(padding=kernel_size // 2)
        if self.downsample and kernel_size == 1:
            x = downsample_fir(x)
        elif self.downsample:
            # A blur at full resolution, then a convolution with stride; the blur's padding makes
            # the output H/2.
            x = blur_fir(x, padding=kernel_size // 2 + 1)
            geometry = Geometry(stride=2)
        if self.activation:
            return activated_convolution(x, weight, bias, geometry, limit)
        return convolve(x, weight, bias, geometry)


def clamped(x: Tensor, limit: float | None) -> Tensor:
    """Return `x` clamped to +-limit; `x` itself if `limit` is None."""
    return x if limit is None else x.clamp(-limit, limit)


def activated_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, limit: float | None = None
) -> Tensor:
    """Return `convolve`'s output after a leaky ReLU, clamped to +-limit if a limit is given."""
    if bias is not None and uses_kernels(x):
        x = convolve(x, weight, None, geometry)
        return fused.Activation.apply(x, None, bias, None, limit)
    x = convolve(x, weight, bias, geometry)
    # In place, because no derivative of a convolution needs its output.
    return clamped(F.leaky_relu(x, LEAKY_SLOPE, inplace=True), limit)


class _ScaledActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, scale: Tensor, bias: Tensor, noise: Tensor | None
    ) -> Tensor:
        y = torch.addcmul(bias, x, scale)
        if noise is not None:
            y.add_(noise)
        y = F.leaky_relu(y, LEAKY_SLOPE, inplace=True)
        ctx.save_for_backward(x, scale, y)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, y = ctx.saved_tensors
        # y has the sign of the activation's input.
        grad = torch.ops.aten.leaky_relu_backward(grad, y, LEAKY_SLOPE, True)
        needed = ctx.needs_input_grad
        return (
            grad * scale if needed[0] else None,
            (grad * x).sum(dim=(2, 3), keepdim=True) if needed[1] else None,
            grad.sum(dim=(0, 2, 3), keepdim=True) if needed[2] else None,
            grad.sum(dim=1, keepdim=True) if needed[3] else None,
        )


def scaled_activation(
    x: Tensor, scale: Tensor, bias: Tensor, noise: Tensor | None, limit: float | None
) -> Tensor:
    """Return leaky_relu(x * scale + bias + noise), the step after a modulated convolution.

    The output is clamped to +-limit if a limit is given. The function can be differentiated twice.
    Its backward pass needs only the inputs and the output, and passes over the image once less than
    autograd's derivative of addcmul.

    Args:
        x: [N, C, H, W].
        scale: [N, C, 1, 1]; all tensors have the same dtype.
        bias: [C].
        noise: [N or 1, 1, H, W] or None.
    """
    if uses_kernels(x):
        return fused.Activation.apply(x, scale, bias, noise, limit)
    bias = bias[None, :, None, None]
    if torch.jit.is_tracing():  # TensorBoard's graph: the tracer cannot record a custom node
        x = torch.addcmul(bias, x, scale)
        return clamped(F.leaky_relu(x if noise is None else x + noise, LEAKY_SLOPE), limit)
    return clamped(_ScaledActivation.apply(x, scale, bias, noise), limit)


def pointwise(x: Tensor, filters: Tensor) -> Tensor:
    """Apply a 1x1 convolution to `x` [N, I, H, W], with different filters for each sample.

    `filters` are [N, O, I]. The output [N, O, H, W] has the memory format of `x`.
    """
    # The product has the memory format of x, so that its gradient has it, too.
    if x.is_contiguous(memory_format=torch.channels_last):
        n, _, h, w = x.shape
        rows = x.permute(0, 2, 3, 1).flatten(1, 2)  # [N, H W, I], a view
        return torch.bmm(rows, filters.transpose(1, 2)).view(n, h, w, -1).permute(0, 3, 1, 2)
    return torch.bmm(filters, x.flatten(2)).unflatten(2, x.shape[2:])


# --- FIR resampling
# The low-pass filter is [1, 3, 3, 1] x [1, 3, 3, 1]. It is symmetric, so the transpose of a blur is
# a blur, and downsampling and upsampling are each other's transpose. The gradient of each operation
# is written as its transpose, which in turn has a gradient. Autograd's derivatives of the
# convolutions below would compute gradients of the constant taps, use slow kernels (the backward of
# a strided depthwise convolution, bf16 on the CPU: 16 times slower) and, for the second derivative,
# a loop over the channels.

TAPS = (1.0, 3.0, 3.0, 1.0)
TRANSPOSED = {"blur": "blur", "down": "up", "up": "down"}  # operation -> its transpose

_KernelKey = tuple[float, torch.dtype, torch.device]
# Kernels are cached because building one in each call would cost seven launches.
_kernels: dict[_KernelKey, Tensor] = {}


def fir_kernel(channels: int, gain: float, x: Tensor) -> Tensor:
    """Return a depthwise kernel [channels, 1, k, k] in the dtype and on the device of `x`.

    The kernel is the outer product of TAPS with itself, scaled so that its sum is `gain`.
    """
    make = _make_kernel if torch.compiler.is_dynamo_compiling() else constant_kernel
    return make(gain, x.dtype, x.device).expand(channels, 1, -1, -1)


def _make_kernel(gain: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the kernel of `fir_kernel` for one channel, [1, 1, k, k].

    The kernel is filled on the device, without a host copy. Compiled graphs call this in each pass
    instead of reading the cache, because a cached kernel would add guards, and because torch 2.11
    accepts only one constant in a graph.
    """
    line = torch.cat([torch.full((1,), tap, dtype=dtype, device=device) for tap in TAPS])
    return (torch.outer(line, line) * (gain / sum(TAPS) ** 2))[None, None]


def constant_kernel(gain: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the kernel that `_make_kernel` would make, from a cache."""
    key = (gain, dtype, device)
    kernel = _kernels.get(key)
    if kernel is None:
        with torch.inference_mode(False):
            kernel = _make_kernel(gain, dtype, device)
        if type(kernel) is Tensor:  # not a stand-in of torch.export
            _kernels[key] = kernel
    return kernel


def _run(x: Tensor, kind: str, gain: float, padding: int) -> Tensor:
    """Resample `x` [N, C, H, W] with the FIR low-pass; `kind` is blur, down or up.

    `gain` and `padding` are as in `blur_fir`; upsampling ignores `padding`. Upsampling is bilinear
    interpolation times gain / 4, except in the outermost rows and columns, where the filter reads
    zeros beyond the border. A depthwise transposed convolution would be 3 (fp32) to 40 (bf16) times
    slower on the CPU.
    """
    if uses_kernels(x):
        return fused.kernels().fir(x, kind, gain, padding)
    if kind == "up":
        x = x if gain == 4 else x * (gain / 4)  # at the low resolution, where it is cheapest
        with torch.autocast(x.device.type, enabled=False):  # CUDA's autocast would return fp32
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
        # the outermost rows, then the outermost columns
        x[:, :, :: x.shape[2] - 1].mul_(0.75)
        x[..., :: x.shape[3] - 1].mul_(0.75)
        return x
    channels, stride = x.shape[1], 2 if kind == "down" else 1
    if not uses_sums(x):
        return F.conv2d(
            x, fir_kernel(channels, gain, x), stride=stride, padding=padding, groups=channels
        )
    x = F.pad(x, [padding] * 4)
    height, width = x.shape[2] - 3, x.shape[3] - 3
    rows = [x[:, :, k : k + height : stride] for k in range(4)]
    x = 0.125 * (rows[0] + rows[3]) + 0.375 * (rows[1] + rows[2])
    columns = [x[..., k : k + width : stride] for k in range(4)]
    return (columns[0] + columns[3]) * (gain / 8) + (columns[1] + columns[2]) * (gain * 3 / 8)


def uses_sums(x: Tensor) -> bool:
    """Return True if a sum of shifted images is faster for `x` than a depthwise convolution.

    It is faster on CUDA, because cuDNN has no kernel for 4x4 depthwise filters: such convolutions
    took 70 % of StyleGAN2's step on an H200 (docs/measurements/gpu.md). torch.compile also fuses
    the sum.
    """
    return x.is_cuda


class _Resample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, kind: str, gain: float, padding: int) -> Tensor:
        ctx.operation = (kind, gain, padding)
        return _run(x, kind, gain, padding)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        kind, gain, padding = ctx.operation
        if kind == "blur":
            padding = len(TAPS) - 1 - padding
        return _resample(grad, TRANSPOSED[kind], gain, padding), None, None, None


def _resample(x: Tensor, kind: str, gain: float, padding: int) -> Tensor:
    # Without a gradient plain operators run, so that exports and compilers meet no custom node.
    if torch.is_grad_enabled() and x.requires_grad and not torch.jit.is_tracing():
        return _Resample.apply(x, kind, gain, padding)
    return _run(x, kind, gain, padding)


def blur_fir(x: Tensor, *, padding: int, gain: float = 1.0) -> Tensor:
    """Apply the FIR low-pass, with taps that add up to `gain` and zero padding of 0 to 3 px.

    [N, C, H, W] -> [N, C, H + 2 padding - 3, W + 2 padding - 3].
    """
    return _resample(x, "blur", gain, padding)


def downsample_fir(x: Tensor) -> Tensor:
    """Apply the FIR low-pass with zero padding, then halve H and W, which must be even.

    [N, C, H, W] -> [N, C, H/2, W/2].
    """
    return _resample(x, "down", 1.0, 1)


def upsample_fir(x: Tensor) -> Tensor:
    """Double H and W: insert zeros, then apply the FIR low-pass with gain 4 (2 per axis).

    [N, C, H, W] -> [N, C, 2H, 2W].
    """
    return _resample(x, "up", 4.0, 1)


# --- fused kernels


def uses_kernels(x: Tensor) -> bool:
    """Return True if the CUDA kernels of `fused` are used for the images `x`."""
    return fused.can_use(x) and not fused.problem(x.device)
