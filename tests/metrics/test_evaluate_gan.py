import itertools
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.evaluate_classifier import logits_of
from duetgan.metrics.evaluate_gan import _skill, evaluate_generator, has_skill, judge_skills, weak_judges
from duetgan.metrics.features.extractors import Extractor, RealFeatures, classifier_features, pixel_features
from duetgan.metrics.features.selection import draw_samples, select
from duetgan.metrics.figures import GAN, history
from duetgan.metrics.grad_cam import image_heat
from duetgan.metrics.intervals import Measured
from duetgan.metrics.samples import memorisation
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.gan import ImageGenerator
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from tests.conftest import assert_raises
from tests.metrics.conftest import CLASSES, SIDE, gan_run, pack

PIXELS = pixel_features(ImageSpec(1, 16, 16))


@pytest.fixture(scope="module")
def generator(runs):
    return generator_from(load(resolve(runs["gan"])))


@pytest.fixture(scope="module")
def judge(runs):
    return classifier_from(load(resolve(runs["classifier"])))


class Counting(Extractor):
    """Counts the images that it is shown."""

    def __init__(self, name="counting"):
        super().__init__(name, PIXELS.dim, PIXELS.compute, PIXELS.device)
        self.seen = 0

    def __call__(self, images):
        self.seen += len(images)
        return super().__call__(images)


def evaluate(generator, reader, **options):
    settings: dict[str, Any] = {"n": 30, "seed": 3, "extractors": [PIXELS], "per_class": 8}
    return evaluate_generator(generator, reader, **settings | options)


def test_same_seed_same_figures_at_any_batch_size_and_none_paid_for_without_details(generator, test_reader):
    """And at any number of ranks: tests/distributed/test_evaluation.py."""
    found = evaluate(generator, test_reader, details=False)
    assert "clipped_density" not in found["distances"][0]
    assert found["clipped_density"] is None
    assert history(GAN, found["distances"][0]).keys() == {"frechet", "kernel", "diversity_ratio"}
    first = evaluate(generator, test_reader)
    assert first == evaluate(generator, test_reader, batch_size=7)
    assert evaluate(generator, test_reader, seed=4)["distances"][0]["frechet"] != first["distances"][0]["frechet"]


def test_subsets_of_the_kernel_distance_are_of_the_given_seed(generator, test_reader, train_reader, monkeypatch):
    monkeypatch.setattr("duetgan.metrics.figures.kernel_distance", lambda *sets, seed: (float(seed), 0.0))
    row = evaluate(generator, test_reader, train_dataset=train_reader, seed=11)["distances"][0]
    assert (row["kernel"], row["kernel_floor"]) == (11, 11)


def test_the_search_for_copies_knows_the_labels_of_both_sets(
    generator, test_reader, train_reader, monkeypatch, tmp_path
):
    sets: list[Any] = []
    search = memorisation.memorisation

    def watched(samples: torch.Tensor, *given: Any) -> Any:
        sets.extend(given)
        return search(samples, *given)

    monkeypatch.setattr(memorisation, "memorisation", watched)
    evaluate(generator, test_reader, train_dataset=train_reader, searched=40)
    train = memorisation.training_selection(train_reader.labels(), n=30, searched=40, seed=3)
    test = select(test_reader.labels(), n=30, seed=3, role="test", per_class=8)
    assert [each.labels.tolist() for each in sets] == [train.labels.tolist(), test.labels[:30].tolist()]
    with Dataset(pack(tmp_path / "others.lmdb", classes=["a", "b", "c"], seed=5)) as others:  # other names
        evaluate(generator, test_reader, train_dataset=others, searched=40)
    assert [each.labels.tolist() for each in sets[2:]] == [[0] * 40, [0] * 30]


