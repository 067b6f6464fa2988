"""Autocast on the device: what CUDA computes in the faster type, what in float32, what in its operands' widest."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

# operation -> arguments to try it with: sizes of tensors, "labels", numbers; `disagreeing` compares with torch's own
Arguments = tuple[Any, ...]
IMAGES, MATRIX, VECTOR, STACK = (2, 3, 8, 8), (3, 3), (3,), (2, 3, 3)
FASTER: dict[str, Arguments] = {
    "conv2d": (IMAGES, (4, 3, 3, 3)),
    "convolution": (IMAGES, (4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "conv_transpose2d.input": (IMAGES, (3, 4, 3, 3)),
    "linear": (MATRIX, MATRIX, VECTOR),
    "matmul": (MATRIX, MATRIX),
    "mm": (MATRIX, MATRIX),
    "mv": (MATRIX, VECTOR),
    "bmm": (STACK, STACK),
    "addmm": (VECTOR, MATRIX, MATRIX),
    "baddbmm": (STACK, STACK, STACK),
}
FLOAT32: dict[str, Arguments] = {
    "softplus": (MATRIX,),
    "log_softmax.int": (MATRIX, 1),
    "softmax.int": (MATRIX, 1),
    "pow.Tensor_Scalar": (MATRIX, 2),
    "rsqrt": (MATRIX,),
    "reciprocal": (MATRIX,),
    "exp": (MATRIX,),
    "log": (MATRIX,),
    "nll_loss": ((2, 3), "labels"),
    "layer_norm": (MATRIX, [3]),
    "native_layer_norm": (MATRIX, [3], None, None, 1e-5),
    "norm.Scalar": (MATRIX,),
    "linalg_vector_norm": (MATRIX,),
    "sum": (MATRIX,),
    "sum.dim_IntList": (MATRIX, [1]),
    "prod": (MATRIX,),
    "cumsum": (MATRIX, 1),
    "binary_cross_entropy_with_logits": (MATRIX, MATRIX),
    "mse_loss": (MATRIX, MATRIX),
    "_upsample_bilinear2d_aa": (IMAGES, [4, 4], False),
    "upsample_bilinear2d": (IMAGES, [16, 16], False),
    "upsample_nearest2d": (IMAGES, [16, 16]),
}
WIDEST: dict[str, Arguments] = {
    "addcmul": (MATRIX, MATRIX, MATRIX),
    "addcdiv": (MATRIX, MATRIX, MATRIX),
    "dot": (VECTOR, VECTOR),
    "index_put": (MATRIX, ["labels"], (2, 3)),
}
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


def disagreeing(mode: Any) -> list[str]:
    """Operations of the lists whose results have other types under torch's own autocast of CUDA: tensors without
    numbers ask it, no GPU is needed. `mode`: in which `sim` can be asked for tensors.
    """
    found = []
    for name, given in (FASTER | FLOAT32 | WIDEST).items():
        for types in ((0, 0, 0), (1, 1, 1), (0, 1, 1), (1, 0, 0)):
            said = []
            for device, inside in (("cuda", FakeTensorMode()), ("sim", mode)):
                with inside:
                    said.append(_type(name, given, [(torch.float32, torch.bfloat16)[each] for each in types], device))
            if said[0] != said[1]:
                found.append(f"{name} of {types}: {said}")
    return found


def _type(name: str, given: Arguments, types: list[torch.dtype], device: str) -> str:
    """Of an operation's result under autocast to bfloat16, or that it is refused."""
    order = iter(types)

    def made(value: Any) -> Any:
        if value == "labels":
            return torch.zeros(2, dtype=torch.long, device=device)
        return torch.ones(value, dtype=next(order), device=device) if isinstance(value, tuple) else value

    arguments = [[made(each) for each in value] if isinstance(value, list) else made(value) for value in given]
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)  # torch.autocast looks for a GPU first
    torch.set_autocast_dtype(device, torch.bfloat16)
    try:
        return str(tree_leaves(operation(name)(*arguments))[0].dtype)
    except RuntimeError:
        return "refused"
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
