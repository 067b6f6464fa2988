"""The registry of tasks, and the construction of a run's config.

To add a task, add a line to `TASKS`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from duetgan.training.base import data
from duetgan.training.base.config import RunConfig
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.gan.config import config_of
from duetgan.training.gan.task import GanTask
from duetgan.utils import extras
from duetgan.utils.config import plugins
from duetgan.utils.config.build import build, given_keys
from duetgan.utils.config.cli import entry
from duetgan.utils.config.yaml_files import Tree
from duetgan.utils.errors import UserError


class Entry(NamedTuple):
    """The config class and the task class of a task."""

    # returns the config class; takes the architecture, if a recipe names one
    config: Callable[..., type[RunConfig]]
    task: type[Any]  # a subclass of training.base.task.Task


# An extra may replace an entry by a subclass: extras/few_labels trains with unlabelled images.
TASKS = {
    "gan": Entry(config_of, GanTask),
    "classifier": Entry(lambda *_: ClassifierConfig, ClassifierTask),
}


def _with_imports(tree: Tree, overrides: list[str]) -> tuple[Tree, list[str]]:
    """Import the user's modules that the recipe's key `imports` and the options `--import` name.

    Returns: The recipe, in which `imports` is now a dict from module name to the file's SHA-256;
    and the options other than `--import`.
    """
    names = tree.get("imports") or []
    if not isinstance(names, list | dict) or not all(isinstance(name, str) for name in names):
        raise UserError("imports: give a list of .py files or installed modules: [my_losses.py]")
    modules = list(names)
    remaining = []
    for token in overrides:
        if token.startswith("--import="):
            modules.append(token.removeprefix("--import="))
        else:
            remaining.append(token)
    digests = plugins.load(dict.fromkeys(modules))
    return (tree | {"imports": digests} if digests else tree), remaining


def build_run_config(tree: Tree, overrides: list[str], source: str) -> RunConfig:
    """Build the config of a run from the recipe `tree` and the options `overrides`.

    The recipe's key `task` chooses the class of the config. Lengths in epochs, such as `90ep`,
    become updates; for this the images are opened and counted. The modules that the recipe names
    are imported. So `tree` must be the user's own recipe, never a checkpoint's config. `source` is
    the name of the recipe in messages.

    Raises UserError for mistakes in the recipe or the overrides.
    """
    tree, overrides = _with_imports(tree, overrides)
    name = tree.get("task")
    if name is None:
        raise UserError(f"{source}: has no key 'task'; tasks are {', '.join(TASKS)}")
    task = entry(TASKS, str(name), f"{source}: task")
    architecture = given_keys(overrides).get("architecture") or tree.get("architecture")
    config = task.config(str(architecture)) if architecture else task.config()
    lengths: list[float] = []

    def draft(epochs: float) -> int:
        lengths.append(epochs)
        return 1000 * len(lengths)  # These placeholders increase, as milestones must.

    result = build(config, tree, overrides, source=source, context=draft)
    if not lengths:
        return result
    with data.open_training(result.data) as dataset:
        images, spans = len(dataset), result.spans(dataset.resolution)
    if len({size for _, _, size in spans}) > 1:
        raise UserError(
            "lengths in epochs need batches of one size, and progressive.batch_sizes differ; give updates"
        )
    batch_size = spans[0][2]

    def updates(epochs: float) -> int:
        return max(1, round(epochs * images / batch_size))

    return build(config, tree, overrides, source=source, context=updates)


extras.attach(__name__)
