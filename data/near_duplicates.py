"""Candidates for near duplicates by their signatures, and their confirmation by pixels."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import cv2
import numpy as np
from tqdm import tqdm

# Candidates, by their hashes. Of photos of 128 px that were saved as JPEG of quality 50 to 90, halved and enlarged
# again, made 5 % brighter or darker, or cropped by 1 or 2 px, 96 to 100 % differ in at most 7 bits of 64 (in at most 3:
# 64 to 100 %).
DISTANCE = 7
LIMIT = 4_000_000  # candidates
LEAST_BITS = 4  # set in the hash of an image with texture
WORK = 1_000_000_000  # comparisons at most, for each of the 4 bands and each of the 17 ways to look into it
CHUNK = 1 << 18  # comparisons at a time

# Near duplicates, by their pixels; differences are in standard deviations of the image. In CIFAR-10 the pairs that
# correlate by 0.95 are the same photo; in Fashion-MNIST thousands of different trousers correlate by 0.99, but each has
# hundreds of candidates.
CROWD = 10  # candidates of an image, above which images that look alike are the rule
LEAST_CORRELATION = 0.95  # after registration
LEAST_BEFORE = 0.8  # before registration
MOST_SHIFT = 0.04  # by registration, of the side
CROWD_CORRELATION, CROWD_CHANGE = 0.995, 0.2  # without registration, in a crowd
LEAST_CONTRAST = 1.0  # standard deviation in grey levels
CHUNK_PAIRS = 1 << 17  # whose thumbnails are in memory at a time
BATCH, READ = 1024, 64  # pairs compared at a time, images read at a time

Read = Callable[[np.ndarray], np.ndarray]  # records -> their images, uint8 [n, C, H, W]


class Candidates(NamedTuple):
    """Pairs that may be near duplicates."""

    pairs: np.ndarray  # int64 [m, 2], ascending
    crowd: np.ndarray  # int64 [m]: how many candidates that image of the pair has that has more of them
    left_out: int  # candidates beyond the limit and comparisons that were not made: at most so many pairs are missing
    textureless: int  # images that were not searched


def near(a: np.ndarray, b: np.ndarray | None = None, *, distance: int = DISTANCE, limit: int = LIMIT) -> Candidates:
    """Pairs within `a`, or of an image of `a` and one of `b`, whose difference hashes differ in at most `distance`
    bits (0 to 7); SIGNATURE [n]. Every pair once, within `a` with the smaller index first.

    Of exact duplicates only the first is searched, and pairs of equal digest are left out. Images without texture are
    not searched: those with fewer than LEAST_BITS bits set, since all flat images have the hash 0.

    Multi-index hashing (Norouzi et al. 2012): of 4 bands of 16 bits at least one differs in at most `distance` // 4
    bits, so only images with such bands are compared. Where too many share a band, each is compared with a part of
    them only (WORK); of more than `limit` candidates those that differ least are kept. What is left out is counted.
    """
    if not 0 <= distance <= 7:
        raise ValueError(f"distance {distance} is outside 0 to 7")
    rows, textureless = _searched(a)
    columns, others = (rows, 0) if b is None else _searched(b)
    second = a if b is None else b
    found = _Nearest(limit, len(a), None if b is None else len(b))
    for band in range(4):
        for first, other, differing in _close(
            a["dhash"][rows], second["dhash"][columns], band, distance, b is None, found
        ):
            pairs = np.stack([rows[first], columns[other]], axis=1)
            new = a["digest"][pairs[:, 0]] != second["digest"][pairs[:, 1]]
            if b is None:
                pairs.sort(axis=1)
            found.add(pairs[new], differing[new])
    pairs, crowd = found.result()
    possible = len(rows) * (len(rows) - 1) // 2 if b is None else len(rows) * len(columns)
    return Candidates(pairs, crowd, min(found.left_out, possible - len(pairs)), textureless + others)


def _searched(signatures: np.ndarray) -> tuple[np.ndarray, int]:
    """The images that are searched, and how many have no texture."""
    _, first = np.unique(signatures["digest"], return_index=True)
    first.sort()
    textured = np.bitwise_count(signatures["dhash"][first]) >= LEAST_BITS
    return first[textured], len(first) - int(textured.sum())


class _Nearest:
    """Collects pairs; of more than `limit` those with the least distance stay."""

    def __init__(self, limit: int, count: int, other_count: int | None) -> None:
        self.limit, self.left_out = limit, 0
        self._parts = [(np.empty((0, 2), np.int64), np.empty(0, np.uint8))]
        self._held = 0
        self._first = np.zeros(count, np.int64)  # candidates of each image, of those left out too
        self._second = self._first if other_count is None else np.zeros(other_count, np.int64)

    def add(self, pairs: np.ndarray, distances: np.ndarray) -> None:
        np.add.at(self._first, pairs[:, 0], 1)
        np.add.at(self._second, pairs[:, 1], 1)
        self._parts.append((pairs, distances))
        self._held += len(pairs)
        if self._held > 2 * self.limit:
            self._trim()

    def _trim(self) -> None:
        pairs, distances = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        order = np.argsort(distances, kind="stable")[: self.limit]
        self._parts = [(pairs[order], distances[order])]
        self.left_out += len(pairs) - len(order)
        self._held = len(order)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs in order, and the crowd of each."""
        self._trim()
        pairs = self._parts[0][0]
        pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        return pairs, np.maximum(self._first[pairs[:, 0]], self._second[pairs[:, 1]])


