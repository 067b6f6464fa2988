"""Every family of backbones through the scripts: train, go on, predict with Grad-CAM, export, load from the hub."""

import json

import cv2
import numpy as np
import pytest
import torch

import export
import hubconf
import predict
from duetgan.models.backbones import base
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.script import run_cli
from tests.end_to_end.helpers import differing, state_of, train_in_process, write_config
from tests.slim import SLIM

MODELS = {
    "resnet18": ["--model.stem", "small-stride2"],
    "convnext_tiny": ["--model.stem", "small"],
    "efficientnet_b0": ["--model.stem", "small"],
    "timm:test_efficientnet": ["--model.stem", "imagenet", "--model.input_size", "32"],
}
SLOW = {"efficientnet_b0": [pytest.mark.slow]}  # one EfficientNet is in the fast tests


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, [])) for name in MODELS])
def test_from_training_to_the_hub(name, packed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(base, "make", lambda name, **options: SLIM[name]())
    config = write_config(tmp_path / "c.yaml", "classifier", packed)
    options = ["--model.name", name, *MODELS[name], "--finetune.layer_decay", "0.8", "--optimizer.name", "adamw"]
    options += ["--finetune.unfreeze", "{backbone: 2, head: 0}"]
    options += ["--finetune.freeze", "[stem]", "--device", "cpu"]
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    assert train_in_process(config, straight, *options, "--max-steps", "4") == 0
    for last in ("2", "4"):
        assert train_in_process(config, parted, *options, "--max-steps", last) == 0
    assert differing(state_of(straight, 4)["model"], state_of(parted, 4)["model"]) == []
    before, after = state_of(straight, 2)["model"], state_of(straight, 4)["model"]
    model = classifier_from(load(resolve(straight)))
    for key in model.block_of:
        assert torch.equal(before[key], after[key]) == (model.stage_of(key) == "stem"), key

    assert cv2.imwrite(str(tmp_path / "image.png"), np.full((20, 20), 90, np.uint8))
    files = [str(tmp_path / "image.png"), "--json", "--gradcam", str(tmp_path / "maps")]
    assert run_cli(predict.main, ["--checkpoint", str(straight), *files]) == 0
    assert (tmp_path / "maps" / "image-gradcam.png").is_file()
    quick = ["--n", "40", "--batch-size", "8", "--repeats", "1", "--json"]
    for form in ("safetensors", "onnx"):
        capsys.readouterr()
        out = ["--format", form, "--out", str(tmp_path / f"x.{form}")]
        assert run_cli(export.main, ["--checkpoint", str(straight), *out, *quick]) == 0
        assert json.loads(capsys.readouterr().out)["passed"]
    x = torch.rand(2, model.channels, model.resolution, model.resolution) * 2 - 1
    for place in (straight, tmp_path / "x.safetensors"):
        torch.testing.assert_close(hubconf.resnet_classifier(str(place))(x), model(x))
