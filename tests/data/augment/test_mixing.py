"""Mixup and CutMix against a loop over samples."""

from typing import Any

import pytest
import torch

from duetgan.data.augment.mixing import Mixing, MixingAugment, cut_boxes, draw_mixing, mix_images, partners
from duetgan.data.augment.transforms import to_float
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.data.conftest import sample_images

CPU = torch.device("cpu")


def drawn(count: int = 4000, **settings: Any) -> Mixing:
    whole: dict[str, Any] = {"start": 0, "count": count, "global_batch": count, "size": (20, 30), "device": CPU}
    return draw_mixing(MixingAugment(**settings), seed=0, step=3, **whole)


def test_partners_are_neighbours_and_images_are_mixed_as_by_a_loop() -> None:
    assert partners(torch.arange(6)).tolist() == [1, 0, 3, 2, 5, 4]
    images = torch.rand(4, 1, 2, 2)
    assert torch.equal(partners(images), images[[1, 0, 3, 2]])
    assert_raises(ValueError, "3 rows", partners, torch.arange(3))
    images = to_float(torch.from_numpy(sample_images(6, 3, side=9)[:, :, :, :8].copy()))
    boxes = torch.tensor([[0, 0, 0, 0], [2, 3, 4, 2], [0, 0, 9, 8], [0, 0, 0, 0], [8, 7, 1, 1], [0, 0, 0, 0]])
    blend = torch.tensor([0.3, 1.0, 1.0, 1.0, 1.0, 0.0])
    others = partners(images)
    found = mix_images(images, others, Mixing(blend, blend, boxes))
    assert found.is_contiguous(memory_format=torch.channels_last)
    for place, (top, left, height, width) in enumerate(boxes.tolist()):
        other = images[place + 1 - 2 * (place % 2)]
        expected = blend[place] * images[place] + (1 - blend[place]) * other
        expected[:, top : top + height, left : left + width] = other[:, top : top + height, left : left + width]
        torch.testing.assert_close(found[place], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[3], images[3])  # not mixed: to the bit


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 8.0])
def test_mixups_shares_are_beta_distributed(alpha: float) -> None:
    mixing = drawn(mixup=alpha)
    assert torch.equal(mixing.own, mixing.blend)
    assert mixing.boxes.eq(0).all()
    assert mixing.own.isfinite().all()
    assert mixing.own.mean().item() == pytest.approx(0.5, abs=0.03)
    assert mixing.own.double().var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.08)


def test_cutmixs_shares_are_those_of_the_boxes_which_have_the_images_shape() -> None:
    mixing = drawn(cutmix=1.0)
    top, left, height, width = mixing.boxes.unbind(1)
    assert mixing.blend.eq(1).all()
    assert mixing.boxes.min() >= 0
    assert (top + height).max() <= 20
    assert (left + width).max() <= 30
    torch.testing.assert_close(mixing.own, 1 - height * width / 600)
    assert 0.55 < mixing.own.mean() < 0.75  # above a half: boxes are cut off at the borders
    own = torch.tensor([0.75, 0.0, 1.0, 0.75])
    boxes = cut_boxes(own, torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.2, 0.9], [0.0, 0.999]]), 20, 30)
    assert boxes[0].tolist() == [5, 8, 10, 15]
    assert boxes[1].tolist() == [0, 0, 20, 30]
    assert boxes[2, 2:].tolist() == [0, 0]
    assert boxes[3].tolist() == [0, 22, 5, 8]  # half of it is outside, on both axes


def test_one_of_both_for_each_image_and_only_some() -> None:
    mixing = drawn(mixup=1.0, cutmix=1.0, mix_prob=0.5)
    pasted, blended = mixing.boxes[:, 2] * mixing.boxes[:, 3] > 0, mixing.blend < 1
    assert not (pasted & blended).any()
    assert blended.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert pasted.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert mixing.own[~pasted & ~blended].eq(1).all()
    assert not MixingAugment().mixes
    assert not MixingAugment(mixup=1.0, mix_prob=0.0).mixes
    assert MixingAugment(mixup=1.0).mixes
    assert MixingAugment(cutmix=1.0).mixes


def test_rows_of_a_rank_are_those_of_the_global_batch() -> None:
    config = MixingAugment(mixup=0.3, cutmix=0.7)
    common: dict[str, Any] = {"global_batch": 12, "size": (8, 8), "device": CPU}
    whole = draw_mixing(config, seed=1, step=2, start=0, count=12, **common)
    for start in (0, 4, 8):
        part = draw_mixing(config, seed=1, step=2, start=start, count=4, **common)
        assert all(torch.equal(p, w[start : start + 4]) for p, w in zip(part, whole, strict=True))
    assert all(torch.equal(p, w[2:5]) for p, w in zip(whole.rows(slice(2, 5)), whole, strict=True))
    for seed, step in ((1, 3), (2, 2)):
        assert not torch.equal(draw_mixing(config, seed=seed, step=step, start=0, count=12, **common).own, whole.own)


@pytest.mark.parametrize("wrong", [{"mixup": -1.0}, {"cutmix": 1e-3}, {"mix_prob": 1.5}, {"shift": -1}])
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    assert_raises(UserError, f"^{next(iter(wrong))}", MixingAugment, **wrong)
