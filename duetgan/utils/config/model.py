"""The base classes of configurations (`Config`) and of stored documents (`Stored`).

They are strict pydantic models. An error is one line with the key, its value and the values that
are accepted.
"""

import itertools
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
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
Probability = Annotated[float, Interval(ge=0, le=1)]  # or a fraction
InnerFraction = Annotated[float, Interval(gt=0, lt=1)]
Decay = Annotated[float, Interval(ge=0, lt=1)]  # decay of a moving mean, or momentum
PositiveFraction = Annotated[float, Interval(gt=0, le=1)]
AboveOne = Annotated[float, Gt(1)]
LIMIT = 2**63  # limit of a config's numbers
Whole = Annotated[int, Interval(ge=-LIMIT, lt=LIMIT)]  # in a stored document
Count = Annotated[int, Interval(ge=0, lt=LIMIT)]  # in a stored document

NULLS = ("null", "Null", "NULL", "~")
PYDANTIC = "Input should be "  # the beginning of pydantic's messages


# --- types of fields


@cache
def hints(model: type) -> dict[str, object]:
    """Return a dict from the name to the type of each field of a model.

    The types keep their `Annotated` metadata.
    """
    return get_type_hints(model, include_extras=True)


@cache
def alternatives(hint: object) -> tuple[object, ...]:
    """Return the members of a union type, or a tuple with the type itself if it is no union.

    The result has no `Annotated` metadata and no nested unions.
    """
    if get_origin(hint) is Annotated:
        return alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(itertools.chain.from_iterable(map(alternatives, get_args(hint))))
    return (hint,)


@cache
def item_types(hint: object, *kinds: type) -> tuple[object, ...]:
    """Return the type arguments of a container type: (int,) for list[int].

    If `hint` is a union, the first member that is a container counts. Returns () if there is none.

    Args:
        kinds: the container classes that count, such as list and tuple.
    """
    for arm in alternatives(hint):
        if get_origin(arm) in kinds:
            return get_args(arm)
    return ()


def section_of(hint: object) -> type[BaseModel] | None:
    """Return the class of the section (nested model) that a field of type `hint` holds, or None."""
    for arm in alternatives(hint):
        if isinstance(arm, type) and issubclass(arm, BaseModel):
            return arm
    return None


def section_at(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the class of the section at a dotted key of `model`; None if the key is no section."""
    section: type[BaseModel] | None = model
    for part in name.split("."):
        section = section_of(hints(section)[part]) if section else None
    return section


def format_value(value: object) -> str:
    """Return a value as short text for a message.

    The text shows numbers, text, bytes, bools and None. For any other value, such as a list, it is
    only the name of the type.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, (int, float, str, bytes)):
        return type(value).__name__
    text = repr(value)
    return text if len(text) <= 42 else f"{text[:42]}..."


# --- errors