def _close(
    a: np.ndarray,  # uint64 [n]
    b: np.ndarray,  # uint64 [m]; if `within`, the same
    band: int,
    distance: int,
    within: bool,
    found: _Nearest,  # counts the comparisons that are left out
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Indices into `a` and `b` and distances of the pairs that meet in this band and in none before."""
    near_by = distance // 4  # bits in which the band may differ
    band_a, band_b = _band(a, band), _band(b, band)
    order = np.argsort(band_b, kind="stable")
    sorted_b = b[order]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(band_b, minlength=1 << 16))])
    for flip in [0, *(1 << bit for bit in range(16))] if near_by else [0]:
        low, high = bounds[band_a ^ flip], bounds[(band_a ^ flip) + 1]
        if within and flip:
            high = np.where(band_a & flip, low, high)  # the other image of the pair looks here
        elif within:
            low[order] = np.arange(1, len(order) + 1)  # those that come later
        most = max(1, WORK // max(1, len(a)))
        found.left_out += int(np.maximum(high - low - most, 0).sum())
        for first, place in _expand(low, np.minimum(high, low + most)):
            differing = a[first] ^ sorted_b[place]
            close = np.bitwise_count(differing) <= distance
            for earlier in range(band if close.any() else 0):
                close &= np.bitwise_count(_band(differing, earlier)) > near_by
            yield first[close], order[place[close]], np.bitwise_count(differing[close])


def _band(hashes: np.ndarray, band: int) -> np.ndarray:
    return (hashes >> np.uint64(16 * band) & np.uint64(0xFFFF)).astype(np.int64)


def _expand(low: np.ndarray, high: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All (i, j) with low[i] <= j < high[i], about CHUNK at a time."""
    counts = high - low
    ends = np.cumsum(counts)
    start = 0
    while start < len(counts):
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + CHUNK, side="right")))
        part = slice(start, stop)
        total = int(ends[stop - 1]) - done
        if total:
            offsets = np.repeat(low[part] - (ends[part] - counts[part]), counts[part])
            yield np.repeat(np.arange(start, stop), counts[part]), offsets + np.arange(done, done + total)
        start = stop


