"""Evaluate a generator by the protocol in docs/evaluation.md.

The functions below the comment `evaluate.py` write the results and pictures of that script.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.classification.answers import Answers, balanced_accuracy
from duetgan.metrics.evaluate_classifier import logits_of
from duetgan.metrics.features.extractors import (
    Extractor,
    RealFeatures,
    build_extractors,
    compute_features,
    fingerprint,
)
from duetgan.metrics.features.precision import device_of
from duetgan.metrics.features.selection import draw_samples, select
from duetgan.metrics.figures import GAN, Samples, measured
from duetgan.metrics.images import save_samples
from duetgan.metrics.intervals import Measured
from duetgan.metrics.lineage import leaks, load_judge, training_images
from duetgan.metrics.protocol import GAN_IMAGES, PER_CLASS, SEARCHED, Document
from duetgan.metrics.samples import memorisation
from duetgan.metrics.samples.judged import recognised
from duetgan.metrics.tables import few_images
from duetgan.models.classifier import Classifier
from duetgan.models.gan import ImageGenerator
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.checkpoint.provenance import Lineage, recorded
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, refuse, require_same_classes
from duetgan.utils.images import save_captioned

MIN_JUDGE_SKILL = 0.4  # from 0 (always predicts the most frequent class) to 1 (no mistakes)


@dataclass(frozen=True)
class Gathered:
    """The features and labels from which the metrics are computed. Only rank 0 has the features."""

    samples: list[Samples]  # the features of each extractor
    labels: Tensor  # label number of each sample, int64 [m]
    probabilities: Tensor | None  # of the judge, [m, K]
    extractors: list[Extractor]
    search: Callable[[], Document] | None  # searches for copies, if requested and possible
    notes: dict[str, str]  # reasons why metrics are missing

    def document(self, *, details: bool) -> Document:
        """Compute the metrics and return them as a document, ready for JSON.

        If `details` is False, only the metrics that are logged during training are computed.
        """
        notes, first = dict(self.notes), self.samples[0]
        rows = [row for row in GAN if details or row.in_training]
        distances = [
            {"extractor": extractor.name, "weights": extractor.source, "n": samples.n}
            | measured([row for row in rows if not row.by_judge], samples, notes)
            for extractor, samples in zip(self.extractors, self.samples, strict=True)
        ]
        document: Document = {"n": first.n, "seed": first.seed, "distances": distances}
        document |= measured([row for row in rows if row.by_judge], first, notes)
        for row in GAN:
            if not row.by_judge and row.place != "column":
                document |= {key: distances[0].get(key) for key in row.keys(Measured(None), ())}
        document["diversity_images"] = first.diversity.images
        document["diversity_extractor"] = self.extractors[0].name
        document["memorisation"] = self.search() if self.search else None
        document["notes"] = notes
        return document


def evaluate_generator(
    generator: ImageGenerator,
    dataset: Dataset,
    *,
    details: bool = True,  # if False, compute only the metrics logged in training
    **options: Any,  # keyword arguments of `gather`
) -> Document:
    """Evaluate a generator by the metrics of `metrics.figures.GAN`.

    All ranks must call this function. They share the images. Rank 0 computes the metrics, and all
    ranks return them.

    Returns:
        A dict with `n`; `seed`; `distances`, a list with a dict for each extractor; the metrics
        that use the judge; the first extractor's metrics once more, except distances;
        `diversity_images` and `diversity_extractor`, the number of images and the extractor of the
        diversity; `memorisation`, the result of `search_copies`; and `notes`, the reasons why
        metrics are None. The dict of an extractor has `extractor`, `weights`, `n` and its metrics.

    Raises:
        UserError: If images, classes or judge do not fit the generator, or there are fewer than two
            images.
    """
    gathered = gather(generator, dataset, **options)
    return collectives.from_main_process(lambda: gathered.document(details=details))


def gather(
    generator: ImageGenerator,  # a module of any architecture
    dataset: Dataset,  # real test images
    *,
    n: int,  # samples, and as many real images, to compare
    seed: int,
    extractors: Sequence[Extractor],  # at least one
    classifier: Classifier | None = None,  # judge, which predicts the class of each sample
    train_dataset: Dataset | None = None,  # for the floor and the search for copies
    real: RealFeatures | None = None,  # cache of the features of real images
    per_class: int = PER_CLASS,  # images of each class for the diversity
    floor: bool = True,  # if False, no floors are computed
    searched: int = SEARCHED,  # training images to search; 0 turns the search off
    batch_size: int = 64,
    show: bool = False,  # if True, show progress bars
) -> Gathered:
    """Compute all features that the metrics need.

    There is one pass over the samples, one over the test images, and at most one for each extractor
    over the training images. `n` is reduced to the number of test images and, if `floor` is True,
    to that of training images. Sample i has the label of the i-th selected test image, so samples
    and test images have the same class frequencies.
    """
    train, notes = _second_real_set(dataset, train_dataset)
    real = real or RealFeatures(batch_size=batch_size, show=show)
    with collectives.raising_together():
        n = _count(n, dataset, train if floor else None, notes)
        has_label_sets = bool(generator.classes) and dataset.meta.sets is not None
        multi_hot = dataset.meta.multi_hot if has_label_sets else None
        test_draw = select(
            _fitting_labels(generator, dataset, "test"),
            n=n,
            seed=seed,
            role="test",
            per_class=per_class,
            multi_hot=multi_hot,
        )
        train_draw = None
        if train is not None:
            train_labels = _fitting_labels(generator, train, "train")
            train_draw = memorisation.training_selection(
                train_labels, n=n, searched=searched, seed=seed
            )
    search_extractor = None
    if train is not None and searched:
        search_extractor = memorisation.search_extractor(extractors, generator.spec)
    all_extractors = list(extractors)
    if search_extractor is not None and search_extractor not in extractors:
        all_extractors.append(search_extractor)
    test_features = real.get(dataset, test_draw, all_extractors)
    train_features: dict[str, Tensor] = {}
    if train is not None and train_draw is not None:
        floor_draw = replace(
            train_draw,
            indices=train_draw.indices[:n],
            labels=train_draw.labels[:n],
            key=f"{train_draw.key}, the first {n}",
        )
        for extractor in all_extractors:
            if extractor is search_extractor:
                (train_features[extractor.name],) = real.get(train, train_draw, [extractor])
            elif floor:
                (train_features[extractor.name],) = real.get(train, floor_draw, [extractor])
    judges = [] if classifier is None else [judge_extractor(classifier)]
    labels = torch.from_numpy(test_draw.labels)
    conditions = torch.from_numpy(dataset.meta.conditions(test_draw.labels))
    sample_sets = sample_features(
        generator,
        conditions if generator.classes else None,
        [*all_extractors, *judges],
        seed=seed,
        total=len(labels),
        batch_size=batch_size,
        progress="samples" if show else "",
    )
    probabilities = sample_sets[-1] if judges else None
    records = []
    # `all_extractors` may end in an extractor that only the search for copies uses
    for extractor, fake, test in zip(extractors, sample_sets, test_features, strict=False):
        samples = Samples(
            fake=fake,
            real=test,
            training=train_features.get(extractor.name) if floor else None,
            labels=labels if multi_hot is None else conditions > 0,
            n=n,
            names=dataset.classes if generator.classes else [],
            probabilities=None if probabilities is None else probabilities[:n],
            thresholds=getattr(classifier, "thresholds", None),
            seed=seed,
            per_class=per_class,
            extractor=extractor.name,
        )
        records.append(samples)
    if search_extractor is None or train is None or train_draw is None:
        notes["memorisation"] = notes.get("floor", "no search for copies was requested")
        return Gathered(records, labels, probabilities, list(extractors), None, notes)
    index = all_extractors.index(search_extractor)
    search = partial(
        memorisation.search_copies,
        search_extractor,
        sample_sets[index][:n],
        memorisation.RealImages(dataset, test_draw, test_features[index]),
        memorisation.RealImages(train, train_draw, train_features[search_extractor.name]),
    )
    return Gathered(records, labels, probabilities, list(extractors), search, notes)


def sample_features(
    generator: ImageGenerator,
    labels: Tensor | None,  # of all samples, in the generator's format, if it has classes
    extractors: Sequence[Extractor],
    *,
    seed: int,
    **options: Any,  # keyword arguments of `compute_features`
) -> list[Tensor]:
    """Generate samples and return a list with their features, [total, F], for each extractor."""

    def draw(rows: range) -> Tensor:
        chunk = None if labels is None else labels[rows.start : rows.stop]
        return draw_samples(generator, chunk, rows, seed=seed)

    return compute_features(draw, extractors, side=generator.spec.side, **options)


def judge_extractor(classifier: Classifier) -> Extractor:
    """Return an extractor whose features are the classifier's probabilities."""
    return Extractor(
        "of the judge", classifier.classes, partial(judge_images, classifier), device_of(classifier)
    )


