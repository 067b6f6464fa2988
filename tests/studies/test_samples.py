"""Samples for a study: which they are, what selection keeps of them, and how far they are spread."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.data.records import pack_arrays
from duetgan.inference.samples import Sampler
from duetgan.models.gan import draw, generate
from duetgan.models.restore import generator_from
from duetgan.studies.augment import sample_counts
from duetgan.studies.images import (
    HELD_BACK,
    HELD_OUT,
    TEST,
    TRAIN,
    StudyConfig,
    StudyData,
    divide,
    expected_counts,
    make_parts,
    quickened,
    tokens,
    training_counts,
)
from duetgan.studies.samples import BLOCK, MEAN_OF, Drawing, Selector, draw_samples, last_checkpoints
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.checkpoint import load, resolve, save
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.provenance import Lineage
from duetgan.utils.seeding import generator as keyed_generator
from tests.conftest import REPOSITORY, assert_raises
from tests.inference.conftest import gan_run, styled
from tests.metrics.conftest import CLASSES, SIDE, pack
from tests.models.helpers import to_uint8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generator's run with checkpoints of three steps, whose w_avg is far from any class's mean."""
    folder = gan_run(tmp_path_factory.mktemp("study") / "gan", styled())
    content = load(resolve(str(folder)))
    content.pop("file", None)
    for step in (8, 9):
        state = {key: value.clone() for key, value in content["state"]["generator_ema"].items()}
        state["w_avg"] += 3.0
        for key, value in state.items():
            if key.endswith("affine.weight"):
                value += 0.1 * step * torch.randn(value.shape, generator=keyed_generator(step, "test"))
        save(folder / "checkpoints", {**content, "step": step, "state": {"generator_ema": state}})
    return folder


def drawn(
    run: Path, out: Path, counts: list[int], count: int = 1, **options
) -> tuple[Tensor, np.ndarray, list[float | None]]:
    """The images and labels of a file of samples, and the shares that were kept."""
    how = {"seed": 5, "drawing": Drawing(), "stream": ("study", "sample"), **options}
    shares = draw_samples({out: counts}, last_checkpoints(run, count), CLASSES, **how)
    with Dataset(out) as reader:
        return read_batch(reader, np.arange(len(reader))).images, reader.labels().copy(), shares


def test_samples_have_keys_of_their_own_and_checkpoints_take_turns(run: Path, tmp_path: Path) -> None:
    drawing = Drawing(checkpoints=2)
    images, labels, shares = drawn(run, tmp_path / "x.lmdb", [BLOCK + 3, 0, 5], 2, drawing=drawing)
    assert np.bincount(labels).tolist() == [BLOCK + 3, 0, 5]
    assert shares == [1.0, None, 1.0]
    generators = [generator_from(load(file)) for file in last_checkpoints(run, 2)]
    for first, label, generator in ((0, 0, generators[0]), (BLOCK, 0, generators[1]), (BLOCK + 3, 2, generators[0])):
        index = first if label == 0 else 0
        alone = generate(
            generator, labels=torch.tensor([label]), indices=[index], seed=5, stream=("study", "sample", label)
        )
        assert (images[first].int() - alone[0].int()).abs().max() <= 1  # of another batch size
    with Dataset(tmp_path / "x.lmdb") as reader:
        passport = reader.meta.passport
    assert (passport["step"], passport["seed"], passport["selection"]) == (9, 5, "2 checkpoints in turn")
    again, _, _ = drawn(run, tmp_path / "x.lmdb", [BLOCK + 3, 0, 5], 2, drawing=drawing)
    assert torch.equal(again, images)


def test_a_rule_keeps_the_first_that_pass(run: Path, tmp_path: Path) -> None:
    everything, _, _ = drawn(run, tmp_path / "all.lmdb", [0, BLOCK, 0])
    rule = lambda images, label: (torch.arange(len(images)) % 4 == label, torch.arange(len(images)))  # noqa: E731
    images, _, shares = drawn(run, tmp_path / "some.lmdb", [0, 20, 0], rule=rule)
    assert torch.equal(images[:16], everything[1::4])
    assert shares == [None, 32 / 128, None]


def nothing_fits(images: Tensor, label: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(images), dtype=torch.bool), (torch.arange(len(images)) == 3).int()


def test_a_pool_gives_what_it_has_and_the_best_at_least(run: Path, tmp_path: Path) -> None:
    everything, _, _ = drawn(run, tmp_path / "all.lmdb", [0, 40, 0], stream=None)
    images, _, shares = drawn(run, tmp_path / "x.lmdb", [0, 20, 0], rule=nothing_fits, pool=2, stream=None)
    assert torch.equal(images, everything[3:4])
    assert shares == [None, 0.0, None]
    files = {tmp_path / "a.lmdb": [0, 3, 1], tmp_path / "b.lmdb": [2, 1, 0]}  # each the beginning of the same draws
    draw_samples(files, last_checkpoints(run, 1), CLASSES, seed=5, drawing=Drawing())
    for file, counts in files.items():
        with Dataset(file) as reader:
            assert reader.meta.histogram == counts
            middle = read_batch(reader, np.flatnonzero(reader.labels() == 1)).images
            assert torch.equal(middle, everything[: counts[1]])
    sampler = Sampler(generator=generator_from(load(last_checkpoints(run, 1)[0])), chosen=[1], seed=5)
    assert (sampler.images(range(40)).int() - everything.int()).abs().max() <= 1  # those of generate.py


def test_psi_spreads_w_about_the_class(run: Path, tmp_path: Path) -> None:
    images, _, _ = drawn(run, tmp_path / "x.lmdb", [0, 0, 4], drawing=Drawing(psi=1.5))
    generator: Any = generator_from(load(last_checkpoints(run, 1)[0]))
    z, maps = draw(generator, range(4), 5, ("study", "sample", 2))
    many, _ = draw(generator, range(MEAN_OF), 0, ("study", "mean"))
    with torch.no_grad():
        mean = generator.mapping(many, torch.full((MEAN_OF,), 2)).mean(0)
        w = generator.mapping(z, torch.full((4,), 2))
        ws = (mean + 1.5 * (w - mean))[:, None].expand(-1, generator.num_ws, -1)
        expected = to_uint8(generator.synthesis(ws, maps))
    assert (images.int() - expected.int()).abs().max() <= 1
    plain, _, _ = drawn(run, tmp_path / "y.lmdb", [0, 0, 4])
    assert (images.int() - plain.int()).abs().max() > 1


class Known(nn.Module):
    """Its only feature is an image's mean; class 0 is likelier the darker it is."""

    resolution, channels, classes, lineage = SIDE, 1, 3, Lineage.of()
    spec = ImageSpec(1, SIDE, SIDE)

    def features(self, x: Tensor) -> Tensor:
        return x.mean((1, 2, 3))[:, None]

    def head(self, features: Tensor) -> Tensor:
        return torch.cat([-4 * features, 0 * features, 4 * features], dim=1)


