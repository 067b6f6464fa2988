"""Slow NumPy versions of the augmentation's operations, a pixel at a time, written from the paper's definitions."""

import math

import numpy as np
import torch

from duetgan.training.gan.ada.warp import DOWN_TAPS, UP_TAPS
from duetgan.utils.seeding import generator


def random(*shape, key="images"):
    """Images in [-1, 1]."""
    return torch.rand(shape, generator=generator(0, "test", key), dtype=torch.float64) * 2 - 1


def mirrored(index, size):
    """Bounce an index off the first and the last pixel until it is inside."""
    while not 0 <= index < size:
        index = -index if index < 0 else 2 * (size - 1) - index
    return index


def tap(taps, offset):
    return taps[abs(offset)] if abs(offset) < len(taps) else 0.0


def oversampled(image, x, y, known):
    """Value of the endless mirrored image [H, W] at (x / 2, y / 2) px, zeros inserted and filtered, gain 4."""
    if (x, y) not in known:
        reach, (height, width) = len(UP_TAPS) // 2 + 1, image.shape
        known[x, y] = sum(
            4 * tap(UP_TAPS, x - 2 * a) * tap(UP_TAPS, y - 2 * b) * image[mirrored(b, height), mirrored(a, width)]
            for a in range(x // 2 - reach, x // 2 + reach + 1)
            for b in range(y // 2 - reach, y // 2 + reach + 1)
        )
    return known[x, y]


def warped(image, forward):
    """[H, W] transformed by `forward` [3, 3], which moves places given in pixels from the centre."""
    (height, width), inverse = image.shape, np.linalg.inv(forward)
    known: dict[tuple[int, int], float] = {}
    margin = len(DOWN_TAPS) - 1

    def sampled(x, y):
        """The transformed image at (x / 2, y / 2) px, bilinear between the oversampled pixels."""
        middle, centre = (width - 1) / 2, (height - 1) / 2
        place = inverse @ [x / 2 - middle, y / 2 - centre, 1]
        u, v = 2 * (place[0] + middle), 2 * (place[1] + centre)
        left, top = math.floor(u), math.floor(v)
        return sum(
            (1 - abs(u - a)) * (1 - abs(v - b)) * oversampled(image, a, b, known)
            for a in (left, left + 1)
            for b in (top, top + 1)
        )

    fine = {
        (x, y): sampled(x, y)
        for x in range(-margin, 2 * width - 1 + margin)
        for y in range(-margin, 2 * height - 1 + margin)
    }
    result = np.zeros_like(image)
    for i in range(height):
        for j in range(width):
            result[i, j] = sum(
                tap(DOWN_TAPS, a) * tap(DOWN_TAPS, b) * fine[2 * j + a, 2 * i + b]
                for a in range(-margin, margin + 1)
                for b in range(-margin, margin + 1)
            )
    return result


def copied(image, forward):
    """[C, H, W] transformed by `forward` [3, 3], each pixel from the nearest place."""
    result, inverse, (height, width) = np.zeros_like(image), np.linalg.inv(forward), image.shape[1:]
    for i, j in np.ndindex(height, width):
        x, y, _ = inverse @ [j - (width - 1) / 2, i - (height - 1) / 2, 1]
        row, column = round(y + (height - 1) / 2), round(x + (width - 1) / 2)
        result[:, i, j] = image[:, mirrored(row, height), mirrored(column, width)]
    return result


def blitted(image, flip, quarters, x, y):
    """[C, R, R] mirrored left-right, turned clockwise by quarters, shifted by x and y pixels."""
    image = np.rot90(image[:, :, ::-1] if flip else image, -quarters, axes=(1, 2))
    pad, size = image.shape[1] - 1, image.shape[1]
    wide = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
    return wide[:, pad - y : pad - y + size, pad - x : pad - x + size]


def turn(angle):
    return np.array([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0], [0, 0, 1]])


def shift(x, y):
    return np.array([[1.0, 0, x], [0, 1, y], [0, 0, 1]])


def blit_matrix(chance, uniform, p, size):
    """The numbers that `blitted` takes and the matrix of the same transformation."""
    flip = bool(chance[0] < p and math.floor(2 * uniform[0]) == 1)
    quarters = math.floor(4 * uniform[1]) if chance[1] < p else 0
    sides = np.broadcast_to(size, 2)[::-1]  # width, height
    x, y = (
        round((u * 0.25 - 0.125) * side) if chance[2] < p else 0 for u, side in zip(uniform[2:], sides, strict=True)
    )
    mirror = np.diag([-1.0 if flip else 1.0, 1, 1])
    return (flip, quarters, x, y), shift(x, y) @ turn(quarters * math.pi / 2) @ mirror


def geometry_matrix(chance, uniform, normal, p, size):
    matrix, p_turn = np.eye(3), 1 - math.sqrt(1 - p)
    if chance[0] < p:
        s = math.exp(0.2 * math.log(2) * normal[0])
        matrix = np.diag([s, s, 1]) @ matrix
    if chance[1] < p_turn:
        matrix = turn(-math.pi + 2 * math.pi * uniform[0]) @ matrix
    if chance[2] < p:
        s = math.exp(0.2 * math.log(2) * normal[1])
        matrix = np.diag([s, 1 / s, 1]) @ matrix
    if chance[3] < p_turn:
        matrix = turn(-math.pi + 2 * math.pi * uniform[1]) @ matrix
    if chance[4] < p:
        height, width = np.broadcast_to(size, 2)
        matrix = shift(0.125 * normal[2] * width, 0.125 * normal[3] * height) @ matrix
    return matrix


def recoloured(image, chance, uniform, normal, p):
    """[3, R, R], an operation after the other, a pixel at a time."""
    v = np.ones(3) / math.sqrt(3)
    angle = -math.pi + 2 * math.pi * uniform[1]
    result = np.empty_like(image)
    for place in np.ndindex(*image.shape[1:]):
        c = image[:, *place]
        if chance[0] < p:
            c = c + 0.2 * normal[0]
        if chance[1] < p:
            c = c * math.exp(0.5 * math.log(2) * normal[1])
        if chance[2] < p and uniform[0] >= 0.5:
            c = c - 2 * v * (v @ c)
        if chance[3] < p:  # Rodrigues' formula
            c = c * math.cos(angle) + np.cross(v, c) * math.sin(angle) + v * (v @ c) * (1 - math.cos(angle))
        if chance[4] < p:
            grey = v * (v @ c)
            c = grey + (c - grey) * math.exp(math.log(2) * normal[2])
        result[:, *place] = c
    return result


def band_gains(chance, normal, p):
    power, gains = np.array([10, 1, 1, 1]) / 13, np.ones(4)
    for band in range(4):
        if chance[band] < p:
            step = np.ones(4)
            step[band] = math.exp(math.log(2) * normal[band])
            gains = gains * step / math.sqrt((power * step**2).sum())
    return gains


def band_taps():
    """Four impulse responses [43], lowest band first: the half-band filter of sym2 forth and back, three levels."""
    half_band = np.array([-1, 0, 9, 16, 9, 0, -1]) / 32
    impulse = np.zeros(43)
    impulse[21] = 1

    def low_pass(signal, dilation):
        taps = np.zeros(6 * dilation + 1)
        taps[::dilation] = half_band
        return np.convolve(signal, taps, mode="same")

    first = low_pass(impulse, 1)
    second = low_pass(first, 2)
    third = low_pass(second, 4)
    return np.stack([third, second - third, first - second, impulse - first])


def filtered(image, gains):
    """[H, W] through the same one-dimensional filter across and down."""
    taps, (height, width) = gains @ band_taps(), image.shape
    across = np.zeros_like(image)
    for i, j in np.ndindex(height, width):
        across[i, j] = sum(taps[k + 21] * image[i, mirrored(j + k, width)] for k in range(-21, 22))
    result = np.zeros_like(image)
    for i, j in np.ndindex(height, width):
        result[i, j] = sum(taps[k + 21] * across[mirrored(i + k, height), j] for k in range(-21, 22))
    return result


def cut(image, chance, uniform, p):
    """[C, H, W] with a part of half of each side about the place (x, y) set to 0."""
    image, (height, width) = image.copy(), image.shape[1:]
    for i, j in np.ndindex(height, width):
        inside = abs((j + 0.5) / width - uniform[0]) < 0.25 and abs((i + 0.5) / height - uniform[1]) < 0.25
        if inside and chance[0] < p:
            image[:, i, j] = 0
    return image
