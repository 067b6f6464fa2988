"""Runs of the version before go on as that version would have, and its checkpoints can be used: tests/fixtures."""

import json
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import evaluate
import generate
import predict
from tests import slim
from tests.conftest import REPOSITORY
from tests.end_to_end.helpers import rows, state_of, train_in_process
from training.gan import generator_step, penalties
from training.optim.ema import half_life_beta
from utils.config.build import of_today
from utils.config.yaml_files import read_yaml
from utils.errors import run_cli

RUNS = ("stylegan2", "r3gan", "classifier")


@pytest.fixture
def old(tmp_path, monkeypatch):
    """The folder of the old runs, which is the working folder."""
    with tarfile.open(REPOSITORY / "tests" / "fixtures" / "v1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slim, "SHRINK", 32)
    monkeypatch.setattr("models.backbones.base.make", lambda name, **options: slim.SlimResNet())
    return tmp_path


@pytest.fixture
def formulas_of_before(monkeypatch):
    """What was changed on purpose since, as it was: path length's own share (P1) and the average's ramp (P2)."""

    def constant_mean(lengths, mean, batch_mean, decay, batch):
        return (lengths - mean).square().sum() / batch

    def ramp_after_the_step(batch, seen, *rest):
        return half_life_beta(batch, seen + batch, *rest)

    monkeypatch.setattr(penalties, "path_length_penalty", constant_mean)
    monkeypatch.setattr(generator_step, "half_life_beta", ramp_after_the_step)


@pytest.mark.usefixtures("formulas_of_before")
@pytest.mark.parametrize("run", RUNS)
def test_an_old_run_goes_on_as_the_old_version_did(old, run):
    after = torch.load(old / "after.pt", weights_only=True)[run]
    # NCHW: in channels_last oneDNN's AVX2 kernel for the weights' gradient of a 1x1 convolution with stride 2 writes
    # beyond its buffer where there are one to three input channels, as in this slim network (torch 2.15)
    layout = ["--channels_last", "false"]
    assert train_in_process(old / run / "config.yaml", old / run, "--device", "cpu", *layout) == 0
    state = state_of(old / run, 6)
    for network, tensors in after["state"].items():
        assert state[network].keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(state[network][name], tensor, rtol=1e-4, atol=1e-5, msg=f"{network}.{name}")
    assert of_today(read_yaml(old / run / "config.yaml")) == read_yaml(old / run / "config.yaml")
    later = [row for row in rows(old / run) if row["step"] > 3]
    assert len(later) == len(after["rows"]) == 4
    for found, expected in zip(later, after["rows"], strict=True):
        assert found | expected == pytest.approx(found, rel=1e-3, abs=1e-4)


def test_an_old_recipe_is_refused_with_the_new_name_of_a_key(old, capsys):
    recipe = (old / "stylegan2" / "config.yaml").rename(old / "recipe.yaml")
    assert train_in_process(recipe, old / "new", "--device", "cpu") == 2
    assert "recipe.yaml: " in (told := capsys.readouterr().err)
    assert told.strip().endswith(" is now generator_optimizer.pct_start")


def test_what_old_checkpoints_hold_can_be_used(old, capsys):
    common = ["--json", "--out", "figures"]
    assert run_cli(evaluate.main, ["--checkpoint", "classifier", *common]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["accuracy"] <= 1
    assert cv2.imwrite("image.png", np.full((20, 20), 90, np.uint8))
    assert run_cli(predict.main, ["--checkpoint", "classifier", "image.png", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)[0]["probabilities"]) == 3
    for run in ("stylegan2", "r3gan"):
        grid = Path(f"{run}.png")
        assert run_cli(generate.main, ["grid", "--checkpoint", run, "--n", "4", "--out", str(grid)]) == 0
        assert grid.stat().st_size > 100
