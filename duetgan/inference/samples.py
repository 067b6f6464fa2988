"""Draw samples of a generator, and write pictures of them: a grid, truncation and style mixing.

The number of a sample determines its class and its latents. The latents are drawn with a random key
or come from a file.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from duetgan.inference.latents import Latents, noise_maps, read_latents
from duetgan.inference.settings import GRID, label_of
from duetgan.inference.settings import numbers as parse_numbers
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
from duetgan.utils.errors import UserError, explained, refuse
from duetgan.utils.images import PADDING, save_captioned, save_image, save_table
from duetgan.utils.machine import upload
from duetgan.utils.runlog.progress import Bar


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A generator and the settings for drawing samples from it.

    Samples are numbered from 0. With K chosen classes, sample i has the class `chosen[i % K]`. An
    unconditional generator counts as K = 1. If images may have several labels, a class here is a
    set of labels (`ImageGenerator.label_sets`).

    If `sources` is empty, sample i depends only on `seed`, its class and i // K. Otherwise,
    `sources[i]` is either a seed or saved latents. If it is a seed, sample i depends only on this
    seed and its class. If it is saved latents, sample i is generated from them.

    Raises UserError for a truncation that the generator does not support.
    """

    generator: ImageGenerator
    chosen: Sequence[int] = ()  # classes to sample; empty for an unconditional generator
    seed: int = 0
    sources: Sequence[int | Latents] = ()  # seed or latents of each sample
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
        """Return the class of each of these samples; an empty list if there are no classes."""
        return [self.chosen[number % len(self.chosen)] for number in numbers if self.chosen]

    def labels(self, numbers: Sequence[int]) -> Tensor | None:
        """Return the generator's input `labels` for these samples, on the CPU.

        Returns None for an unconditional generator.
        """
        if not self.chosen:
            return None
        return self.generator.conditions(torch.tensor(self.classes(numbers)))

    def seeds(self, numbers: Sequence[int]) -> list[int]:
        """Return the seed in each sample's random key (seed, "eval", index).

        For a sample with saved latents the seed is 0.
        """
        if not self.sources:
            return [self.seed] * len(numbers)
        sources = [self.sources[number] for number in numbers]
        return [0 if isinstance(source, Latents) else source for source in sources]

    def saved(self, numbers: Sequence[int]) -> dict[int, Latents]:
        """Return a dict from position in `numbers` to the saved latents of the sample there.

        Samples whose source is a seed have no entry.
        """
        sources = enumerate(self.sources[number] for number in numbers if self.sources)
        return {row: source for row, source in sources if isinstance(source, Latents)}

    def refuse_latents(self, remedy: str) -> None:
        """Raise UserError if a source is saved latents. The message ends with `remedy`."""
        for latents in self.saved(range(len(self.sources))).values():
            raise UserError(f"{latents.name}: is a saved w, which has no seed and no z; {remedy}")

    def indices(self, numbers: Sequence[int]) -> list[int]:
        """Return the index in each sample's random key (seed, "eval", index)."""
        if self.sources:
            return self.classes(numbers) or [0] * len(numbers)
        if not self.chosen:
            return list(numbers)
        count, num_labels = len(self.chosen), self.generator.num_labels
        return [number // count * num_labels + self.chosen[number % count] for number in numbers]

    def numpy_seeds(self, numbers: Sequence[int]) -> list[int] | None:
        """Return the seeds with which NVIDIA's programs draw these samples.

        Returns None if `numpy_latents` is False.
        """
        if not self.numpy_latents:
            return None
        if self.sources:
            return [seed % 2**32 for seed in self.seeds(numbers)]
        return [(self.seed + number // max(1, len(self.chosen))) % 2**32 for number in numbers]

    def images(self, numbers: Sequence[int]) -> Tensor:
        """Generate the samples with these numbers: pixel values [n, C, H, W] on the CPU."""
        if self.saved(numbers):
            return torch.stack(synthesize(self, truncated_styles(self, numbers)))
        with full_float32(self.device):
            return generate(
                self.generator,
                labels=self.labels(numbers),
                indices=self.indices(numbers),
                seed=self.seeds(numbers),
                noise_mode=self.noise_mode,
                numpy_seeds=self.numpy_seeds(numbers),
                batch_size=self.batch_size,
                **self.truncation,
            )

    def latents(self, numbers: Sequence[int]) -> "Start":
        """Draw z and noise of the samples with these numbers, and return them with the labels.

        For a sample with saved latents, z and noise are placeholders, drawn from seed 0.
        """
        z, maps = draw(
            self.generator,
            self.indices(numbers),
            self.seeds(numbers),
            numpy_seeds=self.numpy_seeds(numbers),
        )
        labels = self.labels(numbers)
        if labels is not None:
            labels = upload(labels, self.device)
        noise: list[Tensor] | NoiseMode = self.noise_mode
        if noise == "random":
            noise = [upload(noise_map, self.device) for noise_map in maps]
        return Start(upload(z, self.device), labels, noise)

    def styles(self, z: Tensor, labels: Tensor | None, psi: float | None = None) -> Tensor:
        """Map z to truncated styles [n, num_ws, w_dim]; the generator must have a w.

        `psi` is the truncation; None means `truncation_psi`.
        """
        generator = cast(StyledGenerator, self.generator)
        psi = self.truncation_psi if psi is None else psi
        ws = generator.mapping(z, labels)[:, None].expand(-1, generator.num_ws, -1)
        return generator.truncate(
            ws, psi, self.truncation_cutoff, labels=labels, mean=self.truncation_mean
        )


def with_styles(generator: ImageGenerator, operation: str) -> StyledGenerator:
    """Return the generator; raise UserError if it has no w between z and the image.

    `operation` is the name of the operation that needs w, for the message.
    """
    if not generator.has_styles:
        raise UserError(
            f"{operation} works on w, which this generator does not have (one that is still growing "
            "does not show it); it can do grid, interpolate --space z and dataset, without truncation"
        )
    return cast(StyledGenerator, generator)


def chosen_classes(names: str, classes: Sequence[str], most: int | None) -> list[int]:
    """Return the labels of the classes that the option --classes selects.

    Args:
        names: Value of the option: class names with commas in between, or "all".
        classes: Names of all classes; empty if the generator is unconditional.
        most: Number of classes that "all" selects, from the first; None for all.

    Raises:
        UserError: A class is unknown or repeated, or a class is named but there are none.
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


def draw_grid(sampler: Sampler, out: Path, *, count: int | None, names: Sequence[str]) -> int:
    """Write samples as a grid if `out` ends in .png, else one by one into the folder `out`.

    There is a sample for each of the sampler's sources. Without sources, there are `count` samples
    of alternating classes, and within each class the seeds ascend from the sampler's seed. By
    default there are 8 of each class, or 64 without classes. The captions of a grid, and the names
    and text chunks of single images, contain the seed (or the file of latents) and the class name.
    `names[i]` is the class name of label i. Returns the number of samples.
    """
    num_classes, spec = len(sampler.chosen), sampler.generator.spec
    sampler = seeded(sampler, count or GRID[0] * num_classes or GRID[1])
    count = len(sampler.sources)
    heads = captions(sampler, names, range(count))
    picture = out.suffix.lower() == ".png"
    if not picture and len(set(heads)) < len(heads):
        raise UserError(f"{out}: two images would have one name; give each seed and file once")
    images: list[Tensor] = []
    for numbers in Bar(sampler.batches(count), "samples", unit="batch", delay=1):
        if picture:
            images += sampler.images(numbers)
        else:
            _save_images(sampler, numbers, heads, out)
    if not picture:
        return count
    rows = [images[label::num_classes] for label in range(min(num_classes, count))]
    if len(rows) > 1 and not sampler.saved(range(count)):
        seeds = [f"seed\n{seed}" for seed in sampler.seeds(range(0, count, num_classes))]
        classes = [names[label] for label in sampler.chosen]
        save_table(rows, out, row_heads=classes, column_heads=seeds, cell=64, gap=0, spec=spec)
    else:
        columns = max(1, COLUMNS // max(1, num_classes)) * max(1, num_classes)
        save_captioned(images, heads, out, columns=min(columns, 2 * COLUMNS), spec=spec)
    return count


def _save_images(
    sampler: Sampler, numbers: Sequence[int], heads: Sequence[str], folder: Path
) -> None:
    spec = sampler.generator.spec
    seeds, saved = sampler.seeds(numbers), sampler.saved(numbers)
    for row, image in enumerate(sampler.images(numbers)):
        class_name, _, name = heads[numbers[row]].rpartition("\n")
        chunks = {"latents": name}
        if row not in saved:
            chunks = {"seed": str(seeds[row])}
            name = f"seed{seeds[row]:04d}"
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
    count: int | None,
) -> int:
    """Write a PNG with a row for each truncation psi; all rows have the same latents and noise.

    Truncation changes w to mean + psi (w - mean) (StyleGAN, section 4 and appendix B). The mean is
    the one that `sampler.truncation_mean` selects. Each column is a sample: one for each of the
    sampler's sources or, without sources, `count` samples (by default `default_count`).
    `names[i]` is the class name of label i, for the captions. Returns the number of columns. Raises
    UserError for a generator without w.
    """
    with_styles(sampler.generator, "truncation")
    sampler = seeded(sampler, count or default_count(sampler))
    numbers = range(len(sampler.sources))
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
    count: int | None,
    rows: Sequence[int | Latents] = (),
    columns: Sequence[int | Latents] = (),
) -> str:
    """Write a PNG table of mixed styles (StyleGAN, section 3.1).

    The first column has samples A, the first row has samples B. Each other cell has the styles and
    noise of its column's B at `layers`, and those of its row's A at the other layers. The sources
    of A are `rows`, by default `count` seeds that ascend by 2 within each class. The sources of B
    are `columns`, by default the seeds of A plus 1. `names[i]` is the class name of label i, for
    the captions.

    Returns the numbers of samples A and B as text, e.g. "8 x 8". Raises UserError for a generator
    without w.
    """
    with_styles(sampler.generator, "mix")
    count = count or default_count(sampler, most=8)
    sampler_a = seeded(replace(sampler, sources=rows), count, step=2)
    sampler_b = seeded(replace(sampler, sources=columns, seed=sampler.seed + 1), count, step=2)
    numbers_a, numbers_b = range(len(sampler_a.sources)), range(len(sampler_b.sources))
    a, b = truncated_styles(sampler_a, numbers_a), truncated_styles(sampler_b, numbers_b)
    table: list[list[Tensor | None]] = [[None, *synthesize(sampler, b)]]
    for row, image in enumerate(synthesize(sampler, a)):
        table.append([image, *synthesize(sampler, mixed(a, b, row, layers))])
    heads_a = [head.replace("\n", " ") for head in captions(sampler_a, names, numbers_a)]
    save_table(
        table,
        out,
        row_heads=["", *(f"A {head}" for head in heads_a)],
        column_heads=["", *(f"B {head}" for head in captions(sampler_b, names, numbers_b))],
        margin=3 * PADDING,
        spec=sampler.generator.spec,
    )
    return f"{len(a)} x {len(b)}"


def draw_style_tables(
    checkpoint: Checkpoint,
    out: Path,
    *,
    seed: int,
    device: torch.device,
    mean: TruncationMean,
) -> list[str]:
    """Write truncation.png and mixing.png into the folder `out` and return their names.

    `mean` is the `Sampler.truncation_mean`. For a generator without w, write nothing and return an
    empty list.
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
        """Return the inputs for the images that a slice, indices or a mask select."""
        noise = self.noise if isinstance(self.noise, str) else [level[rows] for level in self.noise]
        return Start(self.code[rows], None if self.labels is None else self.labels[rows], noise)

    def batches(self, size: int) -> Iterator["Start"]:
        """Return an iterator over parts of at most `size` images."""
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
    """Return the truncated styles and the noise maps of the samples with these numbers.

    `psi` is the truncation; None means that of the sampler.
    """
    start = sampler.latents(numbers)
    generator = cast(StyledGenerator, sampler.generator)
    noise = start.noise
    if isinstance(noise, str):
        noise = [m.repeat(len(start), 1, 1, 1) for m in noise_maps(generator, noise)]
    with torch.no_grad(), full_float32(sampler.device):
        ws = sampler.styles(start.code, start.labels, psi).clone()
        for row, latents in sampler.saved(numbers).items():
            ws[row : row + 1] = _truncated(sampler, latents, psi)
            maps = noise_maps(generator, latents.noise)
            for level, noise_map in zip(noise, maps, strict=True):
                level[row] = noise_map[0]
    return Start(ws, None, noise)


def _truncated(sampler: Sampler, latents: Latents, psi: float | None) -> Tensor:
    """Return the truncated styles [1, num_ws, w_dim] of saved latents."""
    generator = cast(StyledGenerator, sampler.generator)
    psi = sampler.truncation_psi if psi is None else psi
    mean = "global" if latents.label is None else sampler.truncation_mean
    labels = upload(generator.conditions(torch.tensor([latents.label or 0])), sampler.device)
    ws = latents.ws[None].to(sampler.device)
    return generator.truncate(ws, psi, sampler.truncation_cutoff, labels=labels, mean=mean)


def mixed(a: Start, b: Start, row: int, layers: Sequence[int]) -> Start:
    """Mix sample `row` of `a` with each sample of `b`; return the inputs of the len(b) mixtures.

    The styles and the noise at `layers` come from `b`, all others from `a`.
    """
    mixture = a.take([row] * len(b))
    mixture.code[:, layers] = b.code[:, layers]
    if isinstance(mixture.noise, str) or isinstance(b.noise, str):
        return mixture
    noise = [b.noise[i] if i in layers else level for i, level in enumerate(mixture.noise)]
    return replace(mixture, noise=noise)


def synthesize(sampler: Sampler, start: Start) -> list[Tensor]:
    """Generate the images of the styles in `start`, in batches.

    Returns pixel values [C, H, W] on the CPU.
    """
    images: list[Tensor] = []
    for part in start.batches(sampler.batch_size):
        with torch.no_grad(), full_float32(sampler.device):
            floats = cast(StyledGenerator, sampler.generator).synthesis(part.code, part.noise)
            images += sampler.generator.spec.from_float(floats).cpu()
    return images


def default_count(sampler: Sampler, most: int = 16) -> int:
    """Return the default number of samples.

    It is the number of chosen classes, but at least 8 and at most `most`.
    """
    return min(max(8, len(sampler.chosen)), most)


def seeded(sampler: Sampler, count: int, *, step: int = 1) -> Sampler:
    """Return a copy of the sampler with `count` seeds as sources.

    Within each class, the first seed is the sampler's `seed`, and each further one is larger by
    `step`. A sampler that has sources already is returned unchanged.
    """
    if sampler.sources:
        return sampler
    num_classes = max(1, len(sampler.chosen))
    seeds = [sampler.seed + step * (number // num_classes) for number in range(count)]
    return replace(sampler, sources=seeds)


def load_sources(
    sources: Sequence[int | str | Path | Latents],
    generator: ImageGenerator,
    names: Sequence[str],
    *,
    times: int = 1,
) -> list[int | Latents]:
    """Convert the sources of samples to seeds and latents; read sources that are file names.

    Each seed is repeated `times` times, once for each chosen class. Latents, which have a class
    already, are not repeated. `Sampler` gives classes by position, so latents between the seeds would
    shift the seeds' classes. If `times` is above 1, latents are therefore moved to the end.
    `names[i]` is the class name of label i. Raises UserError for latents that do not fit the
    generator.
    """
    result: list[int | Latents] = []
    for source in sources:
        if isinstance(source, str | Path):
            styled = with_styles(generator, str(source))
            result.append(read_latents(str(source), styled, names))
        elif isinstance(source, Latents):
            styled = with_styles(generator, source.name)
            shape, expected = list(source.ws.shape), [styled.num_ws, styled.w_avg.numel()]
            refuse((shape != expected, f"{source.name}: w is {shape}, not {expected} as here"))
            result.append(source)
        else:  # Seeds become Python's integers, because NumPy's cannot be parts of random keys.
            message = f"seeds: {source!r} is not a whole number, a file name or a projection"
            with explained(TypeError, f"{message}; give one of these"):
                result += [operator.index(source)] * max(times, 1)
    if times > 1:
        result.sort(key=lambda source: isinstance(source, Latents))
    return result


def captions(sampler: Sampler, names: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Return the caption of each of these samples: its class name, if any, and its seed.

    For saved latents, the caption is the name of their file. `names[i]` is the class name of label
    i.
    """
    heads = [f"seed {seed}" for seed in sampler.seeds(numbers)]
    for row, label in enumerate(sampler.classes(numbers)):
        heads[row] = f"{names[label]}\n{heads[row]}"
    for row, latents in sampler.saved(numbers).items():
        heads[row] = latents.name
    return heads


def parse_layers(text: str, count: int) -> list[int]:
    """Parse layers like `0-3,6` of a generator with `count` layers into an ascending list.

    Raises UserError for an invalid text and for layers outside 0 to `count` - 1.
    """
    try:
        return sorted(set(parse_numbers(text, count - 1)))
    except ValueError as error:
        raise UserError(
            f"--layers {text}: {str(error)!r} is no layer or range within 0-{count - 1}, this "
            "generator's layers; write it like 0-3,6"
        ) from None
