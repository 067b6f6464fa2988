"""Synthetic images in a run's config: opened, checked against the real ones, shared out over the classes."""

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.mixture import MixedDataset, MixedSampler
from duetgan.data.reading.sampler import GlobalSampler, Position
from duetgan.training.base import data
from duetgan.training.base.config import DataConfig, RunConfig, SyntheticConfig
from duetgan.training.base.data import label_frequencies, real_label_frequencies, synthetic_fraction
from duetgan.training.gan.config import GanConfig, GanLossConfig
from duetgan.utils.errors import UserError
from tests.data.conftest import CLASSES, sample_images
from tests.data.packing.test_inspect import change_entry, pack_samples
from tests.data.reading.test_sampler import batches_of

LABELS = [0, 0, 0, 0, 0, 0, 1, 1, 1, 2]


@pytest.fixture
def folder(tmp_path):
    """train.lmdb: 10 raw RGB images of 8 px, 6, 3 and 1 of a class; drawn.lmdb: 12 others, 4 of each class."""
    pack_arrays(tmp_path / "train.lmdb", sample_images(10), LABELS, CLASSES)
    pack_arrays(tmp_path / "drawn.lmdb", sample_images(12, seed=1), np.arange(12) % 3, CLASSES)
    return tmp_path


def config_of(folder: Path, *, more: Any = None, **synthetic: Any) -> RunConfig:
    settings: dict[str, Any] = {"path": str(folder / "drawn.lmdb"), "share": 0.25} | synthetic
    options = DataConfig(path=str(folder / "train.lmdb"), synthetic=SyntheticConfig(**settings), **more or {})
    return RunConfig(task="x", batch_size=8, steps=100, seed=5, data=options)


def opened(config: RunConfig) -> MixedDataset:
    training = data.open_training(config.data)
    data.check_data(config, training, data.open_held_out(config.data, training))
    assert isinstance(training, MixedDataset)
    return training


def refusal(config: RunConfig) -> str:
    with pytest.raises(UserError) as refused:
        opened(config)
    return str(refused.value)


# --- settings


@pytest.mark.parametrize(("until", "end"), [(1.0, None), (0.8, 80), (0.801, 81), (30, 30), (100, None), (2, 2)])
def test_until_is_a_share_of_the_steps_or_a_step(until, end):
    assert SyntheticConfig(path="x", share=0.5, until=until).last_step(100) == end


# --- the second file


def test_it_is_read_as_the_training_images_are(folder):
    training = opened(config_of(folder, more={"crop": "random", "workers": 2}))
    second = training.synthetic
    assert isinstance(second, Dataset)
    assert (second.crop, second.workers, second.resolution) == (training.crop, 2, 8)
    found = data.facts(training, None)["synthetic"]
    assert (found["path"], found["by_class"]) == (str(folder / "drawn.lmdb"), dict.fromkeys(CLASSES, 4))
    assert type(data.open_training(DataConfig(path=str(folder / "train.lmdb")))).__name__ == "Dataset"


def test_images_of_another_size_fit_if_a_size_is_set(folder):
    pack_arrays(folder / "large.lmdb", sample_images(6, side=16), [0, 1, 2] * 2, CLASSES)
    training = opened(config_of(folder, path=str(folder / "large.lmdb"), more={"resolution": 6}))
    assert (training.resolution, training.synthetic.resolution) == (6, 6)


def test_a_file_that_cannot_be_used_is_told_before_the_first_step(folder):
    told = refusal(config_of(folder, path=str(folder / "none.lmdb")))
    assert told.startswith("data.synthetic.path ")
    assert "generate.py dataset" in told
    change_entry(folder / "drawn.lmdb", label=7)
    assert "drawn.lmdb: record 0 is damaged: label 7 has no class" in refusal(config_of(folder))


@pytest.mark.parametrize(
    ("images", "labels", "classes", "told"),
    [
        (sample_images(6, side=16), [0, 1, 2] * 2, CLASSES, "images of 16 px, RGB, those of"),
        (sample_images(6, channels=1), [0, 1, 2] * 2, CLASSES, "images of 8 px, grey, those of"),
        (sample_images(6), [0, 1, 2] * 2, ["cat", "emu", "dog"], "class 1 is 'emu' here and 'dog' there"),
        (sample_images(6), [0, 1, 0] * 2, CLASSES[:2], "emu missing here"),
        (sample_images(6), None, (), "cat, dog, emu missing here"),
        (sample_images(6, side=4), [0, 1, 2] * 2, CLASSES, "less than the 8 px asked for"),
        (sample_images(6), [0, 1] * 3, CLASSES, "no image of class 'emu'"),
    ],
)
def test_a_file_that_does_not_fit_is_named(folder, images, labels, classes, told):
    pack_arrays(folder / "other.lmdb", images, labels, classes)
    found = refusal(config_of(folder, path=str(folder / "other.lmdb"), share=None, balance="fill"))
    assert found.startswith(str(folder / "other.lmdb"))
    assert told in found
    remedy = "trained on these classes" if "its classes" in found else "of these images"
    if "those of" in found:
        assert re.search(rf"; draw samples from a generator (that was )?{remedy}$", found)