def test_n_falls_to_the_smallest_real_set(generator, test_reader, train_reader, tmp_path):
    """Without a floor it is not bound by the training images."""
    found = evaluate(generator, test_reader, n=5000, train_dataset=train_reader)
    assert found["n"] == found["distances"][0]["n"] == len(test_reader) == 60
    with Dataset(pack(tmp_path / "small.lmdb", count=12, seed=5)) as small:
        found = evaluate(generator, test_reader, n=5000, train_dataset=small)
        told = "n is 12, not 60: there are no more training images"
        assert (found["n"], found["notes"]["training_images"]) == (12, told)
        found = evaluate(generator, test_reader, n=5000, train_dataset=small, floor=False)
        silent = evaluate(generator, test_reader, train_dataset=small, floor=False, searched=0)
    assert (found["n"], found["memorisation"]["searched"]) == (60, 12)
    assert found["distances"][0]["floor"] is found["distances"][0]["kernel_floor"] is silent["memorisation"] is None
    assert "no search" in silent["notes"]["memorisation"]
    assert evaluate(generator, test_reader, n=2)["distances"][0]["n"] == 2
    assert_raises(UserError, "at least 2 images", evaluate, generator, test_reader, n=1)


def test_what_cannot_be_computed_is_none_and_said(generator, test_reader):
    found = evaluate(generator, test_reader)
    assert found["recognised"] is found["recognised_by_class"] is found["distances"][0]["floor"] is None
    assert "--classifier" in found["notes"]["recognised"]
    assert "no training images" in found["notes"]["floor"]
    same = evaluate(generator, test_reader, train_dataset=test_reader)
    assert same["distances"][0]["floor"] is same["memorisation"] is found["memorisation"] is None
    assert "the same" in same["notes"]["floor"]
    assert same["notes"]["memorisation"] == same["notes"]["floor"]
    assert "no training images" in found["notes"]["memorisation"]
    few = evaluate(generator, test_reader, n=5)  # for neighbourhoods
    assert few["clipped_coverage"] is few["precision_interval"] is None
    assert "more than 5" in few["notes"]["density"]


def test_unconditional_generator(test_reader, tmp_path, judge):
    generator = generator_from(load(resolve(gan_run(tmp_path / "gan", classes=[]))))
    found = evaluate(generator, test_reader, classifier=judge)
    assert found["diversity_ratio"] > 0
    assert found["diversity_by_class"] is found["recognised"] is found["intra_class_frechet"] is None
    assert "unconditional" in found["notes"]["recognised"]


def test_copies_are_looked_for_in_features_that_never_saw_the_training_images(
    generator, test_reader, train_reader, judge
):
    """A classifier's features serve only where it stands beside others; then pixels do, and no distance is added."""
    features, other = classifier_features(judge, name="classifier:x"), Counting("other")
    alone = evaluate(generator, test_reader, extractors=[features], train_dataset=train_reader)
    assert [row["extractor"] for row in alone["distances"]] == ["classifier:x"]
    assert alone["memorisation"] == evaluate(generator, test_reader, train_dataset=train_reader)["memorisation"]
    both = evaluate(generator, test_reader, extractors=[features, other], train_dataset=train_reader)
    assert both["memorisation"]["extractor"] == "other"
    assert both["distances"][0] == alone["distances"][0]
    assert (both["diversity_extractor"], both["distances"][0]["weights"]) == ("classifier:x", features.source)


def test_fewer_images_are_searched_and_the_floor_stays(generator, test_reader, train_reader, judge):
    few, all_ = (evaluate(generator, test_reader, train_dataset=train_reader, searched=n) for n in (40, 5000))
    assert (few["memorisation"]["searched"], all_["memorisation"]["searched"]) == (40, 90)
    assert few["distances"] == all_["distances"]
    features = [classifier_features(judge, name="classifier:x")]  # nothing is looked for in them
    alone, beside = (
        evaluate(generator, test_reader, extractors=features, train_dataset=train_reader, searched=n) for n in (0, 5000)
    )
    assert alone["distances"] == beside["distances"]


