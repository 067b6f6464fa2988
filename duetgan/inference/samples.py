"""Sampling of a generator, and pictures of samples: a grid, truncation and style mixing.

A sample's number gives its class and the key of its random numbers, which give its latents.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from duetgan.inference.settings import GRID, label_of
from duetgan.metrics.features.precision import device_of, full_float32
from duetgan.models.gan import (
    ImageGenerator,
    NoiseMode,
    StyledGenerator,
    TruncationMean,
    draw,
    generate,
)
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.errors import UserError
from duetgan.utils.images import PADDING, save_image, save_rows, save_table
from duetgan.utils.machine import upload
from duetgan.utils.runlog.progress import Bar


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A generator and the settings to sample it. Samples are numbered from 0, and their classes
    cycle through `chosen`.

    With K chosen classes, number i is the (i // K)-th sample of class `chosen[i % K]`; it depends
    only on the seed, its class and i // K. If images may have several labels, a class is a set of
    them (`ImageGenerator.label_sets`). Raises UserError for a truncation that the generator does
    not support.
    """

    generator: ImageGenerator
    chosen: Sequence[int] = ()  # classes to sample; empty for an unconditional generator
    seed: int = 0
    truncation_psi: float = 1.0
    truncation_cutoff: int | None = None  # number of layers to truncate, from the first; None: all
    # truncate w towards the mean of the sample's class, or of all samples ("global")
    truncation_mean: TruncationMean = "class"
    noise_mode: NoiseMode = "random"
    # draw z as NVIDIA's programs do: sample j of a class is the one of their seed `seed` + j
    numpy_latents: bool = False
    batch_size: int = 64  # changes speed and memory only

    def __post_init__(self) -> None:
        if bool(self.chosen) != bool(self.generator.classes):
            raise ValueError("classes are chosen from a conditional generator, and only from one")
        if self.truncation_psi != 1 or self.truncation_cutoff is not None:
            layers = with_styles(self.generator, "--truncation-psi or --truncation-cutoff").num_ws
            if not 0 <= (self.truncation_cutoff or 0) <= layers:
                raise UserError(
                    f"--truncation-cutoff {self.truncation_cutoff}: give 0 to {layers}, this generator's layers"
                )

    @property
    def truncation(self) -> dict[str, Any]:
        """The keyword arguments of `ImageGenerator.forward` for the truncation."""
        return {
            "truncation_psi": self.truncation_psi,
            "truncation_cutoff": self.truncation_cutoff,
            "truncation_mean": self.truncation_mean,
        }

    @property
    def device(self) -> torch.device:
        return device_of(self.generator)

    def batches(self, count: int) -> list[range]:
        """Return the sample numbers 0 to `count` - 1 as ranges of at most `batch_size`."""
        size = self.batch_size
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def classes(self, numbers: Sequence[int]) -> list[int]:
        """Return the class of each sample number; an empty list for an unconditional generator."""
        return [self.chosen[number % len(self.chosen)] for number in numbers if self.chosen]

    def labels(self, numbers: Sequence[int]) -> Tensor | None:
        """Return the generator's `labels` input for these samples, on the CPU.

        Returns None for an unconditional generator.
        """
        if not self.chosen:
            return None
        return self.generator.conditions(torch.tensor(self.classes(numbers)))

    def indices(self, numbers: Sequence[int]) -> list[int]:
        """Return the last part of each sample's random key, (seed, "eval", index)."""
        if not self.chosen:
            return list(numbers)
        count, num_labels = len(self.chosen), self.generator.num_labels
        return [number // count * num_labels + self.chosen[number % count] for number in numbers]

    def numpy_seeds(self, numbers: Sequence[int]) -> list[int] | None:
        """Return the samples' seeds in NVIDIA's programs; None without `numpy_latents`."""
        if not self.numpy_latents:
            return None
        return [(self.seed + number // max(1, len(self.chosen))) % 2**32 for number in numbers]

    def images(self, numbers: Sequence[int]) -> Tensor:
        """Draw the samples with these numbers, [n, C, H, W] on the CPU, with values as in files."""
        with full_float32(self.device):
            return generate(
                self.generator,
                labels=self.labels(numbers),
                indices=self.indices(numbers),
                seed=self.seed,
                noise_mode=self.noise_mode,
                numpy_seeds=self.numpy_seeds(numbers),
                batch_size=self.batch_size,
                **self.truncation,
            )

    def latents(self, numbers: Sequence[int]) -> "Start":
        """Draw the z and the noise of the samples with these numbers, with their labels."""
        z, maps = draw(
            self.generator, self.indices(numbers), self.seed, numpy_seeds=self.numpy_seeds(numbers)
        )
        labels = self.labels(numbers)
        if labels is not None:
            labels = upload(labels, self.device)
        noise: list[Tensor] | NoiseMode = self.noise_mode
        if noise == "random":
            noise = [upload(noise_map, self.device) for noise_map in maps]
        return Start(upload(z, self.device), labels, noise)

    def styles(self, z: Tensor, labels: Tensor | None, psi: float | None = None) -> Tensor:
        """Map z to truncated styles [n, num_ws, w_dim]; the generator must have a w. `psi` defaults
        to `truncation_psi`.
        """
        generator = cast(StyledGenerator, self.generator)
        psi = self.truncation_psi if psi is None else psi
        ws = generator.mapping(z, labels)[:, None].expand(-1, generator.num_ws, -1)
        return generator.truncate(
            ws, psi, self.truncation_cutoff, labels=labels, mean=self.truncation_mean
        )


def with_styles(generator: ImageGenerator, operation: str) -> StyledGenerator:
    """Return the generator; raise UserError if it has no w between z and the image.

    The message names the `operation` that needs w.
    """
    if not generator.has_styles:
        raise UserError(
            f"{operation} works on w, which this generator does not have (one that is still growing "
            "does not show it); it can do grid, interpolate --space z and dataset, without truncation"
        )
    return cast(StyledGenerator, generator)


def chosen_classes(names: str, classes: Sequence[str], most: int | None = None) -> list[int]:
    """Return the labels that the option --classes selects: comma-separated class names, or "all",
    of which the first `most` are taken.

    Raises UserError for an unknown or a repeated class, and for any name if `classes` is empty.
    """
    if names == "all":
        return list(range(len(classes)))[:most]
    if not classes:
        raise UserError(
            f"--classes {names}: this generator is unconditional and has none; leave it out"
        )
    parts = [names] if names in classes else names.split(",")
    chosen = [label_of(part.strip(), classes, "--classes") for part in parts]
    if len(set(chosen)) < len(chosen):
        raise UserError(f"--classes {names}: a class is named twice; name it once")
    return chosen


# --- tables

COLUMNS = 8  # columns of a grid without classes


def draw_grid(
    sampler: Sampler, out: Path, *, count: int | None = None, names: Sequence[str] = ()
) -> int:
    """Write `count` samples as a grid if `out` ends in .png, else one by one into the folder `out`.

    Two classes differ by at most one sample. File names and text chunks of single images hold the
    seed, the index (`Sampler.indices`) and the class's name from `names`. Returns the number of
    samples.
    """
    num_classes, spec = len(sampler.chosen), sampler.generator.spec
    count = count or GRID[0] * num_classes or GRID[1]
    picture = out.suffix.lower() == ".png"
    images: list[Tensor] = []
    for numbers in Bar(sampler.batches(count), "samples", unit="batch", delay=1):
        if picture:
            images += sampler.images(numbers)
        else:
            _save_images(sampler, numbers, names, out)
    if not picture:
        return count
    rows = [images]
    if num_classes:
        rows = [images[label::num_classes] for label in range(min(num_classes, count))]
    columns = max(len(row) for row in rows) if len(rows) > 1 else min(COLUMNS, len(rows[0]))
    save_rows(rows, out, columns=columns, spec=spec)
    return count


def _save_images(
    sampler: Sampler, numbers: Sequence[int], names: Sequence[str], folder: Path
) -> None:
    spec = sampler.generator.spec
    classes = captions(sampler, names, numbers) if sampler.chosen else [""] * len(numbers)
    images = sampler.images(numbers)
    for index, class_name, image in zip(sampler.indices(numbers), classes, images, strict=True):
        name, chunks = f"seed{sampler.seed}-index{index}", {"seed": str(sampler.seed)}
        chunks["index"] = str(index)
        if class_name:
            name += f"-{class_name}"
            chunks["class"] = class_name
        path = folder / name.replace("/", "_")
        save_image(image.permute(1, 2, 0).numpy(), spec, path, chunks)


def draw_truncation(
    sampler: Sampler,
    names: Sequence[str],
    out: Path,
    *,
    psis: Sequence[float],
    count: int | None = None,
) -> int:
    """Write a PNG with a row for each truncation psi; all rows have the same latents and noise.

    StyleGAN, section 4 and appendix B: w becomes mean + psi (w - mean), with the mean of
    `sampler.truncation_mean`. Returns the number of columns. Raises UserError for a generator
    without w.
    """
    with_styles(sampler.generator, "truncation")
    numbers = range(count or default_count(sampler))
    rows = [synthesize(sampler, truncated_styles(sampler, numbers, psi)) for psi in psis]
    heads = [f"psi {psi:g}" for psi in psis]
    save_table(
        rows,
        out,
        row_heads=heads,
        column_heads=captions(sampler, names, numbers),
        spec=sampler.generator.spec,
    )
    return len(numbers)


def draw_mix(
    sampler: Sampler,
    names: Sequence[str],
    out: Path,
    *,
    layers: Sequence[int],
    count: int | None = None,
) -> int:
    """Write a PNG with samples A in the first column and samples B in the first row; each other
    cell is its row's A with the styles of its column's B at `layers`.

    Style mixing of StyleGAN, section 3.1. The noise of a layer is that of its style's sample, so
    that with all layers a cell equals B, and with none A. Returns the number of samples A and of B.
    Raises UserError for a generator without w.
    """
    with_styles(sampler.generator, "mix")
    count = count or default_count(sampler, most=8)
    # A takes the even samples of each class, B the odd ones.
    num_classes = max(1, len(sampler.chosen))
    numbers_a = [2 * (i // num_classes) * num_classes + i % num_classes for i in range(count)]
    numbers_b = [number + num_classes for number in numbers_a]
    a, b = truncated_styles(sampler, numbers_a), truncated_styles(sampler, numbers_b)
    rows: list[list[Tensor | None]] = [[None, *synthesize(sampler, b)]]
    for row, image in enumerate(synthesize(sampler, a)):
        rows.append([image, *synthesize(sampler, mixed(a, b, row, layers))])
    save_table(
        rows,
        out,
        row_heads=["", *(f"A {name}" for name in captions(sampler, names, numbers_a))],
        column_heads=["", *(f"B {name}" for name in captions(sampler, names, numbers_b))],
        margin=3 * PADDING,
        spec=sampler.generator.spec,
    )
    return count


def draw_style_tables(
    checkpoint: Checkpoint,
    out: Path,
    *,
    seed: int,
    device: torch.device,
    mean: TruncationMean = "class",
) -> list[str]:
    """Write truncation.png and mixing.png into the folder `out` and return their names; return an
    empty list for a generator without w.
    """
    generator = generator_from(checkpoint, device, several=True)
    if not generator.has_styles:
        return []
    names = generator.label_names(checkpoint["classes"])
    sampler = Sampler(
        generator=generator, chosen=range(generator.num_labels), seed=seed, truncation_mean=mean
    )
    draw_truncation(sampler, names, out / "truncation.png", psis=(0, 0.3, 0.5, 0.7, 1), count=10)
    layers = range(cast(StyledGenerator, generator).num_ws // 2)
    draw_mix(sampler, names, out / "mixing.png", layers=layers, count=6)
    return ["truncation.png", "mixing.png"]


@dataclass(frozen=True)
class Start:
    """The inputs of a generator for n images: styles or z, labels and noise."""

    code: Tensor  # the styles [n, num_ws, w_dim], or z [n, z_dim]
    # int64 [n]; None without classes, and for styles, which depend on the class already
    labels: Tensor | None
    noise: list[Tensor] | NoiseMode  # a map [n, 1, H, W] per layer, or a mode's name

    def __len__(self) -> int:
        return len(self.code)

    def take(self, rows: Sequence[int] | slice | Tensor) -> "Start":
        """Select images by a slice, indices or a mask."""
        noise = self.noise if isinstance(self.noise, str) else [level[rows] for level in self.noise]
        return Start(self.code[rows], None if self.labels is None else self.labels[rows], noise)

    def batches(self, size: int) -> Iterator["Start"]:
        """Split into parts of at most `size` images."""
        return (self.take(slice(first, first + size)) for first in range(0, len(self), size))

    @staticmethod
    def join(parts: Sequence["Start"]) -> "Start":
        """Concatenate inputs of the same generator and noise mode."""
        code = torch.cat([part.code for part in parts])
        labels = [part.labels for part in parts if part.labels is not None]
        noise = parts[0].noise
        if not isinstance(noise, str):
            levels = zip(*(part.noise for part in parts), strict=True)
            noise = [torch.cat(maps) for maps in levels]
        return Start(code, torch.cat(labels) if labels else None, noise)


def truncated_styles(sampler: Sampler, numbers: Sequence[int], psi: float | None = None) -> Start:
    """Return the truncated styles and the noise of the samples with these numbers. `psi` defaults
    to the sampler's.
    """
    start = sampler.latents(numbers)
    with torch.no_grad(), full_float32(sampler.device):
        return Start(sampler.styles(start.code, start.labels, psi), None, start.noise)


def mixed(a: Start, b: Start, row: int, layers: Sequence[int]) -> Start:
    """Mix sample `row` of A with each sample of B, whose styles and noise are used at `layers`."""
    mixture = a.take([row] * len(b))
    mixture.code[:, layers] = b.code[:, layers]
    if isinstance(mixture.noise, str) or isinstance(b.noise, str):
        return mixture
    noise = [b.noise[i] if i in layers else level for i, level in enumerate(mixture.noise)]
    return replace(mixture, noise=noise)


def synthesize(sampler: Sampler, start: Start) -> list[Tensor]:
    """Generate the images of styles in batches: [C, H, W] on the CPU, with values as in files."""
    images: list[Tensor] = []
    for part in start.batches(sampler.batch_size):
        with torch.no_grad(), full_float32(sampler.device):
            floats = cast(StyledGenerator, sampler.generator).synthesis(part.code, part.noise)
            images += sampler.generator.spec.from_float(floats).cpu()
    return images


def default_count(sampler: Sampler, most: int = 16) -> int:
    """Return the default number of samples: 8, or one of each class if that is more, but no more
    than `most`.
    """
    return min(max(8, len(sampler.chosen)), most)


def captions(sampler: Sampler, names: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Return the class names of samples, or their numbers if the generator is unconditional."""
    if not sampler.chosen:
        return [str(number) for number in numbers]
    return [names[label] for label in sampler.classes(numbers)]


def parse_layers(text: str, count: int) -> list[int]:
    """Parse layers like `0-3,6` into an ascending list. Raises UserError for an invalid text and
    for layers outside 0 to `count` - 1.
    """
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.replace(" ", ""))
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not low <= high < count:
            raise UserError(
                f"--layers {text}: {part.strip()!r} is no layer or range within 0-{count - 1}, this "
                "generator's layers; write it like 0-3,6"
            )
        layers.update(range(low, high + 1))
    return sorted(layers)
