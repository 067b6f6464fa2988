"""Every transform against a loop over samples."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms.v2 import InterpolationMode, TrivialAugmentWide

from duetgan.data.augment import transforms
from duetgan.data.augment.transforms import (
    Augment,
    Mixing,
    MixingAugment,
    cut_boxes,
    draw_and_apply,
    draw_mixing,
    erase_boxes,
    inside,
    mix_images,
    partners,
    random_erase,
    random_flip,
    random_shift,
    to_float,
)
from duetgan.data.augment.trivial_augment import BINS, KINDS, SIGNED, STRENGTHS, Draws, draw, trivial_augment
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import generator
from tests.conftest import assert_raises
from tests.data.conftest import sample_images


def images(dtype: torch.dtype = torch.uint8, channels: int = 3) -> torch.Tensor:
    whole = torch.from_numpy(sample_images(7, channels, side=9)[:, :, :, :8].copy())  # 9 x 8: not square
    return whole if dtype == torch.uint8 else whole.to(dtype) / 127.5 - 1


def test_to_float_layout_and_type(monkeypatch):
    """Its values are those of `ImageSpec.to_float`."""
    result = to_float(images())
    assert not result.is_contiguous()
    assert to_float(images(), channels_last=False).is_contiguous()
    assert torch.equal(to_float(images(), channels_last=False), result)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    assert to_float(images()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("reflect", [False, True])
def test_flip_and_shift(dtype, reflect):
    before = images(dtype)
    flips = torch.tensor([True, False, True, True, False, False, True])
    for old, new, flip in zip(before, random_flip(before, flips), flips, strict=True):
        assert torch.equal(new, old.flip(-1) if flip else old)
    offsets = torch.tensor([[3, 3], [0, 6], [6, 0], [1, 2], [5, 4], [0, 0], [6, 6]])
    after = random_shift(before, offsets, 3, reflect=reflect)
    assert after.dtype == dtype
    how: dict[str, Any] = {"mode": "reflect"} if reflect else {"value": 0 if dtype == torch.uint8 else -1}
    padded = F.pad(before.float(), [3] * 4, **how).to(dtype)  # torch does not reflect uint8
    for old, new, (row, column) in zip(padded, after, offsets.tolist(), strict=True):
        assert torch.equal(new, old[:, row : row + 9, column : column + 8])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_erase(dtype):
    before = images(dtype)
    boxes = torch.tensor(
        [[0, 0, 9, 8], [2, 3, 4, 2], [0, 0, 0, 0], [8, 7, 1, 1], [1, 1, 0, 5], [5, 0, 3, 8], [0, 6, 9, 2]]
    )
    after = random_erase(before, boxes)
    for old, new, (top, left, height, width) in zip(before, after, boxes.tolist(), strict=True):
        expected = old.clone()
        expected[:, top : top + height, left : left + width] = 0 if dtype == torch.uint8 else -1
        assert torch.equal(new, expected)


def test_gradients_pass_twice():
    before = images(torch.float64).requires_grad_()
    flips, offsets = torch.arange(7) % 2 == 0, torch.full((7, 2), 2)
    boxes = torch.tensor([[1, 1, 2, 2]] * 7)
    after = random_erase(random_shift(random_flip(before, flips), offsets, 1, reflect=False), boxes)
    (gradient,) = torch.autograd.grad((after**3).sum(), before, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), before)
    # 6x where a pixel is kept, 0 where it is shifted out or erased: a row, a column and a square of 4
    assert torch.allclose(second, torch.where(gradient == 0, 0.0, 6 * before))
    assert (second != 0).sum() == 7 * 3 * (8 * 7 - 4)


def test_erase_boxes_are_the_papers_and_lie_inside():
    """Areas of 0.02 to 0.33 and aspect ratios of 0.3 to 3.3."""
    draws = torch.rand(2000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for (chance, size, aspect, row, column), box in zip(draws.tolist(), erase_boxes(draws, 0.25, 20, 30), strict=True):
        area, ratio = 600 * (0.02 + 0.31 * size), 0.3 * 11**aspect
        height = min(max(round((area * ratio) ** 0.5), 1), 20)
        width = min(max(round((area / ratio) ** 0.5), 1), 30)
        inner = [int(row * (21 - height)), int(column * (31 - width)), height, width]
        assert box.tolist() == (inner if chance < 0.25 else [0] * 4)
    for extreme in (0.0, 1 - 2**-24):
        row, column, rows, columns = erase_boxes(torch.full((1, 5), extreme), 1.0, 4, 4)[0].tolist()
        assert 0 <= row < row + rows <= 4
        assert 0 <= column < column + columns <= 4


ALL = Augment(flip=True, shift=2, erase=0.5)


@pytest.mark.parametrize("options", [ALL.model_dump(), {"own": ["fade"]}, {"trivial_augment": True}])
def test_ranks_draw_what_one_process_draws_by_the_key(options, monkeypatch):
    fade = lambda images, draws: (images * draws[:, 7, None, None, None]).to(images.dtype)  # noqa: E731
    monkeypatch.setitem(transforms.AUGMENTATIONS, "fade", fade)
    config = Augment(**options)
    before = images().repeat(2, 1, 1, 1)[:12]

    def run(seed: int = 1, step: int = 5, start: int = 0, count: int = 12, **more: Any) -> torch.Tensor:
        rows = before[start : start + count]
        return draw_and_apply(rows, config, seed=seed, step=step, start=start, global_batch=12, **more)

    whole = run()
    assert not torch.equal(whole, before)
    torch.rand(3)  # the global generator has no part in it
    for share in (12, 6, 4, 3):
        assert torch.equal(torch.cat([run(start=start, count=share) for start in range(0, 12, share)]), whole)
    for key in ({"seed": 2}, {"step": 6}, {"phase": "x"}):
        assert not torch.equal(run(**key), whole)


def test_each_setting_has_its_own_draws_of_the_key():
    before = torch.from_numpy(sample_images(400, 1, side=8)[:, :, :, :4].copy())  # 8 x 4: not square

    def run(config: Augment) -> torch.Tensor:
        return draw_and_apply(before, config, seed=0, step=0, start=0, global_batch=400)

    draws = torch.rand(400, 8, generator=generator(0, "augment", 0))
    flips, offsets, boxes = draws[:, 0] < 0.5, (5 * draws[:, 1:3]).long(), erase_boxes(draws[:, 3:], 0.5, 8, 4)
    assert run(Augment()) is before
    ways: Any = (False, True, "alternating")  # the loader makes the last ones
    edges: Any = ("black", "reflect")
    for flip, shift, erase, edge in itertools.product(ways, (0, 2), (0.0, 0.5), edges):
        expected = random_flip(before, flips) if flip is True else before
        expected = random_shift(expected, offsets, 2, edge == "reflect") if shift else expected
        expected = random_erase(expected, boxes) if erase else expected
        assert torch.equal(run(Augment(flip=flip, shift=shift, erase=erase, shift_edge=edge)), expected)
    with pytest.raises(UserError, match=r"shift 4 with reflected edges: images of 4 px .* at most 3"):
        run(Augment(shift=4, shift_edge="reflect"))
    run(Augment(shift=3, shift_edge="reflect"))


def test_trivial_augment_and_own_augmentations_draw_by_their_names(monkeypatch):
    """The keys of docs/randomness.md; of the rows of this rank, in the order of the config."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def darker(name: str, images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        seen[name] = images, draws
        return images // 2

    for name in ("fade", "blur"):
        monkeypatch.setitem(transforms.AUGMENTATIONS, name, partial(darker, name))
    config = Augment(trivial_augment=True, own=["fade", "blur"])
    found = draw_and_apply(images(), config, seed=4, step=9, start=3, global_batch=12, phase="x")
    key, rows = (4, "augment", 9, "x"), slice(3, 10)
    expected = trivial_augment(images(), draw((*key, "trivial"), 12, rows))
    assert not torch.equal(expected, images())
    for name in ("fade", "blur"):
        draws = torch.rand(12, 8, generator=generator(*key, "own", name))[rows]
        torch.testing.assert_close(seen[name], (expected, draws), rtol=0, atol=0)
        expected = expected // 2
    assert torch.equal(found, expected)


