"""Evaluation of a generator by the protocol in docs/evaluation.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.reading.dataset import Dataset
from metrics import PER_CLASS, SEARCHED
from metrics.features.extractors import Extractor, classifier_input
from metrics.features.precision import device_of, evaluating, full_float32
from metrics.features.sets import FeatureSet, RealFeatures, Selection, feature_sets, select
from metrics.intervals import normal_interval
from metrics.sample_figures import HEADLINE, sample_figures
from metrics.samples.class_score import class_score
from metrics.samples.copies import TrainingSets, search_copies, search_place, training_selection, training_sets
from metrics.samples.diversity import Diversity, diversity_by_class, recognised_share
from metrics.samples.frechet import frechet_distance
from metrics.samples.kernel import kernel_distance, kernel_with_variance
from models.classifier import Classifier
from models.gan import ImageGenerator
from models.sampling import generate
from utils.distributed import collectives
from utils.errors import UserError

Observer = Callable[[Tensor, Tensor, Tensor | None], None]
"""Called with each chunk of samples on rank 0, in their order: samples uint8 [b, C, H, W], labels int64 [b], the
judge's probabilities [b, K] or None."""


def evaluate_generator(
    generator: ImageGenerator,  # a module of any architecture
    reader: Dataset,  # real test images
    *,
    n: int,  # images on each side of a distance
    seed: int,
    extractors: Sequence[Extractor],  # at least one; the first one's features give the diversity
    classifier: Classifier | None = None,  # independent judge of conditional samples
    train_reader: Dataset | None = None,  # the second real set, for the floor and the search for copies
    real: RealFeatures | None = None,  # keeps real features between calls
    per_class: int = PER_CLASS,  # images of a class for the diversity
    floor: bool = True,  # whether floors are computed
    searched: int = SEARCHED,  # training images that are searched for copies; 0: no search
    details: bool = True,  # whether the figures of `sample_figures` are computed, and intervals of distances
    batch_size: int = 64,
    show: bool = False,  # progress bars
    observe: Observer | None = None,
) -> dict[str, Any]:
    """Distances with their floors, recognised share, diversity and memorisation, ready for JSON.

    n falls to the size of the smallest real set. Sample i has the label of the i-th real image drawn, so both sides
    have the same mix of classes. What cannot be computed is None, and `notes` says why.

    Returns `n`, `seed`, `distances` (a list of `extractor`, `weights`, `frechet`, `kernel`, `floor`, `kernel_floor`,
    `n`, `diversity_ratio` and the figures of `sample_figures`), `recognised`, `recognised_by_class`, `class_score`, the
    figures of `_first`, `memorisation` (see `metrics.samples.copies.search_copies`), `notes`. 95 % intervals are
    under `NAME_interval`.

    All ranks must call this, and get the same. They share the passes over the images; rank 0 computes the figures.
    Raises UserError where images or classes of a file or the judge do not fit the generator; for less than two images.
    """
    if not extractors:
        raise ValueError("at least one extractor is needed")
    notes: dict[str, str] = {}
    train_reader = _second_real_set(reader, train_reader, notes)
    real = real or RealFeatures(batch_size=batch_size, show=show)
    with collectives.raising_together():
        side = _test_side(generator, reader, train_reader if floor else None, n=n, seed=seed, per_class=per_class)
        drawn = None if train_reader is None else _training_side(generator, train_reader, side.n, searched, seed)
    place = search_place(extractors, generator.channels) if train_reader is not None and searched else None
    spaces = [*extractors] if place is None or place in extractors else [*extractors, place]
    tests = real.get(reader, side, spaces)
    train = None
    if train_reader is not None and drawn is not None:
        train = training_sets(train_reader, drawn, real, floors=extractors if floor else [], place=place)
    samples = Samples(generator, side, seed=seed, judge=classifier, observe=observe)
    with evaluating(generator):
        size: Any = {"n": side.n, "total": len(side.indices), "side": generator.resolution, "batch_size": batch_size}
        fakes = feature_sets(samples.draw, spaces, **size, what="samples", show=show, take=samples.take)
    gathered = Gathered(reader, side, samples, list(extractors), spaces, fakes, tests, train, floor)
    return collectives.from_main_process(lambda: gathered.figures(seed, per_class, notes, details=details))


