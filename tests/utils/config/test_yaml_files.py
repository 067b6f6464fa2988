import re
import subprocess
import sys
import time
from typing import Any

import pytest
import yaml

from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config import yaml_files
from duetgan.utils.config.build import build, differences
from duetgan.utils.config.recipes import CONFIGS, LENGTH, STUDIES, listing, recipes
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from tests.conftest import REPOSITORY, assert_raises

LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12))
REFUSED = {
    "steps: 3\nseed: 1\nsteps: 5\n": "line 3, column 1: key 'steps' is given twice; keep one of them",  # H7
    "data: {path: a, path: b}": "line 1, column 17: key 'path' is given twice; keep one of them",
    "!!set {a, a}": "line 1, column 11: key 'a' is given twice; keep one of them",
    LAUGHS: "line 2, column 10: an alias inside an anchor, or more than 20 aliases",  # H13
    "a: &a [1, *a]": "line 1, column 11: an alias inside an anchor, or more than 20 aliases",
    f"a: &a [1]\nb: [{'*a, ' * 21}]": "line 2, column 85: an alias inside an anchor, or more than 20 aliases",
    "[" * 100_000: "too many levels inside one another",  # H23
    "- " * 100_000: "too many levels inside one another",
    "x" * 2**21: "more than 1048576 characters",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_out_of_bounds_is_refused_in_seconds(tmp_path, text):
    path, began = tmp_path / "recipe.yaml", time.monotonic()
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_yaml(path)
    assert str(error.value) == f"{path}: not valid YAML: {REFUSED[text]}"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("text", ["[" * 30_000, "{a: 1, a: 2}", "&a [*a]", LAUGHS])
def test_values_of_the_command_line_and_texts_in_a_tree_have_the_same_bounds(text):
    """Deep lists there ended the process: PyYAML.s parser is recursive."""
    bounds = r"data.class_rates: .*(given twice|levels|alias)"
    for tokens in (["--data.class_rates", text], [f"--data.class_rates={text}"]):
        assert_raises(UserError, f"^command line: {bounds}", build, ClassifierConfig, {}, tokens)
    assert_raises(UserError, f"^configuration: {bounds}", build, ClassifierConfig, {"data": {"class_rates": text}})


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1, 2]\nb: *a\nc: [*a, *a]\n",
        "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\n",
        "a: 1\nb:\n  a: 2\n",
        "[{a: 1}, {a: 1}]",
        "- [1.5, .inf, 0x10, 1e3, null, 2020-01-01]\n",
        "",
        "just words",
    ],
)
def test_what_is_within_bounds_is_read_as_ever(text):
    assert yaml_files.load(text) == yaml.safe_load(text)


ALL = recipes()


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_every_head_says_what_for_what_it_needs_and_what_to_change(recipe):
    path = CONFIGS / f"{recipe.name}.yaml"
    lines = path.read_text().splitlines()
    head = lines[: next(place for place, line in enumerate(lines) if not line.startswith("#"))]
    assert len(recipe.purpose) <= LENGTH
    for what in ("Needs", "Change first"):
        assert [line for line in head if line.startswith(f"# {what}: ")], what
    config: Any = build_run_config(read_yaml(path), [], str(path))
    assert config.task == recipe.task
    assert config.data.val_path is None or "test" in config.data.val_path
    assert "test" not in config.data.path
    if recipe.task == "classifier":
        assert not {"head", "*"} & {*config.finetune.freeze, *config.finetune.freeze_at}
    else:  # both networks follow one schedule
        for key in ("schedule", "hold", "final_lr", "beta2_final"):
            assert getattr(config.generator_optimizer, key) == getattr(config.discriminator_optimizer, key), key


def test_airbench_has_the_same_settings_for_both_data_sets():
    cifar10, fashion = (read_yaml(CONFIGS / f"{name}_airbench.yaml") for name in ("cifar10", "fashion_mnist"))
    assert set(differences(cifar10, fashion)) == {"steps", "data.path", "data.val_path"}


def test_all_are_listed_by_task_and_size_without_torch():
    assert {recipe.name for recipe in ALL} == {
        path.stem for path in CONFIGS.glob("*.yaml") if not path.name.startswith(STUDIES)
    }
    for task in ("gan", "classifier"):
        sizes = [int(re.search(r"(\d+) px", recipe.purpose)[1]) for recipe in ALL if recipe.task == task]
        assert sizes == sorted(sizes)
    lines = listing(ALL).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [recipe.name for recipe in ALL]
    assert max(map(len, lines)) <= 120
    code = "import sys; from duetgan.commands import train; assert train.main(['--list']) == 0"
    code += "; assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "gan_64_cpu" in ended.stdout
