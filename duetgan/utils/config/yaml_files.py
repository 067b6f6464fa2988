"""Read YAML files within limits, so that even a malicious one takes little time and memory.

No content is silently ignored: a duplicate key, for example, is an error.
"""

import io
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode

from duetgan.utils import files
from duetgan.utils.errors import UserError
from duetgan.utils.files import replace_file
from duetgan.utils.text import did_you_mean

Tree = dict[str, Any]

LONGEST = 2**20  # characters
DEEPEST = 20  # levels of nested mappings and lists
LONGEST_NUMBER = 100  # characters; a long one takes much time to convert
MAX_VALUES = 20_000  # The values of an anchor count again at each alias.


class BoundError(yaml.MarkedYAMLError):
    """Valid YAML that is refused here; `problem` is the reason."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, deep nesting, and more than MAX_VALUES values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0  # counts the values of an anchor again at each alias
        self._values_of: dict[str | None, int] = {}  # anchor -> values that its alias repeats

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        mark = event.start_mark
        first = self._values
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.anchors and event.anchor not in self._values_of:
                raise BoundError(problem="an alias inside of what it stands for", problem_mark=mark)
            self._values += self._values_of.get(event.anchor, 0)
        else:
            self._values += 1
        self._depth += 1
        if self._depth > DEEPEST:
            raise BoundError(
                problem=f"more than {DEEPEST} levels inside one another", problem_mark=mark
            )
        if self._values > MAX_VALUES:
            raise BoundError(
                problem=f"more than {MAX_VALUES} values, with those that aliases repeat",
                problem_mark=mark,
            )
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, ScalarNode):
            # Only a quoted "\0" gives one. No name and no path may contain it.
            if "\0" in node.value:
                raise BoundError(problem="a NUL character", problem_mark=mark)
            if len(node.value) > LONGEST_NUMBER and node.tag.endswith((":int", ":float")):
                problem = f"a number of {len(node.value)} characters; at most {LONGEST_NUMBER}"
                raise BoundError(problem=problem, problem_mark=mark)
        if isinstance(node, MappingNode):
            self._refuse_duplicates(node)
        self._values_of[event.anchor] = self._values - first
        return node

    def _refuse_duplicates(self, node: MappingNode) -> None:
        names = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode) and key.value in names:
                problem = f"key {key.value[:40]!r} is given twice; keep one of them"
                raise BoundError(problem=problem, problem_mark=key.start_mark)
            names.add(key.value if isinstance(key, ScalarNode) else id(key))


def load(text: str) -> object:
    """Return the content of YAML text.

    Raises yaml.YAMLError, including BoundError, and ValueError for an invalid date.
    """
    if len(text) > LONGEST:
        raise BoundError(
            problem=f"more than {LONGEST} characters", problem_mark=yaml.Mark("", 0, 0, 0, None, 0)
        )
    return yaml.load(text, _Loader)


def from_text(text: str) -> object:
    """Return the value of text on a command line; text that is not YAML is returned unchanged.

    Raises ValueError for text beyond the limits.
    """
    with suppress(ValueError):
        return int(text)  # 010 is ten, which YAML would read as eight
    try:
        value = load(text)
    except BoundError as error:
        raise ValueError(error.problem) from None
    except (yaml.YAMLError, ValueError):
        return text
    with suppress(ValueError):
        # YAML 1.1 reads 1e-3 as text.
        return float(value) if isinstance(value, str) and value == text else value
    return value


def read_yaml(path: str | Path) -> Tree:
    """Return the mapping in a YAML file.

    Raises UserError naming the file, and the line of a syntax error.
    """
    path = Path(path)
    if path.is_dir():
        inside = path / "config.yaml"
        remedy = f"give {inside}" if inside.is_file() else "a configuration is a YAML file"
        raise UserError(f"{path} is a folder: {remedy}")
    if not path.is_file():
        hint = near_file(path, "*.yaml")
        if path.parent.name == "configs":
            hint += "; `python train.py --list` prints the recipes"
        raise UserError(f"{path}: no such configuration file{hint}")
    try:
        with io.TextIOWrapper(files.open_file(path, files.CONFIG), encoding="utf-8") as file:
            tree = load(file.read(LONGEST + 1))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        hint = " (YAML is indented with spaces, not tabs)" if "'\\t'" in str(problem) else ""
        raise UserError(f"{path}: not valid YAML: {where}{problem}{hint}") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or an invalid date
        raise UserError(f"{path}: cannot be read as a configuration: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(
            f"{path}: a configuration is a mapping of keys to values, but this file holds {type(tree).__name__}"
        )
    return tree


def near_file(path: Path, pattern: str = "*") -> str:
    """Return `" (did you mean 'folder/x'?)"` if the folder holds a file of a similar name, else "".

    Numbers in the names must be equal: a recipe for 256 px is not similar to one for 64 px.
    """
    numbers = re.findall(r"\d+", path.name)
    files = {}
    for file in sorted(path.parent.glob(pattern)):
        if not numbers or re.findall(r"\d+", file.name) == numbers:
            files[file.name] = str(file)
    return did_you_mean(path.name, files)


def save_yaml(tree: Tree, path: Path) -> None:
    """Write a mapping as YAML, atomically."""
    replace_file(path, yaml.safe_dump(tree, sort_keys=False, default_flow_style=False).encode())
