"""The list of keys in docs/keys.md, and the JSON schema of recipes; `docs/hooks.py` writes both.

Defaults, types and comments are read from the config models.
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
from pydantic_core.core_schema import ModelSchema

from duetgan.models.registry import ARCHITECTURES, DEFAULT
from duetgan.training.base.config import RunConfig
from duetgan.training.engine.tasks import TASKS
from duetgan.utils import extras
from duetgan.utils.config.model import Config, hints

Schema = dict[str, Any]  # a JSON schema
Entry = tuple[str, str, str]  # a key: name without its section, type, meaning
Section = dict[Entry, str]  # the keys of a section -> their defaults
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
if "studies" in extras.names():
    from duetgan.extras.studies.subjects import SUBJECTS, load_subject

    TASKLESS = {name: load_subject(name)[0] for name in SUBJECTS}


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


def as_markdown(selected: dict[str, list[Key]]) -> str:
    """Return the body of docs/keys.md: a list of keys for each section of each group.

    A key that a previous section documents is only named, with its default.
    """
    lines: list[str] = []
    previous: dict[str, Section] = {}
    documented: set[Entry] = set()
    for title, listed in selected.items():
        lines += [f"## {title}", ""]
        names = dict.fromkeys(_section_of(key) for key in listed)
        for name in sorted(names, key=bool):  # keys without a section come first
            by_entry = {_entry(key): key for key in listed if _section_of(key) == name}
            section = {entry: key.default for entry, key in by_entry.items()}
            if name:
                lines += [f"### {name}", ""]
            if same := _most_similar(name, section, previous, part="differs" in title):
                lines.append(same)
            else:
                for entry, key in by_entry.items():
                    if entry not in documented:
                        meaning = _plain(key.meaning)
                        lines.append(f"- `{key.name}: {key.default}` `{key.takes}` {meaning}")
                again = [_default(*item) for item in section.items() if item[0] in documented]
                if again:
                    lines.append(f"- As above: {', '.join(again)}.")
            previous.setdefault(name, section)
            documented |= section.keys()
            lines.append("")
    wrapped = [
        "\n".join(textwrap.wrap(line, 120, subsequent_indent="  " * line.startswith("-")))
        for line in lines
    ]
    return "\n".join(wrapped)


def _section_of(key: Key) -> str:
    return key.name.rpartition(".")[0]


def _entry(key: Key) -> Entry:
    return key.name.rpartition(".")[2], key.takes, key.meaning


def _default(entry: Entry, default: str) -> str:
    return f"`{entry[0]}: {default}`"


def _most_similar(
    name: str, section: Section, previous: Mapping[str, Section], *, part: bool
) -> str:
    """Describe a section by a previous one with the same keys, and by defaults that differ.

    With `part` the previous section may have more keys. Returns "" if there is no such section.
    """
    candidates = {}
    for candidate, defaults in previous.items():
        is_part = part and section.keys() <= defaults.keys()
        if is_part or section.keys() == defaults.keys():
            candidates[candidate] = [
                _default(*item) for item in section.items() if defaults[item[0]] != item[1]
            ]
    if not candidates:
        return ""
    # Prefer a section of the same name, then the one with the fewest differences.
    best = min(candidates, key=lambda candidate: (candidate != name, len(candidates[candidate])))
    exceptions = f", but {', '.join(candidates[best])}" if candidates[best] else ""
    return f"As `{best}`{exceptions}."


def _plain(text: str) -> str:
    """Escape Markdown's special characters, except inside code."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"[\\*_<>\[\]]|(?<=\d)[.)](?= |$)", r"\\\g<0>", parts[index])
    return "`".join(parts)


class _Documented(GenerateJsonSchema):
    """A generator of JSON schemas that adds the comments of config fields as descriptions."""

    def model_schema(self, schema: ModelSchema) -> Schema:
        result = super().model_schema(schema)
        for name, field in result["properties"].items():
            field["description"] = comment(schema["cls"], name)
        return result


def schema() -> Schema:
    """Return the JSON schema with which editors complete and check recipes."""
    gans = {name: TASKS["gan"].config(name) for name in ARCHITECTURES}
    configs = {"classifier": TASKS["classifier"].config(), **gans, **TASKLESS}
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
        "else": {"anyOf": [refs[name] for name in TASKLESS]},
        **generated,
    }


def _if(values: dict[str, str], schema: Schema) -> Schema:
    properties = {name: {"const": value} for name, value in values.items()}
    return {"if": {"properties": properties, "required": list(values)}, "then": schema}
