"""The GAN's speed measured again, before it begins."""

import json

import pytest

from duetgan.commands.planning import replan
from duetgan.commands.planning.given import Speed
from duetgan.commands.planning.measure import ThisMachine
from duetgan.commands.planning.plan import Plan, choose
from duetgan.utils.script import run_cli
from tests.commands.machines import WEIGHTS, Fast, seen


@pytest.mark.parametrize(("unlabelled", "classes"), [(0, 5), (1000, 0)])
def test_a_gan_that_is_slower_by_now_gets_the_time_that_is_left(tmp_path, monkeypatch, capsys, unlabelled, classes):
    machine, asked = Fast(), []
    machine.weights = WEIGHTS
    first = choose(seen(300, 5).model_copy(update={"unlabelled": unlabelled}), machine, minutes=15)

    def half(_self, config, overrides, side, images):
        asked.append((config, overrides, side, images.classes))
        return Speed("bf16", first.gan.images_per_second / 2)

    monkeypatch.setattr(ThisMachine, "speed", half)
    timings = {"pack": {"seconds": first.seconds["pack"] + 60, "done": True}}
    for name, tree in (("plan", first.model_dump()), ("timings", timings)):
        (tmp_path / f"{name}.json").write_text(json.dumps(tree))
    assert run_cli(replan.main, [str(tmp_path)]) == 0
    made = Plan.read(json.loads((tmp_path / "plan.json").read_text()))
    assert asked == [(first.gan.config, first.gan.overrides, first.gan.resolution, classes)]
    assert made.gan.images_per_second == first.gan.images_per_second / 2
    assert made.gan.steps < first.gan.steps / 2
    assert made.total == pytest.approx(15 * 60, rel=0.02)
    later = replan.replanned(first, replan.spent_before_gan(first, timings), 2.0, 50.0)  # measuring took time
    assert later.gan.steps < made.gan.steps
    assert f"GAN: {made.gan.steps:,} steps instead of {first.gan.steps:,}" in capsys.readouterr().out
