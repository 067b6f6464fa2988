"""The recipes of configs/: what each is for, in a line, from the head of its file. Imports neither
torch nor YAML.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TITLES = {"gan": "GANs", "classifier": "Classifiers"}
STUDIES = "study_"  # names of the recipes of study.py begin so
LENGTH = 88  # characters of a head's first line, so that a listed line stays within 120


def recipe_file(name: str) -> str:
    """The file that `--config name` means: a file, else the recipe `gan_64` or configs/gan_64.yaml,
    from any folder.
    """
    own = CONFIGS / Path(name).with_suffix(".yaml").name
    bare = own.is_file() or not Path(name).suffix
    ours = str(Path(name).parent) in (".", "configs") and bare and not Path(name).exists()
    return str(own) if ours else name


def shipped_file(name: str) -> str:
    """Return the path of a file named `configs/NAME`: as given if there is one, else Duet's own,
    from any folder.
    """
    own = CONFIGS / Path(name).name
    is_own = Path(name).parent == Path("configs") and own.is_file() and not Path(name).exists()
    return str(own) if is_own else name


@dataclass(frozen=True)
class Recipe:
    """A file of configs/ and what its head says."""

    name: str  # of the file, without .yaml
    task: str
    size: int  # px of the images it was made for
    purpose: str  # the first line of the head


def recipe_of(path: Path) -> Recipe:
    """What a recipe's head says. Raises ValueError where the file has no head of the usual form."""
    text = path.read_text(encoding="utf-8")
    head = re.match(r"# (.+)\n", text)
    task = re.search(r"^task: (\w+)", text, re.MULTILINE)
    size = re.search(r"(\d+) px", head[1]) if head else None
    if not (head and task and size):
        raise ValueError(
            f"{path}: begins with a comment that names its purpose and size (`64 px`), and has a task"
        )
    return Recipe(path.stem, task[1], int(size[1]), head[1])


def recipes(folder: Path = CONFIGS) -> list[Recipe]:
    """All recipes of a folder that are for train.py, sorted by task, size and name."""
    found = [recipe_of(path) for path in folder.glob("*.yaml") if not path.name.startswith(STUDIES)]
    order = list(TITLES)
    return sorted(found, key=lambda recipe: (order.index(recipe.task), recipe.size, recipe.name))


def listing(found: Sequence[Recipe]) -> str:
    width = max(len(recipe.name) for recipe in found)
    lines: list[str] = []
    for task, title in TITLES.items():
        lines += ["", f"{title}:"]
        lines += [
            f"  {recipe.name:{width}}  {recipe.purpose}" for recipe in found if recipe.task == task
        ]
    lines += [
        "",
        "A recipe's head says what it needs and what to change first: configs/NAME.yaml.",
        "Train: python train.py --config configs/NAME.yaml [--data.path X.lmdb --data.val-path Y.lmdb]",
    ]
    return "\n".join(lines[1:])
