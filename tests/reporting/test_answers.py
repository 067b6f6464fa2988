"""What the quickstart says of its metrics."""

from typing import Any

import pytest

from duetgan.reporting.answers import answers

RIGHT = "The classifier is right on 86 % of 200 held-out images (95 % interval 82 to 90 %). Always predicting the most "
RIGHT += "frequent class would be right on 60 %."
SAMPLES = (
    "The classifier predicts the requested class for 71 % of the GAN's samples, and the true class for 90 % of the "
    "real images of the same size (16x16 px). Always predicting the most frequent class would be right on 50 % of the "
    "real images."
)
WEAK = "The classifier is too weak to judge the GAN. Look at the samples yourself."
COPIES = "the GAN copies training images."
CLASSIFIER = {"accuracy": 0.861, "accuracy_interval": [0.82, 0.904], "n": 200, "majority_class_rate": 0.6}
CLASSIFIER |= {"balanced_accuracy": 0.82, "confused": []}
CONFUSED = [{"true": "cat", "predicted": "dog", "n": 3}, {"true": "dog", "predicted": "cow", "n": 1}]
GAN: dict[str, Any] = {"recognised": 0.71, "judge": {"accuracy": 0.9, "majority_class_rate": 0.5}, "size": "16x16"}
GAN |= {"recognised_by_class": {"cat": 0.43, "dog": 0.46, "cow": None}}
GAN |= {"samples_by_class": {"cat": 300, "dog": 300, "cow": 0}}
GAN |= {"samples_predicted": {"cat": 300, "dog": 200, "cow": 100}}


@pytest.mark.parametrize(
    ("classifier", "gan", "sentences"),
    [
        ({}, {}, []),
        (CLASSIFIER, {}, [RIGHT]),
        (
            CLASSIFIER | {"confused": CONFUSED},
            {},
            [RIGHT, "The classifier's most frequent mistakes: cat predicted as dog (3 images)."],
        ),
        (  # two pairs are told
            CLASSIFIER | {"confused": [*CONFUSED[:1], CONFUSED[1] | {"n": 1200}, CONFUSED[0] | {"n": 2}]},
            {},
            [
                RIGHT,
                "The classifier's most frequent mistakes: cat predicted as dog (3 images), dog predicted as cow (1,200 "
                "images).",
            ],
        ),
        ({}, {"weak_extractors": ["classifier:x"]}, [WEAK]),
        (CLASSIFIER | {"confused": CONFUSED[1:]}, {}, [RIGHT]),  # U10: one image is no habit
        ({}, GAN | {"memorisation": {"copies": False}}, [SAMPLES, f"There is no sign that {COPIES}"]),
        ({}, GAN | {"memorisation": {"copies": True}}, [SAMPLES, "The GAN copies training images."]),
        (  # U1: a judge near chance
            {},
            {"recognised": None, "judge": {"is_weak": True}},
            [WEAK],
        ),
    ],
)
def test_metrics_in_sentences(classifier, gan, sentences):
    assert answers(classifier, gan) == sentences
