"""Evaluation on several ranks and with several batch sizes gives the same figures, and shows the same images."""

import hashlib
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from duetgan.commands import evaluate
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.evaluate_classifier import classify, evaluate_classifier
from duetgan.metrics.evaluate_gan import evaluate_generator
from duetgan.metrics.features.extractors import RealFeatures, classifier_features, pixel_features
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed import collectives
from duetgan.utils.image_spec import ImageSpec
from tests.distributed import worker
from tests.end_to_end.helpers import rows
from tests.end_to_end.ranks import run, together
from tests.metrics.conftest import classifier_run, gan_run, pack
from tests.slim import slim_down

BATCH_SIZES = (5, 64, 150)
COUNT = 300  # test images, which neither a chunk nor the ranks divide
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tested on Linux"),
    pytest.mark.timeout(900),  # the records of all variants are made at once
]


def gan_figures(folder: Path, batch_size: int) -> dict[str, Any]:
    device = torch.device("cpu")
    generator = generator_from(load(resolve(folder / "gan")), device)
    judge = classifier_from(load(resolve(folder / "classifier")), device)
    real = RealFeatures(batch_size=batch_size)
    with Dataset(folder / "test.lmdb") as reader, Dataset(folder / "train.lmdb") as train:
        found = [
            evaluate_generator(
                generator,
                reader,
                n=COUNT - 20,
                seed=3,
                extractors=[classifier_features(judge, name="classifier:x"), pixel_features(ImageSpec(1, 16, 16))],
                classifier=judge,
                train_dataset=train,
                real=real,
                per_class=98,  # some samples are for the diversity alone
                batch_size=batch_size,
            )
            for _ in range(2)  # real features are kept on rank 0 alone
        ]
    assert found[0] == found[1]
    return found[0]


def classifier_figures(folder: Path, batch_size: int) -> dict[str, Any]:
    classifier = classifier_from(load(resolve(folder / "classifier")), torch.device("cpu"))
    with Dataset(folder / "test.lmdb") as reader:
        found = evaluate_classifier(classifier, reader, batch_size=batch_size, details=True)
        logits = classify(classifier, reader, batch_size=batch_size)
    return found | {"seen": hashlib.sha256(logits.numpy().tobytes()).hexdigest(), "count": len(logits)}


def written(folder: Path, task: str, *more: str) -> dict[str, Any]:
    """Return what evaluate.py writes, and what this rank prints."""
    out = folder / f"{task}-by-{collectives.world_size()}"
    argv = ["--checkpoint", str(folder / task), "--out", str(out), "--n", "70", "--device", "cpu", *more]
    with redirect_stdout(io.StringIO()) as printed:
        assert evaluate.evaluate_here(evaluate.parser().parse_args(argv), argv) == 0
    pictures = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.glob("*.png"))}
    return {"pictures": pictures, "text": (out / "metrics.json").read_text(), "printed": printed.getvalue()}


def be_a_rank(out: Path, folder: Path) -> None:
    slim_down()
    collectives.start(torch.device("cpu"))
    found: dict[str, Any] = {}
    for size in BATCH_SIZES:
        found[f"gan {size}"] = gan_figures(folder, size)
        found[f"classifier {size}"] = classifier_figures(folder, size)
    found["classifier written"] = written(folder, "classifier")
    judge = str(folder / "classifier")
    found["gan written"] = written(folder, "gan", "--classifier", judge, "--extractor", "pixels,classifier")
    Path(f"{out}.{collectives.rank()}").write_text(json.dumps(found))
    collectives.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, slim_module):
    """Packed images and untrained runs, the classifier's slim."""
    path = tmp_path_factory.mktemp("evaluation")
    files = {"path": str(path / "train.lmdb"), "val_path": str(path / "test.lmdb")}
    pack(files["path"], count=400, seed=1)
    pack(files["val_path"], count=COUNT, seed=2)
    gan_run(path / "gan", data=files)
    classifier_run(path / "classifier", data=files)
    return path


class Records(dict[int, list[dict[str, Any]]]):
    """What each rank found, by the number of ranks; made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, ranks: int) -> list[dict[str, Any]]:
        out = self.folder / f"{ranks}.json"
        together(be_a_rank, out, self.folder, world=ranks, output=out.with_suffix(".txt"))
        self[ranks] = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
        return self[ranks]


@pytest.fixture(scope="module")
def records(folder):
    return Records(folder)


@pytest.mark.parametrize("size", BATCH_SIZES)
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", ["gan", "classifier"])
def test_neither_ranks_nor_batch_size_change_a_bit(records, task, ranks, size):
    """Integers and distances alike: the same chunks are computed, and the same features make the figures."""
    expected = records[1][0][f"{task} {BATCH_SIZES[0]}"]
    found = [record[f"{task} {size}"] for record in records[ranks]]
    assert found[0] == expected
    logits = {} if task == "gan" else {"count": 0, "seen": hashlib.sha256().hexdigest()}
    for other in found[1:]:  # the figures are all ranks', the logits rank 0's
        assert other == expected | logits


@pytest.mark.parametrize("task", ["gan", "classifier"])
def test_the_first_rank_writes_and_prints_what_one_process_does(records, task):
    alone, (first, *others) = records[1][0][f"{task} written"], (record[f"{task} written"] for record in records[2])
    assert first == alone
    assert "seed 0" in alone["printed"]
    assert len(alone["pictures"]) >= 4
    assert others == [alone | {"printed": ""}]


def test_the_comparison_is_of_something(records):
    gan, classifier = (records[1][0][f"{task} 64"] for task in ("gan", "classifier"))
    assert classifier["count"] == COUNT
    for row in gan["distances"]:
        assert row["frechet"] > row["floor"] > 0
    assert 0 < gan["recognised"] < 1
    assert gan["memorisation"]["searched"] == 400


@pytest.mark.parametrize("task", ["gan", "classifier"])
def test_evaluation_in_training(folder, task, tmp_path):
    """`train.py` in float64: weights after two steps differ between numbers of ranks in their last digits only."""
    tree = worker.TREES[task] | {"steps": 4, "batch_size": 12, "checkpoint": {"every": 100}}
    tree |= {"data": {"path": str(folder / "train.lmdb"), "val_path": str(folder / "test.lmdb")}}
    tree |= {"evaluation": {"every": 2, "n": 1000}, "log": {"every": 2, "samples_every": 0, "tensorboard": False}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    found = {}
    for count in (1, 2):
        options = ["--config", str(tmp_path / "recipe.yaml"), "--run-dir", str(tmp_path / str(count))]
        run(options, tmp_path / f"notes-{count}", world=count, float64=True)
        found[count] = rows(tmp_path / str(count))
    figure = {"gan": "val/logits/real", "classifier": "val/accuracy"}[task]
    assert [row["step"] for row in found[1] if figure in row] == [2, 4]
    if task == "gan":
        assert [row["val/n"] for row in found[1] if figure in row] == [COUNT, COUNT]
    for row, expected in zip(found[2], found[1], strict=True):
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-9)
