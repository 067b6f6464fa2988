"""Both tasks on an accelerator; skipped where there is none."""

import pytest
import torch

import train
from duetgan.utils.script import run_cli
from tests.end_to_end.helpers import differing, state_of, write_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("task", ["gan", "classifier"])
def test_trains_stops_and_goes_on(tmp_path, packed, task, precision):
    compiling = "on" if (task, precision) in (("gan", "fp16"), ("classifier", "bf16")) else "off"  # half a minute each
    config = write_config(tmp_path / "recipe.yaml", task, packed)
    arguments = ["--config", str(config), "--run-dir", str(tmp_path / "run"), "--precision", precision]
    arguments += ["--compile", compiling]
    assert run_cli(train.main, [*arguments, "--max-steps", "4"]) == 0
    before = state_of(tmp_path / "run", 4)
    assert run_cli(train.main, arguments) == 0
    assert differing(before, state_of(tmp_path / "run", 8)) != []
    # a checkpoint of an accelerator is read on a machine without one
    network = "generator" if task == "gan" else "model"
    assert all(value.device.type == "cpu" for value in before[network].values())
