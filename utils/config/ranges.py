"""Ranges of config keys: types that say which numbers a key takes, and one check of all of them.

The rules are jsonargparse's restricted numbers. They stand in `Annotated`, so that values stay plain numbers, which
YAML and checkpoints can hold. Whatever its rule, a number of a config is finite and below 2^63.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse import typing as rules
from jsonargparse.typing import restricted_number_type

from utils.errors import UserError

PositiveInt = Annotated[int, rules.PositiveInt]
NonNegativeInt = Annotated[int, rules.NonNegativeInt]
PositiveFloat = Annotated[float, rules.PositiveFloat]
NonNegativeFloat = Annotated[float, rules.NonNegativeFloat]
Probability = Annotated[float, rules.ClosedUnitInterval]  # or a share: 0 to 1
InnerShare = Annotated[float, rules.OpenUnitInterval]  # neither 0 nor 1
Decay = Annotated[float, restricted_number_type(None, float, [(">=", 0), ("<", 1)])]  # of a mean; momentum
Share = Annotated[float, restricted_number_type(None, float, [(">", 0), ("<=", 1)])]  # not 0
AboveOne = Annotated[float, restricted_number_type(None, float, (">", 1))]

FINITE = "a finite number below 2^63"
WORDS = {"v>=": "at least ", "v<=": "at most ", "v>": "above ", "v<": "below "}


def at_least(limit: int) -> Any:
    """For `Annotated[int, at_least(2)]`."""
    return restricted_number_type(None, int, (">=", limit))


def between(low: float, high: float, kind: type = int) -> Any:
    """For `Annotated[int, between(1, 8)]`, `Annotated[float, between(0, 9, float)]`; both ends are allowed."""
    return restricted_number_type(None, kind, [(">=", low), ("<=", high)])


@dataclass(kw_only=True)
class Checked:
    """Base of config dataclasses: a number outside its field's range raises UserError `section.key value: must be ...`.

    Checks across fields stand in a `__post_init__` that calls this one first.
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str | None = None) -> None:
        if section is not None:
            cls.section = section

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), f"{self.section}." if self.section else "")


def check_ranges(config_class: type, values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise UserError for the first of the `values` that its field's type does not allow."""
    for name, hint in _hints(config_class).items():
        if name in values:
            _check(prefix + name, values[name], hint)


@cache
def _hints(config_class: type) -> dict[str, Any]:
    return get_type_hints(config_class, include_extras=True)


def _check(key: str, value: Any, hint: Any) -> None:
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for arm in arms:
        plain, *bounds = get_args(arm) if get_origin(arm) is Annotated else (arm,)
        kind, inside = get_origin(plain) or plain, get_args(plain)
        if plain in (int, float) and isinstance(value, (int, float)):
            words = [word for other in arms for word in _words(other)]
            _check_number(key, value, plain, bounds, "".join(f", or {word}" for word in words))
        elif kind is dict and isinstance(value, dict):
            for name, item in value.items():
                _check(key, name, inside[0])
                _check(f"{key}.{name}", item, inside[1])
        elif kind in (list, tuple) and isinstance(value, (list, tuple)):
            for item in value:
                _check(key, item, inside[0])
        elif hasattr(value, "__dict__") and hasattr(kind, "__dataclass_fields__"):
            check_ranges(kind, vars(value), f"{key}.")


def _words(arm: Any) -> Sequence[str]:
    """What may be given instead of a number."""
    return get_args(arm) if get_origin(arm) is Literal else ["null"] if arm is type(None) else []


def _check_number(key: str, value: float, kind: type, bounds: list[Any], otherwise: str) -> None:
    rule = "a whole number" if kind is int and isinstance(value, float) else ""
    if not abs(value) < 2**63:  # nan is none either
        rule = FINITE
    try:
        for bound in bounds if abs(value) < 2**63 or isinstance(value, float) else []:
            bound(value)
    except ValueError as error:  # "-1 does not conform to restriction v>0"
        rule = str(error).rpartition("restriction ")[2]
        for sign, words in WORDS.items():
            rule = rule.replace(sign, words)
    if rule:
        raise UserError(f"{key} {_shown(value)}: must be {rule}{otherwise}")


def check_finite(key: str, value: float) -> None:
    """Raise UserError for a number that no key takes, whatever its type."""
    if not abs(value) < 2**63:
        raise UserError(f"{key} {_shown(value)}: must be {FINITE}")


def _shown(value: float) -> str:
    """A number in a message; Python does not write whole ones of more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"(of {value.bit_length()} bits)"
    return str(value)
