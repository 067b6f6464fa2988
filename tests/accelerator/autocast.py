"""Autocast on the device: what CUDA computes in the faster type, and what in float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten
FASTER = (
    *(aten.conv2d.default, aten.convolution.default, aten.conv_transpose2d.input, aten.linear.default),
    *(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
)
FLOAT32 = (
    *(aten.softplus.default, aten.log_softmax.int, aten.softmax.int, aten.pow.Tensor_Scalar, aten.rsqrt.default),
    *(aten.exp.default, aten.log.default, aten.nll_loss.default, aten.cross_entropy_loss.default),
    *(aten.layer_norm.default, aten.norm.Scalar, aten.sum.default, aten.sum.dim_IntList, aten.cumsum.default),
    aten.binary_cross_entropy_with_logits.default,
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_libraries: list[torch.library.Library] = []  # they end with what they registered


def register() -> None:
    """Everything falls through but these."""
    fallback, library = (torch.library.Library(name, "IMPL", "AutocastPrivateUse1") for name in ("_", "aten"))
    fallback.fallback(torch.library.fallthrough_kernel)
    for operations, dtype in ((FASTER, None), (FLOAT32, torch.float32)):
        for operation in operations:
            library.impl(operation, _casting(operation, dtype))
    _libraries.extend([fallback, library])


def _casting(operation: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        to = dtype or torch.get_autocast_dtype("sim")

        def cast(each: Any) -> Any:
            return each.to(to) if isinstance(each, torch.Tensor) and each.dtype in FLOATS else each

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run
