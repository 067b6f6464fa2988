"""Runs of commit 158b9c7 go on as it would have, and its checkpoints can be used: tests/fixtures."""

import json
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from duetgan.commands import evaluate, generate, predict
from duetgan.models.layers import convolution
from duetgan.utils.distributed.process import run_cli
from tests import slim
from tests.end_to_end.helpers import rows, state_of, train_in_process
from tests.fixtures.before import ARCHIVE, RUNS, STEPS, STOPPED, machine


@pytest.fixture
def old(tmp_path, monkeypatch):
    """The folder of the old runs, which is the working folder."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slim, "SHRINK", 32)
    monkeypatch.setattr("duetgan.models.backbones.base.make", lambda name, **options: slim.SlimResNet())
    return tmp_path


@pytest.mark.parametrize("run", RUNS)
def test_an_old_run_goes_on_as_the_old_version_did(old, run, monkeypatch):
    """Within rounding, of which less is allowed where the torch and the CPU are those that made the fixture.

    That is with autograd's own second derivatives, as at 158b9c7: commit 7a22871 made faster ones.
    """
    monkeypatch.setattr(convolution, "_twice", convolution._plain)
    stored = torch.load(old / "after.pt", weights_only=True)
    after, same = stored[run], stored["machine"] == machine()
    assert train_in_process(old / run / "config.yaml", old / run, "--device", "cpu") == 0
    state = state_of(old / run, STEPS)
    for network, tensors in after["state"].items():
        assert state[network].keys() == tensors.keys()
        for name, tensor in tensors.items():
            rtol, atol = (1e-5, 1e-5) if same else (1e-3, 1e-4)  # equal CPUs in other hosts differ in their last bits
            torch.testing.assert_close(state[network][name], tensor, rtol=rtol, atol=atol, msg=f"{network}.{name}")
    later = [row for row in rows(old / run) if row["step"] > STOPPED]
    assert len(later) == len(after["rows"])
    for found, expected in zip(later, after["rows"], strict=True):
        for key in ("val/logits/real", "val/logits/fake"):  # of images of every class since, where it took the first
            expected.pop(key, None)
        assert found | expected == pytest.approx(found, rel=rtol * 10, abs=atol * 10)


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
