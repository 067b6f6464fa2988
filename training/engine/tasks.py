"""The registry of tasks, where a third one is one more line, and how a run's config is built: lengths in epochs too."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from training.base import data
from training.base.config import RunConfig
from training.classifier.config import ClassifierConfig
from training.classifier.task import ClassifierTask
from training.gan.config import config_of
from training.gan.task import GanTask
from utils.config.build import build
from utils.config.cli import Parser, did_you_mean
from utils.config.yaml_files import Tree
from utils.errors import UserError

KEYS = re.compile(r"steps|(\w+_)?optimizer\.(warmup_steps|milestones|step_every)")  # dotted names
LENGTH = re.compile(r"(?<![\w.-])(\d{1,9}(?:\.\d{1,9})?)ep(?!\w)")

Replace = Callable[[float], int]  # epochs -> updates


class Entry(NamedTuple):
    """A task's configuration and the class that trains it."""

    config: Callable[..., type[RunConfig]]  # (architecture, where a recipe names one) -> its config class
    task: type[Any]  # of training.base.task.Task


TASKS = {
    "gan": Entry(config_of, GanTask),
    "classifier": Entry(lambda *_: ClassifierConfig, ClassifierTask),
}


def build_run_config(tree: Tree, overrides: list[str], source: str) -> RunConfig:
    """The config of the task that `tree["task"]` names, with overrides. Raises UserError for what is wrong in it."""
    name = tree.get("task")
    if not isinstance(name, str) or name not in TASKS:
        hint = did_you_mean(str(name), list(TASKS)) if name else ""
        told = "has no key 'task'" if name is None else f"unknown task {name!r}{hint}"
        raise UserError(f"{source}: {told}; tasks are {', '.join(TASKS)}")
    parser = Parser("train.py")
    parser.add_argument("--architecture")
    architecture = parser.parse_known(overrides)[0].architecture or tree.get("architecture")
    config = TASKS[name].config(*([str(architecture)] if architecture else []))
    make = partial(build, config, source=source)
    return make(*resolved(tree, overrides, make))


def resolved(tree: Tree, overrides: list[str], build: Callable[[Tree, list[str]], RunConfig]) -> tuple[Tree, list[str]]:
    """The same config with every length in updates, where epochs may be written, `90ep`; what `build` makes first only
    tells images and batches.
    """
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
