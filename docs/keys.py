"""The list of keys in docs/keys.md, and the JSON schema of recipes; `docs/hooks.py` writes both."""

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core.core_schema import ModelSchema

from duetgan.models.registry import ARCHITECTURES, DEFAULT
from duetgan.training.engine.tasks import TASKS
from duetgan.training.reference import TASKLESS, Key, comment

Schema = dict[str, Any]  # a JSON schema
Entry = tuple[str, str, str]  # a key: name without its section, type, meaning
Section = dict[Entry, str]  # the keys of a section -> their defaults


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
