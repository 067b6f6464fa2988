"""Evaluation of a generator by the protocol in docs/evaluation.md, and what evaluate.py makes of
it.
"""

import sys
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
from duetgan.metrics.comparison.compare import keep_predictions
from duetgan.metrics.evaluate_classifier import logits_of
from duetgan.metrics.features.extractors import (
    Extractor,
    RealFeatures,
    build_extractors,
    feature_sets,
    fingerprint,
)
from duetgan.metrics.features.precision import device_of, evaluating, full_float32
from duetgan.metrics.features.selection import select
from duetgan.metrics.figures import GAN, Samples, measured
from duetgan.metrics.images import SampleBoard
from duetgan.metrics.intervals import Measured
from duetgan.metrics.lineage import leaks, load_judge, training_images
from duetgan.metrics.protocol import GAN_IMAGES, PER_CLASS, SEARCHED
from duetgan.metrics.samples import memorisation
from duetgan.metrics.samples.judged import class_score, recognised
from duetgan.metrics.tables import few_images
from duetgan.models.classifier import Classifier
from duetgan.models.gan import ImageGenerator, generate
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.images import save_captioned
from duetgan.utils.provenance import Lineage, recorded

Observer = Callable[[Tensor, Tensor, Tensor | None], None]
"""Called with each chunk of samples on rank 0, in their order: samples uint8 [b, C, H, W], labels int64 [b], the
judge's probabilities [b, K] or None."""
MIN_JUDGE_SKILL = 0.4  # 0: always predicting the most frequent class; 1: no mistake


@dataclass(frozen=True)
class Gathered:
    """What the passes over all images came to; on rank 0 alone it holds features."""

    samples: list[Samples]  # under each extractor
    extractors: list[Extractor]
    search: Callable[[], dict[str, Any]] | None  # for copies of training images
    notes: dict[str, str]  # what cannot be had, and why

    def document(self, *, details: bool) -> dict[str, Any]:
        """Its figures, ready for JSON; without `details` those that are followed during training."""
        notes, first = dict(self.notes), self.samples[0]
        rows = [row for row in GAN if details or row.in_training]
        distances = [
            {"extractor": extractor.name, "weights": extractor.source, "n": samples.n}
            | measured([row for row in rows if not row.by_judge], samples, notes)
            for extractor, samples in zip(self.extractors, self.samples, strict=True)
        ]
        document: dict[str, Any] = {"n": first.n, "seed": first.seed, "distances": distances}
        document |= measured([row for row in rows if row.by_judge], first, notes)
        # of the first extractor
        for row in (row for row in GAN if not row.by_judge and row.place != "column"):
            document |= {key: distances[0].get(key) for key in row.keys(Measured(None), ())}
        more = {
            "diversity_images": first.diversity.images,
            "diversity_extractor": self.extractors[0].name,
        }
        return (
            document
            | more
            | {"memorisation": self.search() if self.search else None, "notes": notes}
        )


def evaluate_generator(
    generator: ImageGenerator,
    reader: Dataset,
    *,
    details: bool = True,  # whether the figures that training does not follow are computed
    **how: Any,  # see `gather`
) -> dict[str, Any]:
    """The figures of `metrics.figures.GAN`, ready for JSON: `n`, `seed`, `distances` (a list of
    `extractor`, `weights`, `n` and the figures of that extractor), the judge's figures and, once
    more, those of the first extractor, `memorisation` (see `search_copies`), `notes`. What cannot
    be computed is None, and `notes` says why.

    All ranks must call this, and get the same. They share the passes over the images; rank 0
    computes the figures.
    Raises UserError where images or classes of a file or the judge do not fit the generator; for
    less than two images.
    """
    gathered = gather(generator, reader, **how)
    return collectives.from_main_process(lambda: gathered.document(details=details))


