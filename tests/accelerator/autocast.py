"""Autocast on the device: what CUDA computes in the faster type, what in float32, what in its operands' widest."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

# operations, as CUDA's autocast has them
FASTER = ("conv2d", "convolution", "conv_transpose2d.input", "linear", "matmul", "mm", "mv", "bmm", "addmm", "baddbmm")
FLOAT32 = (
    *("softplus", "log_softmax.int", "softmax.int", "pow.Tensor_Scalar", "rsqrt", "reciprocal", "exp", "log"),
    *("nll_loss", "layer_norm", "native_layer_norm", "norm.Scalar", "linalg_vector_norm", "sum", "sum.dim_IntList"),
    *("prod", "cumsum", "binary_cross_entropy_with_logits", "mse_loss", "_upsample_bilinear2d_aa"),
    *("upsample_bilinear2d", "upsample_nearest2d"),
)
WIDEST = ("addcmul", "addcdiv", "dot", "index_put")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # the widest last
_libraries: list[torch.library.Library] = []  # they end with what they registered
_has = torch._C._dispatch_has_kernel_for_dispatch_key


def register() -> None:
    """Everything falls through but what CUDA casts; what it casts and is in no list here is refused."""
    fallback, library = (torch.library.Library(name, "IMPL", "AutocastPrivateUse1") for name in ("_", "aten"))
    fallback.fallback(torch.library.fallthrough_kernel)
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    for name in sorted(name for name in names if _has(f"aten::{name}", "AutocastCUDA")):
        library.impl(name, _casting(name))
    _libraries.extend([fallback, library])


def operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _casting(name: str) -> Callable[..., Any]:
    keys, call = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1), operation(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if name in FASTER:
            to = torch.get_autocast_dtype("sim")
        elif name in FLOAT32:
            to = torch.float32
        elif name in WIDEST:
            to = max((x.dtype for x in tree_leaves(args) if _casts(x)), key=FLOATS.index, default=torch.float32)
        else:
            raise NotImplementedError(f"{name}: CUDA's autocast casts it, and tests/accelerator/autocast.py does not")
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return call(*tree_map(lambda x: x.to(to) if _casts(x) else x, args), **kwargs)

    return run


def _casts(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS
