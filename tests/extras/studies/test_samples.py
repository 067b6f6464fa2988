"""Samples for a study: which they are, and what selection keeps of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.extras.studies.images import (
    HELD_BACK,
    HELD_OUT,
    TEST,
    TRAIN,
    StudyData,
    divide,
    make_parts,
    tokens,
    training_counts,
)
from duetgan.extras.studies.samples import BLOCK, Drawing, draw_samples
from duetgan.inference.samples import Sampler
from duetgan.models.gan import generate
from duetgan.models.restore import generator_from
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from tests.conftest import REPOSITORY
from tests.inference.conftest import gan_run, styled
from tests.metrics.conftest import CLASSES, SIDE


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gan_run(tmp_path_factory.mktemp("study") / "gan", styled())


def drawn(run: Path, out: Path, counts: list[int], **options) -> tuple[Tensor, np.ndarray, list[float | None]]:
    """The images and labels of a file of samples, and the shares that were kept."""
    how = {"seed": 5, "drawing": Drawing(), "stream": ("study", "sample"), **options}
    shares = draw_samples({out: counts}, run, CLASSES, **how)
    with Dataset(out) as reader:
        return read_batch(reader, np.arange(len(reader))).images, reader.labels().copy(), shares


def test_samples_have_keys_of_their_own(run: Path, tmp_path: Path) -> None:
    images, labels, shares = drawn(run, tmp_path / "x.lmdb", [BLOCK + 3, 0, 5])
    assert np.bincount(labels).tolist() == [BLOCK + 3, 0, 5]
    assert shares == [1.0, None, 1.0]
    generator = generator_from(load(resolve(run)))
    for place, label, index in ((0, 0, 0), (BLOCK, 0, BLOCK), (BLOCK + 3, 2, 0)):
        how: dict[str, Any] = {"seed": 5, "stream": ("study", "sample", label)}
        alone = generate(generator, labels=torch.tensor([label]), indices=[index], **how)
        assert (images[place].int() - alone[0].int()).abs().max() <= 1  # of another batch size
    with Dataset(tmp_path / "x.lmdb") as reader:
        passport = reader.meta.passport
    assert (passport["step"], passport["seed"], passport["selection"]) == (load(resolve(run))["step"], 5, None)
    again, _, _ = drawn(run, tmp_path / "x.lmdb", [BLOCK + 3, 0, 5])
    assert torch.equal(again, images)


def test_a_rule_keeps_the_first_that_pass(run: Path, tmp_path: Path) -> None:
    everything, _, _ = drawn(run, tmp_path / "all.lmdb", [0, BLOCK, 0])
    rule = lambda images, label: (torch.arange(len(images)) % 4 == label, torch.arange(len(images)))  # noqa: E731
    how: dict[str, Any] = {"drawing": Drawing(confidence=(0.5, 1.0)), "pool": 9}
    images, _, shares = drawn(run, tmp_path / "some.lmdb", [0, 20, 0], rule=rule, **how)
    with Dataset(tmp_path / "some.lmdb") as reader:
        assert reader.meta.passport["selection"] == "confidence 0.5 to 1; the first of 9 drawn for each"
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
    draw_samples(files, run, CLASSES, seed=5, drawing=Drawing())
    for file, counts in files.items():
        with Dataset(file) as reader:
            assert reader.meta.histogram == counts
            middle = read_batch(reader, np.flatnonzero(reader.labels() == 1)).images
            assert torch.equal(middle, everything[: counts[1]])
    sampler = Sampler(generator=generator_from(load(resolve(run))), chosen=[1], seed=5)
    assert (sampler.images(range(40)).int() - everything.int()).abs().max() <= 1  # those of generate.py


class Known(nn.Module):
    """Class 0 is likelier the darker an image is."""

    resolution, channels, classes, lineage = SIDE, 1, 3, Lineage.of()
    spec = ImageSpec(1, SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((1, 2, 3))[:, None]
        return torch.cat([-4 * means, 0 * means, 4 * means], dim=1)


def test_what_is_selected() -> None:
    images = torch.arange(0, 256, 2, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, SIDE, SIDE)
    means = images[:, 0, 0, 0].double() / 127.5 - 1
    chances = torch.stack([-4 * means, 0 * means, 4 * means], dim=1).softmax(1)

    def kept(label: int, **drawing: Any) -> Tensor:
        chosen, sure = Drawing(**drawing).accepts(Known(), images, label)  # type: ignore[arg-type]
        assert torch.allclose(sure, chances[:, label], atol=1e-6)
        return chosen

    named = chances.argmax(1) == 0
    within = (chances[:, 0] >= 0.2) & (chances[:, 0] <= 0.9)
    assert 0 < (named & within).sum() < min(named.sum(), within.sum())
    assert torch.equal(kept(0, recognised=True), named)
    assert torch.equal(kept(0, confidence=(0.2, 0.9)), within)
    assert torch.equal(kept(0, recognised=True, confidence=(0.2, 0.9)), named & within)
    assert kept(1, confidence=(0.0, 1.0)).all()


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
    pack_arrays(tmp_path / "test.lmdb", test[:1], [1], "abc", overwrite=True)
    with pytest.raises(UserError, match=r"test.lmdb: has no image of a, c; add some"):
        make_parts(data, tmp_path)


def test_overrides_become_options_and_off_stays_off():
    given = {"a.b": True, "c": [0.0, 0.99], "d": None, "e": "text", "f": {"g": 1}}
    assert " ".join(tokens(given)) == "--a.b=on --c=[0.0, 0.99] --d=null --e=text --f={g: 1}"
    recipe = "configs/quickstart_gan.yaml"
    given = yaml.safe_load("{ada.mode: off, deterministic: on}")  # false and true to YAML
    config: Any = build_run_config(read_yaml(REPOSITORY / recipe), tokens(given), recipe)
    assert (config.ada.mode, config.deterministic) == ("off", True)
    for path in ("/home/josé/x.lmdb", "/a #b", "null.lmdb", "[a]", "yes"):  # text is taken as it is
        assert build_run_config(read_yaml(REPOSITORY / recipe), tokens({"data.path": path}), recipe).data.path == path