def gather(
    generator: ImageGenerator,  # a module of any architecture
    reader: Dataset,  # real test images
    *,
    n: int,  # images on each side of a distance
    seed: int,
    # at least one; the first one's figures stand at the top of the document as well
    extractors: Sequence[Extractor],
    classifier: Classifier | None = None,  # independent judge of conditional samples
    # the second real set, for the floor and the search for copies
    train_reader: Dataset | None = None,
    real: RealFeatures | None = None,  # keeps real features between calls
    per_class: int = PER_CLASS,  # images of a class for the diversity
    floor: bool = True,  # whether floors are computed
    searched: int = SEARCHED,  # training images that are searched for copies; 0: no search
    batch_size: int = 64,
    show: bool = False,  # progress bars
    observe: Observer | None = None,
) -> Gathered:
    """One pass over the samples and over each set of real images, for all extractors.

    n falls to the size of the smallest real set. Sample i has the label of the i-th real image
    drawn, so both sides have the same mix of classes.
    """
    train, notes = _second_real_set(reader, train_reader)
    real = real or RealFeatures(batch_size=batch_size, show=show)
    with collectives.raising_together():
        n = _count(n, reader, train if floor else None, notes)
        hot = reader.meta.multi_hot if generator.classes and reader.meta.sets is not None else None
        labels = _fitting_labels(generator, reader, "test")
        side = select(labels, n=n, seed=seed, role="test", per_class=per_class, hot=hot)
        known = None if train is None else _fitting_labels(generator, train, "train")
        drawn = (
            None
            if known is None
            else memorisation.training_selection(known, n=n, searched=searched, seed=seed)
        )
    place = (
        memorisation.search_place(extractors, generator.spec)
        if train is not None and searched
        else None
    )
    spaces = [*extractors] if place is None or place in extractors else [*extractors, place]
    tests = real.get(reader, side, spaces)
    trains: dict[str, Tensor] = {}
    if train is not None and drawn is not None:
        few = replace(
            drawn,
            indices=drawn.indices[:n],
            labels=drawn.labels[:n],
            key=f"{drawn.key}, the first {n}",
        )
        for space in spaces if floor else filter(None, [place]):
            (trains[space.name],) = real.get(train, drawn if space is place else few, [space])
    judges = [] if classifier is None else [judging(classifier)]
    shown, asked = (
        torch.from_numpy(each) for each in (side.labels, reader.meta.conditions(side.labels))
    )
    watch = observe and (
        lambda rows, *seen: observe(seen[0], shown[rows], seen[1][-1] if judges else None)
    )
    how: Any = {
        "total": len(shown),
        "batch_size": batch_size,
        "what": "samples" if show else "",
        "observe": watch,
    }
    fakes = sample_features(
        generator, asked if generator.classes else None, [*spaces, *judges], seed=seed, **how
    )
    about: Any = {
        "n": n,
        "seed": seed,
        "per_class": per_class,
        "thresholds": getattr(classifier, "thresholds", None),
    }
    about |= {
        "names": reader.classes if generator.classes else [],
        "probabilities": fakes[-1][:n] if judges else None,
    }
    about["labels"] = shown if hot is None else asked > 0
    records = [
        Samples(
            fake=fake,
            real=test,
            training=trains.get(space.name) if floor else None,
            extractor=space.name,
            **about,
        )
        # without the added space
        for space, fake, test in zip(extractors, fakes, tests, strict=False)
    ]
    if place is None or train is None or drawn is None:
        notes["memorisation"] = notes.get("floor", "no search for copies was asked for")
        return Gathered(records, list(extractors), None, notes)
    held_out = memorisation.Drawn(reader, side, tests[spaces.index(place)])
    searched_in = memorisation.Drawn(train, drawn, trains[place.name])
    search = partial(
        memorisation.search_copies, place, fakes[spaces.index(place)][:n], held_out, searched_in
    )
    return Gathered(records, list(extractors), search, notes)


def sample_features(
    generator: ImageGenerator,
    labels: Tensor | None,  # of all samples, as the generator takes them
    extractors: Sequence[Extractor],
    *,
    seed: int,
    **how: Any,  # see `feature_sets`
) -> list[Tensor]:
    """`feature_sets` of samples; sample i depends on the seed, i and its label alone."""

    def draw(rows: range) -> Tensor:
        own = None if labels is None else labels[rows.start : rows.stop]
        with full_float32(device_of(generator)):
            return generate(generator, labels=own, indices=rows, seed=seed, batch_size=len(rows))

    with evaluating(generator):
        return feature_sets(draw, extractors, side=generator.spec.side, **how)


def judging(classifier: Classifier) -> Extractor:
    """Its probabilities as features."""
    return Extractor(
        "of the judge", classifier.classes, partial(judge_images, classifier), device_of(classifier)
    )


def judge_images(classifier: Classifier, images: Tensor) -> Tensor:
    """A classifier's probabilities of images, float64 [n, K] on the CPU; see `logits_of`."""
    logits = logits_of(classifier, images).double()
    return (
        logits.softmax(1) if getattr(classifier, "thresholds", None) is None else logits.sigmoid()
    )


def _second_real_set(
    reader: Dataset, train: Dataset | None
) -> tuple[Dataset | None, dict[str, str]]:
    """The training images, if they can serve for the floor; otherwise a note says why not."""
    if train is None:
        return None, {"floor": "no training images were given as the second real set"}
    if train.meta.content_hash == reader.meta.content_hash:
        return None, {
            "floor": "training and test images are the same; the floor needs two disjoint real sets"
        }
    return train, {}


