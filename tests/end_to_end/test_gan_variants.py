"""GANs with all options and every family of backbones through the command line; all kinds: test_resumed_kinds.py."""

import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from duetgan import hub as hubconf
from duetgan.commands import evaluate, export, generate, predict, train
from duetgan.models.backbones import base
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from tests.end_to_end.helpers import differing, graph_scopes, log_of, state_of, train_in_process, write_config
from tests.slim import SLIM

NETS = """
generator: {z_dim: 8, w_dim: 8, mapping_layers: 2, channel_base: 128, channel_max: 8}
discriminator: {channel_base: 128, channel_max: 8, minibatch_std_group: 2}
"""
VARIANTS = {
    # all that StyleGAN2 has, ADA, and several losses told apart
    "stylegan2": NETS
    + """
loss: {r1_interval: 2, style_mixing: 0.9, path_length_weight: 2, path_length_interval: 3, gradients_every: 2,
  feature_matching_weight: 0.1, feature_matching_group: 2, auxiliary_weight: 0.5}
ada: {mode: adaptive, p: 0.5, kimg: 0.1, interval: 4}
""",
    "unconditional": NETS + "conditional: false\nloss: {mismatch_weight: 0.1}",  # the recipes' weight
    "progressive": NETS + "progressive: {start: 8, fade_kimg: 0.024, stable_kimg: 0.016, batch_sizes: {8: 16}}",
}
R3GAN = """
architecture: r3gan
generator: {z_dim: 8, width: 8, cardinality: 2, blocks: 1}
discriminator: {width: 8, cardinality: 2, blocks: 1}
loss: {r1_gamma: 0.5, r2_gamma: 0.5}
"""
COMMON = """
task: gan
steps: 7
batch_size: 8
precision: bf16
log: {{every: 2, samples_every: 3, tensorboard: false}}
checkpoint: {{every: 3}}
evaluation: {{every: 5, n: 40}}
data: {{path: {folder}/train.lmdb, val_path: {folder}/test.lmdb}}
"""


def run(main: Callable[[list[str]], int], *arguments: str | Path) -> None:
    assert run_cli(main, [str(argument) for argument in arguments]) == 0


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_trains_and_is_used(name, packed, tmp_path, capsys):
    config = tmp_path / "variant.yaml"
    config.write_text(COMMON.format(folder=packed) + VARIANTS[name])
    straight = tmp_path / "straight"
    run(train.main, "--config", config, "--run-dir", straight)
    rows = log_of(straight)
    named = set().union(*rows)
    assert {"logits/margin", "logits/real_sign", "loss/r1", "gradient_norm/generator"} <= named
    if name == "stylegan2":
        assert {"loss/path_length", "path_length/mean", "ada/p", "loss/feature_matching"} <= named
        assert {"loss/auxiliary", "loss/auxiliary_real", "accuracy/auxiliary"} <= named
        assert "gradient_cosine/generator/adversarial~path_length" in named
    if name == "unconditional":
        held = load(resolve(straight))
        assert (held["classes"], held["shape"]["classes"], generator_from(held).classes) == ([], 0, 0)
        run(evaluate.main, "--checkpoint", straight, "--extractor", "pixels", "--n", "20", "--out", tmp_path / "out")
        document = json.loads((tmp_path / "out" / "metrics.json").read_text())
        assert document["recognised"] is None
        refused = ["grid", "--checkpoint", str(straight), "--out", str(tmp_path / "x.png"), "--classes", "a"]
        assert run_cli(generate.main, refused) == 2
        assert "this generator is unconditional" in capsys.readouterr().err
    if name == "progressive":
        images = [row["images"] for row in rows if "images" in row]
        assert images == [24, 40, 56, 64]  # 16 at 8 px are one step, then steps of 8 fade 16 px in
    grid = tmp_path / "grid.png"
    run(generate.main, "grid", "--checkpoint", straight, "--out", grid, "--n", "10")
    assert grid.stat().st_size > 500
    assert (straight / "report.html").is_file()


def test_activation_checkpointing_changes_no_weight_and_is_traced(packed, tmp_path):
    """N1: the graphs for TensorBoard are traced, which cannot record a stage that is computed again."""
    config = tmp_path / "variant.yaml"
    config.write_text(COMMON.format(folder=packed).replace("precision: bf16", "precision: fp32") + R3GAN)
    saving = [f"--{network}.activation-checkpointing=true" for network in ("generator", "discriminator")]
    runs = {"kept": [], "recomputed": saving}
    for folder, options in runs.items():
        more = ["--max-steps", "2", "--log.tensorboard", "true", *options]
        run(train.main, "--config", config, "--run-dir", tmp_path / folder, *more)
        assert {"generator", "discriminator"} <= graph_scopes(tmp_path / folder)
    kept, recomputed = (state_of(tmp_path / folder, 2)["generator"] for folder in runs)
    assert differing(kept, recomputed) == []


MODELS = {
    "resnet18": ["--model.stem", "small-stride2"],
    "convnext_tiny": ["--model.stem", "small"],
    "efficientnet_b0": ["--model.stem", "small"],
    "timm:test_efficientnet": ["--model.stem", "imagenet", "--model.input_size", "32"],
}
FAST = "convnext_tiny"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == FAST else pytest.mark.slow) for name in MODELS]
)
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
    quick = ["--n", "40", "--json"]
    capsys.readouterr()
    out = ["--format", "safetensors", "--out", str(tmp_path / "x.safetensors")]
    assert run_cli(export.main, ["--checkpoint", str(straight), *out, *quick]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    x = torch.rand(2, *model.spec.shape) * 2 - 1
    for place in (straight, tmp_path / "x.safetensors"):
        torch.testing.assert_close(hubconf.resnet_classifier(str(place))(x), model(x))