def judge_images(classifier: Classifier, images: Tensor) -> Tensor:
    """Return the probabilities that a classifier predicts for images [n, C, H, W].

    They are float64 [n, K] on the CPU.
    """
    logits = logits_of(classifier, images).double()
    if getattr(classifier, "thresholds", None) is None:
        return logits.softmax(1)
    return logits.sigmoid()


def _second_real_set(
    dataset: Dataset, train: Dataset | None
) -> tuple[Dataset | None, dict[str, str]]:
    """Return the training images and {} if they can serve as the second set of real images.

    The floors need this set. If there are no training images, or they are the same as the test
    images, return None and {"floor": reason}.
    """
    if train is None:
        return None, {"floor": "no training images were given as the second real set"}
    if train.meta.content_hash == dataset.meta.content_hash:
        return None, {
            "floor": "training and test images are the same; the floor needs two disjoint real sets"
        }
    return train, {}


def _count(n: int, dataset: Dataset, train: Dataset | None, notes: dict[str, str]) -> int:
    """Return n, limited to the number of test images and of training images (if any).

    Adds a note if the training images limit n. Raises UserError if the result is below 2.
    """
    limit = min(n, len(dataset))
    n = limit if train is None else min(limit, len(train))
    if n < limit:
        notes["training_images"] = f"n is {n:,}, not {limit:,}: there are no more training images"
    if n < 2:
        raise UserError(
            f"an evaluation needs at least 2 images on each side, not {n}; raise --n or give more data"
        )
    return n