def _count(n: int, reader: Dataset, train: Dataset | None, notes: dict[str, str]) -> int:
    """Images of each set: n, or as many as the smallest has, which is noted. Raises UserError for
    fewer than 2.
    """
    most = min(n, len(reader))
    n = min(most, most if train is None else len(train))
    if n < most:
        notes["training_images"] = f"n is {n:,}, not {most:,}: there are no more training images"
    if n < 2:
        raise UserError(
            f"an evaluation needs at least 2 images on each side, not {n}; raise --n or give more data"
        )
    return n


def _fitting_labels(generator: ImageGenerator, reader: Dataset, role: str) -> np.ndarray:
    """The labels of a file's images, all 0 for an unconditional generator.

    Raises UserError unless its images and classes are those of the generator.
    """
    reader.read(np.zeros(1, dtype=np.int64))
    given, drawn = reader.spec, generator.spec
    if given != drawn:
        raise UserError(
            f"the {role} images are {given.width}x{given.height}, {given.words}, the generator draws "
            f"{drawn.width}x{drawn.height}, {drawn.words}; pack them with --size {drawn.resolution} "
            f"--channels {drawn.channels}"
        )
    if generator.classes and len(reader.classes) != generator.classes:
        raise UserError(
            f"the {role} images have {len(reader.classes)} classes, the generator {generator.classes}; "
            "give the data it was trained on with --data"
        )
    return reader.label_numbers() if generator.classes else np.zeros(len(reader), dtype=np.int64)


# --- evaluate.py


def evaluate_gan_run(
    checkpoint: Checkpoint, reader: Dataset, out: Path, options: Namespace
) -> dict[str, Any]:
    with collectives.raising_together():
        device = collectives.choose_device(options.device)
        generator = generator_from(checkpoint, device, several=True)
        names = checkpoint["classes"] if generator.classes else []
        if names:
            require_same_classes("the generator", names, "the images", reader.classes)
            if (generator.sets is None) != (reader.meta.sets is None):
                raise UserError(
                    f"{reader.path}: images and generator differ in whether one may have several labels"
                )
        judge = (
            load_judge(options.classifier, checkpoint, names, device, reader)
            if options.classifier
            else None
        )
        train, why = training_images(checkpoint)
    extractors = collectives.main_first(
        lambda: build_extractors(options, reader.spec, device, judge)
    )
    if collectives.is_main():
        print(
            f"extractors: {', '.join(extractor.name for extractor in extractors)}", file=sys.stderr
        )
    sets = None if generator.sets is None else reader.meta
    board, learnt_from = SampleBoard(names, sets=sets), recorded(checkpoint)
    with train or nullcontext():
        gathered = gather(
            generator,
            reader,
            n=options.n or GAN_IMAGES,
            seed=options.seed,
            extractors=extractors,
            classifier=judge,
            train_reader=train,
            per_class=options.per_class or PER_CLASS,
            searched=SEARCHED if options.searched is None else options.searched,
            batch_size=options.batch_size,
            show=True,
            observe=board.observe,
        )
        samples = gathered.samples[0]
        of_judge, *skills = judge_skills(
            [judge, *(each.classifier for each in extractors)], reader, samples.n, options
        )
        skill_of = {
            each.name: skill for each, skill in zip(extractors, skills, strict=True) if skill
        }

        def finish() -> dict[str, Any]:
            document, images = gathered.document(details=True), board.save(out, reader)
            if train is not None and document["memorisation"] is not None:
                how: Any = {"seed": options.seed, "asked": reader.meta.conditions}
                pairs = memorisation.neighbour_images(
                    generator, train, document["memorisation"], **how
                )
                save_captioned(*pairs, out / "neighbours.png")
                images.append("neighbours.png")
            notes = document["notes"] | leaks(reader, train, why)
            notes |= {"floor": why, "memorisation": why} if why else {}
            interval = document["recognised_interval"]
            notes |= few_images(
                samples.n, interval=interval, what="recognised share", distances=True
            )
            notes |= flattered(extractors, learnt_from, judge) | weak_judges(of_judge, skill_of)
            columns = {
                "label": samples.labels[: samples.n].numpy()
                if sets is None
                else np.zeros(samples.n, np.int64)
            }
            if sets is None and samples.probabilities is not None:
                confidence, predicted = samples.probabilities.max(1)
                columns |= {"prediction": predicted.numpy(), "confidence": confidence.numpy()}
            source = None if judge is None else fingerprint(judge)
            kept = keep_predictions(
                out, columns, checkpoint, reader, seed=options.seed, judge=source
            )
            kept |= {"judge": of_judge, "size": f"{reader.spec.width}x{reader.spec.height}"}
            kept["weak_extractors"] = [name for name, skill in skill_of.items() if skill["is_weak"]]
            if sets is None and names:
                kept |= samples_by_class(names, columns)
            return document | kept | {"notes": notes, "images": images}

        return collectives.from_main_process(finish)


