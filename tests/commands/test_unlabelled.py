"""A folder `unlabelled` beside class folders: what is counted, planned, run and learnt from."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from duetgan.commands.planning.measure import ThisMachine, plan_lines, survey
from duetgan.commands.planning.plan import FEW_LABELS, SCRATCH, Plan, choose
from duetgan.commands.planning.replan import replanned
from duetgan.commands.planning.sizes import SIZES
from duetgan.commands.planning.steps import ROOT, Quickstart
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.duplicates import find
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.yaml_files import read_yaml
from tests.commands.machines import WEIGHTS, Accelerator, Fast, Slow, Tiny, seen


def with_more(count: int, classes: int, unlabelled: int, **more):
    return seen(count, classes, **more).model_copy(update={"unlabelled": unlabelled})


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """12 dark and 12 bright images; 40 without labels, of which four are labelled ones' copies and one says so."""
    folder = tmp_path_factory.mktemp("few") / "photos"
    draws = np.random.default_rng(0)
    for number in range(60):
        kind = ("dark", "bright")[number % 2] if number < 24 else "unlabelled"
        cells = draws.integers(0, 128, (6, 6, 3)) + 127 * (number % 2)
        image = Image.fromarray(cells.astype(np.uint8)).resize((24, 24), Image.Resampling.BICUBIC)
        for place in [kind, *["unlabelled"] * (number < 4)]:
            (folder / place).mkdir(parents=True, exist_ok=True)
            image.save(folder / place / f"{number:02d}.png")
    return folder


def test_they_are_counted_and_told(photos):
    found = survey(str(photos))
    assert (found.count, found.classes, found.unlabelled) == (24, 2, 40)
    assert found.text() == "24 images, 2 classes of 12, and 40 without labels, about 24 px, colour"


@pytest.mark.parametrize("machine", [Fast, Slow, Tiny, Accelerator])
@pytest.mark.parametrize("images", [with_more(100, 10, 1000, side=28, channels=1), with_more(900, 3, 40_000)])
@pytest.mark.parametrize("minutes", [3, 15, 600])
def test_every_plan_trains_the_gan_first_and_the_classifier_by_the_recipe_of_few_labels(machine, images, minutes):
    made = choose(images, machine(), minutes=minutes)
    assert (made.pooled, made.from_gan, list(made.trainings)) == (True, True, ["gan", "classifier"])
    assert list(made.seconds) == ["pack", "train gan", "train classifier", "evaluate gan", "evaluate classifier"]
    assert (made.total <= 63 * minutes) is not any("longer than" in note for note in made.notes)
    assert made.classifier is not None
    assert made.classifier.config == FEW_LABELS
    assert "--unlabelled.spread" not in made.classifier.overrides
    crowd = choose(images.model_copy(update={"unlabelled": 50_000}), machine(), minutes=minutes)
    assert "--unlabelled.spread" in crowd.classifier.overrides  # a graph of so many takes too long
    assert made.size == made.smallest == made.classifier.resolution == made.gan.resolution <= 64
    assert ("--ada.mode" in made.gan.overrides) is (images.unlabelled < 10_000)
    assert "--loss.mismatch-weight" in made.gan.overrides
    assert "--extractor" not in made.evaluation  # ResNet-50's features are at hand, and D judges nothing
    assert Plan.read(json.loads(made.model_dump_json())) == made
    assert "few images have labels and no ImageNet weights were found (--weights FILE)" in str(plan_lines(made))
    slower = replanned(made, {"pack": made.seconds["pack"] + 30})
    assert slower.gan.steps <= made.gan.steps
    assert slower.classifier == made.classifier


