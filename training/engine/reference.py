"""A reference of all config keys, read from the config models: names, defaults, ranges, and their comments."""

import ast
import inspect
import io
import json
import re
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic_core import PydanticUndefined

from models.registry import ARCHITECTURES
from training.base.config import RunConfig
from training.engine.tasks import TASKS
from utils.config.model import Config, hints, takes
from utils.errors import UserError


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
    common = list(keys(RunConfig))
    shared = {key.name for key in common}
    first, *others = ([key for key in keys(config) if key.name not in shared] for config in gans.values())
    found = {"Every run": common, "Classifier": list(keys(TASKS["classifier"].config())), "GAN": first}
    found["Classifier"] = [key for key in found["Classifier"] if key.name not in shared]
    for name, listed in zip(list(gans)[1:], others, strict=True):
        own = [key for key in listed if key not in first and key.name != "architecture"]
        found[f"GAN with architecture {name}: what differs"] = own
    return found


def keys(config: type[Config], prefix: str = "", values: Any = None) -> Iterator[Key]:
    """Every key of a config model and its sections, in the order of the fields, with the defaults that `values`, an
    instance, has.
    """
    for name, hint in hints(config).items():
        if name not in config.model_fields:
            continue
        default = config.model_fields[name].default if values is None else getattr(values, name)
        if isinstance(default, Config):
            yield from keys(type(default), f"{prefix}{name}.", default)
        else:
            text = "required" if default is PydanticUndefined else json.dumps(default)
            yield Key(prefix + name, re.sub(r'^"(.+)"$', r"\1", text), takes(hint), comment(config, name))


def comment(config: type, name: str) -> str:
    """The comment beside or above a field, in the class that has it."""
    return next((found[name] for each in config.__mro__ if name in (found := _comments(each))), "")


@cache
def _comments(config: type) -> dict[str, str]:
    """field -> its comment, from a class's source."""
    try:
        source = textwrap.dedent(inspect.getsource(config))
    except (OSError, TypeError):  # a class of Python's own, or one that was made by a function
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    said = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for node in next(each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)).body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        first = node.lineno
        while first - 1 in said and not said[first - 1].line.partition("#")[0].strip():
            first -= 1
        lines = range(first, (node.end_lineno or node.lineno) + 1)
        words = " ".join(said[line].string.lstrip("# ") for line in lines if line in said)
        found[node.target.id] = re.sub(r"\bNone\b", "null", words)
    return found


def matching(word: str) -> dict[str, list[Key]]:
    """The groups with the keys that have `word` in name or meaning. Raises UserError where there is none."""
    word = word.lower().replace("-", "_")
    found = {
        title: [key for key in listed if word in f"{key.name} {key.meaning}".lower()]
        for title, listed in groups().items()
    }
    if not any(found.values()):
        raise UserError(f"--keys {word}: no key has this in its name or meaning; `python train.py --keys` prints all")
    return {title: listed for title, listed in found.items() if listed}


def as_text(found: dict[str, list[Key]], width: int = 110) -> str:
    """The text of `train.py --keys`."""
    lines: list[str] = []
    for title, listed in found.items():
        lines += ["", title, "=" * len(title)]
        for key in listed:
            lines.append(f"--{key.name} {key.default}")
            lines += textwrap.wrap(_told(key), width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines[1:])


def _told(key: Key) -> str:
    return f"{key.meaning} ({key.takes})" if key.meaning else f"({key.takes})"


def as_markdown(found: dict[str, list[Key]]) -> str:
    """The tables of the site's page of keys: a list for each section."""
    lines: list[str] = []
    for title, listed in found.items():
        lines += [f"## {title}", ""]
        for section, inside in _by_section(listed):
            lines += [f"### {section}", ""] if section else []
            lines += [f"- `{key.name}`: `{key.default}`. {_plain(_told(key))}" for key in inside]
            lines.append("")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text in which Markdown finds nothing of its own."""
    for sign in "\\`*_<>[]":
        text = text.replace(sign, f"\\{sign}")
    return text


def _by_section(listed: Sequence[Key]) -> Iterator[tuple[str, list[Key]]]:
    sections = dict.fromkeys(key.name.rpartition(".")[0] for key in listed)
    for section in sorted(sections, key=bool):
        yield section, [key for key in listed if key.name.rpartition(".")[0] == section]