def flattered(
    extractors: Sequence[Extractor], generator: Lineage, judge: Classifier | None
) -> dict[str, str]:
    """Return a note for each extractor in whose features samples look better than they are, and on
    such a judge.
    """
    notes = {}
    for extractor in extractors:
        if not {extractor.source, *extractor.lineage.teachers}.isdisjoint(generator.teachers):
            why = "this classifier, or one that taught it, supplied a loss to the generator: the distance is flattered"
        elif extractor.lineage.synthetic:
            why = "this classifier was trained on samples, which seem more real in its features than they are"
        elif extractor.lineage.related(generator):
            why = "a classifier that supplied a loss to the generator began with the same weights: it may be flattered"
        else:
            continue
        notes[extractor.name] = why
    if judge is not None and judge.lineage.related(generator):
        notes["judge"] = (
            "a classifier that supplied a loss to the generator began with the same weights"
        )
    return notes


def samples_by_class(
    names: Sequence[str], columns: Mapping[str, np.ndarray]
) -> dict[str, dict[str, int]]:
    """Return the number of samples of each class as requested, and as the judge predicts if there
    is one.
    """
    result = {}
    for key, column in (("samples_by_class", "label"), ("samples_predicted", "prediction")):
        if column in columns:
            counts = np.bincount(columns[column], minlength=len(names)).tolist()
            result[key] = dict(zip(names, counts, strict=True))
    return result


def has_skill(fraction: Measured, chance: float) -> bool:
    """Return whether a classifier's accuracy is clearly above that of always predicting one class."""
    low = fraction.interval[0] if fraction.interval else 0.0
    skilled = chance + MIN_JUDGE_SKILL * (1 - chance)
    return low > chance and fraction.value is not None and fraction.value >= skilled


def weak_judges(
    judge: dict[str, Any] | None, extractors: Mapping[str, dict[str, Any]]
) -> dict[str, str]:
    """Return notes on the judge and on extractors by name, from `judge_skills`, that are too weak
    to judge the GAN.
    """
    notes = {"recognised": _weakness(judge)} if judge and judge["is_weak"] else {}
    for name, skill in extractors.items():
        if skill["is_weak"] and skill != judge:
            notes["weak_extractors"] = f"{name}: {_weakness(skill)}"
    return notes


def _weakness(skill: dict[str, Any]) -> str:
    return (
        f"the classifier is too weak to judge the GAN: it is right on {skill['accuracy']:.0%} of the real images at "
        f"the samples' size; always predicting the most frequent class is right on {skill['majority_class_rate']:.0%}"
    )


def judge_skills(
    classifiers: Sequence[Classifier | None], reader: Dataset, n: int, options: Namespace
) -> list[dict[str, Any] | None]:
    """Return how well each classifier predicts n real test images, drawn by the seed, at the
    samples' size.

    Returns `accuracy` with its interval, `majority_class_rate`, `is_weak`, `n`, and the
    `class_score` of real images; None for a classifier of other classes than the images'.
    """
    chosen = select(reader.label_numbers(), n=n, seed=options.seed, role="judge")
    known: dict[int, dict[str, Any]] = {}
    for classifier in classifiers:
        if (
            classifier is None
            or id(classifier) in known
            or list(classifier.class_names) != list(reader.classes)
        ):
            continue
        (probabilities,) = RealFeatures(batch_size=options.batch_size).get(
            reader, chosen, [judging(classifier)]
        )
        known[id(classifier)] = collectives.from_main_process(
            partial(_skill, probabilities, reader, chosen.labels, classifier.thresholds)
        )
    return [known.get(id(classifier)) for classifier in classifiers]


def _skill(
    probabilities: Tensor, reader: Dataset, labels: np.ndarray, thresholds: Tensor | None
) -> dict[str, Any]:
    hits = recognised(probabilities, torch.from_numpy(reader.meta.conditions(labels)), thresholds)
    majority = float(np.bincount(labels).max() / len(labels))
    skilled, score = has_skill(hits, majority), Measured(None)
    if thresholds is None:
        answers = Answers(probabilities, torch.from_numpy(labels), reader.classes)
        skilled = skilled or has_skill(balanced_accuracy(answers), 1 / len(np.unique(labels)))
        score = class_score(probabilities)
    return {
        "accuracy": hits.value,
        "accuracy_interval": hits.interval,
        "majority_class_rate": majority,
        "is_weak": not skilled,
        "n": len(labels),
        "class_score": score.value,
        "class_score_interval": score.interval,
    }
