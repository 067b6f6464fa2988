"""Samples that are drawn while training: functions of epoch, number and label, however they are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.sampler import SampleKeys
from duetgan.models.gan import generate
from duetgan.training.base import data, generated
from duetgan.training.base.config import DataConfig, RunConfig, SyntheticConfig
from duetgan.training.base.generated import BLOCK, GeneratedSamples, even_labels
from duetgan.utils.errors import UserError
from tests.data.conftest import sample_images
from tests.metrics.conftest import CLASSES, classifier_run, gan_run
from tests.training.base.test_synthetic import opened

COUNT = 37  # two whole blocks and a part of a third
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An untrained GAN of 8 px grey images of three classes."""
    return gan_run(tmp_path_factory.mktemp("gan") / "run")


def keys(epochs: Any, seed: int = 5) -> SampleKeys:
    return SampleKeys(seed, np.array(epochs), np.zeros(len(epochs), np.int64))


def test_a_sample_depends_on_its_epoch_and_number_alone(run):
    whole, labels = GeneratedSamples(str(run), COUNT, None).read(range(COUNT), keys=keys([0] * COUNT))
    np.testing.assert_array_equal(labels, np.arange(COUNT) % 3)
    later, _ = GeneratedSamples(str(run), COUNT, None).read(range(COUNT), keys=keys([1] * COUNT))
    assert all(not np.array_equal(a, b) for a, b in zip(whole, later, strict=True))
    other, _ = GeneratedSamples(str(run), COUNT, None).read(range(COUNT), keys=keys([0] * COUNT, seed=6))
    assert not np.array_equal(whole, other)
    samples = GeneratedSamples(str(run), COUNT, None)
    order = [36, 3, 17, 3, 0]
    found, labels = samples.read(order, keys=keys([0, 0, 1, 1, 0]))
    for place, (number, epoch) in enumerate(zip(order, [0, 0, 1, 1, 0], strict=True)):
        np.testing.assert_array_equal(found[place], (whole, later)[epoch][number])
    np.testing.assert_array_equal(labels, np.array(order) % 3)
    meta = samples.meta
    assert (meta.count, meta.histogram, meta.mean, meta.std) == (COUNT, [13, 12, 12], [0.5], [0.5])
    with pytest.raises(ValueError, match="keys are needed"):
        samples.read([0])


def test_they_are_the_generators_own_with_their_labels(run):
    samples = GeneratedSamples(str(run), COUNT, None)
    found, labels = samples.read(range(BLOCK), keys=keys([4] * BLOCK))
    expected = generate(
        samples.generator, labels=torch.from_numpy(labels), indices=range(BLOCK), seed=5, stream=("synthetic", 4)
    )
    np.testing.assert_array_equal(found, expected)
    assert samples.meta.histogram == [13, 12, 12]
    assert (samples.meta.mean, samples.meta.std) == ([0.5], [0.5])
    fixed = generate(samples.generator, labels=torch.from_numpy(labels), indices=range(BLOCK), seed=5)
    assert not np.array_equal(found, fixed)  # those of grids and evaluation have keys of their own


def test_samples_are_drawn_in_full_precision(run, monkeypatch):
    found: list[str] = []
    backend: Any = torch.backends.mkldnn

    def spied(*arguments: Any, **options: Any) -> torch.Tensor:
        found.append(backend.matmul.fp32_precision)
        return generate(*arguments, **options)

    monkeypatch.setattr(generated, "generate", spied)
    GeneratedSamples(str(run), COUNT, None).read([3], keys=keys([0]))
    assert found == ["ieee"]


def test_what_makes_other_samples_has_another_hash(run, tmp_path):
    hashes = {
        GeneratedSamples(str(run), COUNT, None).meta.content_hash,
        GeneratedSamples(str(run), COUNT + 1, None).meta.content_hash,
        GeneratedSamples(str(run), COUNT, [0.0, 1.0, 2.0]).meta.content_hash,
        GeneratedSamples(str(gan_run(tmp_path / "grown", side=16)), COUNT, None).meta.content_hash,
    }
    assert len(hashes) == 4
    assert GeneratedSamples(str(run), COUNT, None).meta.content_hash in hashes