def test_rows_outside_the_batch_are_a_mistake_and_alternating_flips_draw_nothing(monkeypatch):
    with pytest.raises(ValueError, match="global batch of 8"):
        draw_and_apply(images(), ALL, seed=0, step=0, start=2, global_batch=8)
    # the loader makes them
    monkeypatch.setattr(transforms, "generator", None)
    config, batch = Augment(flip="alternating"), images()
    assert draw_and_apply(batch, config, seed=0, step=0, start=0, global_batch=len(batch)) is batch


CPU = torch.device("cpu")


def drawn(start: int = 0, count: int = 4000, **settings: Any) -> Mixing:
    part: dict[str, Any] = {"start": start, "count": count, "global_batch": 4000, "size": (20, 30), "device": CPU}
    return draw_mixing(MixingAugment(**settings), seed=0, step=3, **part)


def test_partners_are_neighbours_and_images_are_mixed_as_by_a_loop():
    assert partners(torch.arange(6)).tolist() == [1, 0, 3, 2, 5, 4]
    images = torch.rand(4, 1, 2, 2)
    assert torch.equal(partners(images), images[[1, 0, 3, 2]])
    assert_raises(ValueError, "3 rows", partners, torch.arange(3))
    images = to_float(torch.from_numpy(sample_images(6, 3, side=9)[:, :, :, :8].copy()))
    boxes = torch.tensor([[0, 0, 0, 0], [2, 3, 4, 2], [0, 0, 9, 8], [0, 0, 0, 0], [8, 7, 1, 1], [0, 0, 0, 0]])
    blend = torch.tensor([0.3, 1.0, 1.0, 1.0, 1.0, 0.0])
    others = partners(images)
    pasted = inside(boxes[:, :2], boxes[:, 2:], 9, 8)
    found = mix_images(images, others, Mixing(blend, pasted, blend))
    assert found.is_contiguous(memory_format=torch.channels_last)
    for place, (top, left, height, width) in enumerate(boxes.tolist()):
        other = images[place + 1 - 2 * (place % 2)]
        expected = blend[place] * images[place] + (1 - blend[place]) * other
        expected[:, top : top + height, left : left + width] = other[:, top : top + height, left : left + width]
        torch.testing.assert_close(found[place], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[3], images[3])  # not mixed: to the bit


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 8.0])
def test_mixups_shares_are_beta_distributed(alpha):
    mixing = drawn(mixup=alpha)
    assert mixing.blend is not None
    assert torch.equal(mixing.label_weights, mixing.blend)
    assert not mixing.is_pasted.any()
    assert mixing.label_weights.isfinite().all()
    assert mixing.label_weights.mean().item() == pytest.approx(0.5, abs=0.03)
    assert mixing.label_weights.double().var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.08)


