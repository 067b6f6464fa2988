"""Build configurations from nested mappings and command-line overrides; compare mappings."""

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import TypeVar

from pydantic import ValidationError

from duetgan.utils.config.cli import UnknownKey, normalise
from duetgan.utils.config.model import Config, config_error, keys_of, section_at
from duetgan.utils.config.yaml_files import Tree, from_text
from duetgan.utils.errors import UserError, explained

C = TypeVar("C", bound=Config)


def build(
    config_class: type[C],
    tree: Tree,
    overrides: Sequence[str] = (),
    *,
    source: str = "configuration",
    context: object = None,  # passed to pydantic's validation
) -> C:
    """Return an instance of `config_class` from a nested mapping and command-line tokens.

    Raises UserError for an unknown key, a value of the wrong type, and values that a section's
    `check` refuses.

    Args:
        overrides: tokens such as `--section.key value`, which override the mapping.
        source: the name of the mapping's origin in messages.
    """
    texts = given_keys(overrides)
    keys = list(keys_of(config_class)) if texts else []
    for key, text in texts.items():
        if key not in keys:
            raise UnknownKey("command line", key, keys)
        if text is None:
            raise UserError(f"command line: --{key} has no value; write --{key} VALUE")
        with explained(ValueError, partial("command line: {}: {}".format, key)):
            value = from_text(text) if section_at(config_class, key) else text
            tree = with_value(tree, key, value)
    with explained(
        ValidationError, lambda error: config_error(error, config_class, source, list(texts))
    ):
        return config_class.model_validate(tree, context=context)


def given_keys(overrides: Sequence[str]) -> dict[str, str | None]:
    """Parse command-line tokens into a dict from each dotted key to the text of its value.

    The tokens are `--key value` or `--key=value`. The text is None if the value is missing. Raises
    UserError for a value without a key.
    """
    texts: dict[str, str | None] = {}
    key = None  # the key whose value comes next
    for token in normalise(overrides):
        if token.startswith("--"):
            name, equals, text = token[2:].partition("=")
            texts[name] = text if equals else None
            key = None if equals else name
        elif key is None:
            raise UserError(
                f"command line: {token!r} belongs to no option; write overrides as --section.key value"
            )
        else:
            texts[key] = token
            key = None
    return texts


def with_value(tree: Tree, key: str, value: object) -> Tree:
    """Return a copy of a nested mapping in which a dotted key has a new value.

    If the old and the new value are mappings, the result has the entries of both.
    """
    name, _, subkey = key.partition(".")
    current = tree.get(name, {})
    if subkey and isinstance(current, dict):
        value = with_value(current, subkey, value)
    elif subkey:
        value = current  # The value is not a section; its own check reports that.
    elif isinstance(current, dict) and isinstance(value, dict):
        value = {**current, **value}
    return {**tree, name: value}


def to_tree(config: Config) -> Tree:
    """Return a configuration as a nested mapping.

    Tuples become lists, as they do when YAML and checkpoints are read.
    """
    tree: Tree = {}
    for name, value in config:
        if isinstance(value, Config):
            tree[name] = to_tree(value)
        else:
            tree[name] = list(value) if isinstance(value, tuple) else copy(value)
    return tree


def differences(first: Tree, second: Tree, prefix: str = "") -> dict[str, tuple[object, object]]:
    """Compare two nested mappings.

    Returns a dict from each dotted key whose values differ to the pair of values. The value of a
    missing key is None. `prefix` is put before the keys.
    """
    result: dict[str, tuple[object, object]] = {}
    for key in sorted(first.keys() | second.keys()):
        a, b = first.get(key), second.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            result |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            result[prefix + key] = (a, b)
    return result