class Plagiarist(ImageGenerator):
    """Draws training images, and nothing else."""

    resolution, channels, classes, z_dim = SIDE, 1, 3, 4

    def __init__(self, sample_images, labels):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.by_class = [sample_images[labels == label].float() / 127.5 - 1 for label in range(3)]

    def forward(self, z, labels, noise, truncation_psi=1.0, truncation_cutoff=None):
        places = (z[:, 0].abs() * 1e4).long()
        rows = [
            self.by_class[label][place % len(self.by_class[label])] for label, place in zip(labels, places, strict=True)
        ]
        return torch.stack(rows) * self.gain


def test_a_plagiarist_is_found_out(test_reader, train_reader, generator):
    images, labels = train_reader.read(np.arange(90))
    copier = Plagiarist(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))
    found = evaluate(copier, test_reader, train_dataset=train_reader, n=60)["memorisation"]
    assert found["copies"]
    assert found["share"] == 1
    honest = evaluate(generator, test_reader, train_dataset=train_reader, n=60)["memorisation"]
    assert not honest["copies"]


def test_real_features_are_kept_between_calls(generator, test_reader, train_reader, tmp_path):
    counting, real = Counting(), RealFeatures(batch_size=64)
    first = evaluate(generator, test_reader, extractors=[counting], real=real, train_dataset=train_reader)
    fresh = counting.seen
    again = evaluate(generator, test_reader, extractors=[counting], real=real, train_dataset=train_reader)
    samples = counting.seen - fresh
    assert samples == fresh - samples - 90 > 0  # once the real test images (as many as samples), once all to search
    assert first == again
    real = RealFeatures(batch_size=64)
    pair = [Counting("other"), counting]  # copies are searched for with the first; the floor takes fewer images
    evaluate(generator, test_reader, extractors=pair, real=real, train_dataset=train_reader)
    assert evaluate(generator, test_reader, extractors=[counting], real=real, train_dataset=train_reader) == first
    before = counting.seen
    evaluate(generator, test_reader, extractors=[counting], real=real, seed=9)
    assert counting.seen - before > samples  # another seed draws other real images
    other = Counting("other")
    evaluate(generator, test_reader, extractors=[counting, other], real=real, seed=9)
    assert other.seen > 30
    before, counting.source = counting.seen, "other weights"
    evaluate(generator, test_reader, extractors=[counting], real=real, seed=9)
    assert counting.seen - before > samples
    before = counting.seen
    with Dataset(pack(tmp_path / "others.lmdb", seed=6)) as others:  # the same selection of other images
        evaluate(generator, others, extractors=[counting], real=real, seed=9)
    assert counting.seen - before > samples


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"side": 16}, "--size 8"),
        ({"channels": 3}, "--channels 1"),
        ({"classes": ["a", "b"]}, "2 classes, the generator 3"),
        ({"classes": []}, "0 classes"),
    ],
)
def test_files_that_do_not_fit_the_generator_are_told(generator, test_reader, tmp_path, options, told):
    with Dataset(pack(tmp_path / "other.lmdb", **options)) as reader:
        assert_raises(UserError, told, evaluate, generator, reader)
        assert_raises(UserError, "the train images", evaluate, generator, test_reader, train_dataset=reader)


@pytest.mark.parametrize(
    ("hits", "count", "chance", "skilled"),
    [
        (76, 280, 60 / 280, False),  # spectrograms of speech at the samples' 16 px; at 128 px it was right on 72 %
        (151, 280, 60 / 280, True),
        (82, 100, 0.8, False),
        (4, 6, 0.4, False),  # six images: by chance
        (24, 55, 16 / 55, False),  # emoji at 16 px: nearly every sample was food to it
        (36, 60, 0.25, True),
        (60, 60, 1.0, False),  # one class alone
    ],
)
def test_a_judge_near_chance_has_no_skill(hits, count, chance, skilled):
    assert has_skill(Measured.fraction(torch.arange(count) < hits), chance) is skilled


