"""A reference of all config keys, read from the config models: names, defaults, types, and the
comments beside them.
"""

import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import PydanticUndefined

from duetgan.models.registry import ARCHITECTURES, DEFAULT
from duetgan.training.base.config import RunConfig
from duetgan.training.engine.tasks import TASKS
from duetgan.utils.config.model import Config, hints
from duetgan.utils.errors import UserError

NAMES = {
    int: "int",
    float: "float",
    str: "text",
    bool: "true|false",
    type(None): "null",
    Any: "any",
}
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True)
class Key:
    """A config key that takes a value."""

    name: str  # dotted
    default: str  # as in YAML
    takes: str
    meaning: str  # the comment beside the field


def groups() -> dict[str, list[Key]]:
    """The keys of all tasks by what they belong to; a key that several have is in the first only."""
    gans = {name: TASKS["gan"].config(name) for name in ARCHITECTURES}
    first, *others = gans
    configs = {"Classifier": TASKS["classifier"].config(), "GAN": gans[first]}
    result = {"Every run": list(keys(RunConfig))}
    shared = {key.name for key in result["Every run"]}
    result |= {
        title: [key for key in keys(config) if key.name not in shared]
        for title, config in configs.items()
    }
    for name in others:
        own = [key for key in keys(gans[name]) if key.name not in shared | {"architecture"}]
        result[f"GAN with architecture {name}: what differs"] = [
            key for key in own if key not in result["GAN"]
        ]
    return result


def keys(config: type[Config], prefix: str = "", values: Any = None) -> Iterator[Key]:
    """Every key of a config and its sections, in the fields' order, with the defaults of `values`,
    an instance.
    """
    for name, hint in hints(config).items():
        if name not in config.model_fields:
            continue
        default = config.model_fields[name].default if values is None else getattr(values, name)
        if isinstance(default, Config):
            yield from keys(type(default), f"{prefix}{name}.", default)
        else:
            text = "required" if default is PydanticUndefined else json.dumps(default)
            yield Key(
                prefix + name, re.sub(r'^"(.+)"$', r"\1", text), takes(hint), comment(config, name)
            )