@dataclass
class Samples:
    """A generator's samples as a source of images; rank 0 keeps what the judge says of them."""

    generator: ImageGenerator
    selection: Selection
    seed: int
    judge: Classifier | None = None
    observe: Observer | None = None
    answers: list[Tensor] = field(default_factory=list)  # probabilities [b, K] of the judge

    def draw(self, rows: range) -> tuple[Tensor, tuple[Tensor | None, Tensor, Tensor | None]]:
        """Draw and judge samples `rows`; sample i depends on the seed, i and its label alone. Returns them, and what
        `take` wants.
        """
        labels = torch.from_numpy(self.selection.labels[rows.start : rows.stop])
        with full_float32(next(self.generator.parameters()).device):
            images = generate(
                self.generator,
                labels=labels if self.generator.classes else None,
                indices=rows,
                seed=self.seed,
                batch_size=len(rows),
            )
        probabilities = None if self.judge is None else judge_images(self.judge, images)
        return images, (None if self.observe is None else images, labels, probabilities)

    def take(self, drawn: tuple[Tensor | None, Tensor, Tensor | None]) -> None:
        """Keep the answers and show the samples to the observer."""
        images, labels, probabilities = drawn
        if probabilities is not None:
            self.answers.append(probabilities)
        if self.observe is not None and images is not None:
            self.observe(images, labels, probabilities)


@dataclass(frozen=True)
class Gathered:
    """What the passes over all images came to, on rank 0: the figures are made of this alone, whatever the ranks."""

    reader: Dataset  # of the test images
    side: Selection  # of test images; sample i was asked for the label of the i-th of them
    samples: Samples  # the generator, and what the judge says of its samples
    extractors: list[Extractor]  # whose distances are figures
    spaces: list[Extractor]  # these, and perhaps one more to search copies in
    fakes: list[FeatureSet]  # of the samples, in each space
    tests: list[FeatureSet]  # of the test images, in each space
    train: TrainingSets | None  # of training images
    floor: bool  # whether floors are wanted of them

    def figures(self, seed: int, per_class: int, notes: dict[str, str], *, details: bool) -> dict[str, Any]:
        """What `evaluate_generator` returns."""
        generator, train = self.samples.generator, self.train
        floors = [train.of(extractor) if train is not None and self.floor else None for extractor in self.extractors]
        measured = list(zip(self.extractors, self.fakes, self.tests, floors, strict=False))  # without the added space
        side, names = self.side, self.reader.classes if generator.classes else []
        more = [_details(side, names, fake, test, notes) if details else {} for _, fake, test, _ in measured]
        rows = [_distances(*each, seed) | extra for each, extra in zip(measured, more, strict=True)]
        varied = [_diversity(generator, side, fake, test, per_class) for _, fake, test, _ in measured]
        return {
            "n": side.n,
            "seed": seed,
            "distances": [row | each.smallest_figures() for row, each in zip(rows, varied, strict=True)],
            **_recognised(generator, self.samples, self.reader.classes, notes),
            **_class_score(self.samples, seed),
            **_first(rows[0], varied[0], names),
            "memorisation": _memorisation(self, notes),
            "notes": notes,
        }


def judge_images(classifier: Classifier, images: Tensor) -> Tensor:
    """A classifier's probabilities [n, K] for uint8 images [n, C, H, W]; float64 on the CPU."""
    with evaluating(classifier), full_float32(device_of(classifier)):
        return classifier(classifier_input(classifier, images)).cpu().double().softmax(1)


def _second_real_set(reader: Dataset, train: Dataset | None, notes: dict[str, str]) -> Dataset | None:
    """The training images, if they can serve for the floor; otherwise a note says why not."""
    if train is None:
        notes["floor"] = "no training images were given as the second real set"
    elif train.meta.content_hash == reader.meta.content_hash:
        notes["floor"] = "training and test images are the same; the floor needs two disjoint real sets"
        return None
    return train


def _test_side(
    generator: ImageGenerator, reader: Dataset, second: Dataset | None, *, n: int, seed: int, per_class: int
) -> Selection:
    """The draw of test images: n of them, or as many as the smaller real set has, and those that fill up classes."""
    n = min(n, len(reader), len(reader) if second is None else len(second))
    if n < 2:
        raise UserError(f"an evaluation needs at least 2 images on each side, not {n}; raise --n or give more data")
    return select(_fitting_labels(generator, reader, "test"), n=n, seed=seed, role="test", per_class=per_class)


def _training_side(generator: ImageGenerator, train: Dataset, n: int, searched: int, seed: int) -> Selection:
    """The draw of training images, which must fit the generator."""
    return training_selection(_fitting_labels(generator, train, "train"), n=n, searched=searched, seed=seed)


