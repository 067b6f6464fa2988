from collections.abc import Iterator
from math import comb

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from duetgan.training.gan.ada import operations as ops
from duetgan.training.gan.ada import warp as augment_warp
from duetgan.training.gan.ada.operations import DRAWS, GroupDraws
from duetgan.training.gan.ada.warp import DOWN_TAPS, UP_TAPS, Sample, warp
from duetgan.utils.seeding import generator
from tests.training.gan import ada_oracle as oracle
from tests.training.gan.ada_oracle import random


def numbers(group, n, key=0, pixels=None):
    operations, uniform, normal = DRAWS[group]
    keyed = generator(0, "test", group, key)
    chance = torch.rand(n, operations + uniform, generator=keyed, dtype=torch.float64)
    normals = torch.randn(n, normal, generator=keyed, dtype=torch.float64)
    return GroupDraws(chance[:, :operations], chance[:, operations:], normals, pixels)


def probability(p):
    return torch.tensor(p, dtype=torch.float64)


def rows(draws) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Chances, uniform and normal numbers, an image at a time."""
    return zip(draws.chance.numpy(), draws.uniform.numpy(), draws.normal.numpy(), strict=True)


def only(draws, operation):
    """The same numbers, chances such that one operation happens at p = 0.5 and no other."""
    chance = torch.full_like(draws.chance, 0.9)
    chance[:, operation] = 0.1
    return GroupDraws(chance, draws.uniform, draws.normal, draws.pixels)


def variants(group, n, pixels=None):
    """Each operation alone, and draws as they come."""
    draws = numbers(group, n, pixels=pixels)
    return [*(only(draws, k) for k in range(DRAWS[group][0])), draws, numbers(group, n, 1, pixels)]


RECTANGLES = [(8, 12), (14, 6), (16, 24)]  # height, width


@pytest.mark.parametrize("size", [(8, 8), (9, 9), (32, 32), *RECTANGLES])
def test_blit_against_numpy(size):
    images, seen = random(40, 3, *size), set()
    for draws in variants("blit", 40):
        inverse = ops.blit_inverse(draws, probability(0.5), size)
        found = ops.move(images, inverse, None).numpy()
        for k, (chance, uniform, _) in enumerate(rows(draws)):
            numbers_, matrix = oracle.blit_matrix(chance, uniform, 0.5, size)
            seen.add(numbers_)
            if size[0] == size[1]:
                assert (found[k] == oracle.blitted(images[k].numpy(), *numbers_)).all()
            elif k < 4:
                assert (found[k] == oracle.copied(images[k].numpy(), matrix)).all()
            np.testing.assert_allclose(inverse[k], np.linalg.inv(matrix), rtol=0, atol=1e-12)
    assert {flip for flip, *_ in seen} == {False, True}
    assert {quarters for _, quarters, *_ in seen} == {0, 1, 2, 3}
    for side, reach in zip(size, ({y for *_, y in seen}, {x for *_, x, _ in seen}), strict=True):
        most = round(side / 8)
        assert reach <= set(range(-most, most + 1))
        assert len(reach) > most


@pytest.mark.parametrize("p", [0.5, 0.9])
@pytest.mark.parametrize("size", [(10, 10), (8, 20)])
def test_geometry_against_numpy(p, size):
    for draws in variants("geometry", 40):
        inverse, moved = ops.geometry_inverse(draws, probability(p), size)
        for k, (chance, uniform, normal) in enumerate(rows(draws)):
            forward = oracle.geometry_matrix(chance, uniform, normal, p, size)
            np.testing.assert_allclose(inverse[k], np.linalg.inv(forward), rtol=0, atol=1e-12)
            assert moved[k] == (not np.array_equal(forward, np.eye(3)))


def test_both_groups_are_one_warp_and_what_geometry_leaves_is_copied():
    size, n = 8, 4
    images = random(n, 1, size, size)
    blit, geometry = numbers("blit", n), numbers("geometry", n)
    blit.chance[:], geometry.chance[:], geometry.chance[1] = 0.1, 0.1, 0.9
    first = ops.blit_inverse(blit, probability(0.5), (size, size))
    found = ops.move(images, first, ops.geometry_inverse(geometry, probability(0.5), (size, size))).numpy()
    for k, ((chance, uniform, _), (more, angles, normal)) in enumerate(zip(rows(blit), rows(geometry), strict=True)):
        what, matrix = oracle.blit_matrix(chance, uniform, 0.5, size)
        if k == 1:
            assert (found[k] == oracle.blitted(images[k].numpy(), *what)).all()
            continue
        matrix = oracle.geometry_matrix(more, angles, normal, 0.5, size) @ matrix
        np.testing.assert_allclose(found[k, 0], oracle.warped(images[k, 0].numpy(), matrix), rtol=0, atol=1e-11)


def test_colour_against_numpy():
    images = random(20, 3, 4, 4)
    grey = images[:, :1]
    for draws in variants("colour", 20):
        found = ops.recolour(images, ops.colour_matrix(draws, probability(0.5), 3), alpha=False)
        found_grey = ops.recolour(grey, ops.colour_matrix(draws, probability(0.5), 1), alpha=False)
        for k, parts in enumerate(rows(draws)):
            np.testing.assert_allclose(found[k], oracle.recoloured(images[k].numpy(), *parts, 0.5), rtol=0, atol=1e-12)
            alike = oracle.recoloured(grey[k].expand(3, -1, -1).numpy(), *parts, 0.5)  # a grey image in RGB
            np.testing.assert_allclose(found_grey[k].expand(3, -1, -1), alike, rtol=0, atol=1e-12)


@pytest.mark.parametrize("operation", [3, 4])
def test_hue_and_saturation_leave_grey_to_the_bit(operation):
    draws, grey = only(numbers("colour", 10), operation), random(10, 1, 4, 4)
    assert torch.equal(ops.recolour(grey, ops.colour_matrix(draws, probability(0.5), 1), alpha=False), grey)


@pytest.mark.parametrize("size", [(8, 8), (9, 9), (32, 32), (8, 12)])
def test_bands_against_numpy(size):
    images = random(3, 1, *size)
    for draws in variants("filter", 3)[-3:]:
        found = ops.amplify_bands(images, draws, probability(0.5))
        for k, (chance, _, normal) in enumerate(rows(draws)):
            expected = oracle.filtered(images[k, 0].numpy(), oracle.band_gains(chance, normal, 0.5))
            np.testing.assert_allclose(found[k, 0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [(10, 10), (6, 16)])
def test_noise_and_cutout_against_numpy(size):
    images, pixels = random(30, 3, *size), torch.randn(30, 3, *size, generator=generator(0, "n"), dtype=torch.float64)
    for draws in variants("noise", 30, pixels):
        found = ops.add_noise(images, draws, probability(0.5)).numpy()
        for k, (chance, _, normal) in enumerate(rows(draws)):
            strength = 0.1 * abs(normal[0]) if chance[0] < 0.5 else 0.0
            np.testing.assert_allclose(found[k], images[k].numpy() + strength * pixels[k].numpy(), rtol=0, atol=1e-15)
    for draws in variants("cutout", 30):
        found = ops.cut_out(images, draws, probability(0.5)).numpy()
        for k, (chance, uniform, _) in enumerate(rows(draws)):
            assert (found[k] == oracle.cut(images[k].numpy(), chance, uniform, 0.5)).all()


def apply_all(images, p, key=0):
    """Every group, as functions of the images alone."""
    n, channels, size, _ = images.shape
    pixels = torch.randn(images.shape, generator=generator(0, "pixels"), dtype=images.dtype)
    draws = {name: numbers(name, n, key, pixels) for name in DRAWS}
    p = probability(p)
    blit = ops.blit_inverse(draws["blit"], p, (size, size))
    warped = ops.geometry_inverse(draws["geometry"], p, (size, size))
    return {
        "blit": lambda x: ops.move(x, blit, None),
        "geometry": lambda x: ops.move(x, None, warped),
        "both": lambda x: ops.move(x, blit, warped),
        "colour": lambda x: ops.recolour(x, ops.colour_matrix(draws["colour"], p, channels), alpha=False),
        "filter": lambda x: ops.amplify_bands(x, draws["filter"], p),
        "noise": lambda x: ops.add_noise(x, draws["noise"], p),
        "cutout": lambda x: ops.cut_out(x, draws["cutout"], p),
    }


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("accelerator", [False, True])
def test_nothing_happens_to_the_bit_at_0_and_everything_at_1(channels, accelerator, monkeypatch):
    monkeypatch.setattr(ops, "_is_readable", lambda values: not accelerator)
    images = random(30, channels, 8, 8)
    for name, operation in apply_all(images, 0.0).items():
        assert torch.equal(operation(images), images), name
    for name, operation in apply_all(images, 1.0).items():
        changed = (operation(images) != images).flatten(1).any(1)
        assert changed.double().mean() > 0.8 if name == "blit" else changed.all(), name


@pytest.mark.parametrize("name", ["blit", "geometry", "both", "colour", "filter", "noise", "cutout"])
@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_gradients_of_first_and_second_order(name, accelerator, channels, monkeypatch):
    monkeypatch.setattr(ops, "_is_readable", lambda values: not accelerator)
    images = random(6, channels, 8, 8).requires_grad_()
    operation = apply_all(images.detach(), 0.5)[name]
    changed = (operation(images) != images).flatten(1).any(1)
    assert changed.any()
    assert gradcheck(operation, images, fast_mode=True)
    # the square makes the second derivative depend on the first
    assert gradgradcheck(lambda x: operation(x).square(), images, fast_mode=True)


def whole(taps):
    return np.array([*taps[:0:-1], *taps])


def inverses(*forward):
    return torch.from_numpy(np.stack([np.linalg.inv(matrix) for matrix in forward]))


def test_the_two_filters_are_factors_of_the_half_band_filter_that_sym6_makes():
    low_pass, distance = np.array([0.25, 0.5, 0.25]), np.array([-0.25, 0.5, -0.25])
    expected = np.zeros(23)
    for k in range(6):  # Daubechies' polynomial of order 6: six zeros at the Nyquist frequency in each factor
        taps = np.array([float(comb(5 + k, k))])
        for factor in [low_pass] * 6 + [distance] * k:
            taps = np.convolve(taps, factor)
        expected += np.pad(taps, (23 - len(taps)) // 2)
    product = np.convolve(whole(UP_TAPS), whole(DOWN_TAPS))
    np.testing.assert_allclose(product, expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(2 * product[1::2], np.eye(11)[5], rtol=0, atol=1e-14)  # up and down: the identity
    for kernel in (whole(UP_TAPS), whole(DOWN_TAPS)):
        moments = [np.polynomial.Polynomial(kernel).deriv(k)(-1.0) for k in range(6)]
        np.testing.assert_allclose(moments, 0, atol=1e-9)
        assert kernel.sum() == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("size", [(8, 8), (9, 9), (6, 9), (16, 4)])
def test_warp_against_a_slow_one(size):
    forward = [
        oracle.shift(1.3, -0.45) @ oracle.turn(0.7) @ np.diag([1.2, 0.8, 1]),
        oracle.shift(-9.1, 14.2) @ oracle.turn(-2.2) @ np.diag([0.6, 0.4, 1]),  # far outside, and shrunk
        np.array([[-1.1, 0.3, 0.2], [0.5, 1.4, -0.1], [0, 0, 1]]),
    ]
    images = random(3, 1, *size)
    expected = [oracle.warped(image[0], matrix) for image, matrix in zip(images.numpy(), forward, strict=True)]
    np.testing.assert_allclose(warp(images, inverses(*forward))[:, 0], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [12, 15])
def test_resampling_in_pieces_is_resampling_at_once(size, monkeypatch):
    images, inverse = random(2, 3, size, size), inverses(oracle.turn(0.3), oracle.shift(0.3, 2.6))
    expected = warp(images, inverse)
    monkeypatch.setattr(augment_warp, "BLOCK", 5)
    assert augment_warp._block(size) == {12: 4, 15: 5}[size]
    torch.testing.assert_close(warp(images, inverse), expected, rtol=0, atol=1e-13)


def test_sampling_and_its_gradient_are_those_of_torch():
    images = random(2, 3, 7, 5).requires_grad_()
    grid = random(2, 4, 6, 2, key="grid") * 3
    expected = F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=True)
    weights = random(*expected.shape, key="weights")
    found = Sample.apply(images, grid)
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), images)
    (own,) = torch.autograd.grad((found * weights).sum(), images, create_graph=True)
    torch.testing.assert_close(own, gradient, rtol=0, atol=1e-14)
    assert gradcheck(lambda x: Sample.apply(x, grid), images)
    assert gradgradcheck(lambda x: Sample.apply(x, grid).square(), images)


def test_matrices_are_kept_and_usable_after_inference_mode():
    augment_warp._matrices.cache_clear()
    images, inverse = random(1, 1, 10, 10), inverses(oracle.turn(0.3))
    with torch.inference_mode():
        warp(images, inverse)
    warp(images.requires_grad_(), inverse).sum().backward()
    assert augment_warp._matrices.cache_info().misses == 1
