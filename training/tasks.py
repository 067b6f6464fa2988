"""The registry of tasks: a third one is one more file and one more line here."""

from dataclasses import dataclass
from typing import Any

from training.classifier import ClassifierConfig, ClassifierTask
from training.config import RunConfig
from training.gan import GanConfig, GanTask
from utils.cli import did_you_mean
from utils.config import Tree, build
from utils.errors import UserError


@dataclass(frozen=True)
class Entry:
    """A task's configuration and the class that trains it."""

    config: type[RunConfig]
    task: Any  # (config, reader, val_reader, device) -> Task


TASKS = {"gan": Entry(GanConfig, GanTask), "classifier": Entry(ClassifierConfig, ClassifierTask)}


def build_run_config(tree: Tree, overrides: list[str], source: str) -> RunConfig:
    """The config dataclass of the task that `tree["task"]` names, overridden from the command line.

    Raises UserError for a missing or unknown task and for whatever the config refuses.
    """
    name = tree.get("task")
    if not isinstance(name, str) or name not in TASKS:
        hint = did_you_mean(str(name), list(TASKS)) if name else ""
        told = "has no key 'task'" if name is None else f"unknown task {name!r}{hint}"
        raise UserError(f"{source}: {told}; tasks are {', '.join(TASKS)}")
    return build(TASKS[name].config, tree, overrides, source=source)
