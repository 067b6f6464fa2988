"""Choose a few labelled images of each class."""

from collections.abc import Sequence

import numpy as np

from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator


def few_labels(
    labels: np.ndarray, per_class: int, seed: int, names: Sequence[str] = ()
) -> np.ndarray:
    """Choose `per_class` images of each class; return their indices, int64, ascending.

    The images of class k are the first ones of a permutation with the key (seed, "labels", k), so a
    smaller choice is part of a larger one. Raises UserError if `per_class` is below 1 or exceeds
    the size of a class.

    Args:
        labels: Labels of the images, int [n].
        per_class: Number of images of each class.
        names: Names of the classes, for the error message.
    """
    if per_class < 1:
        raise UserError(f"{per_class} labels a class: give 1 or more")
    rows = []
    for label, count in enumerate(np.bincount(labels, minlength=len(names)).tolist()):
        if count < per_class:
            name = names[label] if names else label
            raise UserError(
                f"{per_class} labels a class: class {name} has {count:,} images; give at most as"
                " many"
            )
        members = np.flatnonzero(labels == label)
        order = numpy_generator(seed, "labels", label).permutation(len(members))
        rows.append(members[order[:per_class]])
    return np.sort(np.concatenate(rows))
