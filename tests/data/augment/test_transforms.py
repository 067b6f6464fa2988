"""Every transform against a loop over samples."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from duetgan.data.augment import transforms
from duetgan.data.augment.transforms import (
    Augment,
    draw_and_apply,
    erase_boxes,
    random_erase,
    random_flip,
    random_shift,
    to_float,
)
from duetgan.utils.errors import UserError
from tests.data.conftest import sample_images


def images(dtype: torch.dtype = torch.uint8, channels: int = 3) -> torch.Tensor:
    whole = torch.from_numpy(sample_images(7, channels, side=9)[:, :, :, :8].copy())  # 9 x 8: not square
    return whole if dtype == torch.uint8 else whole.to(dtype) / 127.5 - 1


def test_to_float_range_layout_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    ramp = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(2, 3, 1, 1)
    result = to_float(ramp)
    assert result.dtype == torch.float32
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert not result.is_contiguous()
    np.testing.assert_allclose(result.numpy(), ramp.numpy().astype(np.float64) / 127.5 - 1, atol=1e-6)
    assert (result.min().item(), result.max().item()) == (-1.0, 1.0)
    assert to_float(ramp, channels_last=False).is_contiguous()
    assert torch.equal(to_float(ramp, channels_last=False), result)
    assert torch.equal((result + 1).mul(127.5).round().to(torch.uint8), ramp)  # 8 bits survive
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    assert to_float(images()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_flip_and_shift(dtype: torch.dtype) -> None:
    before, padding = images(dtype), 3
    flips = torch.tensor([True, False, True, True, False, False, True])
    for old, new, flip in zip(before, random_flip(before, flips), flips, strict=True):
        assert torch.equal(new, old.flip(-1) if flip else old)
    offsets = torch.tensor([[3, 3], [0, 0], [6, 6], [0, 6], [2, 5], [4, 3], [3, 2]])
    after = random_shift(before, offsets, padding)
    assert after.dtype == dtype
    black = 0 if dtype == torch.uint8 else -1
    for old, new, (row, column) in zip(before, after, offsets.tolist(), strict=True):
        assert torch.equal(new, F.pad(old, [padding] * 4, value=black)[:, row : row + 9, column : column + 8])
    assert torch.equal(after[0], before[0])


def test_shifted_images_with_reflected_edges() -> None:
    before, offsets = images(), torch.tensor([[3, 3], [0, 6], [6, 0], [1, 2], [5, 4], [0, 0], [6, 6]])
    after = random_shift(before, offsets, 3, reflect=True)
    padded = F.pad(before.float(), [3] * 4, mode="reflect").to(torch.uint8)  # torch does not do it in uint8
    for old, new, (row, column) in zip(padded, after, offsets.tolist(), strict=True):
        assert torch.equal(new, old[:, row : row + 9, column : column + 8])
    how: dict[str, Any] = {"seed": 1, "step": 2, "start": 0, "global_batch": 7}
    found, black = (draw_and_apply(before, Augment(shift=3, shift_edge=edge), **how) for edge in ("reflect", "black"))
    assert torch.equal(found[black > 0], black[black > 0])  # the same offsets
    assert not torch.equal(found, black)
    with pytest.raises(UserError, match="shift 8 with reflected edges: images of 8 px"):
        draw_and_apply(before, Augment(shift=8, shift_edge="reflect"), **how)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_erase(dtype: torch.dtype) -> None:
    before = images(dtype)
    boxes = torch.tensor(
        [[0, 0, 9, 8], [2, 3, 4, 2], [0, 0, 0, 0], [8, 7, 1, 1], [1, 1, 0, 5], [5, 0, 3, 8], [0, 6, 9, 2]]
    )
    after = random_erase(before, boxes)
    for old, new, (top, left, height, width) in zip(before, after, boxes.tolist(), strict=True):
        expected = old.clone()
        expected[:, top : top + height, left : left + width] = 0 if dtype == torch.uint8 else -1
        assert torch.equal(new, expected)


def test_gradients_pass_twice() -> None:
    before = images(torch.float64).requires_grad_()
    flips, offsets = torch.arange(7) % 2 == 0, torch.full((7, 2), 2)
    boxes = torch.tensor([[1, 1, 2, 2]] * 7)
    after = random_erase(random_shift(random_flip(before, flips), offsets, 1), boxes)
    (gradient,) = torch.autograd.grad((after**3).sum(), before, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), before)
    # 6x where a pixel is kept, 0 where it is shifted out or erased: a row, a column and a square of 4
    assert torch.allclose(second, torch.where(gradient == 0, 0.0, 6 * before))
    assert (second != 0).sum() == 7 * 3 * (8 * 7 - 4)


def test_erase_boxes_lie_inside_and_have_the_right_sizes() -> None:
    draws = torch.rand(4000, 5, generator=torch.Generator().manual_seed(0))
    boxes = erase_boxes(draws, 0.25, 20, 30)
    top, left, height, width = boxes.unbind(1)
    erased = height > 0
    assert torch.equal(erased, draws[:, 0] < 0.25)
    assert boxes.min() >= 0
    assert (top + height).max() <= 20
    assert (left + width).max() <= 30
    share = (height * width)[erased] / 600
    assert share.max() < 0.37
    assert 0.1 < share.mean() < 0.2
    assert boxes[~erased].abs().sum() == 0
    for extreme in (0.0, 1 - 2**-24):
        row, column, rows, columns = erase_boxes(torch.full((1, 5), extreme), 1.0, 4, 4)[0].tolist()
        assert 0 <= row < row + rows <= 4
        assert 0 <= column < column + columns <= 4


ALL = Augment(flip=True, shift=2, erase=0.5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("own", [[], ["fade"]])
def test_ranks_draw_what_one_process_draws(world_size: int, own: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fade = lambda images, draws: (images * draws[:, 7, None, None, None]).to(images.dtype)  # noqa: E731
    monkeypatch.setitem(transforms.AUGMENTATIONS, "fade", fade)
    config = Augment(own=own) if own else ALL
    before = images(channels=1).repeat(2, 1, 1, 1)[:12]
    whole = draw_and_apply(before, config, seed=1, step=5, start=0, global_batch=12)
    share = 12 // world_size
    parts = [
        draw_and_apply(before[start : start + share], config, seed=1, step=5, start=start, global_batch=12)
        for start in range(0, 12, share)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(whole, before)


def test_key_decides() -> None:
    before = images()

    def run(seed: int = 1, step: int = 5) -> torch.Tensor:
        return draw_and_apply(before, ALL, seed=seed, step=step, start=0, global_batch=7)

    first = run()
    torch.rand(3)  # the global generator has no part in it
    assert torch.equal(run(), first)
    assert not torch.equal(run(step=6), first)
    assert not torch.equal(run(seed=2), first)


def test_each_setting_does_its_part() -> None:
    before = torch.from_numpy(sample_images(400, 1, side=8))

    def run(config: Augment) -> torch.Tensor:
        return draw_and_apply(before, config, seed=0, step=0, start=0, global_batch=400)

    assert run(Augment()) is before
    flipped = run(Augment(flip=True))
    mirrored = (flipped == before.flip(3)).all(dim=(1, 2, 3))
    assert torch.equal(flipped[~mirrored], before[~mirrored])
    assert 150 < mirrored.sum() < 250
    shifted = run(Augment(shift=1))
    places = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    counts = torch.stack([(random_shift(before, p.expand(400, 2), 1) == shifted).all((1, 2, 3)).sum() for p in places])
    assert counts.sum() >= 400  # every image is one of the nine shifts, and all occur
    assert counts.min() > 20
    erased = run(Augment(erase=0.5))
    changed = (erased != before).any((1, 2, 3))
    assert 150 < changed.sum() < 250
    # A setting does not change another's draws.
    both = run(Augment(flip=True, erase=0.5))
    assert torch.equal((both != flipped).any((1, 2, 3)), changed)
    assert torch.equal(both[~changed], flipped[~changed])


def test_rows_outside_the_batch_are_a_mistake_and_alternating_flips_draw_nothing(monkeypatch):
    with pytest.raises(ValueError, match="global batch of 8"):
        draw_and_apply(images(), ALL, seed=0, step=0, start=2, global_batch=8)
    # the loader makes them
    monkeypatch.setattr(transforms, "generator", None)
    config, batch = Augment(flip="alternating"), images()
    assert draw_and_apply(batch, config, seed=0, step=0, start=0, global_batch=len(batch)) is batch


@pytest.mark.parametrize("wrong", [{"shift": -1}, {"shift": 2**63 - 1}, {"erase": 1.5}, {"erase": -0.1}])
def test_settings_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(wrong))}"):
        Augment(**wrong)  # type: ignore[arg-type]
