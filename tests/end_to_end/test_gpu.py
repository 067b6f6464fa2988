"""Both tasks on an accelerator; skipped where there is none."""

from functools import partial

import pytest
import torch

from duetgan.commands import train
from duetgan.utils.distributed.process import run_cli
from tests.end_to_end.helpers import differing, state_of, write_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("task", ["gan", "classifier"])
def test_trains_stops_and_goes_on(tmp_path, packed, task, precision, request):
    """Uncompiled and deterministic, to the bit as without the stop."""
    compiled = (task, precision) in (("gan", "fp16"), ("classifier", "bf16"))  # half a minute each
    request.addfinalizer(partial(torch.use_deterministic_algorithms, mode=False))
    config = write_config(tmp_path / "recipe.yaml", task, packed)
    arguments = ["--config", str(config), "--precision", precision]
    arguments += ["--compile", "on"] if compiled else ["--compile", "off", "--deterministic", "true"]
    run, straight = (tmp_path / name for name in ("run", "straight"))
    assert run_cli(train.main, [*arguments, "--run-dir", str(run), "--max-steps", "4"]) == 0
    before = state_of(run, 4)
    assert run_cli(train.main, [*arguments, "--run-dir", str(run)]) == 0
    assert differing(before, state_of(run, 8)) != []
    if not compiled:
        assert run_cli(train.main, [*arguments, "--run-dir", str(straight)]) == 0
        assert differing(state_of(straight, 8), state_of(run, 8)) == []
    # a checkpoint of an accelerator is read on a machine without one
    network = "generator" if task == "gan" else "model"
    assert all(value.device.type == "cpu" for value in before[network].values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("task", ["gan", "classifier"])
def test_replayed_steps_have_the_bits_of_eager_ones(tmp_path, packed, task, precision, request, capfd):
    """20 steps as CUDA graphs and without, with lazy penalties and all random draws; a stop half way."""
    request.addfinalizer(partial(torch.use_deterministic_algorithms, mode=False))
    config = write_config(tmp_path / "recipe.yaml", task, packed)
    arguments = ["--config", str(config), "--precision", precision, "--compile", "off", "--deterministic", "true"]
    arguments += ["--steps", "20", "--augment.flip", "true", "--augment.shift", "1"]
    if task == "gan":
        arguments += ["--loss.r1-interval", "4", "--loss.path-length-weight", "2", "--loss.path-length-interval", "2"]
        arguments += ["--loss.style-mixing", "0.9"]
    else:
        arguments += ["--augment.mixup", "0.5", "--optimizer.clip-norm", "0.5"]
    for graphs, plan in (("auto", "CUDA graph, "), ("off", "eager, because graphs is off")):
        run = ["--run-dir", str(tmp_path / graphs), "--graphs", graphs]
        assert run_cli(train.main, [*arguments, *run, "--max-steps", "11"]) == 0
        assert run_cli(train.main, [*arguments, *run]) == 0
        text = capfd.readouterr().err
        assert plan in text
        assert "the capture of a step failed" not in text
    assert differing(state_of(tmp_path / "auto", 20), state_of(tmp_path / "off", 20)) == []
