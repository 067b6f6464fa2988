"""TrivialAugment (2103.10158) by torchvision: one of fourteen operations, at a random strength, on
each image of a batch.
"""

import torch
from torch import Tensor
from torchvision.transforms.v2 import TrivialAugmentWide

from duetgan.utils.seeding import Key, numpy_generator

BINS = 31  # number of strengths of an operation
LIBRARY = TrivialAugmentWide(BINS)  # nearest neighbour, black outside
# operation -> function of BINS that returns its strengths, True if they may be negative too
OPERATIONS = LIBRARY._AUGMENTATION_SPACE
KINDS = tuple(OPERATIONS)
# float64 [kinds, BINS]
STRENGTHS = []
for strengths_of, _ in OPERATIONS.values():
    strengths = strengths_of(BINS, 0, 0)
    STRENGTHS.append([0.0] * BINS if strengths is None else strengths.tolist())

Draw = tuple[str, float]  # operation and signed strength


def draw(key: tuple[Key, ...], global_batch: int, rows: slice) -> list[Draw]:
    """Draw the operations of the whole global batch, and return those of `rows`."""
    numbers = numpy_generator(*key)
    kinds = numbers.integers(len(KINDS), size=global_batch)[rows].tolist()
    bins = numbers.integers(BINS, size=global_batch)[rows].tolist()
    signs = (1 - 2 * numbers.integers(2, size=global_batch)[rows]).tolist()
    draws = []
    for kind, number, sign in zip(kinds, bins, signs, strict=True):
        _, is_signed = OPERATIONS[KINDS[kind]]
        draws.append((KINDS[kind], STRENGTHS[kind][number] * (sign if is_signed else 1)))
    return draws


def trivial_augment(images: Tensor, draws: list[Draw]) -> Tensor:
    """Apply the drawn operation to each image, uint8 [n, 1 or 3, H, W]."""
    results = []
    for image, (kind, strength) in zip(images, draws, strict=True):
        results.append(
            LIBRARY._apply_image_or_video_transform(
                image, kind, strength, LIBRARY.interpolation, LIBRARY._fill
            )
        )
    return torch.stack(results)
