"""The quickstart's figures in sentences, and what to do next: what its report says first, and its last lines."""

from collections.abc import Mapping
from typing import Any

from duetgan.utils.text import listed

LEARNT = 0.5  # of what the judge recognises of a class's real images: below it a class is not learnt
SOLVED = 0.95  # recognised real images, or accuracy: above it there is little to gain
UNEVEN = 0.05  # accuracy over balanced accuracy: above it frequent classes hide rare ones
FEW = 60  # images of a class: with fewer, more of them come first

Document = Mapping[str, Any]  # an evaluation's


def answers(classifier: Document, gan: Document, smallest: int) -> list[str]:
    """Sentences from both evaluations, as far as they tell; `smallest`: images of the smallest class."""
    found = []
    if classifier:
        low, high = (round(100 * bound) for bound in classifier.get("accuracy_interval") or (0, 1))
        found = [
            f"The classifier names {100 * classifier['accuracy']:.0f} of 100 new images rightly ({low} to {high}, "
            f"from {classifier.get('n', 0):,} held-out ones)."
        ]
        balanced = classifier.get("balanced_accuracy")
        if balanced is not None and classifier["accuracy"] - balanced > UNEVEN:
            seen = f"With as many images of every class it would be {100 * balanced:.0f}"
            found.append(f"{seen}: rare ones are named worse.")
        pairs = [f"{row['true']} for {row['predicted']}" for row in classifier.get("confused", ())[:2]]
        found += [f"It takes {' and '.join(pairs)} most often."] if pairs else []
    if gan.get("recognised") is not None:
        real = (gan.get("judge") or {}).get("accuracy")
        beside = "" if real is None else f"; of 100 real images of that size, {100 * real:.0f}"
        found.append(f"Of 100 images that the GAN draws, {100 * gan['recognised']:.0f} are recognised{beside}.")
        shares = gan.get("recognised_by_class") or {}
        recalls = {name: row["recall"] for name, row in (classifier.get("per_class") or {}).items()}
        known = {name: min(each for each in (real, recalls.get(name), 1.0) if each is not None) for name in shares}
        bad = [name for name, share in shares.items() if share is not None and share < LEARNT * known[name]]
        few = f"; {smallest:,} images in the smallest class are few" if smallest < FEW else ""
        found += [f"Of its classes, {listed(bad, 5)} {'are' if len(bad) > 1 else 'is'} not learnt{few}."] if bad else []
    if memorisation := gan.get("memorisation"):
        copies = "It copies training images" if memorisation.get("copies") else "There is no sign of copied images"
        found.append(f"{copies}.")
    return found


def advice(classifier: Document, longer: float, smallest: int, *, weights: bool) -> tuple[str, list[str], str]:
    """What would help most, the quickstart's options for it, and what to add to its folder's name. `longer`: minutes
    that the GAN could use, 0: none; `weights`: any, or images enough without.
    """
    gains = bool(classifier) and classifier["accuracy"] < SOLVED
    if gains and not weights:
        return "ImageNet weights for the classifier", ["--weights", "FILE"], "with-weights"
    if gains and smallest < FEW:
        return f"more images of the smallest classes, which have {smallest:,}", [], "more-images"
    if not longer:
        return "more images; more time would hardly show", [], "more-images"
    return "more time, for larger and better samples", ["--minutes", f"{longer:g}"], "longer"
