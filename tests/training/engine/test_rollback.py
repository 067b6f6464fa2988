"""Spikes of the loss: what counts as one, and the way back from it."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from duetgan.commands import train
from duetgan.training.base.monitors import LEAST, SpikeDetector, SpikesConfig
from duetgan.training.engine.rollback import QUIET, SkippedUpdates, SpikeRollback
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.distributed.process import run_cli
from tests.end_to_end.helpers import differing, log_of, state_of, write_config
from tests.faults import inject

pytestmark = pytest.mark.usefixtures("slim")  # these tests save often


def noise(count: int, seed: int = 0) -> list[float]:
    return list(np.random.default_rng(seed).normal(2.0, 0.1, count))


def test_a_jump_is_found_and_noise_is_not():
    detector = SpikeDetector(SpikesConfig(factor=20))
    assert detector.see(0, noise(500)) is None
    found: Any = detector.see(500, [2.1, 1.9, 9.0, 30.0])
    assert found[:2] == (502, 9.0)
    assert found[2] == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize(("value", "spike"), [(2.0 + 0.1 * 5 * 1.1, True), (2.0 + 0.1 * 5 * 0.9, False)])
def test_the_threshold_is_in_standard_deviations(value, spike):
    detector = SpikeDetector(SpikesConfig(factor=5, window=5000))
    detector.history = noise(5000)
    assert (detector.see(0, [value]) is not None) == spike


def test_what_is_no_spike():
    """A fall, what is not finite, and what comes before anything is usual."""
    detector = SpikeDetector(SpikesConfig())
    assert detector.see(0, [*noise(100), -50.0, math.nan, math.inf]) is None
    assert all(math.isfinite(value) for value in detector.history)
    for before, found in ((LEAST - 1, None), (LEAST, (LEAST, 100.0, 1.0))):
        assert SpikeDetector(SpikesConfig()).see(0, [1.0] * before + [100.0]) == found


def test_a_spike_does_not_become_usual_but_a_new_level_does():
    detector = SpikeDetector(SpikesConfig())
    detector.see(0, noise(100))
    assert detector.see(100, [9.0]) is not None
    assert detector.see(101, [9.0]) is not None
    assert detector.see(102, [2.0]) is None  # after a usual one the next are counted from the start
    for unusual, history in ((LEAST - 1, [*noise(100), 2.0]), (1, [])):  # of LEAST in a row the last one
        assert detector.see(103, [9.0] * unusual) is not None
        assert detector.history == history
    detector.see(133, [9.0 + x for x in noise(3 * LEAST)])
    assert detector.see(200, [9.0 + x for x in noise(20, seed=1)]) is None


def test_a_loss_that_stands_still_may_move_a_little():
    detector = SpikeDetector(SpikesConfig(factor=20))
    assert detector.see(0, [0.5] * 100 + [0.505]) is None
    assert detector.see(101, [0.52]) is not None


def test_roll_backs_to_one_checkpoint_are_all_counted(capsys):
    """The checkpoint's own count is that of its time."""
    callback = SpikeRollback(SpikesConfig())
    callback.count = 2

    def restore(_registry, *, up_to):
        if up_to != 8:
            return None
        callback.count = 0
        return {"state": {"loader": {"consumed": 40, "step": 8, "batch": 1}}}

    position = {"consumed": 48, "step": 9, "batch": 0}
    loaded: list[Any] = []
    loop: Any = SimpleNamespace(
        step=9, loader=SimpleNamespace(state_dict=position.copy, load_state_dict=loaded.append),
        manager=SimpleNamespace(restore=restore), registry=dict, stopwatch=SimpleNamespace(),
        log=SimpleNamespace(close=lambda: None, open=lambda _: None),
    )  # fmt: skip
    callback.roll_back(loop, 5, "a jump")  # there is no checkpoint from before it
    assert (callback.count, vars(loop.stopwatch)) == (2, {})
    assert capsys.readouterr().err.startswith("warning: a jump; there is no checkpoint from before it to go back to")
    callback.roll_back(loop, 8, "a jump")
    assert (callback.count, loop.stopwatch.step) == (3, 9)
    assert loaded == [{"consumed": 48, "step": 8, "batch": 1}]  # other images, at the checkpoint's step


