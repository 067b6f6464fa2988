"""Sizes of the protocol in docs/evaluation.md, unless said otherwise."""

GAN_IMAGES = 5000  # on each side of a distance, unless the real sets are smaller
PER_CLASS = 200  # images of a class for the diversity
SEARCHED = 20_000  # training images that are searched for copies