@pytest.mark.parametrize(
    ("images", "weights", "config", "pooled", "told"),
    [
        (with_more(100, 10, 1000), None, FEW_LABELS, True, "the GAN learns from them and the others"),
        (with_more(100, 10, 1000, held_out=50), None, FEW_LABELS, True, "the source's own 50"),
        (with_more(100, 10, 1000), WEIGHTS, "configs/finetune_resnet50_last.yaml", True, "ImageNet weights, resnet50"),
        (with_more(9000, 10, 20_000), None, SCRATCH, True, "enough for that"),  # labels enough
        (with_more(1000, 10, 90), None, SCRATCH, False, "90 images without labels: left out, because"),
        (with_more(100, 1, 1000), None, None, True, "no classifier: the images are of one class"),
    ],
)
def test_which_classifier_is_taken_and_why_and_what_the_steps_read(
    tmp_path, monkeypatch, images, weights, config, pooled, told
):
    monkeypatch.setattr("duetgan.commands.planning.steps.unfit", lambda run, test: "")  # there are no files
    machine = Fast()
    machine.weights = weights
    made = choose(images, machine, minutes=15)
    assert (made.classifier and made.classifier.config, made.pooled) == (config, pooled)
    assert told in "\n".join(made.notes)
    assert ("without labels" in made.gan.why) is pooled
    begun = Quickstart(tmp_path, made)
    steps = {step.name: step.command for step in begun.steps()}
    files = {name: str(tmp_path / "data" / f"{name}.lmdb") for name in ("train", "test", "all")}
    packing = ["pack train", "pack test"] if images.held_out else ["pack"]
    assert list(steps)[: len(packing) + pooled] == [*packing, *["pack all"] * pooled]
    every = steps.get("pack all", [])
    assert all(word in every for word in ("--classes-from", "none", "--apart", files["test"])) is pooled
    gan, few = steps["train gan"], steps.get("train classifier", [])
    assert gan[gan.index("--data.path") + 1] == files["all" if pooled else "train"]
    assert ("--unlabelled.path" in few) is (config == FEW_LABELS)
    if config == FEW_LABELS:
        assert list(steps).index("train gan") < list(steps).index("train classifier")
        assert few[few.index("--data.path") + 1] == files["train"]
        assert few[few.index("--unlabelled.path") + 1] == files["all"]
        assert few[few.index("--model.weights") + 1] == str(tmp_path / "gan")
        assert "--classifier" not in steps["evaluate gan"]


@pytest.mark.parametrize("size", [size for size in SIZES if size.side <= 32])
def test_the_recipe_is_measured_with_the_discriminator_that_the_gan_will_have(tmp_path, monkeypatch, size):
    """What the plan says of the network before there is a run is what the run's checkpoint will say."""
    monkeypatch.setenv("DUET_PRECISION", "fp32")
    asked = []

    class Asked(Fast):
        def speed(self, config, overrides, side, images):
            asked.append((config, list(overrides), side, images))
            return super().speed(config, overrides, side, images)

    monkeypatch.setattr("duetgan.commands.planning.plan.SIZES", (size,))
    made = choose(with_more(100, 10, 1000, side=size.side), Asked(), minutes=15)
    config, overrides, side, images = next(call for call in asked if call[0] == FEW_LABELS)
    gan: Any = build_run_config(read_yaml(made.gan.config), made.gan.overrides, "gan")
    form = ThisMachine.__new__(ThisMachine)
    form.folder, form._speeds, form._labels = tmp_path, {}, []
    assert form.speed(config, overrides, side, images).images_per_second > 0
    few: Any = build_run_config(read_yaml(config), [*overrides, "--data.path", "x"], "few")
    own, told = gan.discriminator.model_dump(), few.model.discriminator
    assert own == own | told["config"]
    assert (told["architecture"], told["resolution"], told["channels"]) == (gan.architecture, size.side, 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_form_runs_for_real_and_no_test_image_is_learnt_from(photos, tmp_path):
    command = [sys.executable, str(ROOT / "quickstart.py"), str(photos), "--quick", "--dir", str(tmp_path)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("already done") == 2  # the packs
    summary, report = json.loads((tmp_path / "summary.json").read_text()), (tmp_path / "report.html").read_text()
    assert 0 <= summary["classifier"]["accuracy"] <= 1
    assert summary["gan"]["recognised"] is None
    assert "40 images without labels: the GAN learns from them and the others" in report
    train, test, every = (LMDBReader(tmp_path / "data" / f"{name}.lmdb") for name in ("train", "test", "all"))
    assert (len(train) + len(test), every.classes) == (24, [])
    digests = [set(reader.signatures()["digest"].tolist()) for reader in (train, test, every)]
    assert not digests[1] & digests[2]
    assert digests[0] <= digests[2]
    assert find(every, test, similar=True).near == []
    config = (tmp_path / "classifier" / "config.yaml").read_text()
    assert "name: discriminator" in config
