"""The registry of tasks: a third one is one more file and one more line here."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from training.base import epochs
from training.base.config import RunConfig
from training.classifier.config import ClassifierConfig
from training.classifier.task import ClassifierTask
from training.gan.config import config_of
from training.gan.task import GanTask
from utils.config.build import build
from utils.config.cli import Parser, did_you_mean
from utils.config.yaml_files import Tree
from utils.errors import UserError


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
    return make(*epochs.resolved(tree, overrides, make))
