"""What the quickstart says of its figures, and what it advises."""

from typing import Any

import pytest

from duetgan.reporting.answers import advice, answers

CLASSIFIER = {"accuracy": 0.861, "accuracy_interval": [0.82, 0.904], "n": 200}
CONFUSED = [{"true": "cat", "predicted": "dog", "n": 3}, {"true": "dog", "predicted": "cow", "n": 2}]
GAN = {"recognised": 0.71, "judge": {"accuracy": 0.9}, "recognised_by_class": {"cat": 0.44, "dog": 0.46, "cow": None}}


@pytest.mark.parametrize(
    ("classifier", "gan", "smallest", "told"),
    [
        ({}, {}, 100, []),
        (
            CLASSIFIER | {"balanced_accuracy": 0.82},
            {},
            100,
            ["The classifier names 86 of 100 new images rightly (82 to 90, from 200 held-out ones)."],
        ),
        (
            CLASSIFIER | {"confused": CONFUSED, "balanced_accuracy": 0.81},
            {},
            100,
            [
                "The classifier names 86 of 100 new images rightly (82 to 90, from 200 held-out ones).",
                "With as many images of every class it would be 81: rare ones are named worse.",
                "It takes cat for dog and dog for cow most often.",
            ],
        ),
        (
            {},
            GAN | {"memorisation": {"copies": False}},
            100,
            [
                "Of 100 images that the GAN draws, 71 are recognised; of 100 real images of that size, 90.",
                "Of its classes, cat is not learnt.",
                "There is no sign of copied images.",
            ],
        ),
        (  # a class that the judge does not know of real images either
            {"accuracy": 0.9, "per_class": {"cat": {"recall": 0.5}, "dog": {"recall": None}}},
            GAN,
            100,
            [
                "The classifier names 90 of 100 new images rightly (0 to 100, from 0 held-out ones).",
                "Of 100 images that the GAN draws, 71 are recognised; of 100 real images of that size, 90.",
            ],
        ),
        (
            {},
            {"recognised": 0.2, "recognised_by_class": dict.fromkeys("abcdefg", 0.2), "memorisation": {"copies": True}},
            41,
            [
                "Of 100 images that the GAN draws, 20 are recognised.",
                "Of its classes, a, b, c, d, e and 2 more are not learnt; 41 images in the smallest class are few.",
                "It copies training images.",
            ],
        ),
    ],
)
def test_figures_in_sentences(classifier, gan, smallest, told):
    assert answers(classifier, gan, smallest) == told


@pytest.mark.parametrize(
    ("accuracy", "longer", "smallest", "weights", "words", "options", "suffix"),
    [
        (0.8, 40, 20, False, "ImageNet weights", ["--weights", "FILE"], "with-weights"),
        (0.8, 40, 20, True, "the smallest classes, which have 20", [], "more-images"),
        (0.8, 40, 100, True, "more time, for", ["--minutes", "40"], "longer"),
        (0.96, 40, 20, False, "more time, for", ["--minutes", "40"], "longer"),
        (None, 40, 0, False, "more time, for", ["--minutes", "40"], "longer"),
        (0.96, 0, 20, True, "more images; more time would hardly show", [], "more-images"),
    ],
)
def test_what_would_help_most(accuracy, longer, smallest, weights, words, options, suffix):
    classifier: dict[str, Any] = {} if accuracy is None else {"accuracy": accuracy}
    what, *given = advice(classifier, longer, smallest, weights=weights)
    assert words in what
    assert given == [options, suffix]
