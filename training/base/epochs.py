"""Lengths of a config in epochs, `90ep`: what a user may write for updates, resolved before anything else is done."""

import re
from collections.abc import Callable
from typing import Any

from training.base import data
from training.base.config import RunConfig
from utils.config.yaml_files import Tree
from utils.errors import UserError

KEYS = re.compile(r"steps|(\w+_)?optimizer\.(warmup_steps|milestones|step_every)")  # dotted names
LENGTH = re.compile(r"(?<![\w.-])(\d{1,9}(?:\.\d{1,9})?)ep(?!\w)")

Replace = Callable[[float], int]  # epochs -> updates


def resolved(tree: Tree, overrides: list[str], build: Callable[[Tree, list[str]], RunConfig]) -> tuple[Tree, list[str]]:
    """The same config with every length in updates; what `build` makes first only tells images and batches."""
    found = 0

    def placeholder(_epochs: float) -> int:
        nonlocal found
        found += 1
        return found * 1000

    draft = in_updates(tree, overrides, placeholder)
    return in_updates(tree, overrides, updates_of(build(*draft))) if found else (tree, overrides)


def in_updates(tree: Tree, overrides: list[str], replace: Replace) -> tuple[Tree, list[str]]:
    """The same config, its lengths in epochs replaced: in the tree and in tokens (`--steps 90ep`, `--steps=90ep`)."""
    tokens, name = [], ""
    for token in overrides:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            name = name.replace("-", "_")
            tokens.append(f"--{token[2:].partition('=')[0]}{equals}{_value(name, value, replace)}")
        else:
            tokens.append(str(_value(name, token, replace)))
    return _tree(tree, "", replace), tokens


def _tree(tree: Tree, prefix: str, replace: Replace) -> Tree:
    return {
        key: _tree(value, f"{prefix}{key}.", replace)
        if isinstance(value, dict)
        else _value(f"{prefix}{key}", value, replace)
        for key, value in tree.items()
    }


def _value(name: str, value: Any, replace: Replace) -> Any:
    if not KEYS.fullmatch(name):
        return value
    if isinstance(value, list):
        return [_value(name, item, replace) for item in value]
    if not isinstance(value, str):
        return value
    text = LENGTH.sub(lambda length: str(replace(float(length[1]))), value)
    return int(text) if text != value and text.isdecimal() else text


def updates_of(config: RunConfig) -> Replace:
    """epochs -> updates, rounded, at least 1, for the images and the batches of this config. Raises UserError for
    images that cannot be opened and for batches of several sizes.
    """
    with data.open_training(config.data) as reader:
        images, spans = len(reader), config.spans(reader.resolution)
    if len({size for _, _, size in spans}) > 1:
        raise UserError("lengths in epochs need batches of one size, and progressive.batch_sizes differ; give updates")
    return lambda epochs: max(1, round(epochs * images / spans[0][2]))