def test_a_judge_of_rare_classes_is_measured_by_the_mean_of_the_classes_too(test_reader, train_reader, judge):
    """U1: a classifier may be right on every class and still be below the rate of the most frequent one."""
    labels = np.repeat([0, 1, 2], [80, 10, 10])
    probabilities = torch.eye(3)[labels].double()
    probabilities[:30] = torch.tensor([0.0, 1.0, 0.0]).double()
    assert not _skill(probabilities, test_reader, labels, None)["is_weak"]
    constant = torch.tensor([1.0, 0.0, 0.0]).double().expand(100, 3)
    found = _skill(constant, test_reader, labels, None)
    assert (found["accuracy"], found["majority_class_rate"], found["is_weak"]) == (0.8, 0.8, True)
    two = np.repeat([0, 1], [80, 20])  # no image of the third class: guessing is right on half of a class's images
    guessing = torch.eye(3)[np.where(np.r_[np.arange(80) < 52, np.arange(20) < 13], two, 1 - two)].double()
    assert _skill(guessing, test_reader, two, None)["is_weak"]
    weak, skilled = found | {"accuracy": 0.6}, found | {"is_weak": False}
    words = "is right on {} % of the real images at the samples' size (always predicting the most frequent class: "
    words += (
        "80 %), so the fraction of samples that it recognises, and metrics on its features, are only in metrics.json"
    )
    told = weak_judges(found, {"x": found, "y": weak, "z": skilled})  # x is the judge
    assert told == {"recognised": f"it {words.format(80)}", "weak_extractors": f"y {words.format(60)}"}
    assert weak_judges(None, {"y": found, "z": skilled}) == {"weak_extractors": f"y {words.format(80)}"}
    assert weak_judges(skilled, {"x": skilled}) == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "class_names", tuple(CLASSES[::-1]))
        assert judge_skills([judge], train_reader, 30, Namespace(seed=0, batch_size=8)) == [None]
    other = judge_skills([None, judge], train_reader, 30, Namespace(seed=0, batch_size=8))
    assert other == [None, other[1]]
    assert other[1]["majority_class_rate"] == pytest.approx(1 / 3, abs=0.1)


def test_selection_draws_n_and_fills_up_classes():
    labels = np.repeat([0, 1, 2], [50, 5, 45])
    drawn = select(labels, n=20, seed=0, role="test", per_class=10)
    assert len(set(drawn.indices.tolist())) == len(drawn.indices) >= 20
    np.testing.assert_array_equal(labels[drawn.indices], drawn.labels)
    counts = np.bincount(drawn.labels)
    assert counts[0] >= 10
    assert counts[1] == 5  # all there are
    assert counts[2] >= 10
    alone = select(labels, n=20, seed=0, role="test")
    np.testing.assert_array_equal(alone.indices, drawn.indices[:20])  # filling up does not change the n
    assert set(select(labels, n=20, seed=0, role="train").indices) != set(alone.indices)
    draws = itertools.product((20, 21), (0, 1), ("test", "train"), (0, 10))
    keys = [select(labels, n=n, seed=seed, role=role, per_class=count).key for n, seed, role, count in draws]
    assert len(set(keys)) == len(keys) == 16


def test_autocast_around_an_evaluation_changes_nothing_nor_does_the_training_mode(generator, judge, test_reader):
    images, labels = torch.from_numpy(test_reader.read(range(4))[0]), torch.arange(4) % 3
    features = classifier_features(judge, name="classifier:x")
    for compute in (
        lambda: logits_of(judge, images),
        lambda: features(images),
        lambda: image_heat(judge, images, labels),
        lambda: draw_samples(generator, labels, range(4), seed=0),
    ):
        expected = compute()
        judge.train()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(compute(), expected)
        judge.eval()


def test_modes_and_gradients_are_left_as_they_were(generator, test_reader):
    """The judge of another size sees scaled images."""
    judge = Classifier(ModelConfig(), channels=3, classes=3, resolution=32)
    generator.train()
    assert 0 <= evaluate(generator, test_reader, classifier=judge)["recognised"] <= 1
    assert generator.training
    assert judge.training
    assert torch.is_grad_enabled()
    generator.eval()
