"""Schedules as pure functions of how far the training is: nothing to save, nothing to restore."""

import math


def cosine(start: float, end: float, images_seen: int, over_images: int) -> float:
    """`start` until the first image is seen, `end` from `over_images` on, half a cosine between; both exactly.

    R3GAN's only schedule (2501.05441): of the learning rate, beta2, gamma, the augmentation's probability and the
    average's half-life. `over_images` 0 or less: `end` at once. Any unit will do in place of images if both have it.
    """
    if images_seen >= over_images:
        return end
    if images_seen <= 0:
        return start
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * images_seen / over_images))
