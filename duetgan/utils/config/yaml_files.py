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
MAX_ALIASES = 20


class BoundError(yaml.MarkedYAMLError):
    """The error for valid YAML that Duet refuses. `problem` is the reason."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys.

    It also refuses an alias inside an anchor and more than MAX_ALIASES aliases, which could make a
    short text a huge document.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._aliases = 0
        self._open_anchors = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        is_alias = isinstance(event, yaml.AliasEvent)
        self._aliases += is_alias
        if is_alias and (self._open_anchors or self._aliases > MAX_ALIASES):
            problem = f"an alias inside an anchor, or more than {MAX_ALIASES} aliases"
            raise BoundError(problem=problem, problem_mark=event.start_mark)
        is_anchor = event.anchor is not None and not is_alias
        self._open_anchors += is_anchor
        node: Any = super().compose_node(parent, index)
        self._open_anchors -= is_anchor
        if isinstance(node, MappingNode):
            names = set()
            for key, _ in node.value:
                if isinstance(key, ScalarNode) and key.value in names:
                    problem = f"key {key.value[:40]!r} is given twice; keep one of them"
                    raise BoundError(problem=problem, problem_mark=key.start_mark)
                names.add(str(key.value))
        return node


def load(text: str) -> object:
    """Parse YAML text and return its content.

    Raises yaml.YAMLError for invalid YAML, its subclass BoundError for YAML beyond the limits, and
    ValueError for an invalid date.
    """
    if len(text) > LONGEST:
        raise BoundError(problem=f"more than {LONGEST} characters")
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise BoundError(problem="too many levels inside one another") from None


def from_text(text: str) -> object:
    """Parse a command-line value as YAML; text that is not YAML is returned unchanged.

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

    Raises UserError for a file that is missing, invalid or holds no mapping. The message names the
    file, and the line of a syntax error.
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
    """Return `" (did you mean 'folder/x'?)"` if a file next to `path` has a similar name, else "".

    Only files that match `pattern` count. If the name of `path` has numbers, the similar name must
    have the same ones: a recipe for 256 px is not similar to one for 64 px.
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