def test_cutmixs_shares_are_those_of_the_boxes_which_have_the_images_shape():
    mixing = drawn(cutmix=1.0)
    assert mixing.blend is None
    torch.testing.assert_close(mixing.label_weights, 1 - mixing.is_pasted.float().mean((1, 2, 3)))
    own = torch.tensor([0.75, 0.0, 1.0, 0.75])
    found = cut_boxes(own, torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.2, 0.9], [0.0, 0.999]]), 20, 30)
    expected = torch.zeros(4, 1, 20, 30, dtype=torch.bool)
    expected[0, 0, 5:15, 8:23] = True
    expected[1] = True
    expected[3, 0, :5, 22:] = True  # half of it is outside, on both axes
    assert torch.equal(found, expected)


def test_one_of_both_for_each_image_and_only_some(monkeypatch):
    outside: list[torch.Tensor] = []  # the fractions of the images outside of CutMix's boxes

    def noted(remaining: torch.Tensor, *more: Any) -> torch.Tensor:
        outside.append(remaining)
        return cut_boxes(remaining, *more)

    monkeypatch.setattr(transforms, "cut_boxes", noted)
    settings: Any = {"mixup": 8.0, "cutmix": 0.3, "mix_prob": 0.7}
    mixing = drawn(**settings)
    assert mixing.blend is not None
    draws = torch.rand(4000, 4, generator=generator(0, "augment", 3, "mixing"))
    is_mixed, is_cut = draws[:, 0] < 0.7, draws[:, 1] < 0.5
    assert torch.equal(mixing.blend < 1, is_mixed & ~is_cut)
    boxes = cut_boxes(outside[0], draws[:, 2:], 20, 30)
    assert torch.equal(mixing.is_pasted, boxes & (is_mixed & is_cut)[:, None, None, None])
    for values, alpha in ((mixing.blend[is_mixed & ~is_cut], 8.0), (outside[0], 0.3)):
        assert values.double().var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.08)
    own = torch.where(is_cut, 1 - mixing.is_pasted.float().mean((1, 2, 3)), mixing.blend)
    torch.testing.assert_close(mixing.label_weights, own)  # 1 where an image is not mixed
    torch.testing.assert_close(tuple(drawn(100, 50, **settings)), tuple(mixing.rows(slice(100, 150))), rtol=0, atol=0)
    assert not MixingAugment().mixes
    assert not MixingAugment(mixup=1.0, mix_prob=0.0).mixes
    assert MixingAugment(mixup=1.0).mixes
    assert MixingAugment(cutmix=1.0).mixes


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        *((Augment, wrong) for wrong in ({"shift": -1}, {"shift": 2**63 - 1}, {"erase": 1.5}, {"erase": -0.1})),
        *((MixingAugment, w) for w in ({"mixup": -1.0}, {"cutmix": 1e-3}, {"mix_prob": 1.5}, {"shift": -1})),
        *((kind, {"own": ("nowhere",)}) for kind in (Augment, MixingAugment)),
    ],
)
def test_settings_out_of_range(config, wrong):
    assert_raises(UserError, f"^{next(iter(wrong))}", config, **wrong)


