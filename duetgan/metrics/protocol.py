"""Define the default sizes of evaluations (docs/evaluation.md) and the type of their results."""

from typing import Any

Document = dict[str, Any]
"""The result of an evaluation or study, or a part of it, ready for JSON."""

GAN_IMAGES = 5000  # samples, and real images, to compare; fewer if a real dataset is smaller
PER_CLASS = 200  # images of each class that the diversity is computed from
SEARCHED = 20_000  # training images that the memorisation test searches for copies