def _fitting_labels(generator: ImageGenerator, dataset: Dataset, role: str) -> np.ndarray:
    """Return the labels of a dataset's images, all 0 for an unconditional generator.

    Raises UserError if the images' size, channels or number of classes differ from the generator's.
    `role`, "test" or "train", names the images in messages.
    """
    dataset.read(np.zeros(1, dtype=np.int64))  # raises UserError if the images differ in size
    spec, expected = dataset.spec, generator.spec
    refuse(
        (
            spec != expected,
            f"the {role} images are {spec.width}x{spec.height}, {spec.words}, the generator draws "
            f"{expected.width}x{expected.height}, {expected.words}; pack them with "
            f"--size {expected.resolution} --channels {expected.channels}",
        ),
        (
            generator.classes and len(dataset.classes) != generator.classes,
            f"the {role} images have {len(dataset.classes)} classes, the generator {generator.classes}; "
            "give the data it was trained on with --data",
        ),
    )
    return dataset.label_numbers() if generator.classes else np.zeros(len(dataset), dtype=np.int64)


# --- evaluate.py


def evaluate_gan_run(
    checkpoint: Checkpoint, dataset: Dataset, out: Path, options: Namespace
) -> Document:
    """Evaluate a generator for evaluate.py: return the results, write pictures into `out`."""
    with collectives.raising_together():
        device = collectives.choose_device(options.device)
        generator = generator_from(checkpoint, device, several=True)
        names = checkpoint["classes"] if generator.classes else []
        if names:
            require_same_classes("the generator", names, "the images", dataset.classes)
            if (generator.label_sets is None) != (dataset.meta.sets is None):
                raise UserError(
                    f"{dataset.path}: images and generator differ in whether one may have several labels"
                )
        run = options.classifier
        judge = load_judge(run, checkpoint, names, device, dataset) if run else None
        train, reason = training_images(checkpoint)
    extractors = collectives.main_first(
        lambda: build_extractors(options, dataset.spec, device, judge)
    )
    one_label = generator.label_sets is None
    with train or nullcontext():
        gathered = gather(
            generator,
            dataset,
            n=options.n or GAN_IMAGES,
            seed=options.seed,
            extractors=extractors,
            classifier=judge,
            train_dataset=train,
            per_class=options.per_class or PER_CLASS,
            searched=SEARCHED if options.searched is None else options.searched,
            batch_size=options.batch_size,
            show=True,
        )
        samples = gathered.samples[0]
        classifiers = [extractor.classifier for extractor in extractors]
        judge_skill, *skills = judge_skills([judge, *classifiers], dataset, samples.n, options)
        named_skills = zip(extractors, skills, strict=True)
        extractor_skills = {extractor.name: skill for extractor, skill in named_skills if skill}

        def finish() -> Document:
            document = gathered.document(details=True)
            images = save_samples(
                generator,
                dataset,
                gathered.labels,
                gathered.probabilities if one_label else None,
                out,
                seed=options.seed,
            )
            if train is not None and document["memorisation"] is not None:
                pairs = memorisation.neighbour_images(
                    generator,
                    train,
                    document["memorisation"],
                    seed=options.seed,
                    conditions=dataset.meta.conditions,
                )
                save_captioned(*pairs, out / "neighbours.png")
                images.append("neighbours.png")
            notes = document["notes"] | leaks(dataset, train, reason)
            if reason:
                notes |= {"floor": reason, "memorisation": reason}
            is_weak = judge_skill is not None and judge_skill["is_weak"]
            interval = None if is_weak else document["recognised_interval"]
            notes |= few_images(
                samples.n, interval=interval, metric="recognised fraction", distances=True
            )
            notes |= flattered(extractors, recorded(checkpoint), judge)
            notes |= weak_judges(judge_skill, extractor_skills)
            weak = [name for name, skill in extractor_skills.items() if skill["is_weak"]]
            size = f"{dataset.spec.width}x{dataset.spec.height}"
            document |= {"judge": judge_skill, "size": size, "weak_extractors": weak}
            document["judge_weights"] = None if judge is None else fingerprint(judge)
            if one_label and names:
                document |= samples_by_class(names, samples)
            return document | {"notes": notes, "images": images}

        return collectives.from_main_process(finish)


