"""The quickstart's metrics in sentences, and what to do next: the report's first lines, and the
last printed ones.
"""

from collections.abc import Mapping
from typing import Any

from duetgan.metrics.intervals import wilson
from duetgan.utils.text import counted, listed

# of what the judge recognises of a class's real images: below it a class is not learnt
LEARNT = 0.5
SOLVED = 0.95  # recognised real images, or accuracy: above it there is little to gain
UNEVEN = 0.05  # accuracy over balanced accuracy: above it frequent classes hide rare ones
FEW = 60  # images of a class: with fewer, more of them come first
MIN_CONFUSED = 2  # images: a single one is no habit
ONE_CLASS = 0.8  # of the samples: from here on a classifier takes them all for one class
MIN_SAMPLES = 5  # of a class: fewer do not show whether it is learnt

Document = Mapping[str, Any]  # an evaluation's


def answers(classifier: Document, gan: Document, smallest: int) -> list[str]:
    """Return sentences from both evaluations, as far as their metrics go.

    Args:
        classifier: Evaluation of the classifier; empty if there is none.
        gan: Evaluation of the GAN, see `duetgan.metrics.tables.credible`.
        smallest: Number of images of the smallest class.
    """
    sentences = _of_classifier(classifier) if classifier else []
    judge = gan.get("judge") or {}
    if judge.get("is_weak") or gan.get("weak_extractors"):
        sentences.append(
            f"The classifier is too weak to judge the GAN{_skill(judge)}. Look at the samples yourself."
        )
    if gan.get("recognised") is not None:
        sentences += _of_samples(gan, classifier, judge, smallest)
    if memorisation := gan.get("memorisation"):
        copies = (
            "It copies training images"
            if memorisation.get("copies")
            else "There is no sign of copied images"
        )
        sentences.append(f"{copies}.")
    return sentences


def _skill(judge: Document) -> str:
    if judge.get("majority_class_rate") is None:
        return ""
    return (
        f": it is right on {100 * judge['accuracy']:.0f} % of the real images at the samples' size; always predicting "
        f"the most frequent class is right on {100 * judge['majority_class_rate']:.0f} %"
    )


def _of_classifier(classifier: Document) -> list[str]:
    accuracy, n, interval = (
        classifier["accuracy"],
        classifier.get("n"),
        classifier.get("accuracy_interval"),
    )
    certainty = []
    if interval:
        certainty.append(f"95 % interval {100 * interval[0]:.0f} to {100 * interval[1]:.0f} %")
    if n:
        certainty.append(counted(n, "held-out image"))
    brackets = f" ({', '.join(certainty)})" if certainty else ""
    rate = classifier.get("majority_class_rate")
    majority = (
        ""
        if rate is None
        else f"; always predicting the most frequent class is right on {100 * rate:.0f} %"
    )
    sentences = [
        f"The classifier is right on {100 * accuracy:.0f} % of the new images{brackets}{majority}."
    ]
    balanced = classifier.get("balanced_accuracy")
    if balanced is not None and accuracy - balanced > UNEVEN:
        sentences.append(
            f"With equally many images of each class it would be {100 * balanced:.0f} %."
        )
    if pairs := [row for row in classifier.get("confused", ()) if row["n"] >= MIN_CONFUSED][:2]:
        words = [f"{row['true']} as {row['predicted']} ({row['n']:,} images)" for row in pairs]
        sentences.append(f"Its most frequent mistakes: {', '.join(words)}.")
    return sentences


def _of_samples(gan: Document, classifier: Document, judge: Document, smallest: int) -> list[str]:
    accuracy, majority = judge.get("accuracy"), judge.get("majority_class_rate")
    words = f"The classifier recognises {100 * gan['recognised']:.0f} % of the GAN's samples as the requested class"
    size = f"{gan['size']} px" if "size" in gan else "that size"
    words += "" if accuracy is None else f", and {100 * accuracy:.0f} % of real images at {size}"
    words += (
        ""
        if majority is None
        else f" (always predicting the most frequent class: {100 * majority:.0f} %)"
    )
    fractions, counts = gan.get("recognised_by_class") or {}, gan.get("samples_by_class") or {}
    predicted = gan.get("samples_predicted") or {}
    name = max(predicted, key=predicted.__getitem__, default="")
    if len(predicted) > 1 and predicted[name] >= ONE_CLASS * sum(predicted.values()):
        fraction = predicted[name] / sum(predicted.values())
        return [
            f"{words}.",
            f"It takes {100 * fraction:.0f} % of them for {name}: look at the samples yourself.",
        ]
    recalls = {name: row["recall"] for name, row in (classifier.get("per_class") or {}).items()}
    bad = []
    for name in [name for name, fraction in fractions.items() if fraction is not None]:
        limits = [limit for limit in (accuracy, recalls.get(name), 1.0) if limit is not None]
        if _is_clearly_below(fractions[name], counts.get(name), min(limits)):
            bad.append(name)
    if not bad:
        return [f"{words}."]
    few = f"; the smallest class has only {counted(smallest, 'image')}" if smallest < FEW else ""
    if len(bad) == len(fractions) > 1:
        return [f"{words}.", f"The GAN has learnt none of its {len(fractions)} classes{few}."]
    classes = counted(len(fractions), "class")
    return [
        f"{words}.",
        f"The GAN has clearly not learnt {listed(bad, 5)} ({len(bad)} of {classes}){few}.",
    ]


def _is_clearly_below(fraction: float, count: int | None, expected: float) -> bool:
    """Return whether a fraction of `count` samples (None: unknown) is far below the expected one,
    and not by chance.
    """
    if fraction >= LEARNT * expected:
        return False
    interval = wilson(round(fraction * count), count) if count is not None else None
    return interval is None or (
        count is not None and count >= MIN_SAMPLES and interval[1] < expected
    )


def advice(
    classifier: Document, longer: float, smallest: int, *, weights: bool
) -> tuple[str, list[str], str]:
    """What would help most, the quickstart's options for it, and what to add to its folder's name.
    `longer`: minutes that the GAN could use, 0: none; `weights`: any, or images enough without.
    """
    gains = bool(classifier) and classifier["accuracy"] < SOLVED
    if gains and not weights:
        from torchvision.models import ResNet50_Weights  # seconds, which nothing else here needs

        url = ResNet50_Weights.IMAGENET1K_V1.url
        what = f"ImageNet weights for the classifier: with a network they are fetched, else fetch {url} elsewhere"
        return what, ["--weights", url.rpartition("/")[2]], "with-weights"
    if gains and smallest < FEW:
        return f"more images of the smallest classes, which have {smallest:,}", [], "more-images"
    if not longer:
        return "more images; more time would hardly show", [], "more-images"
    return "more time, for larger and better samples", ["--minutes", f"{longer:g}"], "longer"
