import math
from math import comb

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from duetgan.training.gan import warp as augment_warp
from duetgan.training.gan.warp import DOWN_TAPS, UP_TAPS, Sample, copy_pixels, reflect, warp
from tests.training.gan import ada_oracle as oracle
from tests.training.gan.ada_oracle import random


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


@pytest.mark.parametrize("size", [2, 5, 8])
def test_indices_are_mirrored_at_pixel_centres(size):
    index = torch.arange(-5 * size, 5 * size)
    assert reflect(index, size).tolist() == [oracle.mirrored(i, size) for i in index.tolist()]
    assert np.pad(np.arange(size), size - 1, mode="reflect").tolist() == [
        oracle.mirrored(i, size) for i in range(1 - size, 2 * size - 1)
    ]


@pytest.mark.parametrize("move", [copy_pixels, warp])
@pytest.mark.parametrize(("size", "channels"), [(8, 1), (9, 3), (66, 1)])
def test_flips_quarter_turns_and_whole_shifts_are_copies(move, size, channels):
    cases = [(False, 0, 0, 0), (True, 1, 2, -1), (False, 2, -1, 3), (True, 3, 0, 1), (False, 1, 5, 6), (True, 0, 1, 0)]
    images = random(len(cases), channels, size, size)
    expected = np.stack([oracle.blitted(image, *case) for image, case in zip(images.numpy(), cases, strict=True)])
    forward = [
        oracle.shift(x, y) @ oracle.turn(k * math.pi / 2) @ np.diag([-1.0 if flip else 1, 1, 1])
        for flip, k, x, y in cases
    ]
    found = move(images, inverses(*forward)).numpy()
    if move is copy_pixels:
        assert (found == expected).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [8, 9])
def test_warp_against_a_slow_one(size):
    forward = [
        oracle.shift(1.3, -0.45) @ oracle.turn(0.7) @ np.diag([1.2, 0.8, 1]),
        oracle.shift(-9.1, 14.2) @ oracle.turn(-2.2) @ np.diag([0.6, 0.4, 1]),  # far outside, and shrunk
        np.array([[-1.1, 0.3, 0.2], [0.5, 1.4, -0.1], [0, 0, 1]]),
    ]
    images = random(3, 1, size, size)
    expected = [oracle.warped(image[0], matrix) for image, matrix in zip(images.numpy(), forward, strict=True)]
    np.testing.assert_allclose(warp(images, inverses(*forward))[:, 0], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [12, 15])
def test_resampling_in_pieces_is_resampling_at_once(size, monkeypatch):
    images, inverse = random(2, 3, size, size), inverses(oracle.turn(0.3), oracle.shift(0.3, 2.6))
    expected = warp(images, inverse)
    monkeypatch.setattr(augment_warp, "BLOCK", 5)
    assert augment_warp._block(size) == {12: 4, 15: 5}[size]
    torch.testing.assert_close(warp(images, inverse), expected, rtol=0, atol=1e-13)


def test_gradients_of_first_and_second_order(monkeypatch):
    inverse = inverses(oracle.shift(1.3, -0.45) @ oracle.turn(0.7), np.diag([1.3, -0.7, 1]))
    images = random(2, 2, 6, 6).requires_grad_()
    for block in (64, 3):
        monkeypatch.setattr(augment_warp, "BLOCK", block)
        assert gradcheck(lambda x: warp(x, inverse), images, fast_mode=True)
        # the square makes the second derivative depend on the first
        assert gradgradcheck(lambda x: warp(x, inverse).square(), images, fast_mode=True)
    turned = inverses(oracle.turn(math.pi / 2), oracle.shift(2, -1))
    assert gradcheck(lambda x: copy_pixels(x, turned), images, fast_mode=True)
    assert gradgradcheck(lambda x: copy_pixels(x, turned).square(), images, fast_mode=True)


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
