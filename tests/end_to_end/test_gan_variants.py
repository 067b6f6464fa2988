"""GANs with all options and every family of backbones through the command line; all kinds: test_resumed_kinds.py."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from duetgan import hub as hubconf
from duetgan.commands import evaluate, export, generate, train
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from tests.end_to_end.helpers import state_of, train_in_process, write_config

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
    if name == "unconditional":
        held = load(resolve(straight))
        assert (held["classes"], held["shape"]["classes"], generator_from(held).classes) == ([], 0, 0)
        run(evaluate.main, "--checkpoint", straight, "--extractor", "pixels", "--n", "20", "--out", tmp_path / "out")
        document = json.loads((tmp_path / "out" / "metrics.json").read_text())
        assert document["recognised"] is None
        refused = ["grid", "--checkpoint", str(straight), "--out", str(tmp_path / "x.png"), "--classes", "a"]
        assert run_cli(generate.main, refused) == 2
        assert "this generator is unconditional" in capsys.readouterr().err
    grid = tmp_path / "grid.png"
    run(generate.main, "grid", "--checkpoint", straight, "--out", grid, "--n", "10")
    assert grid.stat().st_size > 500
    assert (straight / "report.html").is_file()


@pytest.mark.usefixtures("slim")
def test_from_training_to_the_hub(packed, tmp_path):
    config, straight = write_config(tmp_path / "c.yaml", "classifier", packed), tmp_path / "straight"
    options = ["--model.name", "convnext_tiny", "--model.stem", "small", "--finetune.layer_decay", "0.8"]
    options += ["--optimizer.name", "adamw", "--finetune.unfreeze", "{backbone: 2, head: 0}"]
    options += ["--finetune.freeze", "[stem]", "--device", "cpu"]
    assert train_in_process(config, straight, *options, "--max-steps", "4") == 0
    before, after = state_of(straight, 2)["model"], state_of(straight, 4)["model"]
    model = classifier_from(load(resolve(straight)))
    for key in model.block_of:
        assert torch.equal(before[key], after[key]) == (model.stage_of(key) == "stem"), key

    out = ["--format", "safetensors", "--out", tmp_path / "x.safetensors", "--n", "40"]
    run(export.main, "--checkpoint", straight, *out)
    x = torch.rand(2, *model.spec.shape) * 2 - 1
    for place in (straight, tmp_path / "x.safetensors"):
        torch.testing.assert_close(hubconf.resnet_classifier(str(place))(x), model(x))