def flattered(
    extractors: Sequence[Extractor], generator: Lineage, judge: Classifier | None
) -> dict[str, str]:
    """Return notes on extractors, and on the judge, that may favour the generator's samples.

    An extractor or a judge may do so if it learnt from samples, or if it is related to a classifier
    in the generator's loss. The notes' keys are the names of the extractors, and `judge`.
    """
    notes = {}
    for extractor in extractors:
        lineage = extractor.lineage
        if not {extractor.source, *lineage.teachers}.isdisjoint(generator.teachers):
            notes[extractor.name] = (
                "this classifier, or one that taught it, supplied a loss to the generator: the distance "
                "is flattered"
            )
        elif lineage.synthetic:
            notes[extractor.name] = (
                "this classifier was trained on samples, which seem more real in its features than they "
                "are"
            )
        elif lineage.related(generator):
            notes[extractor.name] = (
                "a classifier that supplied a loss to the generator began with the same weights: it may "
                "be flattered"
            )
    if judge is not None and judge.lineage.related(generator):
        notes["judge"] = (
            "a classifier that supplied a loss to the generator began with the same weights"
        )
    return notes


def samples_by_class(names: Sequence[str], samples: Samples) -> dict[str, dict[str, int]]:
    """Count the samples of each requested class and, if there is a judge, of each predicted class.

    Returns `samples_by_class` and `samples_predicted`, which are dicts from class name to count.
    """
    labels = {"samples_by_class": samples.labels[: samples.n]}
    if samples.probabilities is not None:
        labels["samples_predicted"] = samples.probabilities.argmax(1)
    return {
        key: dict(zip(names, rows.bincount(minlength=len(names)).tolist(), strict=True))
        for key, rows in labels.items()
    }


