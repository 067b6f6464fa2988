"""The list of recipes, from the heads of configs/."""

import subprocess
import sys

import pytest

from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.recipes import CONFIGS, LENGTH, STUDIES, Recipe, listing, recipe_of, recipes
from duetgan.utils.config.yaml_files import read_yaml
from tests.conftest import REPOSITORY

ALL = recipes()


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_every_head_says_what_for_what_it_needs_and_what_to_change(recipe):
    path = CONFIGS / f"{recipe.name}.yaml"
    lines = path.read_text().splitlines()
    head = lines[: next(place for place, line in enumerate(lines) if not line.startswith("#"))]
    assert len(recipe.purpose) <= LENGTH
    for what in ("Needs", "Change first"):
        assert [line for line in head if line.startswith(f"# {what}: ")], what
    assert build_run_config(read_yaml(path), [], str(path)).task == recipe.task


def test_all_are_listed_by_task_and_size():
    assert {recipe.name for recipe in ALL} == {
        path.stem for path in CONFIGS.glob("*.yaml") if not path.name.startswith(STUDIES)
    }
    for task in ("gan", "classifier"):
        sizes = [recipe.size for recipe in ALL if recipe.task == task]
        assert sizes == sorted(sizes)
    lines = listing(ALL).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [recipe.name for recipe in ALL]
    assert max(map(len, lines)) <= 120


def test_a_head(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("# Draws at 64 px\n# more\ntask: gan\n")
    assert recipe_of(path) == Recipe("x", "gan", 64, "Draws at 64 px")
    for text in ("task: gan\n", "# Draws\ntask: gan\n", "# Draws at 64 px\nsteps: 1\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"x\.yaml"):
            recipe_of(path)


def test_the_list_needs_no_torch():
    code = "import sys, train; assert train.main(['--list']) == 0; assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "gan_64_cpu" in ended.stdout