def test_what_is_selected(tmp_path: Path) -> None:
    for name, seed in (("train", 1), ("held", 2)):
        pack(tmp_path / f"{name}.lmdb", seed=seed, count=60)
    images = torch.arange(0, 256, 2, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, SIDE, SIDE)
    means = images[:, 0, 0, 0].double() / 127.5 - 1
    chances = torch.stack([-4 * means, 0 * means, 4 * means], dim=1).softmax(1)
    with Dataset(tmp_path / "train.lmdb") as training, Dataset(tmp_path / "held.lmdb") as held_out:

        def kept(label: int, **drawing) -> Tensor:
            files = tmp_path / "train.lmdb", tmp_path / "held.lmdb"
            chosen, sure = Selector(Drawing(**drawing), Known(), *files)(images, label)  # type: ignore[arg-type]
            assert torch.allclose(sure, chances[:, label], atol=1e-6)
            return chosen

        assert torch.equal(kept(2, recognised=True), chances.argmax(1) == 2)
        confidence = (chances[:, 0] >= 0.2) & (chances[:, 0] <= 0.9)
        assert torch.equal(kept(0, confidence=(0.2, 0.9)), confidence)

        def brightness(reader: Dataset) -> Tensor:
            found = read_batch(reader, np.flatnonzero(reader.labels() == 1)).images
            return (found.double() / 127.5 - 1).mean((1, 2, 3))

        references = brightness(training)
        usual = (brightness(held_out)[:, None] - references).abs().min(1).values.sort().values
        near = (means[:, None] - references).abs().min(1).values
        found = kept(1, distance=(0.0, 1.0))
        assert 0 < found.sum() < len(images)
        assert torch.equal(found, near <= usual[-1] * (1 + 1e-6))
        assert torch.equal(kept(1, distance=(0.5, 1.0)), found & (near >= usual.quantile(0.5)))
        both = kept(1, recognised=True, distance=(0.0, 1.0))
        assert torch.equal(both, found & (chances.argmax(1) == 1))


def test_drawings_in_words_and_alone() -> None:
    drawing = Drawing(recognised=True, confidence=(0.3, 1.0), psi=1.2, fresh=True)
    assert str(drawing) == "recognised as asked, confidence 0.3 to 1, none seen twice, psi 1.2"
    alone = drawing.alone()
    assert list(alone) == ["recognised", "confidence", "fresh", "psi"]
    assert alone["psi"] == Drawing(psi=1.2)
    assert [each.selects for each in alone.values()] == [True, True, False, False]
    assert (str(Drawing()), Drawing().alone()) == ("as drawn", {})


def test_refusals(run: Path, tmp_path: Path) -> None:
    for band in ((0.5, 0.5), (-0.1, 1.0), (0.2, 1.1)):
        assert_raises(UserError, r"^distance .* give two numbers from 0 to 1", Drawing, distance=band)
    assert_raises(UserError, "keeps 3 checkpoints, 4 are asked for", last_checkpoints, run, 4)
    with pytest.raises(UserError, match="its classes are not those of the study's images"):
        draw_samples({tmp_path / "x.lmdb": [1, 1]}, last_checkpoints(run, 1), CLASSES[:2], seed=5, drawing=Drawing())
    with pytest.raises(UserError, match=f"samples of class {CLASSES[1]}; ask for less"):
        drawn(run, tmp_path / "x.lmdb", [0, 9, 0], rule=nothing_fits)
    assert not (tmp_path / "x.lmdb").exists()


DATA = StudyData(path="train.lmdb", test_path="test.lmdb", held_out=0.1, held_back=0.3)
LABELS = np.repeat([0, 1, 2], [200, 100, 50])


def test_parts_are_disjoint_by_class_and_a_long_tail_falls_exponentially():
    drawn = divide(np.arange(350), LABELS, 3, DATA)
    assert sorted(np.concatenate(list(drawn.values()))) == list(range(350))
    counts = {name: np.bincount(LABELS[rows]).tolist() for name, rows in drawn.items()}
    assert counts == {HELD_OUT: [20, 10, 5], TRAIN: [120, 60, 30], HELD_BACK: [60, 30, 15]}
    other = divide(np.arange(350), LABELS, 3, DATA.changed(seed=1))
    assert not np.array_equal(drawn[TRAIN], other[TRAIN])
    data = DATA.changed(largest=100, long_tail=100.0)
    assert training_counts([600] * 10, data) == [100, 59, 35, 21, 12, 7, 4, 2, 1, 1]
    labels = np.repeat(np.arange(10), 600)
    drawn = divide(np.arange(6000), labels, 10, data)
    assert np.bincount(labels[drawn[TRAIN]]).tolist() == training_counts([600] * 10, data)
    assert np.bincount(labels[drawn[HELD_BACK]]).tolist() == [600 - 60 - n for n in training_counts([600] * 10, data)]