def has_skill(fraction: Measured, chance: float) -> bool:
    """Return True if an accuracy, `fraction`, is clearly above `chance`.

    `chance` is the accuracy of always predicting the same class. Clearly means that the interval
    of the accuracy lies above `chance`, and that the accuracy is at least chance +
    MIN_JUDGE_SKILL (1 - chance).
    """
    low = fraction.interval[0] if fraction.interval else 0.0
    skilled = chance + MIN_JUDGE_SKILL * (1 - chance)
    return low > chance and fraction.value is not None and fraction.value >= skilled


def weak_judges(judge: Document | None, extractors: Mapping[str, Document]) -> dict[str, str]:
    """Return notes on a judge and on extractors that are too weak to judge the GAN.

    `judge` is an item of the result of `judge_skills`. `extractors` is a dict from the name of an
    extractor to such an item.
    """
    notes = {"recognised": f"it {_weakness(judge)}"} if judge and judge["is_weak"] else {}
    for name, skill in extractors.items():
        if skill["is_weak"] and skill != judge:
            notes["weak_extractors"] = f"{name} {_weakness(skill)}"
    return notes


def _weakness(skill: Document) -> str:
    return (
        f"is right on {100 * skill['accuracy']:.0f} % of the real images at the samples' size "
        f"(always predicting the most frequent class: {100 * skill['majority_class_rate']:.0f} %), "
        "so the fraction of samples that it recognises, and metrics on its features, are only in "
        "metrics.json"
    )


def judge_skills(
    classifiers: Sequence[Classifier | None], dataset: Dataset, n: int, options: Namespace
) -> list[Document | None]:
    """Measure how well each classifier predicts n real test images, at the samples' size.

    Returns:
        A list with a dict for each classifier: `accuracy` with its interval, `majority_class_rate`,
        `is_weak` and `n`. The item is None if the classifier is None or has other classes than the
        images.
    """
    chosen = select(dataset.label_numbers(), n=n, seed=options.seed, role="judge")
    skills: dict[int, Document] = {}
    for classifier in classifiers:
        if (
            classifier is None
            or id(classifier) in skills
            or list(classifier.class_names) != list(dataset.classes)
        ):
            continue
        (probabilities,) = RealFeatures(batch_size=options.batch_size).get(
            dataset, chosen, [judge_extractor(classifier)]
        )
        skills[id(classifier)] = collectives.from_main_process(
            partial(_skill, probabilities, dataset, chosen.labels, classifier.thresholds)
        )
    return [skills.get(id(classifier)) for classifier in classifiers]


def _skill(
    probabilities: Tensor, dataset: Dataset, labels: np.ndarray, thresholds: Tensor | None
) -> Document:
    hits = recognised(probabilities, torch.from_numpy(dataset.meta.conditions(labels)), thresholds)
    majority = float(np.bincount(labels).max() / len(labels))
    skilled = has_skill(hits, majority)
    if thresholds is None:
        answers = Answers(probabilities, torch.from_numpy(labels), dataset.classes)
        skilled = skilled or has_skill(balanced_accuracy(answers), 1 / len(np.unique(labels)))
    return {
        "accuracy": hits.value,
        "accuracy_interval": hits.interval,
        "majority_class_rate": majority,
        "is_weak": not skilled,
        "n": len(labels),
    }
