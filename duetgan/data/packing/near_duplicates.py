"""Find similar images: candidates by difference hashes (Krawetz 2013, "Kind of Like That"), which
are then confirmed by their pixels.

A hash alone is not sufficient. Among 2,000 images of Fashion-MNIST, imagehash's phash reports 124
pairs that differ in up to 4 bits and 542 in up to 6, and hundreds of times as many in the whole
data set. With these limits it finds only 6 and 18 % of images cropped by 1 px.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import cv2
import numpy as np

from duetgan.utils.machine import cores
from duetgan.utils.runlog.progress import Bar

# Candidates by their hashes. Photos of 128 px were saved as JPEG of quality 50 to 90, halved and
# enlarged again, made 5 % brighter or darker, or cropped by 1 or 2 px: the hashes of 96 to 100 % of
# them changed in at most 7 bits of 64.
DISTANCE = 7  # most bits in which the hashes of a pair differ
LIMIT = 4_000_000  # candidates after which the search ends
LEAST_BITS = 4  # fewest bits set in the hash of an image with texture
TILE = 1 << 19  # comparisons in one job of a thread

# Near duplicates by their pixels; differences are in standard deviations of the image. In CIFAR-10
# pairs with a correlation of 0.95 are the same photo. In Fashion-MNIST thousands of different
# trousers have a correlation of 0.99, but each has hundreds of candidates.
CROWD = 10  # an image with more candidates is of a kind whose images are all similar
LEAST_CORRELATION = 0.95  # after registration
LEAST_UNREGISTERED = 0.8  # before registration
MOST_SHIFT = 0.04  # by registration, as a fraction of the side
CROWD_CORRELATION = 0.995  # least in a crowd, without registration
CROWD_CHANGE = 0.2  # largest difference in a crowd, of any part of the image
LEAST_CONTRAST = 1.0  # standard deviation in grey levels
# root mean square difference of the colours (Cr and Cb together), in levels of 0 to 255
MOST_COLOUR = 12.0
BATCH = 1024  # pairs compared at a time

Read = Callable[[int], np.ndarray]  # number of a record -> its image, uint8 [H, W, C]


class Candidates(NamedTuple):
    pairs: np.ndarray  # int64 [m, 2], ascending
    # int64 [m]: the larger number of candidates of the two images of a pair
    crowd: np.ndarray
    cut_short: bool  # True if the search ended at LIMIT
    textureless: int  # images that were not searched


def near(a: np.ndarray, b: np.ndarray | None = None) -> Candidates:
    """Find pairs of images whose difference hashes differ in at most DISTANCE bits.

    `a` and `b` are the signatures of two data sets, SIGNATURE [n]. A pair has an image of `a` and
    one of `b`, or without `b` two of `a`, the smaller index first. Every pair occurs once.

    All images of both are compared with all, on all cores: this takes seconds for 60,000 images,
    and grows with the square of their number. Exact duplicates are no pairs, and only the first of
    them is compared. Images with fewer than LEAST_BITS bits set have no texture and are not
    compared, because all flat images have the hash 0.

    `crowd` counts candidates in both data sets, so that two parts of a data set have the same pairs
    between them as in the whole.
    """
    joined = a if b is None else np.concatenate([a, b])
    digests, first, image = np.unique(joined["digest"], return_index=True, return_inverse=True)
    is_textured = np.bitwise_count(joined["dhash"][first]) >= LEAST_BITS
    searched = np.flatnonzero(is_textured)  # distinct images
    images_a, images_b = image[: len(a)], image if b is None else image[len(a) :]
    record_a = _first_records(images_a, len(digests))
    record_b = _first_records(images_b, len(digests))
    crowds = np.zeros(len(digests), np.int64)
    parts = [np.empty((0, 2), np.int64)]
    total = 0
    for close in _close(joined["dhash"][first[searched]]):
        i, j = searched[close].T
        crowds += np.bincount(i, minlength=len(crowds)) + np.bincount(j, minlength=len(crowds))
        pairs = np.stack([record_a[i], record_b[j]], axis=1)
        if b is None:
            pairs.sort(axis=1)
        else:
            pairs = np.concatenate([pairs, np.stack([record_a[j], record_b[i]], axis=1)])
            pairs = pairs[(pairs >= 0).all(axis=1)]
        parts.append(pairs)
        total += len(pairs)
        if total > LIMIT:
            break
    pairs = np.concatenate(parts)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    crowd = np.maximum(crowds[images_a[pairs[:, 0]]], crowds[images_b[pairs[:, 1]]])
    return Candidates(pairs, crowd, total > LIMIT, len(digests) - len(searched))


def _first_records(images: np.ndarray, count: int) -> np.ndarray:
    """Return the first record of each of `count` distinct images, int64 [count]; -1 for none.

    `images` has the number of the distinct image of each record.
    """
    records = np.full(count, -1)
    records[images[::-1]] = np.arange(len(images))[::-1]
    return records


def _close(hashes: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the pairs of hashes, uint64 [n], that differ in at most DISTANCE bits: indices, int64
    [p, 2], the smaller one first.
    """
    step = max(1, TILE // max(1, len(hashes)))

    def compare_tile(start: int) -> np.ndarray:
        later = hashes[start:]
        distances = np.bitwise_count(later[:step, None] ^ later)
        pairs = np.argwhere(distances <= DISTANCE)
        return pairs[pairs[:, 0] < pairs[:, 1]] + start

    starts, threads = range(0, len(hashes), step), cores()
    with (
        ThreadPoolExecutor(threads) as pool,
        Bar(starts, "comparing hashes", unit="tile", delay=1) as bar,
    ):
        # One tile per thread at a time limits the memory: a tile may have TILE pairs.
        for first in range(0, len(starts), threads):
            for tile in pool.map(compare_tile, starts[first : first + threads]):
                yield tile
                bar.update()


def confirm(
    candidates: Candidates,
    read_a: Read,
    read_b: Read,
    size: int,  # px: side of the smaller images
) -> tuple[np.ndarray, np.ndarray]:
    """Select the candidates that are near duplicates by their pixels.

    Both images are scaled by area averaging to 32x32 px in grey (those below 64 px to 16x16, below
    24 px to 8x8), and normalised to the same mean and contrast. Small shifts and stretches are
    removed (MOST_SHIFT). Pairs with a correlation of LEAST_CORRELATION are near duplicates, unless
    the colours of the scaled images differ by more than MOST_COLOUR (chrominance of ITU-R 601,
    after the same shifts). Files of one channel are compared without colours.

    An image with more than CROWD candidates often has high correlations. Its pairs need
    CROWD_CORRELATION without the removal of shifts, and no part of 1/8 x 1/8 of the image may
    differ by more than CROWD_CHANGE.

    Returns the pairs, int64 [m, 2], and their correlations, float32 in (0, 1].
    """
    pairs, crowded = candidates.pairs, candidates.crowd > CROWD
    side = 32 if size >= 64 else 16 if size >= 24 else 8
    a, first = _thumbnails(read_a, pairs[:, 0], side)
    b, second = _thumbnails(read_b, pairs[:, 1], side)
    planes = min(a.shape[1], b.shape[1])
    score = np.zeros(len(pairs), np.float32)
    for start in range(0, len(pairs), BATCH):
        rows = slice(start, start + BATCH)
        score[rows] = _scores(a[first[rows], :planes], b[second[rows], :planes], crowded[rows])
    return pairs[score > 0], score[score > 0]


def _thumbnails(read: Read, records: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the images of the distinct records, scaled to side x side px.

    Returns uint8 [u, P, S, S], with P = 1 (grey) or 3 (grey, Cr and Cb), and the row of each of
    `records` in it.
    """
    distinct, rows = np.unique(records, return_inverse=True)
    channels = read(int(distinct[0])).shape[2] if len(distinct) else 1
    thumbnails = np.empty((len(distinct), channels, side, side), np.uint8)
    for row, record in enumerate(Bar(distinct.tolist(), "reading images", unit="image", delay=1)):
        image = np.ascontiguousarray(read(record))
        if channels == 3:
            chroma = cv2.cvtColor(image, cv2.COLOR_RGB2YCrCb)[:, :, 1:]
            image = np.dstack([cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), chroma])
        small = cv2.resize(image, (side, side), interpolation=cv2.INTER_AREA)
        thumbnails[row] = small.reshape(side, side, channels).transpose(2, 0, 1)
    return thumbnails, rows


def _scores(a: np.ndarray, b: np.ndarray, crowded: np.ndarray) -> np.ndarray:
    """Return the correlations of pairs of thumbnails [n, P, S, S]; 0 if not near duplicates."""
    grey_a, grey_b = _standardised(a[:, 0]), _standardised(b[:, 0])
    unregistered = _correlation(grey_b - grey_a)
    scores = np.zeros(len(a), np.float32)
    rows = np.flatnonzero(crowded & (unregistered >= CROWD_CORRELATION))
    part = a.shape[2] // 8  # px
    parts = (grey_b[rows] - grey_a[rows]).reshape(-1, 8, part, 8, part).mean(axis=(2, 4))
    rows = rows[np.abs(parts).max(axis=(1, 2)) <= CROWD_CHANGE]
    is_near = _colour_change(_colours(b[rows]) - _colours(a[rows])) <= MOST_COLOUR
    scores[rows] = np.where(is_near, unregistered[rows], 0)
    rows = np.flatnonzero(~crowded & (unregistered >= LEAST_UNREGISTERED))
    shifts = _shifts(grey_a[rows], grey_b[rows])
    registered = _correlation(_without(shifts, grey_a[rows], grey_b[rows]))
    colours_a, colours_b = _colours(a[rows]), _colours(b[rows])
    difference = np.empty_like(colours_a)
    for plane in range(difference.shape[1]):
        difference[:, plane] = _without(shifts, colours_a[:, plane], colours_b[:, plane])
    is_near = (registered >= LEAST_CORRELATION) & (_colour_change(difference) <= MOST_COLOUR)
    scores[rows] = np.where(is_near, registered, 0)
    return scores


def _colours(thumbnails: np.ndarray) -> np.ndarray:
    return thumbnails[:, 1:].astype(np.float32)


def _colour_change(difference: np.ndarray) -> np.ndarray:
    """Return the root mean square of the colours' difference over pixels.

    `difference` is [n, 2, S, S], or [n, 0, S, S] for grey files; the result is [n].
    """
    return np.sqrt(np.square(difference).sum(axis=1).mean(axis=(1, 2)))


def _standardised(images: np.ndarray) -> np.ndarray:
    """Normalise images [n, S, S] to mean 0 and deviation 1, those below LEAST_CONTRAST to NaN."""
    images = images.astype(np.float32)
    centred = images - images.mean(axis=(1, 2), keepdims=True)
    deviation = centred.std(axis=(1, 2), keepdims=True)
    return centred / np.where(deviation < LEAST_CONTRAST, np.float32(np.nan), deviation)


def _correlation(difference: np.ndarray) -> np.ndarray:
    """Return the correlations of standardised images from their differences [n, S, S]."""
    return 1 - np.square(difference).mean(axis=(1, 2)) / 2


def _moves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the derivatives of the mean of `a` and `b` by shift and by stretch in x and y.

    They are first-order, from the image gradient (Lucas & Kanade 1981): [n, S, S] to [n, 4, S * S].
    """
    n, side, _ = a.shape
    from_middle = np.linspace(-1, 1, side, dtype=np.float32)
    down, right = np.gradient((a + b) / 2, axis=(1, 2))
    return np.stack(
        [right, down, right * from_middle, down * from_middle[:, None]], axis=1
    ).reshape(n, 4, side * side)


def _shifts(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Fit the shift and stretch, in px, between standardised images [n, S, S]: [n, 4, 1]."""
    moves, side = _moves(a, b), a.shape[1]
    # The identity matrix regularises: without texture there is no shift.
    normal = moves @ moves.transpose(0, 2, 1) + np.eye(4, dtype=np.float32)
    shifts = np.linalg.solve(normal, moves @ (b - a).reshape(len(a), side * side, 1))
    return np.asarray(shifts.clip(-MOST_SHIFT * side, MOST_SHIFT * side))


def _without(shifts: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return `b - a` for images [n, S, S] without the difference that the shifts explain."""
    return (b - a) - (_moves(a, b).transpose(0, 2, 1) @ shifts).reshape(a.shape)
