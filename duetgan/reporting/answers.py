"""Write sentences about a quickstart's metrics, for its report and for the end of its output."""

from duetgan.reporting.run_files import Document
from duetgan.utils.text import counted

MIN_CONFUSED = 2  # smallest number of confused images that is worth a sentence


def answers(classifier: Document, gan: Document) -> list[str]:
    """Return sentences about the metrics of the classifier and the GAN.

    Args:
        classifier: results of the classifier's evaluation; empty if there is none.
        gan: results of the GAN's evaluation, without metrics that depend on a weak classifier.
    """
    sentences = []
    if classifier:
        low, high = classifier["accuracy_interval"]
        sentences.append(
            f"The classifier is right on {100 * classifier['accuracy']:.0f} % of "
            f"{counted(classifier['n'], 'held-out image')} (95 % interval {100 * low:.0f} to "
            f"{100 * high:.0f} %). Always predicting the most frequent class would be right on "
            f"{100 * classifier['majority_class_rate']:.0f} %."
        )
        if pairs := [row for row in classifier["confused"] if row["n"] >= MIN_CONFUSED][:2]:
            words = [
                f"{row['true']} predicted as {row['predicted']} ({row['n']:,} images)"
                for row in pairs
            ]
            sentences.append(f"The classifier's most frequent mistakes: {', '.join(words)}.")
    judge = gan.get("judge") or {}
    if judge.get("is_weak") or gan.get("weak_extractors"):
        sentences.append(
            "The classifier is too weak to judge the GAN. Look at the samples yourself."
        )
    if gan.get("recognised") is not None:
        sentences.append(
            f"The classifier predicts the requested class for {100 * gan['recognised']:.0f} % of the "
            f"GAN's samples, and the true class for {100 * judge['accuracy']:.0f} % of the real images "
            f"of the same size ({gan['size']} px). Always predicting the most frequent class would be "
            f"right on {100 * judge['majority_class_rate']:.0f} % of the real images."
        )
    if memorisation := gan.get("memorisation"):
        copies = memorisation.get("copies")
        sentences.append(
            "The GAN copies training images."
            if copies
            else "There is no sign that the GAN copies training images."
        )
    return sentences
