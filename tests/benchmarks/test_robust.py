"""PGD against a linear classifier, whose worst case has a closed form; effects of what withstands and what does not."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.judges import robust
from duetgan.models.gan import ImageNetwork


class Linear(ImageNetwork):
    """Two classes, by the sign of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.channels, self.resolution, self.pixel_format, self.classes = 1, 8, None, 2
        self.weight = nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(1)))

    def forward(self, images):
        score = images.flatten(1) @ self.weight
        return torch.stack([-score, score], 1)


# foolbox imports SciPy by an old path
@pytest.mark.filterwarnings("ignore:Please import `gaussian_filter`:DeprecationWarning")
def test_pgd_finds_the_worst_case_of_a_linear_classifier():
    torch.manual_seed(0)
    classifier: Any = Linear()
    images = torch.randint(40, 216, (300, 1, 8, 8), dtype=torch.uint8)  # no bound of the range is in the way
    score = classifier.spec.to_float(images).flatten(1) @ classifier.weight.detach()
    labels = torch.where(torch.rand(300) < 0.1, score < 0, score > 0).long()
    margin = (2 * labels - 1) * score
    budgets = [1.0, 4.0, 16.0]
    found = robust.withstood(classifier, images, labels, budgets=budgets, steps=20)
    assert list(found) == ["0/255", "1/255", "4/255", "16/255"]
    for budget, right in zip([0.0, *budgets], found.values(), strict=True):
        left = margin - 2 * budget / 255 * classifier.weight.detach().abs().sum()
        sure = left.abs() > 1e-4
        assert np.array_equal(right[sure], (left > 0)[sure].numpy())
    assert found["0/255"].sum() > found["4/255"].sum() > found["16/255"].sum() > 0
