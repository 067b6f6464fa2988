"""Which of several networks suits the packed images, by features of real ones."""

import json
import re

import numpy as np
import torch

from duetgan.commands.planning import networks
from duetgan.commands.planning.given import Speed
from duetgan.commands.planning.plan import LAST, Plan, choose
from duetgan.data.records import pack_arrays
from duetgan.models.registry import backbone_of
from duetgan.utils.script import run_cli
from tests.commands.machines import Fast, Weights, seen


class Quick(Fast):
    """Trains ResNet-18 behind its frozen stages."""

    def speed(self, config, overrides, side, images):
        return Speed("fp32", super().speed(config, overrides, side, images).images_per_second)


def test_the_network_whose_features_tell_the_images_apart_is_taken(tmp_path, capsys):
    torch.manual_seed(0)
    state = backbone_of("resnet18").build("resnet18").state_dict()
    blind = {name: torch.zeros_like(value) if name == "conv1.weight" else value for name, value in state.items()}
    files = {name: tmp_path / f"{name}.pth" for name in ("blind", "seeing")}
    torch.save(blind, files["blind"])
    torch.save(state, files["seeing"])
    machine = Quick()
    machine.weights = [Weights(str(file), "resnet18", False) for file in files.values()]
    made = choose(seen(80, 2, side=16), machine, minutes=15)
    assert [each.config for each in made.choices] == [LAST, LAST]
    (tmp_path / "plan.json").write_text(json.dumps(made.model_dump()))
    labels = np.arange(72) % 2
    noise = np.random.default_rng(0).integers(0, 100, (72, 3, 16, 16), dtype=np.uint8)
    images = noise + (100 * labels[:, None, None, None]).astype(np.uint8)  # dark ones and bright ones
    pack_arrays(tmp_path / "train.lmdb", images, labels, ["dark", "bright"], source="noise")
    assert run_cli(networks.main, [str(tmp_path / "plan.json"), str(tmp_path / "train.lmdb")]) == 0
    taken = Plan.read(json.loads((tmp_path / "plan.json").read_text()))
    assert (taken.choices, taken.classifier) == ([], made.choices[1])
    said = capsys.readouterr().out
    assert f"{files['seeing']}: accuracy 1.000 by a regression on 72 images" in said
    assert f"classifier: {taken.classifier.why}\n" in said
    chance, best = map(float, re.findall(r"(0\.\d+|1\.000) of", taken.notes[-1]))
    assert chance < 0.7 < best
