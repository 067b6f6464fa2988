"""Which images keep their labels where few are to have one: a draw by class."""

from collections.abc import Sequence

import numpy as np

from utils.errors import UserError
from utils.seeding import numpy_generator


def few_labels(labels: np.ndarray, per_class: int, seed: int, names: Sequence[str] = ()) -> np.ndarray:
    """The records, int64 ascending, of `per_class` images of each class; `labels` are int [n].

    Those of class k are the first of a permutation with the key (seed, "labels", k): those of a smaller number are
    among them. Raises UserError for a number below 1 and for a class of fewer images; `names` are for its text.
    """
    if per_class < 1:
        raise UserError(f"{per_class} labels a class: give 1 or more")
    counts = np.bincount(labels, minlength=len(names)).tolist()
    for label, count in enumerate(counts):
        if count < per_class:
            name = names[label] if names else label
            raise UserError(f"{per_class} labels a class: class {name} has {count:,} images; give at most as many")
    rows = []
    for label in range(len(counts)):
        own = np.flatnonzero(labels == label)
        rows.append(own[numpy_generator(seed, "labels", label).permutation(len(own))[:per_class]])
    return np.sort(np.concatenate(rows))
