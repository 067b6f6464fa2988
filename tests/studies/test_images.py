"""A study's images: disjoint parts, the long tail, and exact copies."""

from typing import Any

import numpy as np
import pytest
import yaml

from duetgan.data.reading.dataset import Dataset
from duetgan.data.records import pack_arrays
from duetgan.studies.augment import sample_counts
from duetgan.studies.config import StudyConfig, StudyData, quickened, tokens
from duetgan.studies.images import (
    HELD_BACK,
    HELD_OUT,
    TEST,
    TRAIN,
    divide,
    expected_counts,
    make_parts,
    training_counts,
)
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from tests.conftest import REPOSITORY

DATA = StudyData(path="train.lmdb", test_path="test.lmdb", held_out=0.1, held_back=0.3)
LABELS = np.repeat([0, 1, 2], [200, 100, 50])


def test_parts_are_disjoint_and_drawn_by_class():
    drawn = divide(np.arange(350), LABELS, 3, DATA)
    assert sorted(np.concatenate(list(drawn.values()))) == list(range(350))
    counts = {name: np.bincount(LABELS[rows]).tolist() for name, rows in drawn.items()}
    assert counts == {HELD_OUT: [20, 10, 5], TRAIN: [120, 60, 30], HELD_BACK: [60, 30, 15]}
    other = divide(np.arange(350), LABELS, 3, DATA.changed(seed=1))
    assert not np.array_equal(drawn[TRAIN], other[TRAIN])


def test_a_long_tail_falls_exponentially_and_the_cut_images_are_held_back():
    data = DATA.changed(largest=100, long_tail=100.0)
    assert training_counts([600] * 10, data) == [100, 59, 35, 21, 12, 7, 4, 2, 1, 1]
    labels = np.repeat(np.arange(10), 600)
    drawn = divide(np.arange(6000), labels, 10, data)
    assert np.bincount(labels[drawn[TRAIN]]).tolist() == training_counts([600] * 10, data)
    assert np.bincount(labels[drawn[HELD_BACK]]).tolist() == [600 - 60 - n for n in training_counts([600] * 10, data)]


def test_a_class_that_is_too_small_is_refused():
    with pytest.raises(UserError, match=r"class 1 has 1 images .* too few to divide"):
        divide(np.arange(11), np.repeat([0, 1], [10, 1]), 2, DATA)


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


def test_samples_fill_up_the_classes_in_proportion_to_what_they_lack():
    assert sample_counts([100, 100, 100], 0.5, fill=False) == [50, 50, 50]
    assert sample_counts([100, 40, 10], 0.5, fill=True) == [0, 30, 45]  # of 75: 60 and 90 are lacking
    assert sum(sample_counts([100, 40, 10], 1, fill=True)) == 150


def test_what_is_known_before_the_images_are_packed():
    counts = expected_counts(StudyData(source="sample", long_tail=50.0))
    assert counts[0] == 50 * counts[-1]
    assert len(set(expected_counts(StudyData(source="fashion-mnist")))) == 1


def test_quick_merges_mappings_and_replaces_the_rest():
    tree = {"seeds": 5, "gan": {"config": "x", "overrides": {"a": 1, "b": 2}}}
    tree["quick"] = {"seeds": 2, "gan.overrides": {"b": 3}, "data": {"size": 16}, "ratios": [1]}
    quick = quickened(tree)
    assert quick["gan"] == {"config": "x", "overrides": {"a": 1, "b": 3}}
    assert (quick["seeds"], quick["data"], quick["ratios"]) == (2, {"size": 16}, [1])
    with pytest.raises(UserError, match="no section quick"):
        quickened({"seeds": 5})


def test_overrides_become_options():
    given = {"a.b": True, "c": [0.0, 0.99], "d": None, "e": "text", "f": {"g": 1}}
    assert " ".join(tokens(given)) == "--a.b=on --c=[0.0, 0.99] --d=null --e=text --f={g: 1}"


def test_off_in_a_recipes_overrides_stays_off():
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
