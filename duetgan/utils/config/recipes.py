"""List the recipes of configs/ with their purpose. Imports neither torch nor YAML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TITLES = {"gan": "GANs", "classifier": "Classifiers"}
STUDIES = "study_"  # prefix of `duet study`'s recipes
LENGTH = 88  # characters of a recipe's first line, so that a line of the list has at most 120


def recipe_file(name: str) -> str:
    """Return the file of `--config name`, from any folder.

    A name is a file, or else a recipe: `gan_64` or configs/gan_64.yaml.
    """
    shipped = CONFIGS / Path(name).with_suffix(".yaml").name
    is_recipe = shipped.is_file() or not Path(name).suffix
    in_configs = str(Path(name).parent) in (".", "configs")
    return str(shipped) if in_configs and is_recipe and not Path(name).exists() else name


def shipped_file(name: str) -> str:
    """Return `name`, or the path in Duet's own configs/ if `name` is `configs/NAME` and is missing
    here.
    """
    shipped = CONFIGS / Path(name).name
    in_configs = Path(name).parent == Path("configs")
    return str(shipped) if in_configs and shipped.is_file() and not Path(name).exists() else name


@dataclass(frozen=True)
class Recipe:
    """A file of configs/ and the content of its first comment."""

    name: str  # name of the file, without .yaml
    task: str
    size: int  # side in px of the images that it is made for
    purpose: str  # the first line of the file's comment


def recipe_of(path: Path) -> Recipe:
    """Return the recipe in a file. Raises ValueError for a file without the usual first comment."""
    text = path.read_text(encoding="utf-8")
    head = re.match(r"# (.+)\n", text)
    task = re.search(r"^task: (\w+)", text, re.MULTILINE)
    size = re.search(r"(\d+) px", head[1]) if head else None
    if not (head and task and size):
        raise ValueError(
            f"{path}: begins with a comment that names its purpose and size (`64 px`), and has a task"
        )
    return Recipe(path.stem, task[1], int(size[1]), head[1])


def recipes() -> list[Recipe]:
    """Return the recipes of CONFIGS that are for train.py, sorted by task, size and name."""
    paths = [path for path in CONFIGS.glob("*.yaml") if not path.name.startswith(STUDIES)]
    order = list(TITLES)
    return sorted(
        map(recipe_of, paths),
        key=lambda recipe: (order.index(recipe.task), recipe.size, recipe.name),
    )


def listing(all_recipes: Sequence[Recipe]) -> str:
    width = max(len(recipe.name) for recipe in all_recipes)
    lines: list[str] = []
    for task, title in TITLES.items():
        lines += ["", f"{title}:"]
        for recipe in all_recipes:
            if recipe.task == task:
                lines.append(f"  {recipe.name:{width}}  {recipe.purpose}")
    lines += [
        "",
        "The comment at the top of configs/NAME.yaml says what a recipe needs and what to change first.",
        "Train: python train.py --config configs/NAME.yaml [--data.path X.lmdb --data.val-path Y.lmdb]",
    ]
    return "\n".join(lines[1:])
