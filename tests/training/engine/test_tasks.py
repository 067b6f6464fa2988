"""Lengths in epochs (N10)."""

from typing import Any

import pytest

from data.reading.dataset import Dataset
from tests.end_to_end.helpers import train_in_process, write_config
from training.engine.tasks import build_run_config, in_updates, resolved
from utils.config.yaml_files import read_yaml
from utils.errors import UserError


def ten(epochs):
    return round(10 * epochs)


def test_n10_lengths_are_replaced_where_a_config_counts_updates():
    tree = {
        "steps": "90ep",
        "batch_size": 20,
        "optimizer": {"warmup_steps": "0.5ep", "milestones": ["30ep", 400], "step_every": "3ep", "name": "1ep"},
        "log": {"every": "1ep"},
    }
    options = ["--steps", "7ep", "--generator-optimizer.step-every=2ep", "--optimizer.milestones", "[1ep, 2.5ep,40]"]
    found, tokens = in_updates(tree, [*options, "--data.path", "3ep"], ten)
    assert found["steps"] == 900
    assert found["optimizer"] == {"warmup_steps": 5, "milestones": [300, 400], "step_every": 30, "name": "1ep"}
    assert (found["batch_size"], found["log"]) == (20, {"every": "1ep"})  # no length of a schedule
    assert tokens[:4] == ["--steps", "70", "--generator-optimizer.step-every=20", "--optimizer.milestones"]
    assert tokens[4:] == ["[10, 25,40]", "--data.path", "3ep"]
    assert tree["steps"] == "90ep"


@pytest.mark.parametrize("text", ["90 ep", "ep", "-1ep", "x1ep", "1e9ep", "1epoch", "1.ep", "9999999999ep"])
def test_what_is_no_length_stays(text):
    assert in_updates({"steps": text}, [], ten)[0] == {"steps": text}


def test_without_a_length_nothing_is_opened():
    def never(*_):
        raise AssertionError

    tree = {"steps": 9, "data": {"path": "missing.lmdb"}}
    assert resolved(tree, ["--steps", "8"], never) == (tree, ["--steps", "8"])


def test_n10_epochs_become_updates_of_the_images_and_the_batch(tmp_path, packed):
    recipe = write_config(tmp_path / "recipe.yaml", "classifier", packed)  # batches of 20
    options = ["--steps", "6ep", "--optimizer.schedule=step", "--optimizer.milestones=[2ep,4ep]"]
    config: Any = build_run_config(read_yaml(recipe), [*options, "--optimizer.warmup_steps", "0.4ep"], "recipe")
    epoch = images(packed) / 20
    assert config.steps == round(6 * epoch)
    assert config.optimizer.milestones == [round(2 * epoch), round(4 * epoch)]
    assert config.optimizer.warmup_steps == round(0.4 * epoch)
    halved = build_run_config(read_yaml(recipe), ["--steps", "6ep", "--batch_size", "10"], "recipe")
    assert halved.steps == round(6 * images(packed) / 10)


def images(packed):
    with Dataset(packed / "train.lmdb") as reader:
        return len(reader)


def test_n10_a_run_of_epochs_is_that_of_its_updates_and_resumes(tmp_path, packed, capsys):
    recipe = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    run, options = tmp_path / "run", ["--device", "cpu", "--evaluation.every", "0", "--steps", "1ep"]
    assert train_in_process(recipe, run, *options) == 0
    steps = round(images(packed) / 20)
    assert f"{steps} steps = " in capsys.readouterr().err
    assert read_yaml(run / "config.yaml")["steps"] == steps
    assert train_in_process(recipe, run, *options) == 0
    assert "config changed" not in capsys.readouterr().err


def test_n10_missing_images_and_wrong_places_are_refused_in_one_line(tmp_path, packed):
    recipe = read_yaml(write_config(tmp_path / "recipe.yaml", "classifier", packed))
    with pytest.raises(UserError, match=r"missing\.lmdb"):
        build_run_config(recipe, ["--steps", "6ep", "--data.path", "missing.lmdb"], "recipe")
    with pytest.raises(UserError, match=r"log\.every"):
        build_run_config(recipe, ["--log.every", "1ep"], "recipe")
