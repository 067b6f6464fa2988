"""YAML files, read with bounds: whoever wrote one, it takes little time and memory, and nothing in
it is dropped.
"""

import io
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from duetgan.utils import bounded
from duetgan.utils.errors import UserError
from duetgan.utils.files import replace_file
from duetgan.utils.text import did_you_mean

Tree = dict[str, Any]

LONGEST = 2**20  # characters
DEEPEST = 20  # mappings and lists inside one another
LONGEST_NUMBER = 100  # characters
MOST = 20_000  # values, those that an alias repeats counted each time


class BoundError(yaml.MarkedYAMLError):
    """What is right by YAML's grammar and refused here; `problem` says why."""


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, depth, and more values than `MOST`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        # by id: values in a node that is composed, itself and repetitions included
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > DEEPEST:
            raise BoundError(
                problem=f"more than {DEEPEST} levels inside one another", problem_mark=mark
            )
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if alias and id(node) not in self._sizes:
            raise BoundError(problem="an alias inside of what it stands for", problem_mark=mark)
        if not alias:
            self._sizes[id(node)] = self._size(node)
        if self._sizes[id(node)] > MOST:
            raise BoundError(
                problem=f"more than {MOST} values, with those that aliases repeat",
                problem_mark=mark,
            )
        return node

    def _size(self, node: Node) -> int:
        """Values in a node whose parts are composed. Raises BoundError for a duplicate key, a very
        long number and a NUL character.
        """
        if isinstance(node, ScalarNode):
            # only "\0" in quotes can give one; no name and no path may hold it
            if "\0" in node.value:
                raise BoundError(problem="a NUL character", problem_mark=node.start_mark)
            if len(node.value) > LONGEST_NUMBER and node.tag.endswith((":int", ":float")):
                told = f"a number of {len(node.value)} characters; at most {LONGEST_NUMBER}"
                raise BoundError(problem=told, problem_mark=node.start_mark)
            return 1
        parts = (
            list(node.value)
            if isinstance(node, SequenceNode)
            else [part for pair in node.value for part in pair]
        )
        if isinstance(node, MappingNode):
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, ScalarNode)):
                if key.value in seen:
                    told = f"key {key.value[:40]!r} is given twice; keep one of them"
                    raise BoundError(problem=told, problem_mark=key.start_mark)
                seen.add(key.value)
        return 1 + sum(self._sizes[id(part)] for part in parts)


def load(text: str) -> Any:
    """What YAML `text` holds. Raises yaml.YAMLError, BoundError among them, and ValueError for a
    date that is none.
    """
    if len(text) > LONGEST:
        raise BoundError(
            problem=f"more than {LONGEST} characters", problem_mark=yaml.Mark("", 0, 0, 0, None, 0)
        )
    return yaml.load(text, _Loader)


def from_text(text: str) -> Any:
    """The value of text on a command line; text that is no YAML is itself. ValueError where it is
    out of bounds.
    """
    with suppress(ValueError):
        return int(text)  # 010 is ten; YAML takes it for eight
    try:
        value = load(text)
    except BoundError as error:
        raise ValueError(error.problem) from None
    except (yaml.YAMLError, ValueError):
        return text
    with suppress(ValueError):
        # 1e-3 is text to YAML 1.1
        return float(value) if isinstance(value, str) and value == text else value
    return value


def read_yaml(path: str | Path) -> Tree:
    """The mapping in a YAML file. Raises UserError naming the file, and the line of a syntax error."""
    path = Path(path)
    if path.is_dir():
        inside = path / "config.yaml"
        remedy = f"give {inside}" if inside.is_file() else "a configuration is a YAML file"
        raise UserError(f"{path} is a folder: {remedy}")
    if not path.is_file():
        listed = (
            "; `python train.py --list` prints the recipes" if path.parent.name == "configs" else ""
        )
        raise UserError(f"{path}: no such configuration file{near_file(path, '*.yaml')}{listed}")
    try:
        with io.TextIOWrapper(bounded.open_file(path, bounded.CONFIG), encoding="utf-8") as file:
            tree = load(file.read(LONGEST + 1))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        hint = " (YAML is indented with spaces, not tabs)" if "'\\t'" in str(problem) else ""
        raise UserError(f"{path}: not valid YAML: {where}{problem}{hint}") from error
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no date
        raise UserError(f"{path}: cannot be read as a configuration: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(
            f"{path}: a configuration is a mapping of keys to values, but this file holds {type(tree).__name__}"
        )
    return tree


def near_file(path: Path, pattern: str = "*") -> str:
    """`" (did you mean 'folder/x'?)"` when the folder holds a file of a near name, else an empty
    string.

    Where the name has numbers, a near one has the same: a recipe for 256 px is not near to one for
    64.
    """
    numbers = re.findall(r"\d+", path.name)
    files = [
        near
        for near in sorted(path.parent.glob(pattern))
        if not numbers or re.findall(r"\d+", near.name) == numbers
    ]
    return did_you_mean(path.name, {near.name: str(near) for near in files})


def save_yaml(tree: Tree, path: Path) -> None:
    """Write a mapping as YAML, atomically."""
    replace_file(path, yaml.safe_dump(tree, sort_keys=False, default_flow_style=False).encode())
