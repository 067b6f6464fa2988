"""Default sizes of the evaluation protocol in docs/evaluation.md, and the type of its documents."""

from typing import Any

Document = dict[str, Any]
"""The result of an evaluation or study, or a part of it, ready for JSON."""

GAN_IMAGES = 5000  # on each side of a distance; fewer if a real data set is smaller
PER_CLASS = 200  # images of each class that the diversity is computed from
SEARCHED = 20_000  # training images that the memorisation test searches for copies
