"""Samples for a study, and the division of its images."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.extras.studies import images as images_of
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
from duetgan.extras.studies.samples import draw_samples
from duetgan.models.gan import generate
from duetgan.models.restore import generator_from
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator
from tests.conftest import REPOSITORY, assert_raises
from tests.inference.conftest import gan_run, styled
from tests.metrics.conftest import CLASSES, pack


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return gan_run(tmp_path_factory.mktemp("study") / "gan", styled())


def drawn(run: Path, out: Path, counts: list[int]) -> tuple[Tensor, np.ndarray]:
    """The images and labels of a file of samples."""
    draw_samples(out, counts, run, CLASSES, seed=5)
    with Dataset(out) as reader:
        return read_batch(reader, np.arange(len(reader))).images, reader.labels().copy()


def test_samples_are_those_of_generate(run, tmp_path):
    images, labels = drawn(run, tmp_path / "x.lmdb", [67, 0, 5])
    assert np.bincount(labels).tolist() == [67, 0, 5]
    generator = generator_from(load(resolve(run)))
    for place, label, index in ((0, 0, 0), (64, 0, 64), (67, 2, 0)):
        alone = generate(generator, labels=torch.tensor([label]), indices=[label + 3 * index], seed=5)
        assert (images[place].int() - alone[0].int()).abs().max() <= 1  # of another batch size
    with Dataset(tmp_path / "x.lmdb") as reader:
        passport = reader.meta.passport
    assert (passport["step"], passport["seed"], passport["selection"]) == (load(resolve(run))["step"], 5, None)
    again, _ = drawn(run, tmp_path / "x.lmdb", [67, 0, 5])
    assert torch.equal(again, images)


def test_a_smaller_file_is_the_beginning_of_a_larger_one(run, tmp_path):
    everything, _ = drawn(run, tmp_path / "all.lmdb", [0, 40, 0])
    for counts in ([0, 3, 1], [2, 1, 0]):
        images, labels = drawn(run, tmp_path / "some.lmdb", counts)
        assert np.bincount(labels, minlength=3).tolist() == counts
        assert (images[labels == 1].int() - everything[: counts[1]].int()).abs().max() <= 1


def test_a_generator_without_classes_or_of_others_is_refused(run, tmp_path):
    plain = gan_run(tmp_path / "plain", styled(classes=0))
    for source, told in ((plain, "is a generator without classes"), (run, "its classes are not those of the study's")):
        assert_raises(UserError, told, draw_samples, tmp_path / "x.lmdb", [1, 1, 1], source, CLASSES[::-1], seed=5)
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


def test_a_named_data_set_is_packed_at_its_size_and_real_images_are_drawn_by_the_seed(tmp_path, monkeypatch):
    whole, packed = pack(tmp_path / "whole.lmdb", count=30), {}
    monkeypatch.setattr(images_of, "open_source", lambda *name, **options: nullcontext((*name, options)))
    monkeypatch.setattr(
        images_of, "pack", lambda source, file, **options: packed.update({file.name: (source, options)})
    )
    files = images_of._sources(StudyData(source="cifar10", root="x", size=24), tmp_path)
    options = {"size": 24, "overwrite": True, "duplicates": False}
    for file, split in zip(files, ("train", "test"), strict=True):
        assert packed[file.name] == (("cifar10", {"split": split, "root": "x"}), options)
    for seed in (0, 1):
        images_of.write_first(whole, [3, 0, 5], tmp_path / "some.lmdb", seed)
        with Dataset(whole) as source, Dataset(tmp_path / "some.lmdb") as some:
            rows = []
            for label, count in ((0, 3), (2, 5)):
                order = numpy_generator(seed, "study", "real", label).permutation(
                    np.flatnonzero(source.labels() == label)
                )
                rows += order[:count].tolist()
            for found, expected in zip(some.read(range(8)), source.read(sorted(rows)), strict=True):
                assert (found == expected).all()


def test_overrides_become_options_and_off_stays_off():
    given = {"a.b": True, "c": [0.0, 0.99], "d": None, "e": "text", "f": {"g": 1}}
    assert " ".join(tokens(given)) == "--a.b=on --c=[0.0, 0.99] --d=null --e=text --f={g: 1}"
    recipe = "configs/quickstart_gan.yaml"
    given = yaml.safe_load("{ada.mode: off, deterministic: on}")  # false and true to YAML
    config: Any = build_run_config(read_yaml(REPOSITORY / recipe), tokens(given), recipe)
    assert (config.ada.mode, config.deterministic) == ("off", True)
    for path in ("/home/josé/x.lmdb", "/a #b", "null.lmdb", "[a]", "yes"):  # text is taken as it is
        assert build_run_config(read_yaml(REPOSITORY / recipe), tokens({"data.path": path}), recipe).data.path == path
