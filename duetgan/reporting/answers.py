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
    sentences = []
    if classifier:
        sentences += _of_classifier(classifier)
    if (gan.get("judge") or {}).get("is_weak") or gan.get("weak_extractors"):
        sentences.append(
            "The classifier is too weak to judge the GAN. Look at the samples yourself."
        )
    if gan.get("recognised") is not None:
        sentences += _of_samples(gan, classifier, smallest)
    if memorisation := gan.get("memorisation"):
        if memorisation.get("copies"):
            sentences.append("It copies training images.")
        else:
            sentences.append("There is no sign of copied images.")
    return sentences


def _of_classifier(classifier: Document) -> list[str]:
    accuracy, balanced = classifier["accuracy"], classifier["balanced_accuracy"]
    low, high = classifier["accuracy_interval"]
    n = counted(classifier["n"], "held-out image")
    sentences = [
        f"The classifier is right on {100 * accuracy:.0f} % of the new images (95 % interval "
        f"{100 * low:.0f} to {100 * high:.0f} %, {n}); always predicting the most frequent class "
        f"is right on {100 * classifier['majority_class_rate']:.0f} %."
    ]
    if accuracy - balanced > UNEVEN:
        sentences.append(
            f"With equally many images of each class it would be {100 * balanced:.0f} %."
        )
    if pairs := [row for row in classifier["confused"] if row["n"] >= MIN_CONFUSED][:2]:
        words = [f"{row['true']} as {row['predicted']} ({row['n']:,} images)" for row in pairs]
        sentences.append(f"Its most frequent mistakes: {', '.join(words)}.")
    return sentences


def _of_samples(gan: Document, classifier: Document, smallest: int) -> list[str]:
    judge, predicted = gan["judge"], gan["samples_predicted"]
    text = (
        f"The classifier recognises {100 * gan['recognised']:.0f} % of the GAN's samples as the requested class, and "
        f"{100 * judge['accuracy']:.0f} % of real images at {gan['size']} px (always predicting the most frequent "
        f"class: {100 * judge['majority_class_rate']:.0f} %)."
    )
    name = max(predicted, key=predicted.__getitem__)
    fraction = predicted[name] / sum(predicted.values())
    if len(predicted) > 1 and fraction >= ONE_CLASS:
        percent = f"{100 * fraction:.0f} %"
        return [text, f"It takes {percent} of them for {name}: look at the samples yourself."]
    bad = _not_learnt(gan, classifier)
    if not bad:
        return [text]
    classes = len(gan["recognised_by_class"])
    few = f"; the smallest class has only {counted(smallest, 'image')}" if smallest < FEW else ""
    if len(bad) == classes > 1:
        return [text, f"The GAN has learnt none of its {classes} classes{few}."]
    of_classes = f"{len(bad)} of {counted(classes, 'class')}"
    return [text, f"The GAN has clearly not learnt {listed(bad, 5)} ({of_classes}){few}."]


def _not_learnt(gan: Document, classifier: Document) -> list[str]:
    """Return the classes whose samples are recognised less than LEARNT times as often as real
    images, and significantly less often.
    """
    names = []
    for name, fraction in gan["recognised_by_class"].items():
        count = gan["samples_by_class"][name]
        # Samples need not be recognised more often than real images of the same class.
        expected = gan["judge"]["accuracy"]
        recall = classifier.get("per_class", {}).get(name, {}).get("recall")
        if recall is not None:
            expected = min(expected, recall)
        if fraction is not None and fraction < LEARNT * expected and count >= MIN_SAMPLES:
            interval = wilson(round(fraction * count), count)
            if interval is not None and interval[1] < expected:
                names.append(name)
    return names


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
