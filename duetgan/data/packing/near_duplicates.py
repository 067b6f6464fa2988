"""Find pairs of similar images.

Candidates are pairs with similar difference hashes (Krawetz 2013, "Kind of Like That"). The
correlation of their pixels then confirms or rejects them.

The hashes are not sufficient: among 2,000 images of Fashion-MNIST, imagehash's phash reports 124
pairs that differ in up to 4 bits.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import cv2
import numpy as np

from duetgan.utils.machine import cores

# Photos of 128 px were saved as JPEG of quality 50 to 90, halved and enlarged again, made 5 %
# brighter or darker, or cropped by 1 or 2 px: the hashes of 96 to 100 % of them changed in at most
# 7 bits of 64.
DISTANCE = 7  # most bits in which the hashes of a pair differ
LIMIT = 4_000_000  # candidates after which the search ends
LEAST_BITS = 4  # fewest bits set in the hash of an image with texture
TILE = 1 << 19  # comparisons in one job of a thread

SIDE = 16  # px of the compared images
# In CIFAR-10 pairs with a correlation of 0.95 are the same photo. In Fashion-MNIST thousands of
# different trousers have a correlation of 0.99, but each has hundreds of candidates.
CROWD = 10  # an image with more candidates is of a kind whose images are all similar
LEAST_CORRELATION = 0.95
CROWD_CORRELATION = 0.99
BATCH = 4096  # pairs compared at a time


class Candidates(NamedTuple):
    pairs: np.ndarray  # int64 [m, 2]: records, the smaller one first
    is_crowded: np.ndarray  # bool [m]: True if one of the two has more than CROWD candidates
    cut_short: bool  # True if the search ended at LIMIT


def near(signatures: np.ndarray) -> Candidates:
    """Find pairs of images whose difference hashes differ in at most DISTANCE bits.

    `signatures` is an array [n] of type SIGNATURE (data/lmdb/format.py). Every image is compared
    with every other one, on all cores. This takes seconds for 60,000 images, and the time grows
    with the square of their number. The search ends early if it has found more than LIMIT pairs.

    Of exact duplicates, only the first image is compared. An image whose hash has fewer than
    LEAST_BITS bits set has no texture. It is not compared, because all flat images have the hash 0.
    """
    _, first = np.unique(signatures["digest"], return_index=True)
    is_textured = np.bitwise_count(signatures["dhash"][first]) >= LEAST_BITS
    records = np.sort(first[is_textured])
    parts = [np.empty((0, 2), np.int64)]
    total = 0
    for tile in _close(signatures["dhash"][records]):
        parts.append(records[tile])
        total += len(tile)
        if total > LIMIT:
            break
    pairs = np.concatenate(parts)
    is_crowded = np.bincount(pairs.ravel(), minlength=len(signatures)) > CROWD
    return Candidates(pairs, np.asarray(is_crowded[pairs].any(axis=1)), total > LIMIT)


def _close(hashes: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the pairs of hashes, from uint64 [n], that differ in at most DISTANCE bits.

    Each item holds the indices of several pairs, int64 [p, 2], the smaller index of a pair first.
    """
    step = max(1, TILE // max(1, len(hashes)))

    def compare_tile(start: int) -> np.ndarray:
        later = hashes[start:]
        distances = np.bitwise_count(later[:step, None] ^ later)
        pairs = np.argwhere(distances <= DISTANCE)
        return pairs[pairs[:, 0] < pairs[:, 1]] + start

    starts, threads = range(0, len(hashes), step), cores()
    with ThreadPoolExecutor(threads) as pool:
        # One tile per thread at a time limits the memory: a tile may have TILE pairs.
        for first in range(0, len(starts), threads):
            yield from pool.map(compare_tile, starts[first : first + threads])


def correlations(pairs: np.ndarray, read: Callable[[int], np.ndarray]) -> np.ndarray:
    """Return the correlation between the pixels of each pair of images, float32 [m] in [-1, 1].

    The images are scaled by area averaging to SIDE x SIDE px, and the values of all colours are
    normalised together.

    Args:
        pairs: records, int64 [m, 2].
        read: returns the image of a record, uint8 [H, W, 1 or 3].
    """
    distinct, rows = np.unique(pairs, return_inverse=True)
    images = np.empty((len(distinct), SIDE * SIDE * 3), np.float32)
    for row, record in enumerate(distinct.tolist()):
        small = cv2.resize(read(record), (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        images[row] = np.broadcast_to(small.reshape(SIDE, SIDE, -1), (SIDE, SIDE, 3)).ravel()
    images -= images.mean(axis=1, keepdims=True)
    images /= np.maximum(images.std(axis=1, keepdims=True), 1)  # without contrast: near 0
    rows = rows.reshape(-1, 2)
    result = np.empty(len(pairs), np.float32)
    for start in range(0, len(pairs), BATCH):
        a, b = images[rows[start : start + BATCH]].transpose(1, 0, 2)
        result[start : start + BATCH] = (a * b).mean(axis=1)
    return result
