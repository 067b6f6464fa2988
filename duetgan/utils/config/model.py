"""The base of every configuration (`Config`) and of every document that was stored (`Stored`):
strict pydantic models whose errors are one line with the key, its value and what it takes.
"""

import types
from collections.abc import Iterator, Sequence
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Interval
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from duetgan.utils.config.cli import UnknownKey
from duetgan.utils.config.yaml_files import from_text
from duetgan.utils.errors import UserError, explained

PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Probability = Annotated[float, Interval(ge=0, le=1)]  # or a share
InnerShare = Annotated[float, Interval(gt=0, lt=1)]
Decay = Annotated[float, Interval(ge=0, lt=1)]  # of a mean; momentum
Share = Annotated[float, Interval(gt=0, le=1)]
AboveOne = Annotated[float, Gt(1)]
LIMIT = 2**63  # of the size of a config's numbers
Whole = Annotated[int, Interval(ge=-LIMIT, lt=LIMIT)]  # of a stored document
Count = Annotated[int, Interval(ge=0, lt=LIMIT)]  # likewise

BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Any: "any value",
    dict: "a mapping of names",
    list: "a list",
}
NULLS = ("null", "Null", "NULL", "~")


# --- what a field takes


@cache
def hints(model: type) -> dict[str, Any]:
    """The type of each field, with what narrows it."""
    return get_type_hints(model, include_extras=True)


