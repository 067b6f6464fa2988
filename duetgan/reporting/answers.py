"""Sentences about the metrics of a quickstart, and advice on the next step, for the top of its
report and the end of its output.
"""

from duetgan.metrics.intervals import wilson
from duetgan.reporting.run_files import Document
from duetgan.utils.text import counted, listed

# The GAN has learnt a class if the judge recognises the class's samples at least this many times as
# often as its real images.
LEARNT = 0.5
SOLVED = 0.95  # accuracy of the classifier above which it needs no improvement
UNEVEN = 0.05  # accuracy minus balanced accuracy above which rare classes do much worse
FEW = 60  # images of a class below which the advice is to add images
MIN_CONFUSED = 2  # smallest number of confused images that is worth a sentence
ONE_CLASS = 0.8  # fraction of samples predicted as one class from which the judge is useless
MIN_SAMPLES = 5  # smallest number of a class's samples to say that it is not learnt


def answers(classifier: Document, gan: Document, smallest: int) -> list[str]:
    """Return sentences about the metrics of the classifier and the GAN.

    Args:
        classifier: evaluation of the classifier; empty if there is none.
        gan: evaluation of the GAN, without metrics that depend on a weak classifier.
        smallest: number of images of the smallest class.
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
        if memorisation.get("copies"):
            sentences.append("It copies training images.")
        else:
            sentences.append("There is no sign of copied images.")
    return sentences


def _skill(judge: Document) -> str:
    if judge.get("majority_class_rate") is None:
        return ""
    return (
        f": it is right on {100 * judge['accuracy']:.0f} % of the real images at the samples' size; always predicting "
        f"the most frequent class is right on {100 * judge['majority_class_rate']:.0f} %"
    )


def _of_classifier(classifier: Document) -> list[str]:
    accuracy = classifier["accuracy"]
    certainty = []
    if interval := classifier.get("accuracy_interval"):
        certainty.append(f"95 % interval {100 * interval[0]:.0f} to {100 * interval[1]:.0f} %")
    if n := classifier.get("n"):
        certainty.append(counted(n, "held-out image"))
    text = f"The classifier is right on {100 * accuracy:.0f} % of the new images"
    if certainty:
        text += f" ({', '.join(certainty)})"
    rate = classifier.get("majority_class_rate")
    if rate is not None:
        text += f"; always predicting the most frequent class is right on {100 * rate:.0f} %"
    sentences = [f"{text}."]
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
    recognised = f"{100 * gan['recognised']:.0f} % of the GAN's samples"
    text = f"The classifier recognises {recognised} as the requested class"
    if accuracy is not None:
        size = f"{gan['size']} px" if "size" in gan else "that size"
        text += f", and {100 * accuracy:.0f} % of real images at {size}"
    if majority is not None:
        text += f" (always predicting the most frequent class: {100 * majority:.0f} %)"
    fractions, counts = gan.get("recognised_by_class") or {}, gan.get("samples_by_class") or {}
    predicted = gan.get("samples_predicted") or {}
    name = max(predicted, key=predicted.__getitem__, default="")
    if len(predicted) > 1 and predicted[name] >= ONE_CLASS * sum(predicted.values()):
        fraction = predicted[name] / sum(predicted.values())
        return [
            f"{text}.",
            f"It takes {100 * fraction:.0f} % of them for {name}: look at the samples yourself.",
        ]
    recalls = {name: row["recall"] for name, row in (classifier.get("per_class") or {}).items()}
    bad = []
    for name, fraction in fractions.items():
        # Samples need not be recognised more often than real images of the same class.
        limits = [limit for limit in (accuracy, recalls.get(name), 1.0) if limit is not None]
        if fraction is not None and _is_clearly_below(fraction, counts.get(name), min(limits)):
            bad.append(name)
    if not bad:
        return [f"{text}."]
    few = f"; the smallest class has only {counted(smallest, 'image')}" if smallest < FEW else ""
    if len(bad) == len(fractions) > 1:
        return [f"{text}.", f"The GAN has learnt none of its {len(fractions)} classes{few}."]
    classes = counted(len(fractions), "class")
    return [
        f"{text}.",
        f"The GAN has clearly not learnt {listed(bad, 5)} ({len(bad)} of {classes}){few}.",
    ]


def _is_clearly_below(fraction: float, count: int | None, expected: float) -> bool:
    """Return True if `fraction` is less than LEARNT times `expected`, and significantly less than
    `expected` for this `count` of samples. With an unknown count (None) significance is not tested.
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
    """Return the most helpful next step, the quickstart's options for it, and a suffix for the
    folder of the next quickstart.

    Args:
        classifier: evaluation of the classifier; empty if there is none.
        longer: minutes of a longer quickstart to suggest; 0 if more time would not help.
        smallest: number of images of the smallest class.
        weights: True if the classifier had pretrained weights, or enough images to do without.
    """
    gains = bool(classifier) and classifier["accuracy"] < SOLVED
    if gains and not weights:
        from torchvision.models import ResNet50_Weights  # This import takes seconds.

        url = ResNet50_Weights.IMAGENET1K_V1.url
        step = (
            "ImageNet weights for the classifier: with a network they are downloaded, else "
            f"download {url} elsewhere"
        )
        return step, ["--weights", url.rpartition("/")[2]], "with-weights"
    if gains and smallest < FEW:
        return f"more images of the smallest classes, which have {smallest:,}", [], "more-images"
    if not longer:
        return "more images; more time would hardly show", [], "more-images"
    return "more time, for larger and better samples", ["--minutes", f"{longer:g}"], "longer"
