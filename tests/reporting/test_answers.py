"""What the quickstart says of its figures, and what it advises."""

from pathlib import Path
from typing import Any

import pytest
from torchvision.models import ResNet50_Weights

from duetgan.reporting.answers import advice, answers

WEIGHTS_URL = ResNet50_Weights.IMAGENET1K_V1.url
RIGHT = "The classifier is right on 86 % of the new images (95 % interval 82 to 90 %, 200 held-out images); always "
RIGHT += "predicting the most frequent class is right on 60 %."
SAMPLES = (
    "The classifier recognises 71 % of the GAN's samples as the requested class, and 90 % of real images at 16x16 px "
    "(always predicting the most frequent class: 50 %)."
)
CLASSIFIER = {"accuracy": 0.861, "accuracy_interval": [0.82, 0.904], "n": 200, "majority_class_rate": 0.6}
CLASSIFIER |= {"balanced_accuracy": 0.82, "confused": []}
CONFUSED = [{"true": "cat", "predicted": "dog", "n": 3}, {"true": "dog", "predicted": "cow", "n": 1}]
GAN: dict[str, Any] = {"recognised": 0.71, "judge": {"accuracy": 0.9, "majority_class_rate": 0.5}, "size": "16x16"}
GAN |= {"recognised_by_class": {"cat": 0.43, "dog": 0.46, "cow": None}}
GAN |= {"samples_by_class": {"cat": 300, "dog": 300, "cow": 0}}
GAN |= {"samples_predicted": {"cat": 300, "dog": 200, "cow": 100}}
FEW = {"recognised_by_class": {"cat": 0.0, "dog": 0.4}, "samples_by_class": {"cat": 1, "dog": 300}}
NONE = {"recognised_by_class": dict.fromkeys("abcdefg", 0.2), "samples_by_class": dict.fromkeys("abcdefg", 300)}


@pytest.mark.parametrize(
    ("classifier", "gan", "smallest", "sentences"),
    [
        ({}, {}, 100, []),
        (CLASSIFIER, {}, 100, [RIGHT]),
        (
            CLASSIFIER | {"confused": CONFUSED, "balanced_accuracy": 0.81},
            {},
            100,
            [
                RIGHT,
                "With equally many images of each class it would be 81 %.",
                "Its most frequent mistakes: cat as dog (3 images).",
            ],
        ),
        (CLASSIFIER | {"confused": CONFUSED[1:]}, {}, 100, [RIGHT]),  # U10: one image is no habit
        (
            {},
            GAN | {"memorisation": {"copies": False}},
            100,
            [SAMPLES, "The GAN has clearly not learnt cat (1 of 3 classes).", "There is no sign of copied images."],
        ),
        (  # a classifier that takes every sample for one class says nothing about the others
            {},
            GAN | {"samples_predicted": {"cat": 4, "dog": 90, "cow": 6}},
            100,
            [SAMPLES, "It takes 90 % of them for dog: look at the samples yourself."],
        ),
        (  # a class that the judge does not know of real images either
            CLASSIFIER | {"per_class": {"cat": {"recall": 0.5}, "dog": {"recall": None}}},
            GAN,
            100,
            [RIGHT, SAMPLES],
        ),
        (  # U10: a class of one sample says nothing
            {},
            GAN | FEW,
            1,
            [SAMPLES, "The GAN has clearly not learnt dog (1 of 2 classes); the smallest class has only 1 image."],
        ),
        (  # U10: all classes are not listed as if others were learnt
            {},
            GAN | NONE | {"memorisation": {"copies": True}},
            41,
            [
                SAMPLES,
                "The GAN has learnt none of its 7 classes; the smallest class has only 41 images.",
                "It copies training images.",
            ],
        ),
        (  # U1: a judge near chance
            {},
            {"recognised": None, "judge": {"is_weak": True}, "memorisation": {"copies": False}},
            41,
            [
                "The classifier is too weak to judge the GAN. Look at the samples yourself.",
                "There is no sign of copied images.",
            ],
        ),
    ],
)
def test_metrics_in_sentences(classifier, gan, smallest, sentences):
    assert answers(classifier, gan, smallest) == sentences


@pytest.mark.parametrize(
    ("accuracy", "longer", "smallest", "weights", "words", "options", "suffix"),
    [
        (
            0.8,
            40,
            20,
            False,
            f"download {WEIGHTS_URL} elsewhere",
            ["--weights", Path(WEIGHTS_URL).name],
            "with-weights",
        ),
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