def test_samples_fill_up_the_classes_and_too_small_ones_are_refused():
    with pytest.raises(UserError, match=r"class 1 has 1 images .* too few to divide"):
        divide(np.arange(11), np.repeat([0, 1], [10, 1]), 2, DATA)
    assert sample_counts([100, 100, 100], 0.5, fill=False) == [50, 50, 50]
    assert sample_counts([100, 40, 10], 0.5, fill=True) == [0, 30, 45]  # of 75: 60 and 90 are lacking
    assert sum(sample_counts([100, 40, 10], 1, fill=True)) == 150
    counts = expected_counts(StudyData(source="sample", long_tail=50.0))
    assert counts[0] == 50 * counts[-1]
    assert len(set(expected_counts(StudyData(source="fashion-mnist")))) == 1


def test_the_files_hold_the_images_and_no_twins(tmp_path):
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (60, 1, 8, 8), dtype=np.uint8)
    images[7] = images[3]  # a twin within, and one in the test file
    labels = np.arange(60) % 3
    labels[7] = labels[3]
    test = np.concatenate([images[10:11], draw.integers(0, 256, (5, 1, 8, 8), dtype=np.uint8)])
    pack_arrays(tmp_path / "train.lmdb", images, labels, "abc")
    pack_arrays(tmp_path / "test.lmdb", test, [1, 0, 1, 2, 0, 1], "abc")
    data = DATA.changed(path=str(tmp_path / "train.lmdb"), test_path=str(tmp_path / "test.lmdb"))
    made = make_parts(data, tmp_path)
    found = {}
    for name in (TRAIN, HELD_OUT, HELD_BACK, TEST):
        with Dataset(tmp_path / f"{name}.lmdb") as reader:
            assert made["counts"][name] == reader.meta.histogram
            pixels, own = reader.read(np.arange(len(reader)))
            found[name] = [(image.tobytes(), label) for image, label in zip(pixels, own.tolist(), strict=True)]
    assert [pixels for pixels, _ in found.pop(TEST)] == [image.tobytes() for image in test]
    together = [pair for part in found.values() for pair in part]
    kept = [(images[i].tobytes(), int(labels[i])) for i in range(60) if i not in (7, 10)]
    assert sorted(together) == sorted(kept)
    assert len(set(together)) == 58


def test_quick_merges_mappings_and_replaces_the_rest():
    tree = {"seeds": 5, "gan": {"config": "x", "overrides": {"a": 1, "b": 2}}}
    tree["quick"] = {"seeds": 2, "gan.overrides": {"b": 3}, "data": {"size": 16}, "ratios": [1]}
    quick = quickened(tree)
    assert quick["gan"] == {"config": "x", "overrides": {"a": 1, "b": 3}}
    assert (quick["seeds"], quick["data"], quick["ratios"]) == (2, {"size": 16}, [1])
    assert_raises(UserError, "no section quick", quickened, {"seeds": 5})


def test_overrides_become_options_and_off_stays_off():
    given = {"a.b": True, "c": [0.0, 0.99], "d": None, "e": "text", "f": {"g": 1}}
    assert " ".join(tokens(given)) == "--a.b=on --c=[0.0, 0.99] --d=null --e=text --f={g: 1}"
    recipe = "configs/quickstart_gan.yaml"
    given = yaml.safe_load("{ada.mode: off, deterministic: on}")  # false and true to YAML
    config: Any = build_run_config(read_yaml(REPOSITORY / recipe), tokens(given), recipe)
    assert (config.ada.mode, config.deterministic) == ("off", True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "either source"),
        ({"source": "sample", "path": "x"}, "either source"),
        ({"path": "x"}, "give both"),
        ({"source": "sample", "held_out": 0.6, "held_back": 0.5}, "leave no image"),
    ],
)
def test_data_that_cannot_be_is_refused(settings, words):
    with pytest.raises(UserError, match=words):
        StudyConfig(data=StudyData(**settings))
