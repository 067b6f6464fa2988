"""Study `cas`: its arms' images, its controls, its table. Trainings are replaced by a classifier that takes no time."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.data.records import pack_arrays
from duetgan.models.stylegan2 import Generator, GeneratorConfig
from duetgan.studies.cas import CONTROL, NOISE, PLAIN, REAL, TOGETHER, Cas, CasConfig
from duetgan.studies.images import Recipe, StudyData
from duetgan.studies.results import Result
from duetgan.studies.runner import Study
from duetgan.studies.samples import Drawing
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.conftest import sample_images
from tests.metrics.conftest import TINY, make_run

SHAPE = {"channels": 1, "classes": 10, "resolution": 16}


def images_of(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Images float64 [n, 256] and labels [n]."""
    with Dataset(path) as reader:
        images = read_batch(reader, np.arange(len(reader))).images
        return images.double().flatten(1).numpy(), reader.labels().copy()


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
        assert overrides["data.val_path"] is None or folder.parent.name == "selector"
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
    return CasConfig(data=data, **{**recipes, "seeds": 2, "drawing": Drawing(fresh=True, psi=1.3), **more})


def study(images: Path, folder: Path, kind: type[Cas] = Quick, **more: Any) -> Study:
    return Study("cas", kind(settings(images, **more), folder))


@pytest.fixture(scope="module")
def made(images: Path, tmp_path_factory: pytest.TempPathFactory):
    """A study that was made, its document, and the images that each arm was trained on."""
    folder = tmp_path_factory.mktemp("study") / "cas"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)  # recipes of configs/ are found from any folder
        whole = study(images, folder)
        return folder, whole.run(), whole.subject.seen  # type: ignore[attr-defined]


def test_controls_come_out_right(made) -> None:
    _, document, _ = made
    assert document["complete"]
    assert document["void"] is False
    found = {row["arm"]: row for row in document["controls"]}
    assert found[CONTROL]["found"] == "cannot tell"  # real images passed off as samples
    assert found[CONTROL]["interval"][0] < 0 < found[CONTROL]["interval"][1]
    assert found[NOISE]["found"] == "hurts"


def test_what_arms_are_trained_on(made, images: Path) -> None:
    folder, _, seen = made
    counts = [40] * 10  # as many as are held back, of each class
    for arm, source in (("real", "train"), ("real-again", "held_back")):
        pixels, labels = seen[arm]
        assert np.bincount(labels).tolist() == counts
        known = {row.tobytes() for row in images_of(folder / f"jobs/parts/{source}.lmdb")[0]}
        assert all(row.tobytes() in known for row in pixels)
        assert len({row.tobytes() for row in pixels}) > 390  # each once, but for equal images
    assert list(seen) == ["real", "real-again", "plain", "fresh", "psi", "together", "untrained"]
    for arm in ("plain", "psi", "untrained"):
        assert np.bincount(seen[arm][1]).tolist() == counts
    for arm in ("fresh", "together"):  # 20 steps of 32
        assert np.bincount(seen[arm][1]).tolist() == [64] * 10
    np.testing.assert_array_equal(seen["fresh"][0][:40], seen["plain"][0][:40])
    assert np.abs(seen["psi"][0] - seen["plain"][0]).max() > 1


def test_the_page_has_every_arm(made) -> None:
    folder, document, _ = made
    (table,) = document["tables"]
    assert table["header"] == ["", "test, all", *(f"test, {name}" for name in sample_images("test", 1)[2]), "kept"]
    assert [row[0] for row in table["rows"]] == [REAL, CONTROL, PLAIN, "fresh", "psi", TOGETHER, NOISE]
    gaps = {row["second"]: row for row in document["comparisons"] if row["family"] == "gap to real images"}
    assert list(gaps) == [TOGETHER, PLAIN, "fresh", "psi"]
    assert all(row["first"] == REAL and row["interval"] for row in gaps.values())
    for picture in document["pictures"]:
        assert (folder / picture["file"]).is_file()
    asked = {(row["first"], row["second"]) for row in document["verdicts"]}
    assert asked == {(PLAIN, "fresh"), (PLAIN, "psi"), (PLAIN, TOGETHER), (REAL, PLAIN), (REAL, TOGETHER)}
    assert (document["verdicts"][0]["first"], document["verdicts"][0]["second"]) == (REAL, TOGETHER)
    assert not list((folder / "runs").glob("*.lmdb"))


