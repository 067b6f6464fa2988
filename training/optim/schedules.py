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


def one_cycle(step: int, steps: int, *, rise: float, start: float, peak: float, end: float) -> float:
    """From `start` up to `peak`, then down to `end`, along half cosines (1708.07120, as torch's OneCycleLR).

    The peak is update number `rise` x `steps` - 1, the end the last update, `steps` - 1; both may lie between two
    updates. From there on it stays at `end`.
    """
    top, last = rise * steps - 1, steps - 1
    if step <= top:
        return _between(start, peak, step / top if top > 0 else 1.0)
    return _between(peak, end, min(1.0, (step - top) / (last - top) if last > top else 1.0))


def _between(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))
