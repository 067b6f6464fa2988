"""A classifier of several labels an image from its data to its predictions: what the embedded sample's images are, and
whether they are dark.
"""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.commands import evaluate, export, predict
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.classification.labels import best_thresholds
from duetgan.metrics.evaluate_classifier import answers_of, classify
from duetgan.models.restore import classifier_from, read
from duetgan.training.base.data import data_text, facts
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.errors import UserError
from duetgan.utils.images import save_png
from tests.conftest import sample_images
from tests.training.classifier.test_frozen import train
from tests.training.classifier.test_task import CPU

pytestmark = pytest.mark.usefixtures("slim_module")
NAMES = ["top", "trouser", "dark"]
SETS = [[], [0], [0, 2], [1], [1, 2], [2]]
TREE: dict[str, Any] = {
    "task": "classifier",
    "steps": 60,
    "batch_size": 16,
    "precision": "fp32",
    "model": {"stem": "small-stride2"},
    "augment": {"flip": True, "mixup": 0.2, "cutmix": 1.0, "mix_prob": 0.3},
    "loss": {"kind": "asymmetric", "class_weights": "balanced"},
    "optimizer": {"name": "adamw", "lr": 0.01, "warmup_steps": 5},
    "ema": {"decay": 0.9},
    "evaluation": {"every": 25},
    "checkpoint": {"every": 100},
    "log": {"every": 20, "tensorboard": False, "samples_every": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("labels")
    for split, count in (("train", 20), ("test", 10)):
        images, labels, _ = sample_images(split, count)
        dark = images.reshape(len(images), -1).mean(1) < 70
        of_class = [{0: [0], 1: [1]}.get(int(label), []) for label in labels]
        numbers = [SETS.index([*known, *([2] if night else [])]) for known, night in zip(of_class, dark, strict=True)]
        pack_arrays(place / f"{split}.lmdb", images, numbers, NAMES, label_sets=SETS)
        for number in range(0, len(images), 25):
            save_png(images[number].transpose(1, 2, 0), place / f"{split}-{number}.png")
    pack_arrays(place / "one.lmdb", images, np.arange(len(images)) % 3, NAMES)
    return place


def config_of(place: Path, **more: Any) -> Any:
    data = {"path": str(place / "train.lmdb"), "val_path": str(place / "test.lmdb")}
    return build_run_config(TREE | {"data": data} | more, [], "x")


@pytest.fixture(scope="module")
def run(folder):
    train(config_of(folder), folder / "run")
    return folder / "run"


def test_it_learns_and_keeps_its_thresholds(folder, run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figures = [row for row in rows if "val/average_precision" in row]
    assert [row["step"] for row in figures] == [25, 50, 60]
    assert figures[-1]["val/average_precision"] > 0.6  # by chance: 0.1 for the classes, and the share of dark images
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert best["metric"] == "average_precision"
    assert best["interval"][0] <= best["value"] <= best["interval"][1]
    with Dataset(folder / "test.lmdb") as reader:
        model = classifier_from(load(resolve(run)), several=True)
        found = best_thresholds(answers_of(model, reader, classify(model, reader)))
        assert data_text(reader) == "100 images, 16 px, grey, 3 classes in 6 sets of labels, raw"
    assert model.thresholds.tolist() == pytest.approx(found, abs=1e-6)
    with Dataset(folder / "train.lmdb") as reader:
        criterion: Any = ClassifierTask(config_of(folder), reader, None, CPU).criterion
        frequencies = np.mean([[name in SETS[label] for name in range(3)] for label in reader.label_numbers()], 0)
    assert criterion.weights.tolist() == pytest.approx(1 / frequencies - 1)
    straight = load(resolve(run))["state"]
    assert torch.equal(straight["model"]["thresholds"], straight["model_ema"]["thresholds"])


def test_the_number_of_images_of_each_label_is_reported(folder):
    with Dataset(folder / "train.lmdb") as training, Dataset(folder / "test.lmdb") as held_out:
        for role, dataset in (("training", training), ("held-out", held_out)):
            sets = [SETS[number] for number in dataset.label_numbers()]
            counts = {name: sum(label in labels for labels in sets) for label, name in enumerate(NAMES)}
            assert facts(training, held_out)[role]["by_class"] == counts


def test_it_is_evaluated_and_compared(folder, run, capsys):
    assert evaluate.main(["--checkpoint", str(run), "--device", "cpu"]) == 0
    assert "several labels per image: mean of the labels&#39; F1" in (run / "report.html").read_text()
    assert evaluate.main(["--compare", str(run), str(run)]) == 0
    text = capsys.readouterr().out
    assert all(key in text for key in ("average_precision", "macro_f1", "exact_match"))


def test_predictions_are_sets(folder, run, tmp_path, capsys):
    files = sorted(map(str, folder.glob("t*-*.png")))
    assert predict.main(["--checkpoint", str(run), *files, "--json", "--csv", str(tmp_path / "x.csv")]) == 0
    answers = json.loads(capsys.readouterr().out)
    thresholds = dict(zip(NAMES, classifier_from(load(resolve(run)), several=True).thresholds.tolist(), strict=True))
    for answer in answers:
        shares = answer["probabilities"]
        assert answer["labels"] == [name for name, share in shares.items() if share >= thresholds[name]]
        assert answer["label"] == ";".join(answer["labels"])
    rows = list(csv.DictReader((tmp_path / "x.csv").read_text().splitlines()))
    assert [row["label"] for row in rows] == [answer["label"] for answer in answers]
    assert float(rows[0]["dark"]) == answers[0]["probabilities"]["dark"]
    assert predict.main(["--checkpoint", str(run), files[0], "--gradcam", str(tmp_path / "maps")]) == 0
    assert f": {answers[0]['label'] or 'no label'} (" in capsys.readouterr().out


def test_an_export_carries_the_thresholds(folder, run, tmp_path):
    out = tmp_path / "x.safetensors"
    job = ["--checkpoint", str(run), "--format", "safetensors", "--out", str(out), "--n", "8"]
    assert export.main(job) == 0
    theirs, ours = (classifier_from(read(path), several=True).thresholds for path in (out, resolve(run)))
    assert theirs is not None
    assert ours is not None
    assert torch.equal(theirs, ours)
    for form in ("int8", "folder"):
        with pytest.raises(UserError, match=f"--format {form} is for one label an image"):
            export.main(["--checkpoint", str(run), "--format", form, "--out", str(tmp_path / form)])


REFUSED = [
    ({"loss": {"kind": "cross-entropy"}}, "may have several labels: set --loss.kind bce"),
    ({"data": {"path": "one.lmdb", "val_path": None}}, "have one label each: set loss.kind cross-entropy"),
    ({"data": {"path": "train.lmdb", "val_path": "one.lmdb"}}, "in one of them alone images have several labels"),
    ({"finetune": {"probe": True}}, "finetune.probe is a regression for one label an image"),
    ({"loss": {"kind": "bce", "class_weights": {"darc": 2.0}}}, "no class 'darc' in the data"),
]


def test_outputs_that_are_kept_have_the_labels_of_their_images(folder):
    """With augmentation that leaves the images, and with a head alone that trains."""
    config = config_of(folder, batch_size=200, augment={"flip": True}, finetune={"unfreeze": {"head": 0}})
    with Dataset(folder / "train.lmdb") as reader:
        task = ClassifierTask(config, reader, None, CPU)
        source: Any = task.source(0)
        samples = task.samples(source.batch(np.arange(len(reader))), 0)
        expected = [[float(label in SETS[number]) for label in range(3)] for number in reader.label_numbers()]
    assert (samples.begin, samples.images.shape[2:]) == (5, ())
    assert samples.targets.labels.tolist() == expected


@pytest.mark.parametrize(("more", "words"), REFUSED)
def test_what_does_not_go_together_is_refused_in_a_line(folder, more, words):
    data = {key: value and str(folder / value) for key, value in more.get("data", {}).items()}
    config = config_of(folder, **more | ({"data": data} if data else {}))
    val = Dataset(config.data.val_path) if config.data.val_path else None
    with pytest.raises(UserError, match=words) as refused:
        ClassifierTask(config, Dataset(config.data.path), val, CPU)
    assert "\n" not in str(refused.value)


def test_what_needs_one_label_refuses_the_images_and_the_network(folder, run):
    with Dataset(folder / "train.lmdb") as reader:
        assert reader.label_numbers().max() < len(SETS)
        with pytest.raises(UserError, match="several labels each; this needs one label an image"):
            reader.labels()
    with pytest.raises(UserError, match="is of several labels an image"):
        classifier_from(load(resolve(run)))
    drawn = ["--counterfactual", str(folder / "drawn"), "--generator", str(run)]
    with pytest.raises(UserError, match="--counterfactual is for one label"):
        predict.main(["--checkpoint", str(run), str(folder / "test-0.png"), *drawn])
    with pytest.raises(UserError, match="--robustness is for one label"):
        evaluate.main(["--checkpoint", str(run), "--robustness", "--device", "cpu"])
