"""Images that look alike: candidates by their difference hashes (Krawetz 2013, "Kind of Like
That"), then their pixels.

Why no library's hash decides alone: of 2,000 images of Fashion-MNIST imagehash's phash takes 124
pairs for the same at 4 bits and 542 at 6, hundreds of times as many in the whole set, and finds 6
and 18 % of images cropped by 1 px.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import cv2
import numpy as np

from duetgan.utils.memory import cores
from duetgan.utils.runlog.progress import Bar

# Candidates, by their hashes. Of photos of 128 px that were saved as JPEG of quality 50 to 90,
# halved and enlarged again, made 5 % brighter or darker, or cropped by 1 or 2 px, 96 to 100 %
# differ in at most 7 bits of 64.
DISTANCE = 7
LIMIT = 4_000_000  # candidates
LEAST_BITS = 4  # set in the hash of an image with texture
TILE = 1 << 22  # comparisons that a thread makes before it hands over what it found
BLOCK = 1 << 16  # of them at a time: intermediate results stay in a core's cache

# Near duplicates, by their pixels; differences are in standard deviations of the image. In CIFAR-10
# the pairs that correlate by 0.95 are the same photo; in Fashion-MNIST thousands of different
# trousers correlate by 0.99, but each has hundreds of candidates.
CROWD = 10  # candidates of an image, above which images that look alike are the rule
LEAST_CORRELATION = 0.95  # after registration
LEAST_BEFORE = 0.8  # before registration
MOST_SHIFT = 0.04  # by registration, of the side
CROWD_CORRELATION, CROWD_CHANGE = 0.995, 0.2  # without registration, in a crowd
LEAST_CONTRAST = 1.0  # standard deviation in grey levels
# root mean square difference of the colours (Cr and Cb together), in levels of 0 to 255
MOST_COLOUR = 12.0
SLACK = 1e-4  # of a correlation, for the rounding of float32
BATCH = 1024  # pairs compared at a time

Read = Callable[[int], np.ndarray]  # a record -> its image, uint8 [H, W, C]


class Candidates(NamedTuple):
    pairs: np.ndarray  # int64 [m, 2], ascending
    # int64 [m]: how many candidates that image of the pair has that has more of them
    crowd: np.ndarray
    left_out: int  # candidates beyond the limit, those that differ most
    textureless: int  # images that were not searched


def near(a: np.ndarray, b: np.ndarray | None = None) -> Candidates:
    """Pairs within `a`, or of an image of `a` and one of `b`, whose difference hashes differ in at
    most DISTANCE bits; SIGNATURE [n]. Every pair once, within `a` with the smaller index first.

    All are compared with all, on all cores: seconds for 60,000 images, and with their square. Of
    exact duplicates only the first is searched, and pairs of equal digest are left out. Images
    without texture are not searched: those with fewer than LEAST_BITS bits set, since all flat
    images have the hash 0.

    An image's crowd is that of both sets together: so the pairs of two parts are those of the
    whole.
    """
    second = a if b is None else b
    # `a` counts them
    known = np.zeros(len(second), np.bool_) if b is None else np.isin(b["digest"], a["digest"])
    rows, textureless = _searched(a)
    columns, others = (rows, 0) if b is None else _searched(b)
    parts = [(np.empty((0, 2), np.int64), np.empty(0, np.uint8))]
    crowds = [np.zeros(len(a), np.int64), np.zeros(len(second), np.int64)]
    total = held = 0
    for places, differing in _close(a["dhash"][rows], second["dhash"][columns], within=b is None):
        pairs = np.stack([rows[places[0]], columns[places[1]]], axis=1)
        new = a["digest"][pairs[:, 0]] != second["digest"][pairs[:, 1]]
        pairs, differing = pairs[new], differing[new]
        crowds[0] += np.bincount(pairs[~known[pairs[:, 1]], 0], minlength=len(a))
        crowds[1] += np.bincount(pairs[:, 1], minlength=len(second))
        parts.append((pairs, differing))
        total, held = total + len(pairs), held + len(pairs)
        if held > 2 * LIMIT:
            parts = [_nearest(parts)]
            held = LIMIT
    pairs, _ = _nearest(parts)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    if b is None:
        crowds = [crowds[0] + crowds[1]] * 2  # of either side
    elif len(pairs):
        sets = (a["dhash"], rows, np.zeros(len(a), np.bool_)), (b["dhash"], columns, known)
        for crowd, (hashes, searched, left_out) in zip(crowds, sets, strict=True):
            for places, _ in _close(hashes[searched], hashes[searched], within=True):
                sides = searched[places]
                crowd += np.bincount(sides[~left_out[sides[::-1]]], minlength=len(crowd))
    crowd = np.maximum(crowds[0][pairs[:, 0]], crowds[1][pairs[:, 1]])
    return Candidates(pairs, crowd, total - len(pairs), textureless + others)


def _searched(signatures: np.ndarray) -> tuple[np.ndarray, int]:
    """The images that are searched, and how many have no texture."""
    _, first = np.unique(signatures["digest"], return_index=True)
    first.sort()
    textured = np.bitwise_count(signatures["dhash"][first]) >= LEAST_BITS
    return first[textured], len(first) - int(textured.sum())


def _close(
    a: np.ndarray, b: np.ndarray, *, within: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Places in `a` and `b`, uint64 [n] and [m], of the near pairs, int64 [2, p], and their
    distances; `within` one array the later ones only.
    """
    step = max(1, TILE // max(1, len(b)))

    def tile(start: int) -> tuple[np.ndarray, np.ndarray]:
        xor, bits, close = (
            np.empty(min(BLOCK, len(b)), kind) for kind in (np.uint64, np.uint8, np.bool_)
        )
        rows, columns, distances = [start], [np.empty(0, np.int64)], [bits[:0]]
        for row in range(start, min(start + step, len(a))):
            for column in range(row + 1 if within else 0, len(b), BLOCK):
                others = b[column : column + BLOCK]
                size = len(others)
                np.bitwise_count(np.bitwise_xor(others, a[row], out=xor[:size]), out=bits[:size])
                found = np.flatnonzero(np.less_equal(bits[:size], DISTANCE, out=close[:size]))
                if len(found):
                    rows.append(row)
                    columns.append(found + column)
                    distances.append(bits[found])
        repeated = np.repeat(rows, [len(part) for part in columns])
        return np.stack([repeated, np.concatenate(columns)]), np.concatenate(distances)

    starts, several = range(0, len(a), step), cores()
    with (
        ThreadPoolExecutor(several) as pool,
        Bar(starts, "comparing hashes", unit="tile", delay=1) as bar,
    ):
        # no more at a time: where all look alike a tile has TILE pairs
        for first in range(0, len(starts), several):
            for found in pool.map(tile, starts[first : first + several]):
                yield found
                bar.update()


def _nearest(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The LIMIT pairs that differ least, and their distances."""
    pairs, distances = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(distances, kind="stable")[:LIMIT]
    return pairs[order], distances[order]


def confirm(
    candidates: Candidates,
    read_a: Read,
    read_b: Read,
    size: int,  # px: side of the smaller images
) -> tuple[np.ndarray, np.ndarray]:
    """The pairs whose images are near duplicates, int64 [m, 2], and their correlations, float32 in
    (0, 1].

    Both images are scaled by area averaging to 32x32 px in grey (those below 64 px to 16x16, below
    24 px to 8x8), and brought to the same mean and contrast. Small shifts and stretches are taken
    out (MOST_SHIFT). What correlates by LEAST_CORRELATION then is a near duplicate, unless the
    colours of the scaled images differ by more than MOST_COLOUR (chrominance of ITU-R 601, after
    the same shifts). Of files of one channel the colours are not known.

    Where one of the images has more than CROWD candidates, they are of one kind, and high
    correlations mean little: then CROWD_CORRELATION is needed without the shifts, and no part of
    1/8 x 1/8 of the image may differ by more than CROWD_CHANGE.
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
    """The different records' images, uint8 [u, P, S, S], and the row of each record there. P is 1,
    grey, or 3: grey, Cr and Cb.
    """
    wanted, rows = np.unique(records, return_inverse=True)
    channels = read(int(wanted[0])).shape[2] if len(wanted) else 1
    thumbnails = np.empty((len(wanted), channels, side, side), np.uint8)
    for row, record in enumerate(Bar(wanted.tolist(), "reading images", unit="image", delay=1)):
        image = np.ascontiguousarray(read(record))
        if channels == 3:
            grey, chroma = (
                cv2.cvtColor(image, cv2.COLOR_RGB2GRAY),
                cv2.cvtColor(image, cv2.COLOR_RGB2YCrCb)[:, :, 1:],
            )
            image = np.dstack([grey, chroma])
        small = cv2.resize(image, (side, side), interpolation=cv2.INTER_AREA)
        thumbnails[row] = small.reshape(side, side, channels).transpose(2, 0, 1)
    return thumbnails, rows


def _likely(
    a: np.ndarray, b: np.ndarray, first: np.ndarray, second: np.ndarray, crowded: np.ndarray
) -> np.ndarray:
    """Which pairs of rows of the thumbnails in grey, uint8 [u, S, S], correlate by what `_scores`
    asks of them before registration, bool [n]: few of millions of candidates.
    """
    a, b = (_standardised(x).reshape(len(x), x.shape[1] * x.shape[2]) for x in (a, b))
    needed = np.where(crowded, CROWD_CORRELATION, LEAST_BEFORE) - SLACK
    likely = np.empty(len(first), np.bool_)
    for start in range(0, len(first), BATCH):
        part = slice(start, start + BATCH)
        correlations = np.einsum("np,np->n", a[first[part]], b[second[part]]) / a.shape[1]
        likely[part] = correlations >= needed[part]
    return likely


def _scores(a: np.ndarray, b: np.ndarray, crowded: np.ndarray) -> np.ndarray:
    """Correlations of pairs of thumbnails [n, P, S, S]; 0 where they are no near duplicates."""
    colours_a, colours_b = (images[:, 1:].astype(np.float32) for images in (a, b))
    a, b = _standardised(a[:, 0]), _standardised(b[:, 0])
    before = _correlation(b - a)
    scores = np.zeros(len(a), np.float32)
    rows = np.flatnonzero(crowded & (before >= CROWD_CORRELATION))
    part = a.shape[1] // 8  # px
    parts = (b[rows] - a[rows]).reshape(-1, 8, part, 8, part).mean(axis=(2, 4))
    rows = rows[np.abs(parts).max(axis=(1, 2)) <= CROWD_CHANGE]
    scores[rows] = np.where(
        _colour_change(colours_b[rows] - colours_a[rows]) <= MOST_COLOUR, before[rows], 0
    )
    rows = np.flatnonzero(~crowded & (before >= LEAST_BEFORE))
    shifts = _shifts(a[rows], b[rows])
    after = _correlation(_without(shifts, a[rows], b[rows]))
    difference = np.empty_like(colours_a[rows])
    for plane in range(difference.shape[1]):
        difference[:, plane] = _without(shifts, colours_a[rows, plane], colours_b[rows, plane])
    near = (after >= LEAST_CORRELATION) & (_colour_change(difference) <= MOST_COLOUR)
    scores[rows] = np.where(near, after, 0)
    return scores


def _colour_change(difference: np.ndarray) -> np.ndarray:
    """The root mean square over pixels of the colours' difference, [n, 2 (none of a grey file), S,
    S] -> [n].
    """
    return np.sqrt(np.square(difference).sum(axis=1).mean(axis=(1, 2)))


def _standardised(images: np.ndarray) -> np.ndarray:
    """Each image [n, S, S] with mean 0 and standard deviation 1; not a number if it has hardly any
    contrast.
    """
    images = images.astype(np.float32)
    centred = images - images.mean(axis=(1, 2), keepdims=True)
    deviation = centred.std(axis=(1, 2), keepdims=True)
    return centred / np.where(deviation < LEAST_CONTRAST, np.float32(np.nan), deviation)


def _correlation(difference: np.ndarray) -> np.ndarray:
    """Of two standardised images, by their difference [n, S, S]."""
    return 1 - np.square(difference).mean(axis=(1, 2)) / 2


def _moves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How images [n, S, S] change with a small shift and stretch in x and y, to first order in the
    gradient (Lucas & Kanade 1981): [n, 4, S * S].
    """
    n, side, _ = a.shape
    from_middle = np.linspace(-1, 1, side, dtype=np.float32)
    down, right = np.gradient((a + b) / 2, axis=(1, 2))
    return np.stack(
        [right, down, right * from_middle, down * from_middle[:, None]], axis=1
    ).reshape(n, 4, side * side)


def _shifts(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The shift and stretch in px that explain most of the difference of standardised images [n, S,
    S]: [n, 4, 1].
    """
    moves, side = _moves(a, b), a.shape[1]
    # the identity: no texture, no move
    normal = moves @ moves.transpose(0, 2, 1) + np.eye(4, dtype=np.float32)
    shifts = np.linalg.solve(normal, moves @ (b - a).reshape(len(a), side * side, 1))
    return np.asarray(shifts.clip(-MOST_SHIFT * side, MOST_SHIFT * side))


def _without(shifts: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The difference of images [n, S, S] without what the shifts explain."""
    return (b - a) - (_moves(a, b).transpose(0, 2, 1) @ shifts).reshape(a.shape)