def takes(hint: Any) -> str:
    """A type in short: `int>0|null`."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [
            (sign, getattr(rule, name, None)) for rule in inside[1:] for name, sign in SIGNS.items()
        ]
        return takes(inside[0]) + ",".join(
            f"{sign}{bound:g}" for sign, bound in bounds if bound is not None
        )
    if origin in (Union, types.UnionType):
        return "|".join(map(takes, inside))
    if origin is Literal:
        return "|".join(map(str, inside))
    if origin in (list, tuple):
        return f"[{takes(inside[0])},{'...' if origin is list else takes(inside[1])}]"
    if origin is dict:
        return f"{{{takes(inside[0])}:{takes(inside[1])}}}"
    return NAMES.get(hint, str(hint))


def comment(config: type, name: str) -> str:
    """The comment beside or above a field, in the class that has it."""
    return next(
        (comments[name] for each in config.__mro__ if name in (comments := _comments(each))), ""
    )


@cache
def _comments(config: type) -> dict[str, str]:
    try:
        lines = inspect.getsource(config).splitlines()
    except (OSError, TypeError):  # a class of Python's own, or one that was made by a function
        return {}
    comments, above = {}, []
    for line in lines:
        field, said = re.match(r" {4}(\w+): ", line), re.search(r" # (.*)", line)
        above += [said[1]] if said else []
        if field:
            comments[field[1]] = re.sub(r"\bNone\b", "null", " ".join(above))
        if field or not said:
            above = []
    return comments


def matching(word: str) -> dict[str, list[Key]]:
    """The groups with the keys that have `word` in name or meaning. Raises UserError where there is
    none.
    """
    word = word.lower().replace("-", "_")
    result = {
        title: [key for key in listed if word in f"{key.name} {key.meaning}".lower()]
        for title, listed in groups().items()
    }
    if not any(result.values()):
        raise UserError(
            f"--keys {word}: no key has this in its name or meaning; `python train.py --keys` prints all"
        )
    return {title: listed for title, listed in result.items() if listed}


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


def as_markdown(selected: dict[str, list[Key]]) -> str:
    """The lists of the page of keys, one a section. What was said of a key before is not said
    again.
    """
    lines: list[str] = []
    before: dict[str, dict[Any, str]] = {}  # section -> what is said of a key -> its default
    said: set[Any] = set()
    for title, listed in selected.items():
        lines += [f"## {title}", ""]
        for section in sorted(
            dict.fromkeys(key.name.rpartition(".")[0] for key in listed), key=bool
        ):
            keys = [key for key in listed if key.name.rpartition(".")[0] == section]
            inside = {
                (key.name.rpartition(".")[2], key.takes, key.meaning): key.default for key in keys
            }
            alike = {  # sections that have the same keys -> those with other defaults
                name: [
                    f"`{about[0]}: {text}`"
                    for about, text in inside.items()
                    if others[about] != text
                ]
                for name, others in before.items()
                if inside.keys() == others.keys()
                or (inside.keys() <= others.keys() and "differs" in title)
            }
            lines += [f"### {section}", ""] if section else []
            if alike:
                like, differing = min(
                    alike.items(), key=lambda item: (item[0] != section, len(item[1]))
                )
                lines.append(
                    f"As `{like}`" + f", but {', '.join(differing)}" * bool(differing) + "."
                )
            else:
                new = [key for key, about in zip(keys, inside, strict=True) if about not in said]
                lines += [
                    f"- `{key.name}: {key.default}` `{key.takes}` {_plain(key.meaning)}"
                    for key in new
                ]
                again = [f"`{about[0]}: {text}`" for about, text in inside.items() if about in said]
                lines += [f"- As above: {', '.join(again)}."] if again else []
            before.setdefault(section, inside)
            said |= inside.keys()
            lines.append("")
    wrapped = [
        "\n".join(textwrap.wrap(line, 120, subsequent_indent="  " * line.startswith("-")))
        for line in lines
    ]
    return "\n".join(wrapped)


def _plain(text: str) -> str:
    """Text in which Markdown finds nothing of its own but code."""
    parts = text.split("`")
    parts[::2] = [
        re.sub(r"[\\*_<>\[\]]|(?<=\d)[.)](?= |$)", r"\\\g<0>", part) for part in parts[::2]
    ]
    return "`".join(parts)


class _Documented(GenerateJsonSchema):
    """A model's schema with the comments of its fields."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        result = super().model_schema(schema)
        for name, field in result["properties"].items():
            field["description"] = comment(schema["cls"], name)
        return result


def schema(others: Mapping[str, type[Config]]) -> dict[str, Any]:
    """The JSON schema of a recipe, which editors complete and check by: of a task, and of the
    `others` without one.
    """
    gans = {name: TASKS["gan"].config(name) for name in ARCHITECTURES}
    configs = {"classifier": TASKS["classifier"].config(), **gans, **others}
    places, generated = models_json_schema(
        [(config, "validation") for config in configs.values()], schema_generator=_Documented
    )
    refs = {name: places[config, "validation"] for name, config in configs.items()}
    task = {"properties": {"task": {"enum": list(TASKS)}}, "required": ["task"]}
    cases = [_if({"task": "classifier"}, refs["classifier"])]
    cases += [_if({"task": "gan", "architecture": name}, refs[name]) for name in gans]
    no_architecture = {
        "if": {"required": ["task", "architecture"]},
        "else": _if({"task": "gan"}, refs[DEFAULT]),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of configs/",
        "if": {"required": ["task"]},
        "then": {"allOf": [task, *cases, no_architecture]},
        "else": {"anyOf": [refs[name] for name in others]},
        **generated,
    }


def _if(values: dict[str, str], then: Any) -> dict[str, Any]:
    properties = {name: {"const": value} for name, value in values.items()}
    return {"if": {"properties": properties, "required": list(values)}, "then": then}