@cache
def arms(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type, without what narrows them."""
    if get_origin(hint) is Annotated:
        return arms(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(arm for each in get_args(hint) for arm in arms(each))
    return (hint,)


@cache
def inside(hint: Any, *kinds: type) -> tuple[Any, ...]:
    """What the list, tuple or dict among a type's alternatives holds; empty where there is none."""
    return next((get_args(arm) for arm in arms(hint) if get_origin(arm) in kinds), ())


def section_of(hint: Any) -> "type[_Strict] | None":
    """The model among a type's alternatives."""
    return next(
        (arm for arm in arms(hint) if isinstance(arm, type) and issubclass(arm, _Strict)), None
    )


def section_at(model: type["_Strict"], name: str) -> "type[_Strict] | None":
    """The model of a dotted key; None where the key takes a value."""
    section: type[_Strict] | None = model
    for part in name.split("."):
        section = section_of(hints(section)[part]) if section else None
    return section


def takes(hint: Any) -> str:
    """A type in words: `a whole number above 0, or null`."""
    origin, within = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        bounds = [
            f"{words} {bound:,}" if isinstance(bound, int) else f"{words} {bound:g}"
            for rule in within[1:]
            for name, words in BOUNDS.items()
            if (bound := getattr(rule, name, None)) is not None and abs(bound) < LIMIT
        ]
        bounds += [
            f"such as {rule.examples[0]}" for rule in within[1:] if getattr(rule, "examples", None)
        ]
        return f"{takes(within[0])} {' and '.join(bounds)}".rstrip()
    if origin in (Union, types.UnionType):
        return ", or ".join(map(takes, within))
    if origin is Literal:
        return "one of " * (len(within) > 1) + ", ".join(map(str, within))
    if origin is list and within:
        return f"a list of: {takes(within[0])}"
    if origin is tuple:
        return f"a pair of: {takes(within[0])}"
    if origin is dict and within:
        return f"a mapping of {takes(within[0])} to {takes(within[1])}"
    if section := section_of(hint):
        return (
            "a section with keys of its own"
            if issubclass(section, Config)
            else "a mapping of names"
        )
    return NAMES.get(origin) or str(hint)


def shown(value: Any) -> str:
    """A value in a message: short, and no number of thousands of digits."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return (
            f"(of {value.bit_length()} bits)"
            if isinstance(value, int) and abs(value) > 2**128
            else str(value)
        )
    if not isinstance(value, (str, bytes)):
        return type(value).__name__
    return repr(value) if len(value) <= 40 else f"{value[:40]!r}..."


# --- what is wrong


class Unfit(ValueError):
    """What is wrong: `key`, its `value`, what it takes (`expected`), `how` that is written; or a
    `problem`.
    """

    def __init__(
        self, key: str, value: Any, expected: str, how: str = "", problem: str = ""
    ) -> None:
        self.key, self.value, self.expected, self.problem = key, value, expected, problem
        self.refusal = problem or f" {shown(value)}: must be {expected}{how}"
        super().__init__(key + (problem or f" is {shown(value)}, but must be {expected}"))


def _place(hint: Any, place: Sequence[Any]) -> tuple[str, Any]:
    """The dotted key of pydantic's `place` in a model, and the type that belongs there."""
    key, parts = "", list(place)
    while parts:
        part = parts.pop(0)
        # the name of an alternative comes first
        if len([arm for arm in arms(hint) if arm is not type(None)]) > 1:
            if not parts:
                break
            part = parts.pop(0)
        if section := section_of(hint):
            key, hint = f"{key}.{part}", hints(section).get(part, Any)
        elif items := inside(hint, list, tuple):
            key, hint = f"{key}[{part}]", items[0]
        else:
            names, values = inside(hint, dict) or (Any, Any)
            key, hint = f"{key}.{part}", values
            if parts == ["[key]"]:
                return key.lstrip("."), names
    return key.lstrip("."), hint


def _wrong(error: ValidationError, model: type["_Strict"]) -> UserError | Unfit:
    """The first thing that is wrong, an unknown key before others: UnknownKey, UserError of a
    check, or Unfit.
    """
    lines = error.errors(include_url=False)
    unknown = [line for line in lines if line["type"] in ("extra_forbidden", "invalid_key")]
    line = unknown[0] if unknown else max(lines, key=lambda line: len(line["loc"]))
    if unknown:
        return UnknownKey("", ".".join(map(str, line["loc"])), list(keys_of(model)))
    (key, hint), cause = _place(model, line["loc"]), line.get("ctx", {}).get("error")
    if isinstance(cause, UserError):  # of a check; most begin with the name of a field
        fields = section.model_fields if (section := section_of(hint)) else ()
        return UserError(
            f"{key}{'.' if str(cause).split()[0] in fields else ': '}{cause}" if key else str(cause)
        )
    if isinstance(cause, Unfit):
        return Unfit(key + cause.key, cause.value, cause.expected)
    if cause is not None:
        return Unfit(key, None, "", problem=f": {cause}")
    if line["type"] == "missing":
        return Unfit(key, None, "", problem=" is missing")
    return Unfit(key, line["input"], takes(hint), _how(key, hint, line["input"]))


def _how(key: str, hint: Any, value: Any) -> str:
    """How a list, a mapping or a section is written, where text was given."""
    if section := section_of(hint):
        return f", such as {key}.{next(iter(section.model_fields))}"
    if isinstance(value, (str, int, float)) and inside(hint, list, tuple):
        return f', written "[{value}]"'
    return ', written "{name: value}"' if isinstance(value, str) and inside(hint, dict) else ""


def refused(
    error: ValidationError, model: type["_Strict"], source: str = "", overrides: Sequence[str] = ()
) -> UserError:
    """What is wrong with a configuration, in a line; `overrides`: the dotted keys that the command
    line gave.
    """
    wrong = _wrong(error, model)
    if not isinstance(wrong, (UnknownKey, Unfit)):
        return wrong
    key = wrong.name if isinstance(wrong, UnknownKey) else wrong.key
    typed = any(f"{key}.".replace("[", ".").startswith(f"{name}.") for name in overrides)
    source = "command line" if typed else source
    if isinstance(wrong, UnknownKey):
        return UnknownKey(source, wrong.name, wrong.known)
    return UserError(f"{source}: ".lstrip(": ") + f"{key}{wrong.refusal}")


# --- the models


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Stored(_Strict):
    """A document that was stored, or a part of one. Keys that the model lacks are left unread."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @classmethod
    def read(cls, document: Any, name: str = "") -> Self:
        """The model of a document. Raises ValueError: `NAME.key is VALUE, but must be WHAT`."""
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            wrong = _wrong(error, cls)
        if not isinstance(wrong, Unfit):
            raise wrong
        raise Unfit(
            f"{name}.{wrong.key}".strip("."), wrong.value, wrong.expected, problem=wrong.problem
        )


class Config(_Strict):
    """A section of a configuration. Raises UserError `key value: must be ...` for what a field does
    not take.

    A field takes text, too, as a command line has it: YAML, unless the field's type is text. A
    section takes a mapping of the keys that differ from its default. Checks across fields stand in
    `check`.
    """

    model_config = ConfigDict(extra="forbid")

    if not TYPE_CHECKING:  # type checkers shall see the fields

        def __init__(self, **values: Any) -> None:
            with explained(ValidationError, lambda why: refused(why, type(self))):
                super().__init__(**values)

        # sections inside are validated without it: their errors come together
        __init__.__pydantic_base_init__ = True

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        if isinstance(field.default, Config) and isinstance(value, dict):
            return field.default.model_dump() | value
        return _read(hints(cls)[str(info.field_name)], value)

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise UserError for fields that do not fit one another."""

    def changed(self, **values: Any) -> Self:
        """A copy with other values, checked as a new one is."""
        return type(self)(**{**vars(self), **values})


def keys_of(model: type[_Strict], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration, sections included."""
    for name, hint in hints(model).items():
        if name in model.model_fields:
            yield prefix + name
            if section := section_of(hint):
                yield from keys_of(section, f"{prefix}{name}.")


def _read(hint: Any, value: Any, place: str = "") -> Any:
    """A value for a field of this type, where text may stand for what is no text, and a number for
    a name.
    """
    if isinstance(value, str) and not _is_text(hint, value):
        value = from_text(value)
    if (
        isinstance(value, bool)
        and not {bool, Any} & {*arms(hint)}
        and _is_text(hint, word := "on" if value else "off")
    ):
        return word  # YAML reads it so without quotes
    if isinstance(value, (int, float)) and not abs(value) < LIMIT:  # nan is none either
        raise Unfit(place, value, "a finite number below 2^63")
    if isinstance(value, (list, tuple)) and (items := inside(hint, list, tuple)):
        kind = list if inside(hint, list) else tuple
        return kind(_read(items[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if isinstance(value, dict):
        keys, items = inside(hint, dict) or (Any, Any)
        named = keys is str  # a class or a layer may be called 1
        if named and (odd := [key for key in value if isinstance(key, bool)]):
            raise Unfit(place, odd[0], "a name; write yes, no, on, off, true and false in quotes")
        return {
            str(key) if named and type(key) in (int, float) else _read(keys, key): _read(
                items, item, f"{place}.{key}"
            )
            for key, item in value.items()
        }
    return value


def _is_text(hint: Any, text: str) -> bool:
    """Whether a field takes this text as it is."""
    kinds = arms(hint)
    if int in kinds and text.isdecimal():
        return False
    if any(get_origin(arm) is Literal and text in get_args(arm) for arm in kinds):
        return True
    return (str in kinds or Any in kinds) and not (type(None) in kinds and text in NULLS)