class Unfit(ValueError):
    """The error for an invalid value of `key`. `expected` describes the valid values in words."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        self.key = key
        self.problem = f" {format_value(value)}: must be {expected}"
        super().__init__(key + self.problem)


def _place(hint: object, place: Sequence[int | str]) -> tuple[str, object]:
    """Return the dotted key at a location in a model, and the type of the value there.

    Args:
        hint: the model.
        place: the location, as in pydantic's errors (`loc`).
    """
    key, parts = "", list(place)
    while parts:
        part = parts.pop(0)
        # For a union pydantic's location has the name of the alternative first.
        if len([arm for arm in alternatives(hint) if arm is not type(None)]) > 1:
            if not parts:
                break
            part = parts.pop(0)
        if section := section_of(hint):
            key, hint = f"{key}.{part}", hints(section).get(str(part), Any)
        elif items := item_types(hint, list, tuple):
            key, hint = f"{key}[{part}]", items[0]
        else:
            names, values = item_types(hint, dict) or (Any, Any)
            key, hint = f"{key}.{part}", values
            if parts == ["[key]"]:
                return key.lstrip("."), names
    return key.lstrip("."), hint


def config_error(
    error: ValidationError, model: type[BaseModel], source: str = "", overrides: Sequence[str] = ()
) -> UserError:
    """Choose one of the errors that pydantic found, and return it as a one-line UserError.

    It is an unknown key if there is one, otherwise the most deeply nested error.

    Args:
        error: pydantic's exception, which holds all errors.
        source: the name of the file, for the message.
        overrides: dotted keys that the command line sets. For an error in one of them the message
            names the command line as its source.
    """
    lines = error.errors(include_url=False)
    unknown = [line for line in lines if line["type"] in ("extra_forbidden", "invalid_key")]
    line = unknown[0] if unknown else max(lines, key=lambda line: len(line["loc"]))
    key, hint = _place(model, line["loc"])
    if unknown:
        key = ".".join(map(str, line["loc"]))
    cause = line.get("ctx", {}).get("error")
    if isinstance(cause, UserError):  # from a check; most begin with the name of a field
        section = section_of(hint)
        begins_with_field = section is not None and str(cause).split()[0] in section.model_fields
        separator = "." if begins_with_field else ": "
        return UserError(f"{key}{separator}{cause}" if key else str(cause))
    if isinstance(cause, Unfit):
        key += cause.key
        problem = cause.problem
    elif line["type"] == "missing":
        problem = " is missing"
    elif cause is not None or not line["msg"].startswith(PYDANTIC):
        problem = f": {cause or line['msg']}"
    else:
        expected = []  # by each alternative of a union
        for alternative in lines:
            if _place(model, alternative["loc"])[0] == key:
                expected.append(alternative["msg"].removeprefix(PYDANTIC))
        problem = Unfit("", line["input"], ", or ".join(dict.fromkeys(expected))).problem
    if any(f"{key}.".replace("[", ".").startswith(f"{name}.") for name in overrides):
        source = "command line"
    if unknown:
        return UnknownKey(source, key, list(keys_of(model)))
    return UserError(f"{source}: {key}{problem}".removeprefix(": "))


# --- the models


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Stored(_Strict):
    """The base class of documents that Duet stores in files, and of their parts.

    Objects cannot be changed. Unknown keys of a document are ignored.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    @classmethod
    def read(cls, document: object, name: str = "") -> Self:
        """Validate a document of plain data, and return it as an object of this class.

        Raises ValueError with the message `NAME.key VALUE: must be X`.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            problem = str(config_error(error, cls))
        separator = "" if problem.startswith(" ") else "."
        raise ValueError(f"{name}{separator}{problem}".strip("."))


class Config(_Strict):
    """A section of a configuration. Raises UserError `key value: must be ...` for an invalid value.

    A field also accepts text from a command line, which is parsed as YAML unless the field's type
    is text. A section accepts a mapping of the keys that differ from its default. Override `check`
    for conditions between fields.
    """

    model_config = ConfigDict(extra="forbid")
    # Keys of earlier versions and their defaults. Saved configs may hold these values.
    old_keys: ClassVar[Mapping[str, object]] = {}

    if not TYPE_CHECKING:  # so that type checkers see the fields as parameters

        def __init__(self, **values: Any) -> None:
            with explained(ValidationError, lambda error: config_error(error, type(self))):
                super().__init__(**values)

        # Nested sections are validated without it, so that their errors are reported together.
        __init__.__pydantic_base_init__ = True

    @model_validator(mode="before")
    @classmethod
    def _without_old_keys(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        old = cls.old_keys
        return {key: value for key, value in values.items() if key not in old or value != old[key]}

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[str(info.field_name)]
        if isinstance(field.default, Config) and isinstance(value, dict):
            return field.default.model_dump() | value
        return _read(hints(cls)[str(info.field_name)], value)

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise UserError if fields contradict each other; subclasses override this method."""

    def changed(self, **values: object) -> Self:
        """Return a validated copy in which the fields `values` are replaced."""
        return type(self)(**{**vars(self), **values})


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a configuration, including the sections, each after `prefix`."""
    for name, hint in hints(model).items():
        if name in model.model_fields:
            yield prefix + name
            if section := section_of(hint):
                yield from keys_of(section, f"{prefix}{name}.")


def _read(hint: object, value: object, place: str = "") -> object:
    """Convert a value to what a field of type `hint` takes.

    Text is parsed as YAML unless the field takes text. Items of lists and mappings are converted
    too, and numeric keys of a mapping become text if the field has text keys. Raises Unfit for a
    value that cannot be converted; `place` is its position in the field, for the message.
    """
    if isinstance(value, str) and not _is_text(hint, value):
        value = from_text(value)
    if (
        isinstance(value, bool)
        and not {bool, Any} & {*alternatives(hint)}
        and _is_text(hint, word := "on" if value else "off")
    ):
        return word  # YAML reads on and off without quotes as booleans
    if isinstance(value, (int, float)) and not abs(value) < LIMIT:  # also true for nan
        raise Unfit(place, value, "a finite number below 2^63")
    if isinstance(value, (list, tuple)) and (items := item_types(hint, list, tuple)):
        kind = list if item_types(hint, list) else tuple
        return kind(_read(items[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if isinstance(value, dict):
        key_type, value_type = item_types(hint, dict) or (Any, Any)
        result = {}
        for key, item in value.items():
            if key_type is str and isinstance(key, bool):
                raise Unfit(place, key, "a name; write yes, no, on, off, true and false in quotes")
            # A class or a layer may be called 1.
            is_numeric_name = key_type is str and type(key) in (int, float)
            name = str(key) if is_numeric_name else _read(key_type, key)
            result[name] = _read(value_type, item, f"{place}.{key}")
        return result
    return value


def _is_text(hint: object, text: str) -> bool:
    """Return True if a field of type `hint` takes this text without parsing it as YAML."""
    kinds = alternatives(hint)
    if int in kinds and text.isdecimal():
        return False
    if any(get_origin(arm) is Literal and text in get_args(arm) for arm in kinds):
        return True
    return (str in kinds or Any in kinds) and not (type(None) in kinds and text in NULLS)