def test_goes_on_to_the_same_document(made, images: Path) -> None:
    folder, document, _ = made
    (folder / "runs" / "psi-s1.json").unlink()
    again = study(images, folder)
    assert again.write()["seeds"] == [0]
    for file in (folder / "runs" / "psi-s1/run").iterdir():
        file.unlink()
    assert again.run() == document


def test_keys_are_of_what_recipes_say(images: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"

    def keys(text: str) -> tuple[list[Any], dict[str, Any]]:
        recipe.write_text(f"task: classifier\n{text}\n")
        subject = Cas(settings(images, classifier=Recipe(config=str(recipe))), tmp_path)
        jobs = {job.name: job.key for job in subject.jobs.values() if not job.family}
        return [arm.key for arm in subject.arms], jobs

    (arms, jobs), (other_arms, other_jobs) = keys("steps: 20"), keys("steps: 30")
    assert all(key not in other_arms for key in arms)
    assert {name for name in jobs if jobs[name] != other_jobs[name]} == {"selector"}
    assert keys("steps: 20") == (arms, jobs)


def test_more_images_or_checkpoints_than_there_are_is_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="n 401: give 10 to 400, or raise"):
        study(images, tmp_path / "cas", n=401).run()
    run = make_run(tmp_path / "gan", task="gan", config={}, shape=SHAPE, state={})
    for name, words in ((run, "gan keeps 1 checkpoints, 2 are asked for"), (tmp_path / "no", "no such run folder")):
        with pytest.raises(UserError, match=words):
            Cas(settings(images, gan=Recipe(run=str(name)), drawing=Drawing(checkpoints=2)), tmp_path)
        Cas(settings(images, gan=Recipe(run=str(name))), tmp_path)


@pytest.mark.parametrize(
    ("count", "saving", "words"),
    [
        (2, {}, None),
        (3, {}, "checkpoints 3: a run of configs/quickstart_gan.yaml keeps 2; set checkpoint.keep higher"),
        (3, {"checkpoint.keep": 3}, None),
        (3, {"checkpoint.every": 500, "checkpoint.keep_every": 500}, None),
    ],
)
def test_a_run_that_will_keep_too_few_checkpoints_is_refused(
    images: Path, tmp_path: Path, count: int, saving: dict[str, int], words: str | None
) -> None:
    gan = Recipe(config="configs/quickstart_gan.yaml", overrides=saving)
    with pytest.raises(UserError, match=words) if words else nullcontext():
        Cas(settings(images, gan=gan, drawing=Drawing(checkpoints=count)), tmp_path)


@pytest.mark.slow
def test_with_real_trainings(images: Path, tmp_path: Path) -> None:
    short = {"precision": "fp32", "steps": 12, "batch_size": 16}
    whole = study(
        images,
        tmp_path / "cas",
        Cas,
        n=100,
        seeds=1,
        drawing=Drawing(confidence=(0.0, 1.0), checkpoints=2),
        classifier=Recipe(config="configs/quickstart_classifier.yaml", overrides=short),
        gan=Recipe(config="configs/quickstart_gan.yaml", overrides={**short, "checkpoint.every": 6}),
    )
    document = whole.run()
    assert document["complete"]
    arms = {row["name"]: row["figures"]["0"] for row in document["arms"]}
    assert list(arms) == [REAL, CONTROL, PLAIN, "confidence", "checkpoints", TOGETHER, NOISE]
    assert all(0 <= figures["test_accuracy"] <= 1 for figures in arms.values())
    assert arms["confidence"] == arms[PLAIN]  # all samples pass, and everything else has its key
    assert arms["together"] == arms["checkpoints"]