OTHER_NAMES = {
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateX",
    "translate_y": "TranslateY",
    "autocontrast": "AutoContrast",
}
LIBRARY = TrivialAugmentWide()


def torchvisions(image: torch.Tensor, kind: str, strength: float) -> torch.Tensor:
    return LIBRARY._apply_image_or_video_transform(
        image,
        OTHER_NAMES.get(kind, kind.capitalize()),
        strength,
        interpolation=InterpolationMode.NEAREST,
        fill={torch.Tensor: None},
    )


def some_images(channels: int, height: int, width: int) -> torch.Tensor:
    """BINS images: noise, a ramp, a constant one and a dark one among them."""
    images = torch.from_numpy(sample_images(BINS, channels, side=24)[:, :, :height, :width].copy())
    images[3], images[5] = 7, images[5] // 8 + 40
    images[4] = torch.arange(width, dtype=torch.uint8) * 9
    return images


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 16, 16), (1, 16, 16), (3, 14, 20), (3, 2, 5)])
@pytest.mark.parametrize(("kind", "sign"), [*((kind, 1) for kind in KINDS), *((kind, -1) for kind in SIGNED)])
def test_operations_are_torchvisions(kind, sign, channels, height, width):
    number, images = KINDS.index(kind), some_images(channels, height, width)
    strengths = sign * STRENGTHS[number]
    if kind == "rotate" and height != width:
        strengths = np.where(np.abs(strengths) == 90, 45, strengths)  # ties: between two pixels at every place
    found = trivial_augment(images, Draws(np.full(BINS, number), strengths))
    expected = torch.stack([torchvisions(image, kind, float(s)) for image, s in zip(images, strengths, strict=True)])
    difference = (found.int() - expected.int()).abs()
    # torchvision rounds the factors another way: by one, here and there
    assert difference.max() <= (kind in ("color", "sharpness"))
    assert (difference > 0).float().mean() < 0.01


def test_strengths_are_torchvisions_and_drawn_equally_often():
    for kind, row in zip(KINDS, STRENGTHS, strict=True):
        table, signed = TrivialAugmentWide._AUGMENTATION_SPACE[OTHER_NAMES.get(kind, kind.capitalize())]
        values = table(BINS, 32, 32)
        np.testing.assert_array_equal(row, np.zeros(BINS) if values is None else values.double().numpy())
        assert signed == (kind in SIGNED)
    draws = draw((1, "test"), 50_000, slice(0, 50_000))
    assert abs(np.bincount(draws.kinds, minlength=len(KINDS)) / 50_000 - 1 / len(KINDS)).max() < 0.006
    rotations = draws.strengths[draws.kinds == KINDS.index("rotate")]
    assert abs(rotations.mean()) < 4
    assert len(np.unique(rotations)) == 2 * BINS - 1
    assert draws.strengths[draws.kinds == KINDS.index("solarize")].min() == 0


def test_a_mixture_is_each_images_own():
    images = some_images(3, 16, 16).contiguous(memory_format=torch.channels_last)
    draws = draw((0, "test"), BINS, slice(0, BINS))
    assert len(set(draws.kinds.tolist())) > 8
    found = trivial_augment(images, draws)
    for place in range(BINS):
        alone = trivial_augment(images[place, None], Draws(draws.kinds[place, None], draws.strengths[place, None]))
        assert torch.equal(found[place], alone[0])
    identities = draws.kinds == KINDS.index("identity")
    assert torch.equal(found[identities], images[identities])
    with pytest.raises(ValueError, match="uint8"):
        trivial_augment(torch.zeros(1, 3, 4, 4), draw((0,), 1, slice(0, 1)))
