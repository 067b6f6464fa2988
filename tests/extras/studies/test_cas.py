"""Study `cas`: its arms' images, its controls, its table. Trainings and the selector's answers take no time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.extras.studies.cas import CONTROL, NOISE, PLAIN, REAL, TOGETHER, Cas, CasConfig
from duetgan.extras.studies.images import Recipe, StudyData
from duetgan.extras.studies.results import Result
from duetgan.extras.studies.runner import Study
from duetgan.extras.studies.samples import Drawing
from duetgan.models.stylegan2 import Generator, GeneratorConfig
from duetgan.utils.seeding import forked
from tests.conftest import sample_images
from tests.metrics.conftest import TINY, classifier_run, make_run

SHAPE = {"channels": 1, "classes": 10, "resolution": 16}


def images_of(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Images float64 [n, 256] and labels [n]."""
    with Dataset(path) as reader:
        images = read_batch(reader, np.arange(len(reader))).images
        return images.double().flatten(1).numpy(), reader.labels().copy()


def answers(_classifier: object, images: Tensor) -> Tensor:
    """The selector's: it names the last digit of the sum of an image's pixels, surely where that of tens is 0."""
    total = images.flatten(1).double().sum(1).long()
    return torch.nn.functional.one_hot(total % 10, 10) * torch.where(total // 10 % 10 == 0, 10.0, 1.0)[:, None]


class Quick(Cas):
    """Its trainings take no time; `seen`: the images that each arm was trained on (first seed)."""

    def __init__(self, config: CasConfig, folder: Path) -> None:
        self.seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        super().__init__(config, folder)

    def train(self, folder: Path, recipe: Recipe, overrides: Any, seed: int, max_steps: int | None = None) -> None:
        """Classes' mean images of a random half of the images; for a GAN's recipe a generator that nobody trained."""
        assert recipe.file.is_file()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "status.json").write_text(json.dumps({"state": "finished", "step": 1}))
        if recipe is self.config.gan:
            with forked(0, "init", "generator"):
                generator = Generator(GeneratorConfig(**TINY), resolution=16, channels=1, classes=10)
            with Dataset(overrides["data.path"]) as reader:
                state, names = {"generator_ema": generator.state_dict()}, reader.classes
            make_run(folder, task="gan", config={"generator": TINY}, shape=SHAPE, state=state, classes=names)
            return
        if folder.parent.name == "selector":
            classifier_run(folder, classes=list("0123456789"))
            return
        assert overrides["data.val_path"] is None
        images, labels = images_of(overrides["data.path"])
        if folder.parent.name.endswith("-s0"):
            self.seen[folder.parent.name[:-3]] = images, labels
        half = np.random.default_rng(seed).random(len(labels)) < 0.5
        means = [images[half & (labels == label)].mean(0) for label in range(10)]
        np.save(folder / "means.npy", np.stack(means))

    def judge(self, run: Path) -> Result:
        images, labels = images_of(self.part("test"))
        hits = ((images[:, None] - np.load(run / "means.npy")) ** 2).sum(2).argmin(1) == labels
        return Result({"test_accuracy": float(hits.mean())}, {"test": hits})


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.lmdb with 100 images a class at 16 px, test.lmdb with 40."""
    folder = tmp_path_factory.mktemp("images")
    for split, per_class in (("train", 100), ("test", 40)):
        pixels, labels, classes = sample_images(split, per_class)
        pack_arrays(folder / f"{split}.lmdb", pixels, labels=labels, classes=classes)
    return folder


def settings(images: Path, **more: Any) -> CasConfig:
    data = StudyData(path=str(images / "train.lmdb"), test_path=str(images / "test.lmdb"), held_back=0.4)
    recipes = {
        "classifier": Recipe(config="configs/quickstart_classifier.yaml", overrides={"steps": 20, "batch_size": 32}),
        "gan": Recipe(config="configs/quickstart_gan.yaml"),
    }
    return CasConfig(
        data=data, **{**recipes, "seeds": 2, "drawing": Drawing(recognised=True, confidence=(0.0, 0.5)), **more}
    )


def study(images: Path, folder: Path, kind: type[Cas] = Quick, **more: Any) -> Study:
    return Study("cas", kind(settings(images, **more), folder))


@pytest.fixture(scope="module")
def made(images: Path, tmp_path_factory: pytest.TempPathFactory):
    """A study that was made, its document, and the images that each arm was trained on."""
    folder = tmp_path_factory.mktemp("study") / "cas"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)  # recipes of configs/ are found from any folder
        patch.setattr("duetgan.extras.studies.samples.logits_of", answers)
        whole = study(images, folder, n=200)
        return folder, whole.run(), whole.subject.seen  # type: ignore[attr-defined]


@pytest.mark.slow
def test_controls_come_out_right(made) -> None:
    _, document, _ = made
    assert document["complete"]
    assert document["void"] is False
    found = {row["arm"]: row for row in document["controls"]}
    assert found[CONTROL]["found"] == "cannot tell"  # real images passed off as samples
    assert found[CONTROL]["interval"][0] < 0 < found[CONTROL]["interval"][1]
    assert found[NOISE]["found"] == "hurts"


@pytest.mark.slow
def test_what_arms_are_trained_on(made, images: Path) -> None:
    folder, document, seen = made
    counts = [20] * 10
    for arm, source in (("real", "train"), ("real-again", "held_back")):
        pixels, labels = seen[arm]
        assert np.bincount(labels).tolist() == counts
        known = {row.tobytes() for row in images_of(folder / f"jobs/parts/{source}.lmdb")[0]}
        assert all(row.tobytes() in known for row in pixels)
        assert len({row.tobytes() for row in pixels}) > 190  # each once, but for equal images
    assert list(seen) == ["real", "real-again", "plain", "recognised", "confidence", "together", "untrained"]
    passes = {}
    for arm in ("plain", "recognised", "confidence", "together", "untrained"):
        pixels, labels = seen[arm]
        assert np.bincount(labels).tolist() == counts
        totals = pixels.sum(1).astype(int)
        named = totals % 10 == labels
        passes[arm] = {"recognised": named, "confidence": ~named | (totals // 10 % 10 != 0)}
    for arm, rules in (
        ("recognised", ["recognised"]),
        ("confidence", ["confidence"]),
        ("together", [*passes["plain"]]),
    ):
        assert all(passes[arm][rule].all() for rule in rules)
        among = np.logical_and.reduce([passes["plain"][rule] for rule in rules])
        assert 0 < among.sum() < 200
    figures = {row["name"]: row["figures"]["0"]["kept"] for row in document["arms"]}
    assert (figures[REAL], figures[PLAIN]) == (None, 1.0)
    assert 0.02 < figures[TOGETHER] < figures["recognised"] < 0.2 < 0.95 < figures["confidence"] < 1
