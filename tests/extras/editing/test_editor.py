"""Directions and edits against what is known: linear models, written-out formulas, the generators themselves."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from duetgan.extras.editing.editor import Editor, first_reached
from duetgan.inference.samples import Sampler, Start, truncated_styles
from duetgan.models.gan import StyledGenerator
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from tests.conftest import assert_raises
from tests.inference.conftest import draws, sampler_of, styled, without_w
from tests.metrics.conftest import CLASSES
from tests.models.helpers import to_uint8


def test_the_first_step_that_reaches():
    """Row 2 never is as high as wanted: it is highest at 3."""
    heights = torch.tensor([[5.0, 9, 9, 9], [1, 2, 3, 9], [0, 1, 2, 1]])
    height = Mock(side_effect=lambda rows, step: heights[rows, int(step) - 1])
    steps, done = first_reached(height, torch.tensor([5.0, 3.0, 3.0]), [1.0, 2.0, 3.0, 4.0])
    assert (steps.tolist(), done.tolist()) == ([1, 3, 3], [True, True, False])
    asked = [(rows.tolist(), step) for rows, step in (call.args for call in height.call_args_list)]
    assert asked == [([0, 1, 2], 1), ([1, 2], 2), ([1, 2], 3), ([2], 4)]


class LinearGenerator(StyledGenerator):
    """w = z, image = matrix w."""

    def __init__(self):
        super().__init__()
        self.z_dim, self.classes, self.channels, self.resolution, self.num_ws = 4, 0, 1, 4, 1
        self.register_buffer("w_avg", torch.zeros(4))
        self.register_buffer("matrix", 0.05 * draws(16, 4, seed=5).float())
        self.anchor = nn.Parameter(torch.zeros(1))

    def mapping(self, z, labels):  # type: ignore[override]
        return z

    def synthesis(self, ws, noise):
        return (ws[:, 0] @ self.matrix.T).reshape(-1, 1, 4, 4)


class LinearClassifier(nn.Module):
    """Three logits, linear in the pixels; the classes differ by the first three w."""

    resolution, channels, spec = 4, 1, ImageSpec(1, 4, 4)

    def __init__(self, generator):
        super().__init__()
        self.register_buffer("rows", 3 * torch.linalg.pinv(generator.matrix)[:3])

    def forward(self, images):
        return images.flatten(1) @ self.rows.T


def linear_editor(samples=100):
    generator = LinearGenerator().eval().requires_grad_(False)
    sampler = Sampler(generator=generator, chosen=[], noise_mode="none", batch_size=16)
    classifier: Any = LinearClassifier(generator)
    return Editor(sampler, classifier, ["a", "b", "c"], samples)


def test_the_known_direction_is_found():
    """Logits are 3 w: from a to b it is (-1, 1, 0, 0), whatever w's fourth dimension does to the image."""
    editor = linear_editor(samples=60)
    found = editor.direction(0, 1).vector
    expected = torch.tensor([-1.0, 1.0, 0.0, 0.0]) / 2**0.5
    assert float(found @ expected / found.norm()) > 0.99999
    assert editor.direction(0, 1) is editor.direction(0, 1)
    editor = linear_editor()
    editor.classifier.rows[:] = torch.tensor([1e3, -1e3, 0])[:, None]
    assert_raises(UserError, r"predicts only 0 of .* samples as c", editor.starts, 2, 3)


def test_a_step_is_a_spread():
    editor = linear_editor(samples=60)
    start, direction = editor.starts(0, 5), editor.direction(0, 1)
    spreads = [float(editor._samples(label).code[:, 0].var(0, correction=0).sum()) for label in (0, 1)]
    assert float(direction.vector.norm()) == pytest.approx((sum(spreads) / 2) ** 0.5)
    assert (editor.probabilities(editor.images(start)).argmax(1) == 0).all()
    assert not torch.isin(start.code, editor._samples(0).code).any()  # directions are of other samples


def test_an_image_arrives_at_the_step_that_was_computed(monkeypatch):
    """On the straight line the target's probability rises as it is written down here."""
    monkeypatch.setattr("duetgan.extras.editing.editor.LIMIT", 6.0)
    monkeypatch.setattr("duetgan.extras.editing.editor.REACH", 0.6)
    editor = linear_editor(samples=40)
    start, direction = editor.starts(0, 8), editor.direction(0, 1)
    steps, arrived = editor.reach(start, direction)
    for row in range(8):
        way = start.code[row] + torch.linspace(0, 6, 25)[:, None] * direction.vector
        expected = int(((3 * way[:, :3]).softmax(1)[:, 1] >= 0.6).int().argmax())  # the first
        assert abs(float(steps[row]) - 0.25 * expected) <= 0.2500001  # images are rounded to uint8
    assert arrived.all()
    monkeypatch.setattr("duetgan.extras.editing.editor.LIMIT", 0.01)
    steps, arrived = editor.reach(start, direction)
    assert not arrived.any()
    assert ((steps > 0) & (steps <= 0.01)).all()


def test_without_an_offset_an_image_is_the_samplers():
    unused: Any = None
    editor = Editor(sampler_of(styled()), unused, CLASSES)
    start = truncated_styles(editor.sampler, range(5))
    with torch.no_grad():
        same = editor.moved(start, torch.zeros(5, editor.size))
        other = editor.moved(start, torch.ones(5, editor.size))
    assert torch.equal(to_uint8(same), editor.sampler.images(range(5)))
    assert not torch.equal(to_uint8(other), to_uint8(same))
    joined = Start.join(list(start.batches(2)))
    torch.testing.assert_close(editor.moved(joined, torch.zeros(5, editor.size)), same)
    assert_raises(UserError, "an edit", Editor, sampler_of(without_w()), unused, CLASSES)
