"""Find similar images: candidates by difference hashes (Krawetz 2013, "Kind of Like That"), which
are then confirmed by their pixels.

A hash alone is not sufficient. Among 2,000 images of Fashion-MNIST, imagehash's phash reports 124
pairs that differ in up to 4 bits and 542 in up to 6, and hundreds of times as many in the whole
data set, but finds only 6 and 18 % of images cropped by 1 px.
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
LIMIT = 4_000_000  # most candidates
LEAST_BITS = 4  # fewest bits set in the hash of an image with texture
TILE = 1 << 22  # comparisons in one job of a thread
BLOCK = 1 << 16  # comparisons at a time: intermediate results stay in the core's cache

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
SLACK = 1e-4  # rounding error of a correlation in float32
BATCH = 1024  # pairs compared at a time

Read = Callable[[int], np.ndarray]  # number of a record -> its image, uint8 [H, W, C]


class Candidates(NamedTuple):
    pairs: np.ndarray  # int64 [m, 2], ascending
    # int64 [m]: the larger number of candidates of the two images of a pair
    crowd: np.ndarray
    left_out: int  # candidates beyond LIMIT, those that differ most
    textureless: int  # images that were not searched


def near(a: np.ndarray, b: np.ndarray | None = None) -> Candidates:
    """Find pairs of images whose difference hashes differ in at most DISTANCE bits.

    `a` and `b` are the signatures of two data sets, SIGNATURE [n]. A pair has an image of `a` and
    one of `b`, or without `b` two of `a`, the smaller index first. Every pair occurs once.

    All images are compared with all, on all cores: this takes seconds for 60,000 images, and grows
    with the square of their number. Exact duplicates are no pairs, and only the first of them is
    compared. Images with fewer than LEAST_BITS bits set have no texture and are not compared,
    because all flat images have the hash 0.

    `crowd` counts candidates in both data sets, so that the pairs between two parts of a data set
    are those of the whole.
    """
    second = a if b is None else b
    # images of `b` that are in `a`: they count as those of `a`
    repeated = np.zeros(len(second), np.bool_) if b is None else np.isin(b["digest"], a["digest"])
    rows, textureless = _searched(a)
    columns = rows
    if b is not None:
        columns, second_textureless = _searched(b)
        textureless += second_textureless
    parts = [(np.empty((0, 2), np.int64), np.empty(0, np.uint8))]
    crowds = [np.zeros(len(a), np.int64), np.zeros(len(second), np.int64)]
    total = held = 0
    for close, distances in _close(a["dhash"][rows], second["dhash"][columns], within=b is None):
        pairs = np.stack([rows[close[0]], columns[close[1]]], axis=1)
        new = a["digest"][pairs[:, 0]] != second["digest"][pairs[:, 1]]
        pairs, distances = pairs[new], distances[new]
        crowds[0] += np.bincount(pairs[~repeated[pairs[:, 1]], 0], minlength=len(a))
        crowds[1] += np.bincount(pairs[:, 1], minlength=len(second))
        parts.append((pairs, distances))
        total += len(pairs)
        held += len(pairs)
        if held > 2 * LIMIT:
            parts = [_nearest(parts)]
            held = LIMIT
    pairs, _ = _nearest(parts)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    if b is None:
        crowds = [crowds[0] + crowds[1]] * 2  # An image may be the first or second of a pair.
    elif len(pairs):
        for crowd, hashes, searched, left_out in (
            (crowds[0], a["dhash"], rows, np.zeros(len(a), np.bool_)),
            (crowds[1], b["dhash"], columns, repeated),
        ):
            for close, _ in _close(hashes[searched], hashes[searched], within=True):
                sides = searched[close]
                crowd += np.bincount(sides[~left_out[sides[::-1]]], minlength=len(crowd))
    crowd = np.maximum(crowds[0][pairs[:, 0]], crowds[1][pairs[:, 1]])
    return Candidates(pairs, crowd, total - len(pairs), textureless)


def _searched(signatures: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the indices of the distinct images with texture, and the number of those without."""
    _, first = np.unique(signatures["digest"], return_index=True)
    first.sort()
    textured = np.bitwise_count(signatures["dhash"][first]) >= LEAST_BITS
    return first[textured], len(first) - int(textured.sum())


