"""Split a packed file into training and held-out images (docs/lmdb.md).

The split is stratified by class, keeps similar images in one part, and depends on the images'
content. It is the last step of `duet pack --val-share`.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np

from duetgan.data.lmdb.format import Meta, Split
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.record import Record
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.duplicates import Report, find, group_equal, look_alikes
from duetgan.data.packing.sources import Grouping
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.progress import Bar

LARGEST = Fraction(1, 2)  # largest held-out fraction
# largest number of groups for which every choice of held-out groups is tried
TRIED = 12


def val_path(dest: Path) -> Path:
    """Return the default path of the held-out images: `x/photos-val.lmdb` for `x/photos.lmdb`."""
    return dest.with_name(f"{dest.stem}-val{dest.suffix}")


def to_fraction(value: str | float) -> Fraction:
    """Convert the value of --val-share to an exact fraction: 0.1 becomes one tenth.

    Raises UserError unless it is in (0, 0.5].
    """
    try:
        fraction = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if not 0 < fraction <= LARGEST:
        raise UserError(
            f"--val-share {value}: give a share above 0 and up to {float(LARGEST)}, for example 0.1"
        )
    return fraction


def quotas(counts: Sequence[int], fraction: Fraction) -> list[int]:
    """Return the number of images to hold out of each class.

    `counts` are the numbers of images of the classes. The number of each class is `fraction` of its
    count, rounded down. Then classes get one more, in descending order of what rounding cut off
    (Hare's quota), until the total is `fraction` of all images, rounded. Finally the numbers are
    limited: a class of two or more images has at least one image in each part. A class with a
    single image keeps it for training, and does not count in the total.
    """
    counts = [int(count) if count > 1 else 0 for count in counts]
    parts = [fraction * count for count in counts]
    numbers = list(map(int, parts))
    missing = int(fraction * sum(counts) + Fraction(1, 2)) - sum(numbers)
    by_remainder = sorted(range(len(counts)), key=lambda label: numbers[label] - parts[label])
    for label in by_remainder[:missing]:
        numbers[label] += 1
    for label, count in enumerate(counts):
        if count:
            numbers[label] = min(max(numbers[label], 1), count - 1)
    return numbers


def strata(
    labels: np.ndarray, label_sets: Sequence[Sequence[int]] | None, fraction: Fraction
) -> np.ndarray:
    """Return the stratum of each image, int64 [n]: its class, or its label set.

    All label sets with too few images to hold one out form one common stratum.
    """
    if label_sets is None:
        return labels
    rare = np.bincount(labels, minlength=len(label_sets)) < float(1 / fraction)
    return np.where(rare[labels], len(label_sets), labels)


def draw(
    groups: Sequence[np.ndarray],  # records that stay together
    labels: np.ndarray,  # int64 [n]: the stratum of each record, below called class
    digests: Sequence[bytes],  # hash of each record's content
    fraction: Fraction,
    seed: int,
) -> np.ndarray:
    """Draw the records to hold out, bool [n]. The result depends on contents, labels and seed only.

    The groups are visited in the order of their keys (`in_order_of_keys`). A group is held out if
    it fits into the remaining quotas of its classes. Afterwards, a class may have a quota but no
    held-out image. For such a class, one more group with images of the class is held out: the
    smallest that leaves a training image of each class in the group, if there is one.

    The key of a group does not depend on other groups. So when images are added later, few images
    move to the other part.
    """
    counts = np.bincount(labels, minlength=1)
    remaining = np.array(quotas(counts.tolist(), fraction))
    with_quota = np.flatnonzero(remaining)

    def class_counts(records: np.ndarray) -> np.ndarray:
        return np.bincount(labels[records], minlength=len(counts))

    drawn = in_order_of_keys(groups, digests, seed)
    held_out = np.zeros(len(labels), bool)
    for group in drawn:
        if (class_counts(group) <= remaining).all():
            held_out[group] = True
            remaining -= class_counts(group)
    for label in with_quota:
        training = counts - class_counts(held_out)
        if training[label] < counts[label]:
            continue
        fitting = []
        for group in drawn:
            if not held_out[group[0]] and label in labels[group]:
                numbers = class_counts(group)
                if ((numbers == 0) | (numbers < training)).all():
                    fitting.append(group)
        if fitting:
            held_out[min(fitting, key=len)] = True
    return held_out


def in_order_of_keys(
    groups: Sequence[np.ndarray], digests: Sequence[bytes], seed: int
) -> list[np.ndarray]:
    """Return groups of records, sorted by their keys.

    The key of a group is the hash of (seed, "split", the smallest digest of its records in hex).
    """
    from duetgan.utils.seeding import seed_of  # imports PyTorch, which packing does not need

    def key(group: np.ndarray) -> int:
        return seed_of(seed, "split", min(digests[record] for record in group).hex())

    return sorted(groups, key=key)


def group_counts(
    groups: Sequence[np.ndarray], labels: np.ndarray, classes: np.ndarray
) -> np.ndarray:
    """Count the images of each class in each group: int64 [groups, classes + 1].

    The last column counts all images of the group.

    Args:
        groups: the records of each group.
        labels: int64 [n], the label of each record.
        classes: bool [labels, classes], True for the classes of a label.
    """
    label_counts = []
    for group in groups:
        numbers = np.bincount(labels[group], minlength=len(classes))
        label_counts.append(numbers[: len(classes)])  # without classes all labels are 0
    counts = np.array(label_counts) @ classes.astype(np.int64)
    return np.column_stack([counts, list(map(len, groups))])


def split_cost(
    held_out: np.ndarray, sizes: np.ndarray, shared: np.ndarray, fraction: float
) -> np.ndarray:
    """Return the cost of holding out images, float64 [...].

    The cost is the sum of two terms. The larger term counts missing classes: those without training
    images, and those without held-out images although several groups have them. The smaller term is
    the sum of squared differences between `fraction` and the held-out fraction, over all classes
    and the total.

    Args:
        held_out: numbers of held-out images of each class, and their total, [..., classes + 1].
        sizes: numbers of images of each class, and their total, above 0, [classes + 1].
        shared: bool [classes + 1], True if several groups have images of a class.
    """
    lacking = ((held_out == sizes) | (shared & (held_out == 0))).sum(-1)
    # The sum of squares is smaller than the number of terms.
    return lacking * len(sizes) + np.square(held_out / sizes - fraction).sum(-1)


def balance(counts: np.ndarray, fraction: float, start: np.ndarray) -> np.ndarray:
    """Choose groups to hold out, bool [groups], with a low `split_cost`.

    With up to TRIED groups, every choice is tried, and the best one is returned. With more groups,
    the choice `start` is improved. In each step, one group moves to the other part: the group whose
    move lowers the cost most. This ends when no move lowers the cost.

    If no move is excluded because a class would be missing, the second term of the final cost has a
    bound. It is half of the sum of w f^2 over groups and classes, where f is the group's fraction
    of the class, and w is `fraction` for a training group, 1 - `fraction` for a held-out one.

    Args:
        counts: numbers of images of each class, and their total, int64 [groups, classes + 1].
        start: bool [groups], True for held-out groups.
    """
    counts = counts[:, counts.any(0)]
    sizes = counts.sum(0)
    shared = (counts > 0).sum(0) > 1
    cost = partial(split_cost, sizes=sizes, shared=shared, fraction=fraction)
    if len(counts) <= TRIED:
        choices = np.arange(2 ** len(counts))[:, None] >> np.arange(len(counts)) & 1
        return choices[cost(choices @ counts).argmin()].astype(bool)
    chosen = start.copy()
    while True:
        held_out = counts[chosen].sum(0)
        costs = cost(held_out + np.where(chosen, -1, 1)[:, None] * counts)
        if costs.min() >= cost(held_out) - 1e-12:
            return chosen
        chosen[costs.argmin()] ^= True


def draw_groups(
    groups: Sequence[np.ndarray],  # records that stay together
    labels: np.ndarray,  # int64 [n]
    classes: np.ndarray,  # bool [labels, classes]
    names: Sequence[str],  # name of each record's group
    fraction: Fraction,
    seed: int,
) -> np.ndarray:
    """Draw the records to hold out, bool [n]. Each group is held out as a whole, or not at all.

    The result depends on the names and the labels of the groups, and on the seed.
    """
    digests = [name.encode(errors="surrogateescape") for name in names]
    held_out = draw(groups, labels, digests, fraction, seed)
    groups = in_order_of_keys(groups, digests, seed)
    counts = group_counts(groups, labels, classes)
    chosen = balance(counts, float(fraction), held_out[[group[0] for group in groups]])
    held_out[np.concatenate(groups)] = np.repeat(chosen, list(map(len, groups)))
    return held_out


def write_parts(
    whole: Path,  # the packed file
    records: Sequence[Record],  # records of `whole` without their payloads
    writers: Sequence[LMDBWriter],  # for training and held-out images
    fraction: Fraction,
    seed: int,
    grouping: Grouping | None,  # groups that the split keeps whole
) -> tuple[list[Meta], Report]:
    """Draw the held-out images, and copy each record of `whole` to the file of its part.

    Both files are then complete, but keep temporary names until `publish_both`. Returns the
    metadata of both files, and the report on duplicates in `whole`. Raises UserError if nothing can
    be held out.
    """
    names = grouping.names if grouping else []
    numbers = np.unique(np.array(names, str), return_inverse=True)[1]
    with LMDBReader(whole) as reader:
        meta, report = reader.meta, find(reader, similar=True)
        groups = look_alikes(meta.count, report, group_equal(numbers))
        labels = reader.labels()
        if grouping is None:
            digests = [record.digest for record in records]
            held_out = draw(groups, strata(labels, meta.sets, fraction), digests, fraction, seed)
        else:
            held_out = draw_groups(groups, labels, meta.multi_hot, names, fraction, seed)
        if not held_out.any():
            largest = max(map(len, groups))
            where = "of each class" if grouping is None else "of all groups"
            raise UserError(
                f"{meta.source}: the images {where} look alike (the largest group has"
                f" {largest:,} of {meta.count:,}), so none can be held out; add others, or"
                " pack held-out images of their own"
            )
        _copy(reader, records, writers, held_out)
    split = Split(
        part="train",
        share=float(fraction),
        seed=seed,
        whole=meta.fingerprint,
        images=meta.count,
        group_by=grouping and grouping.option,
    )
    parts = [
        split.model_copy(update={"part": side, "groups": grouping and len(set(numbers[is_part]))})
        for side, is_part in (("train", ~held_out), ("val", held_out))
    ]
    return [writer.complete(part) for writer, part in zip(writers, parts, strict=True)], report


def _copy(
    reader: LMDBReader,
    records: Sequence[Record],
    writers: Sequence[LMDBWriter],
    held_out: np.ndarray,
) -> None:
    """Copy held-out records to the second writer, and all other records to the first."""
    for writer in writers:  # The range of values is that of the whole file.
        writer.layout = replace(writer.layout, spec=reader.meta.spec, ranged=True)
    levels = [LMDBReader(reader.path, resolution=side or None) for side in reader.meta.resolutions]
    copies = enumerate(zip(held_out.tolist(), records, reader.names(), strict=True))
    for index, (is_held_out, record, name) in Bar(copies, "splitting", len(records), unit="image"):
        payloads = tuple(_payload(level, index) for level in levels)
        writers[is_held_out].add_record(replace(record, payloads=payloads), name)


def _payload(level: LMDBReader, index: int) -> bytes:
    if level.meta.encoding == "raw":
        return level.raw_image(index).transpose(2, 0, 1).tobytes()
    with level.encoded(index) as (_, payload, _):
        return bytes(payload)


def publish_both(writers: Sequence[LMDBWriter]) -> None:
    """Rename both complete files to their targets, the training file last.

    An old training file is removed first. So if the process ends in between, new held-out images
    never lie next to an old training file.
    """
    training, held_out = writers
    training.path.unlink(missing_ok=True)
    held_out.publish()
    training.publish()
