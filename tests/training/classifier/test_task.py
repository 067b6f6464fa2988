"""The classifier's step with its settings on: resume to the bit, and what reaches what."""

import re
import shutil
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import fingerprint
from duetgan.metrics.lineage import unfit
from duetgan.models.restore import classifier_from, generator_from
from duetgan.training.base.data import make_loader
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.checkpoint import load, resolve
from tests.conftest import REPOSITORY
from tests.end_to_end.helpers import differing, state_of, train_in_process, write_config
from tests.training.classifier.test_frozen import train

pytestmark = pytest.mark.usefixtures("slim")
CPU = torch.device("cpu")
TREE: dict[str, Any] = {
    "task": "classifier",
    "steps": 5,
    "batch_size": 48,  # five of them are more than an epoch of 200
    "model": {"stem": "small-stride2"},
    "augment": {"flip": True, "shift": 1, "erase": 0.2, "trivial_augment": True, "mixup": 0.4, "cutmix": 1.0},
    "loss": {"class_weights": "balanced"},
    "evaluation": {"every": 3},
    "checkpoint": {"every": 100},  # they are large: besides the evaluations only where a run ends
    "log": {"every": 4, "tensorboard": False, "samples_every": 0},
}
FREE: dict[str, Any] = {
    "optimizer": {"name": "schedulefree-adamw", "lr": 0.01, "schedule": "constant", "clip_value": 0.1},
    "resizing": {"initial_scale": 0.5},
    "micro_batch": "auto",
    "precision": "bf16",
    "loss": {"kind": "squared-error"},
}


def config_of(packed: Path, *overrides: str, **more: Any) -> Any:
    data = {"path": str(packed / "train.lmdb"), "val_path": str(packed / "test.lmdb")}
    return build_run_config(TREE | {"data": data} | more, list(overrides), "x")


def test_a_run_that_had_a_number_can_go_on_with_auto(packed, tmp_path):
    train(config_of(packed), tmp_path / "run", max_steps=1)
    _, state = train(config_of(packed, micro_batch="auto"), tmp_path / "run", max_steps=2)
    assert state["micro_batch"] == {"size": 48}


def task_of(packed: Path, *overrides: str, **more: Any) -> Any:
    return ClassifierTask(config_of(packed, *overrides, **more), Dataset(packed / "train.lmdb"), None, CPU)