def test_the_last_healthy_step_is_remembered_over_a_resume():
    manager = SimpleNamespace(healthy=None)
    loop: Any = SimpleNamespace(step=20, window=SimpleNamespace(failed=[False, True, False]), manager=manager)
    first, second = SkippedUpdates(9), SkippedUpdates(9)
    first.before_save(loop)
    assert manager.healthy == 17  # update 19 was skipped, and update 18 may have broken the weights
    second.load_state_dict(first.state_dict())
    loop.step = 30
    second.before_save(loop)
    assert manager.healthy == 17
    loop.step = 19 + QUIET + 1
    second.before_save(loop)
    assert manager.healthy is None


def test_its_state_goes_on():
    one, two = SpikeDetector(SpikesConfig(window=50)), SpikeDetector(SpikesConfig(window=50))
    one.see(0, [*noise(80), 9.0, 9.0])
    assert len(one.history) == 50
    two.load_state_dict(one.state_dict())
    assert two.see(82, [9.0] * LEAST) == one.see(82, [9.0] * LEAST)
    assert (two.history, two.unusual) == (one.history, one.unusual)


STEPS = ["--steps", "44", "--log.every", "4", "--checkpoint.every", "8", "--evaluation.every", "0"]
STEPS += ["--checkpoint.keep", "9", "--log.samples-every", "0"]


def run(config: Path, folder: Path, *more: str, spikes: str = "") -> int:
    """`spikes`: the updates in which the loss jumps."""
    with pytest.MonkeyPatch.context() as patch:
        if spikes:
            inject.install(patch.setattr)
            patch.setenv(inject.VARIABLE, ",".join(f"0:{step}:spike" for step in spikes.split()))
        return run_cli(train.main, ["--config", str(config), "--run-dir", str(folder), *STEPS, *more])


@pytest.mark.parametrize("task", ["classifier", pytest.param("gan", marks=pytest.mark.slow)])
def test_back_to_the_last_checkpoint_with_other_images(tmp_path, packed, task, capsys):
    """The run that rolled back equals one that stopped at that checkpoint and went on from it with the loader ahead."""
    config = write_config(tmp_path / "recipe.yaml", task, packed)
    assert run(config, tmp_path / "spiked", "--spikes.action", "roll-back", spikes="37") == 0
    line = (
        r"warning: loss/\w+ jumped to ([\d.e+]+) in step 37, from ([\d.]+) in the steps before; went back to the "
        r"checkpoint of step 32 and on from there with other images: those of the 8 steps since are left out "
        r"\(roll-back 1 of 3\)"
    )
    found = re.search(f"^{line}$", capsys.readouterr().err, re.MULTILINE)
    assert found is not None
    assert float(found[1]) > 100 * float(found[2])
    other = tmp_path / "other"
    assert run(config, other, "--spikes.action", "roll-back", "--max-steps", "32") == 0
    path = other / "checkpoints" / "step-00000032.pt"
    content = checkpoints.load(path)
    batches = content["state"]["loader"]["consumed"] // 32
    content["state"]["loader"]["consumed"] += 8 * batches  # the spike was seen at the log's row of step 40
    content["state"]["loop"]["roll_backs"] = 1
    checkpoints.save(other / "checkpoints", content)
    assert run(config, other, "--spikes.action", "roll-back") == 0
    assert differing(state_of(tmp_path / "spiked", 44), state_of(other, 44)) == []
    assert [row["step"] for row in log_of(tmp_path / "spiked") if "images" in row] == list(range(4, 45, 4))


def test_a_warning_changes_nothing(tmp_path, packed, capsys):
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    assert run(config, tmp_path / "quiet") == 0
    assert "jumped" not in capsys.readouterr().err
    assert run(config, tmp_path / "spiked", spikes="37") == 0
    assert "warning: loss/classifier jumped to" in capsys.readouterr().err
    a, b = state_of(tmp_path / "quiet", 44), state_of(tmp_path / "spiked", 44)
    assert differing(a["model"], b["model"]) == []


def test_too_many_roll_backs_end_the_run(tmp_path, packed, capsys):
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    more = ["--spikes.action", "roll-back", "--spikes.limit", "1", "--log.every", "1"]
    assert run(config, tmp_path / "run", *more, spikes="37 38") == 4
    assert "after 1 roll-backs (spikes.limit); lower the learning rate" in capsys.readouterr().err


def test_a_metric_that_is_not_there_is_named(tmp_path, packed, capsys):
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    assert run(config, tmp_path / "run", "--spikes.metric", "loss/generator") == 2
    told = "spikes.metric loss/generator: not a metric of every step; choose one of gradient_norm/classifier, loss/cl"
    assert told in capsys.readouterr().err