def _close(
    a: np.ndarray, b: np.ndarray, *, within: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Find the pairs of hashes, uint64 [n] and [m], that differ in at most DISTANCE bits.

    Yields indices into `a` and `b`, int64 [2, p], and their distances, uint8 [p]. `within` means
    that `a` and `b` are the same: the second index is larger than the first.
    """
    step = max(1, TILE // max(1, len(b)))

    def compare_tile(start: int) -> tuple[np.ndarray, np.ndarray]:
        length = min(BLOCK, len(b))
        xor = np.empty(length, np.uint64)
        bits = np.empty(length, np.uint8)
        close = np.empty(length, np.bool_)
        rows = [start]
        columns = [np.empty(0, np.int64)]
        distances = [bits[:0]]
        for row in range(start, min(start + step, len(a))):
            for column in range(row + 1 if within else 0, len(b), BLOCK):
                block = b[column : column + BLOCK]
                size = len(block)
                np.bitwise_count(np.bitwise_xor(block, a[row], out=xor[:size]), out=bits[:size])
                hits = np.flatnonzero(np.less_equal(bits[:size], DISTANCE, out=close[:size]))
                if len(hits):
                    rows.append(row)
                    columns.append(hits + column)
                    distances.append(bits[hits])
        repeated_rows = np.repeat(rows, list(map(len, columns)))
        return np.stack([repeated_rows, np.concatenate(columns)]), np.concatenate(distances)

    starts, threads = range(0, len(a), step), cores()
    with (
        ThreadPoolExecutor(threads) as pool,
        Bar(starts, "comparing hashes", unit="tile", delay=1) as bar,
    ):
        # One tile per thread at a time limits the memory: a tile may have TILE pairs.
        for first in range(0, len(starts), threads):
            for tile in pool.map(compare_tile, starts[first : first + threads]):
                yield tile
                bar.update()


def _nearest(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the LIMIT pairs that differ least, and their distances."""
    pairs, distances = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(distances, kind="stable")[:LIMIT]
    return pairs[order], distances[order]


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
    likely = np.flatnonzero(_likely(a[:, 0], b[:, 0], first, second, crowded))
    for start in range(0, len(likely), BATCH):
        part = likely[start : start + BATCH]
        score[part] = _scores(a[first[part], :planes], b[second[part], :planes], crowded[part])
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


def _likely(
    a: np.ndarray, b: np.ndarray, first: np.ndarray, second: np.ndarray, crowded: np.ndarray
) -> np.ndarray:
    """Return True for pairs whose correlation before registration is sufficient, bool [n].

    These are few of millions of candidates. `a` and `b` are grey thumbnails, uint8 [u, S, S],
    `first` and `second` the rows of each pair in them.
    """
    a, b = (_standardised(x).reshape(len(x), x.shape[1] * x.shape[2]) for x in (a, b))
    needed = np.where(crowded, CROWD_CORRELATION, LEAST_UNREGISTERED) - SLACK
    likely = np.empty(len(first), np.bool_)
    for start in range(0, len(first), BATCH):
        part = slice(start, start + BATCH)
        correlations = np.einsum("np,np->n", a[first[part]], b[second[part]]) / a.shape[1]
        likely[part] = correlations >= needed[part]
    return likely


def _scores(a: np.ndarray, b: np.ndarray, crowded: np.ndarray) -> np.ndarray:
    """Return the correlations of pairs of thumbnails [n, P, S, S]; 0 if not near duplicates."""
    colours_a, colours_b = (images[:, 1:].astype(np.float32) for images in (a, b))
    a, b = _standardised(a[:, 0]), _standardised(b[:, 0])
    unregistered = _correlation(b - a)
    scores = np.zeros(len(a), np.float32)
    rows = np.flatnonzero(crowded & (unregistered >= CROWD_CORRELATION))
    part = a.shape[1] // 8  # px
    parts = (b[rows] - a[rows]).reshape(-1, 8, part, 8, part).mean(axis=(2, 4))
    rows = rows[np.abs(parts).max(axis=(1, 2)) <= CROWD_CHANGE]
    scores[rows] = np.where(
        _colour_change(colours_b[rows] - colours_a[rows]) <= MOST_COLOUR, unregistered[rows], 0
    )
    rows = np.flatnonzero(~crowded & (unregistered >= LEAST_UNREGISTERED))
    shifts = _shifts(a[rows], b[rows])
    registered = _correlation(_without(shifts, a[rows], b[rows]))
    difference = np.empty_like(colours_a[rows])
    for plane in range(difference.shape[1]):
        difference[:, plane] = _without(shifts, colours_a[rows, plane], colours_b[rows, plane])
    is_near = (registered >= LEAST_CORRELATION) & (_colour_change(difference) <= MOST_COLOUR)
    scores[rows] = np.where(is_near, registered, 0)
    return scores


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
    """Return the derivatives of the mean of two images by shifts and stretches in x and y.

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