def test_an_epoch_of_unfreezing_is_one_of_the_global_batch(packed, monkeypatch):
    """A process of two computes half of each batch of 8."""
    monkeypatch.setattr("duetgan.utils.distributed.collectives.world_size", lambda: 2)
    finetune = {"unfreeze": {"head": 0, "layer4": 2}, "unfreeze_by": "epoch"}
    begins = task_of(packed, "--batch_size", "8", finetune=finetune).finetuning.begins
    assert {begin for name, begin in begins.items() if name.startswith("network.layer4")} == {2 * 200 // 8}


def test_the_evaluated_network_of_a_schedule_free_training_is_x(packed):
    task = task_of(packed, **FREE)
    loader = make_loader(task.config, task.dataset, CPU)
    for step in range(3):
        task.step(loader, step)
    x = task.updater.average(task.model.parameters())
    for found, expected, y in zip(task.ema.model.parameters(), x, task.model.parameters(), strict=True):
        assert torch.equal(found, expected)
        assert not torch.equal(found, y)
    ours, theirs = task.ema.state_dict(), task.model.state_dict()
    name = "network.bn1.running_mean"
    assert not torch.equal(ours[name], theirs[name])  # these are averaged as ever


def test_balances_do_not_add_up_and_the_first_images_are_shown_mixed(packed):
    task = task_of(packed, data={"path": str(packed / "train.lmdb"), "class_rates": {"Sandal": 4.0}})
    place = list(task.dataset.classes).index("Sandal")
    weights: Any = task.criterion.weights
    assert (weights[place] * 4 / weights[place - 1]).item() == pytest.approx(1.0)
    mixed, plain = (task_of(packed, augment=augment).sample_grid(0) for augment in ({"mixup": 8.0}, {}))
    assert mixed.shape == plain.shape
    assert (mixed != plain).mean() > 0.2


def test_the_step_is_that_of_the_documentation(packed):
    text = (REPOSITORY / "docs/architecture.md").read_text().partition("The classifier's step")[2]
    lines = re.findall(r"^( *)([A-Z]\w+\.\w+)", text.split("```")[1], re.MULTILINE)
    expected = []
    for is_repeated, group in groupby(lines, key=lambda line: bool(line[0])):
        expected += [name for _, name in group] * (2 if is_repeated else 1)
    task, calls = task_of(packed, micro_batch=24), []
    loader = make_loader(task.config, task.dataset, CPU)

    def note(frame, event, _argument):
        if event == "call" and frame.f_code.co_qualname in expected:
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        task.step(loader, 0)
    finally:
        sys.setprofile(None)
    assert calls == expected


FROZEN = ["--finetune.freeze", "[backbone]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, packed):
    """gan: a run of one step; recipe.yaml of a classifier; straight: a classifier of 4 steps from D, frozen."""
    path = tmp_path_factory.mktemp("discriminator")
    assert train_in_process(write_config(path / "gan.yaml", "gan", packed), path / "gan", "--max-steps", "1") == 0
    recipe = write_config(path / "recipe.yaml", "classifier", packed)
    text = recipe.read_text().replace("{stem: small-stride2}", f"{{name: discriminator, weights: {path / 'gan'}}}")
    recipe.write_text(text)
    assert train_in_process(recipe, path / "straight", "--max-steps", "4", *FROZEN) == 0
    return path


def test_a_frozen_backbone_is_the_discriminators(folder):
    given, found = state_of(folder / "gan", 1)["discriminator"], state_of(folder / "straight", 4)["model"]
    assert torch.equal(found["network.stem.weight"], given["from_rgb.weight"])
    for part in ("first", "second", "skip"):
        assert torch.equal(found[f"network.stage2.{part}.weight"], given[f"blocks.1.{part}.weight"])
    early = state_of(folder / "straight", 2)["model"]
    assert differing({"head": early["network.fc.weight"]}, {"head": found["network.fc.weight"]})


def test_all_of_it_trains_unless_frozen(folder):
    assert train_in_process(folder / "recipe.yaml", folder / "tuned", "--max-steps", "2") == 0
    given, found = state_of(folder / "gan", 1)["discriminator"], state_of(folder / "tuned", 2)["model"]
    assert differing({"stem": found["network.stem.weight"]}, {"stem": given["from_rgb.weight"]})


def test_it_cannot_judge_samples(folder, packed):
    """D has seen its generator's: so has what starts from it."""
    checkpoint = load(resolve(folder / "straight"))
    (passport,) = checkpoint["lineage"]["synthetic"]
    assert passport["generator"] == fingerprint(generator_from(load(resolve(folder / "gan"))))
    with Dataset(packed / "test.lmdb") as reader:
        assert "was trained on samples" in unfit(checkpoint, reader)


def test_the_run_resumes_to_the_same_bits_and_needs_the_gan_no_more(folder, tmp_path):
    run = tmp_path / "run"
    assert train_in_process(folder / "recipe.yaml", run, "--max-steps", "2", *FROZEN) == 0
    assert train_in_process(folder / "recipe.yaml", run, "--max-steps", "4", *FROZEN) == 0
    assert differing(state_of(folder / "straight", 4), state_of(run, 4)) == []
    shutil.move(folder / "gan", tmp_path / "gone")
    try:
        model = classifier_from(load(resolve(run)))
        assert model(torch.zeros(1, 1, 16, 16)).shape == (1, 10)
    finally:
        shutil.move(tmp_path / "gone", folder / "gan")


def test_a_classifiers_run_is_no_gan(folder, capsys):
    more = ["--max-steps", "1", "--model.weights", str(folder / "straight")]
    assert train_in_process(folder / "recipe.yaml", folder / "none", *more) == 2
    assert "needs a GAN's run" in capsys.readouterr().err
