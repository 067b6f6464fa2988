"""Configurations as nested mappings: built from YAML and dotted command-line overrides, saved, and
compared.
"""

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from duetgan.utils.config.cli import UnknownKey, normalise
from duetgan.utils.config.model import Config, keys_of, refused, section_at
from duetgan.utils.config.yaml_files import Tree, from_text
from duetgan.utils.errors import UserError, explained

C = TypeVar("C", bound=Config)


def build(
    config_class: type[C],
    tree: Tree,
    overrides: Sequence[str] = (),
    *,
    source: str = "configuration",
    context: Any = None,  # of pydantic's validation
) -> C:
    """An instance of `config_class` from a nested mapping and command-line tokens (`--section.key
    value`).

    Raises UserError for an unknown key, a value of the wrong type, or whatever a `check` refuses.
    """
    given = given_keys(overrides)
    known = list(keys_of(config_class)) if given else []
    for key, text in given.items():
        if key not in known:
            raise UnknownKey("command line", key, known)
        if text is None:
            raise UserError(f"command line: --{key} has no value; write --{key} VALUE")
        with explained(ValueError, partial("command line: {}: {}".format, key)):
            tree = with_value(tree, key, from_text(text) if section_at(config_class, key) else text)
    with explained(ValidationError, lambda why: refused(why, config_class, source, list(given))):
        return config_class.model_validate(tree, context=context)


def given_keys(overrides: Sequence[str]) -> dict[str, str | None]:
    """Dotted key -> text of command-line tokens; None: no value is given."""
    given: dict[str, str | None] = {}
    key = None  # that waits for its value
    for token in normalise(overrides):
        if token.startswith("--"):
            name, equals, text = token[2:].partition("=")
            given[name], key = (text, None) if equals else (None, name)
        elif key is None:
            raise UserError(
                f"command line: {token!r} belongs to no option; write overrides as --section.key value"
            )
        else:
            given[key], key = token, None
    return given


def with_value(tree: Tree, key: str, value: Any) -> Tree:
    """The tree with another value of a dotted key; a mapping, a section's, adds to what is there."""
    name, _, rest = key.partition(".")
    before = tree.get(name, {})
    if rest and isinstance(before, dict):
        value = with_value(before, rest, value)
    elif rest:
        value = before  # no section, which its check tells
    elif isinstance(before, dict) and isinstance(value, dict):
        value = {**before, **value}
    return {**tree, name: value}


def to_tree(config: Config) -> Tree:
    """The nested mapping of a configuration. Tuples are lists, which is what YAML and checkpoints
    give back.
    """
    return {
        name: to_tree(value)
        if isinstance(value, Config)
        else list(value)
        if isinstance(value, tuple)
        else copy(value)
        for name, value in config
    }


def differences(before: Tree, after: Tree, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values; a key that one side lacks counts as None
    there.
    """
    result: dict[str, tuple[Any, Any]] = {}
    for key in sorted(before.keys() | after.keys()):
        a, b = before.get(key), after.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            result |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            result[prefix + key] = (a, b)
    return result
