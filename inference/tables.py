"""Images of a generator side by side: a grid of samples, truncation and style mixing."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from inference.samples import Sampler, with_styles
from metrics.precision import exact_float32
from models.gan import NoiseMode, StyledGenerator
from models.sampling import to_uint8
from utils.errors import UserError
from utils.image_tables import PADDING, save_rows, save_table

PER_CLASS = 8  # images of a class unless said
UNCONDITIONAL = 64  # images of a generator without classes unless said
COLUMNS = 8  # of a grid without classes


def draw_grid(sampler: Sampler, out: Path, *, count: int | None = None) -> int:
    """Write `count` images to a PNG file, as many of each class or one less; returns how many they are."""
    kinds = len(sampler.chosen)
    count = count or (PER_CLASS * kinds if kinds else UNCONDITIONAL)
    images = list(sampler.images(range(count)))
    rows = [images[start::kinds] for start in range(min(kinds, count))] if kinds else [images]
    columns = max(len(row) for row in rows) if len(rows) > 1 else min(COLUMNS, len(rows[0]))
    save_rows(rows, out, columns=columns, most_rows=len(rows))
    return count


def draw_truncation(
    sampler: Sampler, names: Sequence[str], out: Path, *, psis: Sequence[float], count: int | None = None
) -> int:
    """Write a PNG: a row for each psi, in each column the same latents and noise; returns how many samples it shows.

    psi 1 is the sample as it is, 0 the mean image (StyleGAN, section 4 and appendix B: w_avg + psi (w - w_avg)).
    Args: `names` of all classes by label. Raises UserError for a generator without w.
    """
    generator = with_styles(sampler.generator, "truncation")
    numbers = range(count or default_count(sampler))
    z, labels, noise = sampler.latents(numbers)
    with torch.no_grad(), exact_float32(sampler.device):
        w = generator.mapping(z, labels)
        ws = w[:, None].expand(-1, generator.num_ws, -1)
        rows = [
            synthesize(generator, sampler.batch_size, generator.truncate(ws, psi, sampler.truncation_cutoff), noise)
            for psi in psis
        ]
    heads = [f"psi {psi:g}" for psi in psis]
    save_table(rows, out, row_heads=heads, column_heads=captions(sampler, names, numbers))
    return len(numbers)


def draw_mix(
    sampler: Sampler, names: Sequence[str], out: Path, *, layers: Sequence[int], count: int | None = None
) -> int:
    """Write a PNG: sources A down the left, sources B along the top, at the crossing A with B's styles at `layers`.

    Style mixing of StyleGAN, section 3.1. Noise follows its layer's style, so that all layers give B itself and none A.
    Returns the number of sources on a side. Raises UserError for a generator without w.
    """
    generator = with_styles(sampler.generator, "mix")
    count = count or default_count(sampler, most=8)
    kinds = max(1, len(sampler.chosen))
    sides = [[(2 * (i // kinds) + side) * kinds + i % kinds for i in range(count)] for side in (0, 1)]
    (ws_a, noise_a), (ws_b, noise_b) = (_styles(sampler, generator, numbers) for numbers in sides)
    rows: list[list[Tensor | None]] = [[None, *synthesize(generator, sampler.batch_size, ws_b, noise_b)]]
    sources = synthesize(generator, sampler.batch_size, ws_a, noise_a)
    for row in range(count):
        ws = ws_a[row : row + 1].repeat(count, 1, 1)
        ws[:, layers] = ws_b[:, layers]
        noise = noise_a if isinstance(noise_a, str) else _mixed_noise(noise_a, noise_b, row, layers)
        rows.append([sources[row], *synthesize(generator, sampler.batch_size, ws, noise)])
    heads = [captions(sampler, names, numbers) for numbers in sides]
    save_table(
        rows,
        out,
        row_heads=["", *(f"A {name}" for name in heads[0])],
        column_heads=["", *(f"B {name}" for name in heads[1])],
        margin=3 * PADDING,
    )
    return count


def _styles(
    sampler: Sampler, generator: StyledGenerator, numbers: Sequence[int]
) -> tuple[Tensor, list[Tensor] | NoiseMode]:
    """The truncated styles [n, num_ws, w_dim] and the noise of samples."""
    z, labels, noise = sampler.latents(numbers)
    with torch.no_grad(), exact_float32(sampler.device):
        ws = generator.mapping(z, labels)[:, None].expand(-1, generator.num_ws, -1)
        return generator.truncate(ws, sampler.truncation_psi, sampler.truncation_cutoff), noise


def _mixed_noise(
    noise_a: list[Tensor], noise_b: list[Tensor] | NoiseMode, row: int, layers: Sequence[int]
) -> list[Tensor]:
    """The noise of a row of the table: B's maps at `layers`, at the others that of source `row` of A."""
    return [
        b if layer in layers else a[row : row + 1].expand(len(b), -1, -1, -1)
        for layer, (a, b) in enumerate(zip(noise_a, noise_b, strict=True))
        if isinstance(b, Tensor)
    ]


def synthesize(
    generator: StyledGenerator, batch_size: int, ws: Tensor, noise: list[Tensor] | NoiseMode
) -> list[Tensor]:
    """Images uint8 [C, H, W] on the CPU for styles [n, num_ws, w_dim] and noise; batch by batch."""
    images: list[Tensor] = []
    for start in range(0, len(ws), batch_size):
        part = slice(start, start + batch_size)
        maps = noise if isinstance(noise, str) else [m[part] for m in noise]
        with torch.no_grad(), exact_float32(ws.device):
            images += to_uint8(generator.synthesis(ws[part], maps)).cpu()
    return images


def default_count(sampler: Sampler, most: int = 16) -> int:
    """Samples that are shown unless said: 8, or one of each class if that is more, but no more than `most`."""
    return min(max(8, len(sampler.chosen)), most)


def captions(sampler: Sampler, names: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """The names of the samples' classes; the samples' numbers where there are none."""
    labels = sampler.labels(numbers)
    if labels is None:
        return [str(number) for number in numbers]
    return [names[label] for label in labels.tolist()]


def parse_layers(text: str, count: int) -> list[int]:
    """Layers like `0-3,6`, ascending. Raises UserError for what is none, or lies outside 0 to `count` - 1."""
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise UserError(f"--layers {text}: {part.strip()!r} is neither a layer nor a range; write it like 0-3,6")
        low, high = int(first), int(last or first)
        if not low <= high < count:
            raise UserError(f"--layers {text}: {part.strip()} is not within this generator's layers 0-{count - 1}")
        layers.update(range(low, high + 1))
    return sorted(layers)


def parse_psis(text: str) -> list[float]:
    """Numbers with commas between. Raises UserError for anything else."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(np.isfinite(values)):
        raise UserError(f"--psis {text}: not numbers with commas between; write them like 0,0.5,1")
    return values
