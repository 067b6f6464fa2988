"""List the recipes in configs/, each with its purpose. Imports neither torch nor yaml."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TITLES = {"gan": "GANs", "classifier": "Classifiers"}
STUDIES = "study_"  # prefix of `duet study`'s recipes
LENGTH = 88  # characters of a recipe's first line, so that a line of the list has at most 120


def recipe_file(name: str) -> str:
    """Return the path of the file that `--config name` means.

    An existing file is returned unchanged. Otherwise both `gan_64` and configs/gan_64.yaml mean the
    recipe in Duet's own configs/, whatever the current folder is. Other names are returned
    unchanged.
    """
    shipped = CONFIGS / Path(name).with_suffix(".yaml").name
    is_recipe = shipped.is_file() or not Path(name).suffix
    in_configs = str(Path(name).parent) in (".", "configs")
    return str(shipped) if in_configs and is_recipe and not Path(name).exists() else name


def shipped_file(name: str) -> str:
    """Return the path of the file that the user means by `name`.

    If `name` is `configs/FILE` and does not exist, this is FILE in Duet's own configs/, provided
    that it exists there. Otherwise this is `name`.
    """
    shipped = CONFIGS / Path(name).name
    in_configs = Path(name).parent == Path("configs")
    return str(shipped) if in_configs and shipped.is_file() and not Path(name).exists() else name


class Recipe(NamedTuple):
    """A recipe for train.py, which is a file in configs/."""

    name: str  # name of the file, without .yaml
    task: str
    purpose: str  # the first line of the file's comment


def recipes() -> list[Recipe]:
    """Return the recipes for train.py in Duet's own configs/, sorted by task, size and name."""
    by_size = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        purpose = text.partition("\n")[0].removeprefix("# ")
        task = re.search(r"^task: (\w+)", text, re.MULTILINE)
        size = re.search(r"(\d+) px", purpose)
        if task and size:  # the recipes of studies have no task
            by_size.append((int(size[1]), Recipe(path.stem, task[1], purpose)))
    by_size.sort(key=lambda entry: (list(TITLES).index(entry[1].task), entry[0]))
    return [recipe for _, recipe in by_size]


def listing(all_recipes: Sequence[Recipe]) -> str:
    width = max(len(recipe.name) for recipe in all_recipes)
    lines: list[str] = []
    for task, title in TITLES.items():
        lines += ["", f"{title}:"]
        for recipe in all_recipes:
            if recipe.task == task:
                lines.append(f"  {recipe.name:{width}}  {recipe.purpose}")
    lines += ["", "The comment at the top of configs/NAME.yaml says what to change first."]
    return "\n".join(lines[1:])
