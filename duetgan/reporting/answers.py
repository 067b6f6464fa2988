"""Write sentences about a quickstart's metrics, for its report and for the end of its output."""

from duetgan.reporting.run_files import Document
from duetgan.utils.text import counted

MIN_CONFUSED = 2  # smallest number of confused images that is worth a sentence


def answers(classifier: Document, gan: Document) -> list[str]:
    """Return sentences about the metrics of the classifier and the GAN.

    Args:
        classifier: evaluation of the classifier; empty if there is none.
        gan: evaluation of the GAN, without metrics that depend on a weak classifier.
    """
    sentences = []
    if classifier:
        low, high = classifier["accuracy_interval"]
        sentences.append(
            f"The classifier is right on {100 * classifier['accuracy']:.0f} % of the new images "
            f"(95 % interval {100 * low:.0f} to {100 * high:.0f} %, "
            f"{counted(classifier['n'], 'held-out image')}); always predicting the most frequent "
            f"class is right on {100 * classifier['majority_class_rate']:.0f} %."
        )
        if pairs := [row for row in classifier["confused"] if row["n"] >= MIN_CONFUSED][:2]:
            words = [f"{row['true']} as {row['predicted']} ({row['n']:,} images)" for row in pairs]
            sentences.append(f"Its most frequent mistakes: {', '.join(words)}.")
    judge = gan.get("judge") or {}
    if judge.get("is_weak") or gan.get("weak_extractors"):
        sentences.append(
            "The classifier is too weak to judge the GAN. Look at the samples yourself."
        )
    if gan.get("recognised") is not None:
        sentences.append(
            f"The classifier recognises {100 * gan['recognised']:.0f} % of the GAN's samples as the "
            f"requested class, and {100 * judge['accuracy']:.0f} % of real images at "
            f"{gan['size']} px (always predicting the most frequent class: "
            f"{100 * judge['majority_class_rate']:.0f} %)."
        )
    if memorisation := gan.get("memorisation"):
        copies = memorisation.get("copies")
        sentences.append(
            "It copies training images." if copies else "There is no sign of copied images."
        )
    return sentences