def test_a_run_that_does_not_fit_is_refused(run, tmp_path):
    with pytest.raises(UserError, match="a 'gan' checkpoint is needed"):
        GeneratedSamples(str(classifier_run(tmp_path / "judge")), COUNT, None)
    with pytest.raises(UserError, match="its generator has 3 classes, the images 2"):
        GeneratedSamples(str(run), COUNT, [1.0, 2.0])


@pytest.mark.parametrize(
    ("shares", "count", "expected"),
    [
        ([1.0, 1.0, 1.0], 7, [0, 1, 2, 0, 1, 2, 0]),
        ([0.0, 3.0, 5.0], 8, [2, 1, 2, 1, 2, 2, 1, 2]),
        ([], 3, [0, 0, 0]),
    ],
)
def test_labels_are_spread_evenly(shares, count, expected):
    assert even_labels(shares, count).tolist() == expected


# --- in a run


def config_of(folder: Path, run: Path, **synthetic: Any) -> RunConfig:
    settings: dict[str, Any] = {"checkpoint": str(run), "share": 0.5} | synthetic
    options = DataConfig(path=str(folder / "train.lmdb"), synthetic=SyntheticConfig(**settings))
    return RunConfig(task="x", batch_size=24, steps=100, seed=5, data=options)


@pytest.fixture
def folder(tmp_path):
    """train.lmdb: 20 images of 8 px, 12, 6 and 2 of a class."""
    labels = [0] * 12 + [1] * 6 + [2] * 2
    pack_arrays(tmp_path / "train.lmdb", sample_images(20, channels=1), labels, CLASSES)
    return tmp_path


def test_ranks_and_restarts_draw_the_same_samples(folder, run, monkeypatch):
    config = config_of(folder, run)
    straight = data.make_loader(config, opened(config), CPU)
    drawn: Any = straight.state_dict()["synthetic"]
    assert (drawn["count"], drawn["shuffle"]) == (20, False)
    batches = [next(straight) for _ in range(6)]  # 72 samples: more than three epochs
    assert len(torch.cat([b.images[b.synthetic] for b in batches]).unique(dim=0)) == 72
    ranks = []
    for rank in range(2):
        monkeypatch.setattr("duetgan.utils.distributed.collectives.rank", lambda rank=rank: rank)
        monkeypatch.setattr("duetgan.utils.distributed.collectives.world_size", lambda: 2)
        ranks.append(data.make_loader(config, opened(config), CPU))
    for number, batch in enumerate(batches):
        if number == 3:  # both start again
            for rank, loader in enumerate(ranks):
                state = loader.state_dict()
                monkeypatch.setattr("duetgan.utils.distributed.collectives.rank", lambda rank=rank: rank)
                ranks[rank] = data.make_loader(config, opened(config), CPU)
                ranks[rank].load_state_dict(state)
        parts = [next(loader) for loader in ranks]
        assert torch.equal(batch.images, torch.cat([part.images for part in parts]))
        assert torch.equal(batch.labels, torch.cat([part.labels for part in parts]))


def test_fresh_samples_fill_up_rare_classes(folder, run):
    config = config_of(folder, run, share=None, balance="fill")  # they lack 0, 6 and 10: 16 of 36
    assert np.bincount(opened(config).synthetic.labels()).tolist() == [0, 8, 12]
    assert data.label_frequencies(config.data, opened(config)) == pytest.approx([1 / 3] * 3)
    config.data.class_rates = {CLASSES[1]: 2.0}  # of the weights 12, 12 and 2 the last alone is less
    assert np.bincount(opened(config).synthetic.labels()).tolist() == [0, 0, 20]


def test_other_classes_are_refused_and_the_plan_names_the_run(folder, run, tmp_path):
    other = gan_run(tmp_path / "other", classes=["light", "grey", "dark"])
    with pytest.raises(UserError, match="its classes are not those of"):
        opened(config_of(folder, other))
    config = config_of(folder, gan_run(tmp_path / "large", side=16))
    for config.data.resolution in (None, 8):  # of the real images: samples are not scaled to it
        with pytest.raises(UserError, match="images of 16 px, grey"):
            opened(config)
    config = config_of(folder, run)
    told = data.mixture_text(config, opened(config))
    assert told == f"drawn while training from {run}, step 7, 20 an epoch; 0.5 of each batch"
    images = opened(config)
    assert data.make_loader(config, images, torch.device("meta")).prefetch == 0  # of other images: 2
    assert {p.device.type for p in images.synthetic.generator.parameters()} == {"meta"}
