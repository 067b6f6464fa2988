"""Every operation against torchvision's TrivialAugmentWide, image by image."""

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode, TrivialAugmentWide

from duetgan.data.augment.transforms import Augment, draw_and_apply
from duetgan.data.augment.trivial_augment import BINS, KINDS, SIGNED, STRENGTHS, Draws, draw, trivial_augment
from tests.data.conftest import sample_images

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
def test_operations_are_torchvisions(kind: str, sign: int, channels: int, height: int, width: int) -> None:
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


def test_strengths_are_torchvisions_and_drawn_equally_often() -> None:
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


def test_a_mixture_is_each_images_own() -> None:
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


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_draw_what_one_process_draws(world_size: int) -> None:
    images, config = some_images(3, 16, 16)[:12], Augment(trivial_augment=True)
    whole = draw_and_apply(images, config, seed=1, step=5, start=0, global_batch=12)
    share = 12 // world_size
    parts = [
        draw_and_apply(images[start : start + share], config, seed=1, step=5, start=start, global_batch=12)
        for start in range(0, 12, share)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(whole, images)
    for key in ({"seed": 2, "step": 5}, {"seed": 1, "step": 6}, {"seed": 1, "step": 5, "phase": "x"}):
        assert not torch.equal(draw_and_apply(images, config, start=0, global_batch=12, **key), whole)
