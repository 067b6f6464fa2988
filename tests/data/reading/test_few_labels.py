"""Which images keep their labels: as many of each class, by the key alone."""

import numpy as np
import pytest

from duetgan.data.reading.weighted_sampling import few_labels
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator

LABELS = np.arange(90) % 3


def test_each_class_keeps_as_many_by_its_key():
    found = few_labels(LABELS, 4, seed=5)
    assert found.tolist() == sorted(set(found.tolist()))
    assert np.bincount(LABELS[found]).tolist() == [4, 4, 4]
    of_two = np.flatnonzero(LABELS == 2)[numpy_generator(5, "labels", 2).permutation(30)[:4]]
    assert set(of_two.tolist()) == set(found[LABELS[found] == 2].tolist())


def test_too_few_images_are_refused_by_name():
    with pytest.raises(UserError, match="class c has 30 images"):
        few_labels(LABELS, 31, 0, ["c", "b", "a"])
    with pytest.raises(UserError, match="class b has 0 images"):
        few_labels(np.array([0, 2]), 1, 0, ["a", "b", "c"])
    with pytest.raises(UserError, match="give 1 or more"):
        few_labels(LABELS, 0, 0)
