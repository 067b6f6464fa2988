"""YAML with bounds: whoever wrote it, reading it takes little time and memory, and nothing in it is dropped."""

from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

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
        self._sizes: dict[int, int] = {}  # by id: values in a node that is composed, itself and repetitions included

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > DEEPEST:
            raise BoundError(problem=f"more than {DEEPEST} levels inside one another", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if alias and id(node) not in self._sizes:
            raise BoundError(problem="an alias inside of what it stands for", problem_mark=mark)
        if not alias:
            self._sizes[id(node)] = self._size(node)
        if self._sizes[id(node)] > MOST:
            raise BoundError(problem=f"more than {MOST} values, with those that aliases repeat", problem_mark=mark)
        return node

    def _size(self, node: Node) -> int:
        """Values in a node whose parts are composed. Raises BoundError for a duplicate key, a very long number
        and a NUL character.
        """
        if isinstance(node, ScalarNode):
            if "\0" in node.value:  # only "\0" in quotes can give one; no name and no path may hold it
                raise BoundError(problem="a NUL character", problem_mark=node.start_mark)
            if len(node.value) > LONGEST_NUMBER and node.tag.endswith((":int", ":float")):
                told = f"a number of {len(node.value)} characters; at most {LONGEST_NUMBER}"
                raise BoundError(problem=told, problem_mark=node.start_mark)
            return 1
        parts = list(node.value) if isinstance(node, SequenceNode) else [part for pair in node.value for part in pair]
        if isinstance(node, MappingNode):
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, ScalarNode)):
                if key.value in seen:
                    told = f"key {key.value[:40]!r} is given twice; keep one of them"
                    raise BoundError(problem=told, problem_mark=key.start_mark)
                seen.add(key.value)
        return 1 + sum(self._sizes[id(part)] for part in parts)


def load(text: str) -> Any:
    """What YAML `text` holds. Raises yaml.YAMLError, BoundError among them, and ValueError for a date that is none."""
    if len(text) > LONGEST:
        raise BoundError(problem=f"more than {LONGEST} characters", problem_mark=yaml.Mark("", 0, 0, 0, None, 0))
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def check(text: str) -> None:
    """Raise BoundError where text that may be YAML is out of bounds; what is none is not looked into."""
    try:
        load(text)
    except BoundError:
        raise
    except (yaml.YAMLError, ValueError):
        pass
