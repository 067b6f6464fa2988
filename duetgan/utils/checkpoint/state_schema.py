"""Compare the tensors in a checkpoint with a network's, before the network loads them.

The network may be on the meta device. The checks raise `Unfit` or another ValueError that names the
first invalid key.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from duetgan.utils.config.model import Unfit
from duetgan.utils.errors import UserError

# exceptions that loading an invalid state raises
FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def check_tensor(name: str, value: object) -> Tensor:
    """Return `value` if it is a dense tensor of real numbers in memory.

    Raises ValueError otherwise, also for an expanded view, which has more elements than its
    storage. `name` is the key of the value, for the message.
    """
    if not isinstance(value, Tensor):
        raise Unfit(name, value, "a tensor")
    plain = value.layout == torch.strided and not (
        value.is_meta or value.is_quantized or value.is_complex()
    )
    if not plain or value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise ValueError(f"{name} is not a dense tensor of real numbers")
    return value


def check_tensors(name: str, state: object, expected: Mapping[str, Tensor] | None = None) -> None:
    """Check that `state` is a dict from names to dense tensors.

    If `expected` is given, its names, shapes and dtypes must be the same, except that float32 is
    accepted by a program whose default dtype is float64. Raises ValueError; `name` is the key of
    the state, for the message.
    """
    if not isinstance(state, dict):
        raise Unfit(name, state, "a mapping of names to tensors")
    for key, value in state.items():
        if not isinstance(key, str):
            raise Unfit(f"a key of {name}", key, "a name")
        check_tensor(f"{name}.{key}", value)
        if expected is not None and key not in expected:
            raise ValueError(f"{name}.{key} is not a tensor of the network")
    for key, tensor in (expected or {}).items():
        if key not in state:
            raise ValueError(f"{name}.{key} is missing")
        if tensor.dtype == torch.get_default_dtype() != state[key].dtype == torch.float32:
            tensor = tensor.float()  # a program in float64 can load float32
        if state[key].dtype != tensor.dtype or state[key].shape != tensor.shape:
            raise ValueError(f"{name}.{key} is {_kind(state[key])}, but must be {_kind(tensor)}")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def load_network(
    build: Callable[[], nn.Module], checkpoint: Mapping[str, Any], part: str, file: str
) -> nn.Module:
    """Build a network, load the state `part` of a checkpoint into it, and return it.

    The state is first compared with the network on the meta device, which allocates no memory.
    Raises UserError, which names `file` and the key, if it does not fit.
    """
    state = checkpoint["state"].get(part)
    try:
        if state is None:
            raise ValueError(f"state.{part} is missing")
        try:
            with torch.device("meta"):
                expected = build().state_dict()
            network = None
        # Networks of other libraries may compute while they are built, which needs real tensors.
        except (NotImplementedError, RuntimeError):
            network = build()
            expected = network.state_dict()
        check_tensors(f"state.{part}", state, expected)
        network = build() if network is None else network
        network.load_state_dict(state)
        return network
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except FAULTS as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{file}: does not fit the network of its config ({reason}); use another checkpoint"
        ) from error
