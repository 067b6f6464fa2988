"""A reference of all config keys: defaults, types and comments, read from the config models."""

import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from duetgan.models.registry import ARCHITECTURES
from duetgan.training.base.config import RunConfig
from duetgan.training.engine.tasks import TASKS
from duetgan.utils import extras
from duetgan.utils.config.model import Config, hints
from duetgan.utils.errors import UserError

NAMES: dict[object, str] = {
    int: "int",
    float: "float",
    str: "text",
    bool: "true|false",
    type(None): "null",
    Any: "any",
}
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
# Configs of recipes that are not for train.py and have no task, by name.
TASKLESS: dict[str, type[Config]] = {}


@dataclass(frozen=True)
class Key:
    """A config key that takes a value, not a section."""

    name: str  # dotted name
    default: str  # as in YAML
    takes: str  # type in short form
    meaning: str  # the comment beside the field


def groups() -> dict[str, list[Key]]:
    """Return the keys of all tasks by group: every run, classifier, GAN, GAN by architecture.

    Keys of every run are in that group only. The group of an architecture has only the keys that
    differ from those of the group GAN.
    """
    gans = {name: TASKS["gan"].config(name) for name in ARCHITECTURES}
    first, *architectures = gans
    configs = {"Classifier": TASKS["classifier"].config(), "GAN": gans[first]}
    result = {"Every run": list(keys(RunConfig))}
    common = {key.name for key in result["Every run"]}
    for title, config in configs.items():
        result[title] = [key for key in keys(config) if key.name not in common]
    common.add("architecture")
    for name in architectures:
        result[f"GAN with architecture {name}: what differs"] = [
            key for key in keys(gans[name]) if key.name not in common and key not in result["GAN"]
        ]
    return result


def keys(config: type[Config], prefix: str = "", values: Config | None = None) -> Iterator[Key]:
    """Yield every key of a config and its sections, in the order of the fields.

    Defaults are those of the instance `values`, or of the class if it is None.
    """
    for name, hint in hints(config).items():
        if name not in config.model_fields:
            continue
        default = config.model_fields[name].default if values is None else getattr(values, name)
        if isinstance(default, Config):
            yield from keys(type(default), f"{prefix}{name}.", default)
        else:
            text = "required" if default is PydanticUndefined else json.dumps(default)
            text = re.sub(r'^"(.+)"$', r"\1", text)
            yield Key(prefix + name, text, takes(hint), comment(config, name))


def takes(hint: object) -> str:
    """Return a type annotation in short form, such as `int>0|null`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = []
        for rule in inner[1:]:
            for name, sign in SIGNS.items():
                bound = getattr(rule, name, None)
                if bound is not None:
                    bounds.append(f"{sign}{bound:g}")
        return takes(inner[0]) + ",".join(bounds)
    if origin in (Union, types.UnionType):
        return "|".join(map(takes, inner))
    if origin is Literal:
        return "|".join(map(str, inner))
    if origin is list:
        return f"[{takes(inner[0])},...]"
    if origin is tuple:
        return f"[{takes(inner[0])},{takes(inner[1])}]"
    if origin is dict:
        return f"{{{takes(inner[0])}:{takes(inner[1])}}}"
    return NAMES.get(hint, str(hint))


def comment(config: type, name: str) -> str:
    """Return the comment beside or above a config field, from the class that declares it."""
    for declaring in config.__mro__:
        if name in (comments := _comments(declaring)):
            return comments[name]
    return ""


@cache
def _comments(config: type) -> dict[str, str]:
    try:
        lines = inspect.getsource(config).splitlines()
    except (OSError, TypeError):  # Built-in classes, and those made by a function, have no source.
        return {}
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in lines:
        field = re.match(r" {4}(\w+): ", line)
        remark = re.search(r" # (.*)", line)
        if remark:
            above.append(remark[1])
        if field:
            comments[field[1]] = re.sub(r"\bNone\b", "null", " ".join(above))
        if field or not remark:
            above = []
    return comments


def matching(word: str) -> dict[str, list[Key]]:
    """Return the keys that have `word` in their name or meaning, by group.

    Raises UserError if there are none.
    """
    word = word.lower().replace("-", "_")
    result = {}
    for title, listed in groups().items():
        matches = [key for key in listed if word in f"{key.name} {key.meaning}".lower()]
        if matches:
            result[title] = matches
    if not result:
        raise UserError(
            f"--keys {word}: no key has this in its name or meaning; `python train.py --keys` prints all"
        )
    return result


def as_text(selected: dict[str, list[Key]]) -> str:
    lines: list[str] = []
    for title, listed in selected.items():
        lines += ["", title, "=" * len(title)]
        for key in listed:
            lines.append(f"--{key.name} {key.default}")
            lines += textwrap.wrap(
                f"{key.takes}: {key.meaning}", 110, initial_indent="    ", subsequent_indent="    "
            )
    return "\n".join(lines[1:])


extras.attach(__name__)