def test_held_out_images_among_the_synthetic_ones_are_told(folder, capsys):
    pack_arrays(folder / "test.lmdb", sample_images(12, seed=1)[:4], [0, 1, 2, 0], CLASSES)
    opened(config_of(folder, more={"val_path": str(folder / "test.lmdb")}))
    assert "warning: 4 of the 4 images of" in capsys.readouterr().err


# --- shares


@pytest.mark.parametrize(("share", "fraction"), [(0.4, Fraction(2, 5)), (None, Fraction(13, 36))])
def test_the_sampler_follows_the_config(folder, share, fraction):
    """Rare classes are filled up to the largest: 6, 4.5 and 1 lack 6.5 of 18."""
    rates = {"class_rates": {"dog": 1.5}}
    config = config_of(folder, share=share, balance="fill", until=0.05, more=rates)
    labels = np.array(LABELS)
    lacking = np.array([0.0, 1.5, 5.0])
    how: dict[str, Any] = {"batch_size": 8, "seed": 5}
    second: Any = {"weights": lacking[np.arange(12) % 3] / 4, "groups": np.arange(12) % 3, "stream": "synthetic"}
    training = opened(config)
    expected = MixedSampler(
        10,
        synthetic=GlobalSampler(12, **second, **how),
        content=training.synthetic.meta.content_hash,
        fraction=fraction,
        until=5,
        weights=np.array([1, 1.5, 1])[labels],
        groups=labels,
        **how,
    )
    found = data.make_sampler(config, training)
    for (indices, _), (others, _) in zip(batches_of(found, 9), batches_of(expected, 9), strict=True):
        np.testing.assert_array_equal(indices, others)
    assert found.state_at(Position()) == expected.state_at(Position())


@pytest.mark.parametrize(("same_pairs", "batches", "end"), [(True, 1, 5), (False, 2, 10)])
def test_until_counts_every_batch_of_its_steps(folder, same_pairs, batches, end):
    """A GAN's discriminator with pairs of its own reads a second batch in every step."""
    loss = GanLossConfig(objective="relativistic", same_pairs=same_pairs)
    section = config_of(folder, until=0.05).data
    config = GanConfig(batch_size=8, steps=100, data=section, loss=loss)
    loader: Any = data.make_loader(config, opened(config), torch.device("cpu"))
    assert (loader.batches_per_step, loader.sampler.until) == (batches, end)


def test_fill_follows_weighted_sampling(folder):
    rates = {"class_rates": {"dog": 2.0}}  # 6, 6 and 1
    config = config_of(folder, share=None, balance="fill", more=rates)
    assert synthetic_fraction(config.data.synthetic, real_label_frequencies(config.data, opened(config))) == Fraction(
        5, 18
    )
    told = refusal(config_of(folder, share=None, balance="fill", more={"sampling": "balanced"}))
    assert told.startswith("data.synthetic.balance fill: no class lacks images")


def test_classes_are_as_frequent_as_both_kinds_show_them(folder):
    config = config_of(folder, share=0.5)
    expected = 0.5 * np.array([0.6, 0.3, 0.1]) + 0.5 / 3
    np.testing.assert_allclose(label_frequencies(config.data, opened(config)), expected)
    config = config_of(folder, share=None, balance="fill")
    np.testing.assert_allclose(label_frequencies(config.data, opened(config)), [1 / 3] * 3)
    config = config_of(folder, balance="fill")
    expected = 0.75 * np.array([0.6, 0.3, 0.1]) + 0.25 * np.array([0, 3, 5]) / 8
    np.testing.assert_allclose(label_frequencies(config.data, opened(config)), expected)


def test_the_plan_says_it(folder):
    config = config_of(folder, until=0.5, weight=0.5)
    told = data.mixture_text(config, opened(config))
    assert told.startswith("12 images, 8 px, RGB, 3 classes, raw, no passport: they count as real; 0.25 of each batch")
    config = config_of(folder, share=None, balance="fill")
    assert data.mixture_text(config, opened(config)).endswith("; 0.444 of each batch")
    config = config_of(folder, path=str(pack_samples(folder / "told.lmdb", count=6)))
    assert data.mixture_text(config, opened(config)) == "6 images, 8 px, RGB, 3 classes, raw; 0.25 of each batch"