def _fitting_labels(generator: ImageGenerator, reader: Dataset, role: str) -> np.ndarray:
    """The labels of a file's images, all 0 for an unconditional generator.

    Raises UserError unless its images and classes are those of the generator.
    """
    channels, height, width = reader.read(np.zeros(1, dtype=np.int64))[0].shape[1:]
    side = generator.resolution
    if (channels, height, width) != (generator.channels, side, side):
        raise UserError(
            f"the {role} images are {width}x{height} with {channels} channels, the generator draws {side}x{side} "
            f"with {generator.channels}; pack them with --size {side} --channels {generator.channels}"
        )
    if generator.classes and len(reader.classes) != generator.classes:
        raise UserError(
            f"the {role} images have {len(reader.classes)} classes, the generator {generator.classes}; "
            "give the data it was trained on with --data"
        )
    return reader.labels() if generator.classes else np.zeros(len(reader), dtype=np.int64)


def _memorisation(found: Gathered, notes: dict[str, str]) -> dict[str, Any] | None:
    """What the search for copies says; None and a note without training images or search."""
    train = found.train
    if train is None or train.place is None:
        notes["memorisation"] = notes.get("floor", "no search for copies was asked for")
        return None
    index = found.spaces.index(train.place)
    return search_copies(train, found.fakes[index], found.tests[index], found.reader, found.side)


def _distances(
    extractor: Extractor, fake: FeatureSet, test: FeatureSet, train: FeatureSet | None, seed: int
) -> dict[str, Any]:
    """Frechet and kernel distance of samples and test images, and of train and test images (the floor)."""
    kernel, variance = kernel_with_variance(fake.counted, test.counted, seed=seed)
    return {
        "extractor": extractor.name,
        "weights": extractor.source,
        "frechet": frechet_distance(fake.moments, test.moments),
        "kernel": kernel,
        "kernel_interval": normal_interval(kernel, variance),
        "floor": None if train is None else frechet_distance(train.moments, test.moments),
        "kernel_floor": None if train is None else kernel_distance(train.counted, test.counted, seed=seed),
        "n": fake.n,
    }


def _details(
    selection: Selection, names: Sequence[str], fake: FeatureSet, test: FeatureSet, notes: dict[str, str]
) -> dict[str, Any]:
    """What is wrong with the samples, by `sample_figures`."""
    labels = torch.from_numpy(selection.labels[: selection.n])
    return sample_figures(fake.counted, test.counted, labels, names, notes)


def _first(row: dict[str, Any], varied: Diversity, names: Sequence[str]) -> dict[str, Any]:
    """The figures of the first extractor that stand at the top of the document as well."""
    return {
        **{key: row.get(key) for key in HEADLINE},
        **varied.smallest_figures(),
        "diversity_by_class": dict(zip(names, varied.by_class, strict=True)) if names else None,
        "diversity_images": varied.images,
        "diversity_extractor": row["extractor"],
    }


def _diversity(
    generator: ImageGenerator, selection: Selection, fake: FeatureSet, test: FeatureSet, per_class: int
) -> Diversity:
    """The diversity ratio of each class; an unconditional generator is one class."""
    labels, classes = torch.from_numpy(selection.labels), max(1, generator.classes)
    return diversity_by_class(fake.features, labels, test.features, labels, classes=classes, images=per_class)


def _recognised(generator: ImageGenerator, samples: Samples, names: list[str], notes: dict[str, str]) -> dict[str, Any]:
    """Share of the samples whose class the judge predicts, over all and by class."""
    if not generator.classes:
        notes["recognised"] = "the generator is unconditional: nothing was asked for that could be recognised"
    elif samples.judge is None:
        notes["recognised"] = "no classifier was given; --classifier RUN names one"
    else:
        n = samples.selection.n
        labels = torch.from_numpy(samples.selection.labels[:n])
        share, by_class = recognised_share(torch.cat(samples.answers)[:n].argmax(1), labels, classes=len(names))
        return {"recognised": share, "recognised_by_class": dict(zip(names, by_class, strict=True))}
    return {"recognised": None, "recognised_by_class": None}


def _class_score(samples: Samples, seed: int) -> dict[str, Any]:
    """The judge's class score of the n samples and its interval; None without a judge, of which `recognised` tells."""
    if samples.judge is None:
        return {"class_score": None, "class_score_interval": None}
    score, interval = class_score(torch.cat(samples.answers)[: samples.selection.n], seed=seed)
    return {"class_score": score, "class_score_interval": interval}
