"""Compare the state in a checkpoint with the objects that would load it, before it is loaded.

A network, which may be on the meta device, is compared name by name. The state of another part must
have the structure of that part's current state. All checks raise `Unfit` or another ValueError that
names the first key that does not fit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from duetgan.utils.config.model import Unfit
from duetgan.utils.errors import UserError

# exceptions that loading an invalid state raises
FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
# keys of a parameter group that torch does not fill in itself
REQUIRED_KEYS = {
    "params",
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "dampening",
    "nesterov",
    "counters",
}
# type of the current value, types that are accepted for it, their name in a message
Types = type | tuple[type, ...]
ACCEPTED: tuple[tuple[Types, Any, str], ...] = (
    (dict, dict, "a mapping of names"),
    ((list, tuple), (list, tuple), "a list"),
    (bool, bool, "true or false"),
    (str, str, "text"),
    (int, int, "a whole number"),
    (float, (int, float), "a number"),
    (type(None), (type(None), int, float), "a number or nothing"),
    (object, object, "anything"),
)


class HasState(Protocol):
    """A part of a training with a state to save."""

    def state_dict(self) -> Any: ...


def check_tensor(name: str, value: object) -> Tensor:
    """Return `value` if it is a real, dense tensor in memory, not an expanded view of less data.

    Raises ValueError otherwise.
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
    """Check that a state is a dict of plain tensors with the names, shapes and types of `expected`,
    if given.
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
    """Build a network and load a checkpoint's state of `part` after it was compared on the meta
    device.

    Raises UserError naming the file and the key.
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


def check_part(name: str, part: HasState, state: object) -> None:
    """Check the saved state of a part of a training: a network's tensors, or any other state's
    structure.
    """
    current = part.state_dict()
    is_network = isinstance(getattr(part, "model", part), nn.Module)
    if is_network and current and all(isinstance(value, Tensor) for value in current.values()):
        check_tensors(name, state, current)
    elif isinstance(current, dict) and "param_groups" in current:
        _check_optimizer(name, current["param_groups"], state)
    else:
        check_same_kind(name, current, state)


def _check_optimizer(name: str, current_groups: Sequence[Mapping[str, object]], state: Any) -> None:
    """Check the groups and tensors of a torch optimizer, not their match with its parameters."""
    check_same_kind(name, {"": None}, state)
    groups, tensors = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise Unfit(f"{name}.param_groups", groups, "a list of groups")
    for index, (group, current) in enumerate(zip(groups, current_groups, strict=False)):
        numbers = {}
        for key, value in current.items():
            if key in REQUIRED_KEYS and key not in group:
                raise ValueError(f"{name}.param_groups[{index}].{key} is missing")
            if key not in ("params", "param_names"):
                numbers[key] = value
        check_same_kind(f"{name}.param_groups[{index}]", numbers, group)
    if not isinstance(tensors, dict) or not all(
        isinstance(value, dict) for value in tensors.values()
    ):
        raise Unfit(f"{name}.state", tensors, "a mapping of numbers to tensors")


def check_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Check that an optimizer's saved moments match its own; the groups must match already.

    In earlier versions Adam had no moments of a parameter before its first gradient, and none at
    all before the first step.
    """
    current = optimizer.state_dict()["state"]
    saved = state["state"]
    if current:  # an optimizer without moments ignores saved ones
        check_same_kind("state", current, saved)
    for number, moments in current.items() if saved else ():
        saved_moments = saved.get(number, {})
        if not saved_moments and isinstance(optimizer, torch.optim.Adam):
            continue
        if missing := moments.keys() - saved_moments.keys():
            raise ValueError(f"state.{number}.{min(missing)} is missing")


def check_same_kind(name: str, current: object, value: Any) -> None:
    """Check that a value has the type and structure of the current value.

    A dict may have other keys and lack some, because older versions had fewer.
    """
    if isinstance(current, Tensor):
        check_tensor(name, value)
        if value.shape != current.shape:
            raise ValueError(
                f"{name} has the shape {list(value.shape)}, but must have {list(current.shape)}"
            )
        return
    accepted, words = next(row[1:] for row in ACCEPTED if isinstance(current, row[0]))
    unfit_number = isinstance(value, int) and (
        isinstance(value, bool) != isinstance(current, bool) or abs(value) >= 2**63
    )
    if not isinstance(value, accepted) or unfit_number:
        raise Unfit(name, value, words)
    if isinstance(current, dict):
        for key, item in value.items():
            if not current:
                check_same_kind(f"{name}.{key}", 0.0, item)
            elif key in current:
                check_same_kind(f"{name}.{key}", current[key], item)
    elif isinstance(current, (list, tuple)):
        kinds = {type(item) for item in current} or {int, float, str}
        kinds |= {int, float} if kinds & {int, float} else set()
        for index, item in enumerate(value):
            if type(item) not in kinds:
                raise Unfit(f"{name}[{index}]", item, "of the type of the other items")