def confirm(
    pairs: np.ndarray,  # int64 [m, 2]
    read_a: Read,
    read_b: Read,
    crowd: np.ndarray,  # int64 [m], see Candidates
) -> tuple[np.ndarray, np.ndarray]:
    """The pairs whose images are near duplicates, and their correlations, float32 in (0, 1].

    Both images are scaled by area averaging to 32x32 px in grey (those below 64 px to 16x16, below 24 px to 8x8),
    and brought to the same mean and contrast. Small shifts and stretches are taken out (MOST_SHIFT). What correlates
    by LEAST_CORRELATION then is a near duplicate; changed colours do not matter.

    Where one of the images has more than CROWD candidates, they are of one kind, and high correlations mean little:
    then CROWD_CORRELATION is needed without the shifts, and no part of 1/8 x 1/8 of the image may differ by more than
    CROWD_CHANGE.
    """
    if not len(pairs):
        return pairs, np.empty(0, np.float32)
    smallest = min(read_a(pairs[:1, 0]).shape[2:] + read_b(pairs[:1, 1]).shape[2:])
    side = 32 if smallest >= 64 else 16 if smallest >= 24 else 8
    crowded = crowd > CROWD
    scores = []
    for start in tqdm(range(0, len(pairs), CHUNK_PAIRS), "comparing images", disable=None):
        chunk, strict = pairs[start : start + CHUNK_PAIRS], crowded[start : start + CHUNK_PAIRS]
        a, first = _thumbnails(read_a, chunk[:, 0], side)
        b, second = _thumbnails(read_b, chunk[:, 1], side)
        for at in range(0, len(chunk), BATCH):
            part = slice(at, at + BATCH)
            scores.append(_scores(a[first[part]], b[second[part]], strict[part]))
    score = np.concatenate(scores)
    return pairs[score > 0], score[score > 0]


def _thumbnails(read: Read, records: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The different records' images in grey, float32 [u, S, S], and the row of each record there."""
    wanted, rows = np.unique(records, return_inverse=True)
    scaled = [
        cv2.resize(_grey(image), (side, side), interpolation=cv2.INTER_AREA)
        for start in range(0, len(wanted), READ)
        for image in read(wanted[start : start + READ])
    ]
    return np.stack(scaled).astype(np.float32), rows


def _grey(image: np.ndarray) -> np.ndarray:
    """uint8 [C, H, W] -> uint8 [H, W]."""
    return cv2.cvtColor(image.transpose(1, 2, 0), cv2.COLOR_RGB2GRAY) if len(image) == 3 else image[0]


def _scores(a: np.ndarray, b: np.ndarray, crowded: np.ndarray) -> np.ndarray:
    """Correlations of pairs of thumbnails [n, S, S]; 0 where they are no near duplicates."""
    a, b = _standardised(a), _standardised(b)
    before = _correlation(b - a)
    scores = np.zeros(len(a), np.float32)
    rows = np.flatnonzero(crowded & (before >= CROWD_CORRELATION))
    rows = rows[_greatest(b[rows] - a[rows]) <= CROWD_CHANGE]
    scores[rows] = before[rows]
    rows = np.flatnonzero(~crowded & (before >= LEAST_BEFORE))
    after = _correlation(_registered(a[rows], b[rows]))
    scores[rows] = np.where(after >= LEAST_CORRELATION, after, 0)
    return scores


def _standardised(images: np.ndarray) -> np.ndarray:
    """Each image [n, S, S] with mean 0 and standard deviation 1; not a number if it has hardly any contrast."""
    centred = images - images.mean(axis=(1, 2), keepdims=True)
    deviation = centred.std(axis=(1, 2), keepdims=True)
    return centred / np.where(deviation < LEAST_CONTRAST, np.float32(np.nan), deviation)


def _correlation(difference: np.ndarray) -> np.ndarray:
    """Of two standardised images, by their difference [n, S, S]."""
    return 1 - np.square(difference).mean(axis=(1, 2)) / 2


def _greatest(difference: np.ndarray) -> np.ndarray:
    """The greatest mean difference of one of 8x8 parts, [n, S, S] -> [n]."""
    size = difference.shape[1] // 8
    return np.abs(difference.reshape(-1, 8, size, 8, size).mean(axis=(2, 4))).max(axis=(1, 2))


def _registered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The difference of standardised images [n, S, S] without what a small shift and stretch in x and y explain, to
    first order in the gradient (Lucas & Kanade 1981).
    """
    n, side, _ = a.shape
    from_middle = np.linspace(-1, 1, side, dtype=np.float32)
    down, right = np.gradient((a + b) / 2, axis=(1, 2))
    moves = np.stack([right, down, right * from_middle, down * from_middle[:, None]], axis=1).reshape(n, 4, side * side)
    difference = (b - a).reshape(n, side * side, 1)
    normal = moves @ moves.transpose(0, 2, 1) + np.eye(4, dtype=np.float32)  # the identity: no texture, no move
    shifts = np.linalg.solve(normal, moves @ difference).clip(-MOST_SHIFT * side, MOST_SHIFT * side)
    return (difference - moves.transpose(0, 2, 1) @ shifts).reshape(a.shape)
