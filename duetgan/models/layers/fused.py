"""Use of the fused CUDA kernels in `triton_kernels`, and autograd functions of the activation.

The kernels replace FIR resampling and the activation after a convolution, for which torch's
operators pass over the image several times. The plain code of `duetgan.models.layers` runs instead
on other devices, without Triton, in graphs of torch.compile and in exports.
"""

import functools
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from duetgan.models.layers.convolution import Context

KernelSetting = Literal["auto", "off"]

setting: KernelSetting = "auto"  # the config key `kernels`; off: plain code everywhere


def kernels() -> ModuleType:
    """Return the module `triton_kernels`; importing it needs Triton."""
    from duetgan.models.layers import triton_kernels

    return triton_kernels


def can_use(x: Tensor) -> bool:
    """Return True if `x` is a CUDA tensor, `setting` is "auto", and no graph is being recorded.

    `problem` tells whether the kernels run on the device of `x`.
    """
    # The tensors that exports and compilers trace have no memory.
    is_real = type(x) is Tensor and not torch.jit.is_tracing() and not torch.compiler.is_compiling()
    return setting == "auto" and x.is_cuda and is_real


@functools.cache
def problem(device: torch.device) -> str:
    """Return the reason why the kernels do not run on a device; "" if they run."""
    if device.type != "cuda":
        return f"{device.type} is not a CUDA device"
    try:
        image = torch.ones(1, 1, 4, 4, device=device)
        kernels().fir(image, "blur", 1.0, 1)
        kernels().activation(image, None, None, None, None)
    except Exception as error:  # Triton may be missing; it needs a C compiler and certain GPUs
        message = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {message[:200]}"
    return ""


def describe(device: torch.device) -> str:
    """Return "Triton" if GANs use the kernels on a device, else "plain" and the reason."""
    reason = "kernels is off" if setting == "off" else problem(device)
    return f"plain, because {reason}" if reason else "Triton"


class Activation(torch.autograd.Function):
    """Autograd function clamp(leaky_relu(x * scale + bias + noise)), computed by one kernel.

    It can be differentiated twice. If `scale` is None, the output overwrites x, provided that x is
    dense. The shapes are those of `layers.scaled_activation`.
    """

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        scale: Tensor | None,
        bias: Tensor,
        noise: Tensor | None,
        limit: float | None,
    ) -> Tensor:
        out = x if scale is None else None
        y, *_ = kernels().activation(x, scale, bias, noise, limit, out=out)
        if y is x:
            ctx.mark_dirty(x)
        ctx.save_for_backward(None if scale is None else x, scale, y)
        ctx.limit = limit
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, y = ctx.saved_tensors
        gradients = _Gradient.apply(grad, x, scale, y, ctx.limit, ctx.needs_input_grad[1:4])
        return *gradients, None


class _Gradient(torch.autograd.Function):
    """Autograd function that computes the gradients of `Activation` for x, scale, bias and noise.

    `y` is the output of `Activation`.
    """

    @staticmethod
    def forward(
        ctx: Context,
        grad: Tensor,
        x: Tensor | None,
        scale: Tensor | None,
        y: Tensor,
        limit: float | None,
        sums: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(None if scale is None else grad, x, scale, y)
        ctx.limit = limit
        ctx.set_materialize_grads(False)
        second = x if sums[0] else None
        return kernels().activation(grad, scale, None, None, limit, second=second, y=y, sums=sums)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context,
        outer_x: Tensor | None,
        outer_scale: Tensor | None,
        outer_bias: Tensor | None,
        outer_noise: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        grad, x, scale, y = ctx.saved_tensors
        activation = functools.partial(kernels().activation, limit=ctx.limit, y=y)
        # The gradients are linear in grad, with terms like the activation's, and bilinear in grad
        # and the scale, and in grad and x.
        grad_gradient, *_ = activation(
            outer_x,
            None if outer_x is None else scale,
            outer_bias,
            outer_noise,
            second=None if outer_scale is None else x,
            second_scale=outer_scale,
        )
        x_gradient = None
        scale_gradient = None
        if scale is not None:
            sums = (outer_x is not None, False, False)
            x_gradient, scale_gradient, _, _ = activation(
                grad, outer_scale, None, None, second=outer_x, sums=sums
            )
        if outer_scale is None:
            x_gradient = None
        return grad_gradient, x_gradient, scale_gradient, None, None, None
