"""The registry of tasks, where a third one is one more line, and how a run's config is built:
lengths in epochs too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from duetgan.training.base import data
from duetgan.training.base.config import RunConfig
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.gan.config import config_of
from duetgan.training.gan.task import GanTask
from duetgan.utils.config import plugins
from duetgan.utils.config.build import build, given_keys
from duetgan.utils.config.cli import entry
from duetgan.utils.config.yaml_files import Tree
from duetgan.utils.errors import UserError


class Entry(NamedTuple):
    """A task's configuration and the class that trains it."""

    # (architecture, where a recipe names one) -> its config class
    config: Callable[..., type[RunConfig]]
    task: type[Any]  # of training.base.task.Task


TASKS = {
    "gan": Entry(config_of, GanTask),
    "classifier": Entry(lambda *_: ClassifierConfig, ClassifierTask),
}


def _with_imports(tree: Tree, overrides: list[str]) -> tuple[Tree, list[str]]:
    """Import what the recipe's key `imports` and the options `--import` name; the key is then name
    -> SHA-256.
    """
    names = tree.get("imports") or []
    if not isinstance(names, list | dict) or not all(isinstance(name, str) for name in names):
        raise UserError("imports: give a list of .py files or installed modules: [my_losses.py]")
    given = [
        token.removeprefix("--import=") for token in overrides if token.startswith("--import=")
    ]
    digests = plugins.load(dict.fromkeys([*names, *given]))
    left = [token for token in overrides if not token.startswith("--import=")]
    return (tree | {"imports": digests} if digests else tree), left


def build_run_config(tree: Tree, overrides: list[str], source: str) -> RunConfig:
    """The config of the task that `tree["task"]` names, with overrides; lengths in epochs, `90ep`,
    become updates by the images, which are opened then, and the batches. What it imports is
    imported: `tree` is the user's own recipe, never a checkpoint's config. Raises UserError for
    what is wrong in it.
    """
    tree, overrides = _with_imports(tree, overrides)
    if (name := tree.get("task")) is None:
        raise UserError(f"{source}: has no key 'task'; tasks are {', '.join(TASKS)}")
    task = entry(TASKS, str(name), f"{source}: task")
    architecture = given_keys(overrides).get("architecture") or tree.get("architecture")
    config = task.config(*([str(architecture)] if architecture else []))
    lengths: list[float] = []

    def draft(epochs: float) -> int:
        lengths.append(epochs)
        return 1000 * len(lengths)  # milestones must rise

    result = build(config, tree, overrides, source=source, context=draft)
    if not lengths:
        return result
    with data.open_training(result.data) as reader:
        images, spans = len(reader), result.spans(reader.resolution)
    if len({size for _, _, size in spans}) > 1:
        raise UserError(
            "lengths in epochs need batches of one size, and progressive.batch_sizes differ; give updates"
        )
    batch = spans[0][2]
    return build(
        config,
        tree,
        overrides,
        source=source,
        context=lambda epochs: max(1, round(epochs * images / batch)),
    )
