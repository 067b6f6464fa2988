"""Lengths in epochs (N10)."""

from typing import Any

import pytest

from duetgan.data.reading.dataset import Dataset
from duetgan.models.dcgan import DcganGeneratorConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from tests.end_to_end.helpers import train_in_process, write_config

pytestmark = pytest.mark.usefixtures("slim")


@pytest.fixture
def recipe(tmp_path, packed):
    """Of a classifier, with batches of 20."""
    return write_config(tmp_path / "recipe.yaml", "classifier", packed)


@pytest.fixture
def epoch(packed):
    """Its updates."""
    with Dataset(packed / "train.lmdb") as reader:
        return len(reader) / 20


def test_n10_epochs_become_updates_of_the_images_and_the_batch(recipe, epoch):
    """In the tree and on the command line, in text and in lists, beside updates."""
    tree = read_yaml(recipe) | {"steps": "90ep"}
    tree["optimizer"] = {"schedule": "step", "milestones": ["2ep", 4000], "warmup_steps": "0.4ep"}
    config: Any = build_run_config(tree, ["--steps", "6ep"], "recipe")
    assert (config.steps, config.optimizer.warmup_steps) == (round(6 * epoch), round(0.4 * epoch))
    assert tree["steps"] == "90ep"
    config = build_run_config(tree, ["--optimizer.milestones=[2ep, 4.5ep,5000]", "--batch_size", "10"], "recipe")
    assert config.steps == round(180 * epoch)
    assert config.optimizer.milestones == [round(4 * epoch), round(9 * epoch), 5000]
    config = build_run_config(tree, ["--optimizer.milestones", "[]", "--optimizer.step-every", "3ep"], "recipe")
    assert config.optimizer.step_every == round(3 * epoch)
    assert build_run_config(tree, ["--steps", "0.01ep"], "recipe").steps == 1


def test_n10_epochs_need_batches_of_one_size(recipe, epoch):
    def steps(batch_sizes: dict[int, int]) -> int:
        tree = {"task": "gan", "batch_size": 20, "steps": "2ep", "data": read_yaml(recipe)["data"]}
        return build_run_config(tree | {"progressive": {"start": 8, "batch_sizes": batch_sizes}}, [], "recipe").steps

    assert steps({8: 20}) == 2 * epoch
    assert steps({8: 40, 16: 40}) == epoch  # no stage has batch_size
    with pytest.raises(UserError, match="lengths in epochs need batches of one size"):
        steps({8: 40})


def test_an_option_replaces_the_architecture_of_the_recipe():
    config: Any = build_run_config({"task": "gan", "architecture": "r3gan"}, ["--architecture=dcgan"], "recipe")
    assert (config.architecture, type(config.generator)) == ("dcgan", DcganGeneratorConfig)


@pytest.mark.parametrize("text", ["90 ep", "ep", "-1ep", "x1ep", "1e9ep", "1epoch", "1.ep", "9999999999ep"])
def test_what_is_no_length_is_refused(recipe, text):
    with pytest.raises(UserError, match=f"^recipe: steps '{text}': must be a valid integer"):
        build_run_config(read_yaml(recipe) | {"steps": text}, [], "recipe")


def test_without_a_length_nothing_is_opened(recipe):
    assert build_run_config(read_yaml(recipe), ["--data.path", "missing.lmdb"], "recipe").data.path == "missing.lmdb"
    with pytest.raises(UserError, match=r"missing\.lmdb"):
        build_run_config(read_yaml(recipe), ["--steps", "6ep", "--data.path", "missing.lmdb"], "recipe")
    with pytest.raises(UserError, match=r"log\.every"):  # no length of a schedule
        build_run_config(read_yaml(recipe), ["--log.every", "1ep"], "recipe")


def test_n10_a_run_of_epochs_is_that_of_its_updates_and_resumes(tmp_path, recipe, epoch, capsys):
    run, options = tmp_path / "run", ["--device", "cpu", "--evaluation.every", "0", "--steps", "1ep"]
    assert train_in_process(recipe, run, *options) == 0
    assert f"{round(epoch)} steps = " in capsys.readouterr().err
    assert read_yaml(run / "config.yaml")["steps"] == round(epoch)
    assert train_in_process(recipe, run, *options) == 0
    assert "config changed" not in capsys.readouterr().err
