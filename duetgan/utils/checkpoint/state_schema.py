"""The state in a checkpoint is compared with what would load it, before anything of it is loaded or
allocated.

`network` (perhaps on the meta device) is compared name by name; for other parts their own state is
the pattern. All of these raise `Unfit` or another ValueError, naming the first key that does not
fit.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from duetgan.utils.config.model import Unfit
from duetgan.utils.errors import UserError

# of a state that is odd
FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
# of a group of parameters: what torch does not fill in itself
NEEDED = {
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
LIKE: tuple[tuple[Any, Any, str], ...] = (  # the kind of our own value, what goes for it, in words
    (dict, dict, "a mapping of names"),
    ((list, tuple), (list, tuple), "a list"),
    (bool, bool, "true or false"),
    (str, str, "text"),
    (int, int, "a whole number"),
    (float, (int, float), "a number"),
    (type(None), (type(None), int, float), "a number or nothing"),
    (object, object, "anything"),
)


def check_tensor(name: str, value: Any) -> None:
    """A whole tensor of real numbers in memory, none that stands for more than is stored."""
    if not isinstance(value, Tensor):
        raise Unfit(name, value, "a tensor")
    plain = value.layout == torch.strided and not (
        value.is_meta or value.is_quantized or value.is_complex()
    )
    if not plain or value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise ValueError(f"{name} is no plain tensor")


def check_tensors(name: str, state: Any, wanted: Mapping[str, Tensor] | None = None) -> None:
    """A dict of plain tensors; those of `wanted` by name, shape and type where it is given."""
    if not isinstance(state, dict):
        raise Unfit(name, state, "a mapping of names to tensors")
    for key, value in state.items():
        if not isinstance(key, str):
            raise Unfit(f"a key of {name}", key, "a name")
        check_tensor(f"{name}.{key}", value)
        if wanted is not None and key not in wanted:
            raise ValueError(f"{name}.{key} is none of the network's")
    for key, own in (wanted or {}).items():
        if key not in state:
            raise ValueError(f"{name}.{key} is missing")
        if own.dtype == torch.get_default_dtype() != state[key].dtype == torch.float32:
            own = own.float()  # a program in float64 loads what was stored in float32
        there, here = (
            [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
            for tensor in (state[key], own)
        )
        if there != here:
            raise ValueError(
                f"{name}.{key} is {there[0]} {there[1:]}, but must be {here[0]} {here[1:]}"
            )


def loaded(
    build: Callable[[], nn.Module], checkpoint: Mapping[str, Any], part: str, file: str
) -> nn.Module:
    """The network that `build` makes, with a checkpoint's state of `part`: compared on the meta
    device first.

    Raises UserError naming the file and the key.
    """
    state = checkpoint["state"].get(part)
    try:
        if state is None:
            raise ValueError(f"state.{part} is missing")
        try:
            with torch.device("meta"):
                wanted = build().state_dict()
            network = None
        except (
            NotImplementedError,
            RuntimeError,
        ):  # another library's, which computes while it is built
            network = build()
            wanted = network.state_dict()
        check_tensors(f"state.{part}", state, wanted)
        network = build() if network is None else network
        network.load_state_dict(state)
        return network
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except FAULTS as error:
        told = " ".join(str(error).split())[:300]
        raise UserError(
            f"{file}: does not fit the network of its config ({told}); use another checkpoint"
        ) from error


def check_part(name: str, part: Any, state: Any) -> None:
    """The state of a part of a training: a network's by its tensors, others by the pattern of their
    own.
    """
    own = part.state_dict()
    network = getattr(part, "model", part)
    if (
        isinstance(network, nn.Module)
        and own
        and all(isinstance(value, Tensor) for value in own.values())
    ):
        check_tensors(name, state, own)
    elif isinstance(own, dict) and "param_groups" in own:
        _check_optimizer(name, own["param_groups"], state)
    else:
        check_like(name, own, state)


def _check_optimizer(name: str, known_groups: list[dict[str, Any]], state: Any) -> None:
    """Groups and tensors of torch's optimizers. Whether the groups are the same ones is for who
    loads them.
    """
    check_like(name, {"": None}, state)
    groups, tensors = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise Unfit(f"{name}.param_groups", groups, "a list of groups")
    for place, (group, known) in enumerate(zip(groups, known_groups, strict=False)):
        if (
            missing := next((key for key in known if key in NEEDED and key not in group), None)
        ) is not None:
            raise ValueError(f"{name}.param_groups[{place}].{missing} is missing")
        numbers = {
            key: value for key, value in known.items() if key not in ("params", "param_names")
        }
        check_like(f"{name}.param_groups[{place}]", numbers, group)
    if not isinstance(tensors, dict) or not all(
        isinstance(value, dict) for value in tensors.values()
    ):
        raise Unfit(f"{name}.state", tensors, "a mapping of numbers to tensors")


def check_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """What an optimizer keeps of each parameter is like its own. The groups must be the optimizer's
    own.

    Earlier versions' Adam had no moments of a parameter before its first gradient, none at all
    before the first step.
    """
    own, saved = optimizer.state_dict()["state"], state["state"]
    if own:  # else it keeps none of what there may have been
        check_like("state", own, saved)
    for number, known in own.items() if saved else ():
        kept = saved.get(number, {})
        missing = (
            known.keys() - kept.keys()
            if kept or not isinstance(optimizer, torch.optim.Adam)
            else ()
        )
        if missing:
            raise ValueError(f"state.{number}.{min(missing)} is missing")


def check_like(name: str, own: Any, value: Any) -> None:
    """A value of the same kind as our own. A dict may have other keys and lack some: older versions
    had fewer.
    """
    if isinstance(own, Tensor):
        check_tensor(name, value)
        if value.shape != own.shape:
            raise ValueError(
                f"{name} has the shape {list(value.shape)}, but must have {list(own.shape)}"
            )
        return
    accepted, words = next(like[1:] for like in LIKE if isinstance(own, like[0]))
    unfit_number = isinstance(value, int) and (
        isinstance(value, bool) != isinstance(own, bool) or abs(value) >= 2**63
    )
    if not isinstance(value, accepted) or unfit_number:
        raise Unfit(name, value, words)
    if isinstance(own, dict):
        for key, item in value.items():
            if not own:
                check_like(f"{name}.{key}", 0.0, item)
            elif key in own:
                check_like(f"{name}.{key}", own[key], item)
    elif isinstance(own, (list, tuple)):
        kinds = {type(item) for item in own} or {int, float, str}
        kinds |= {int, float} if kinds & {int, float} else set()
        for place, item in enumerate(value):
            if type(item) not in kinds:
                raise Unfit(f"{name}[{place}]", item, "of the type of its fellows")
