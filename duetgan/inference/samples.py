"""Which samples a command shows, what they are made from (numbers -> classes and keys -> latents ->
images), and tables of them: a grid, truncation and style mixing.
"""

from collections.abc import Iterable, Iterator, Sequence
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
from duetgan.utils.memory import available_bytes, upload
from duetgan.utils.runlog.progress import Bar


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A generator and how it is sampled. Samples have numbers, from 0, which go round the chosen
    classes.

    Number i of K chosen classes is the (i // K)-th sample of class `chosen[i % K]`: it depends on
    the seed, its class and i // K alone. Where images may have several labels, a class is a set of
    them (`ImageGenerator.sets`). Raises UserError for a truncation that the generator cannot do.
    """

    generator: ImageGenerator
    chosen: Sequence[int] = ()  # labels of a conditional generator's classes
    seed: int = 0
    truncation_psi: float = 1.0
    truncation_cutoff: int | None = None  # layers that are truncated; None: all
    # of its class or of all, towards which w is truncated
    truncation_mean: TruncationMean = "class"
    noise_mode: NoiseMode = "random"
    # z by NVIDIA's rule: the j-th sample of a class is their seed `seed` + j
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
        """The truncation, as `ImageGenerator.forward` takes it."""
        return {
            "truncation_psi": self.truncation_psi,
            "truncation_cutoff": self.truncation_cutoff,
            "truncation_mean": self.truncation_mean,
        }

    @property
    def device(self) -> torch.device:
        return device_of(self.generator)

    def batches(self, count: int) -> list[range]:
        """The numbers of `count` samples, batch by batch."""
        size = self.batch_size
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def classes(self, numbers: Sequence[int]) -> list[int]:
        """The samples' classes; none if the generator is unconditional."""
        return [self.chosen[number % len(self.chosen)] for number in numbers if self.chosen]

    def labels(self, numbers: Sequence[int]) -> Tensor | None:
        """What the generator takes for these, on the CPU; None if it is unconditional."""
        return (
            self.generator.conditions(torch.tensor(self.classes(numbers))) if self.chosen else None
        )

    def indices(self, numbers: Sequence[int]) -> list[int]:
        """The samples' indices in their keys (seed, "eval", index)."""
        if not self.chosen:
            return list(numbers)
        count = len(self.chosen)
        return [
            number // count * self.generator.kinds + self.chosen[number % count]
            for number in numbers
        ]

    def numpy_seeds(self, numbers: Sequence[int]) -> list[int] | None:
        """NVIDIA's seeds of the samples, where z is drawn by its rule."""
        if not self.numpy_latents:
            return None
        return [(self.seed + number // max(1, len(self.chosen))) % 2**32 for number in numbers]

    def images(self, numbers: Sequence[int]) -> Tensor:
        """The samples, [n, C, H, W] on the CPU, as files have them (`ImageSpec.from_float`)."""
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
        """z with the labels, and the noise of the samples."""
        z, maps = draw(
            self.generator, self.indices(numbers), self.seed, numpy_seeds=self.numpy_seeds(numbers)
        )
        labels = self.labels(numbers)
        noise = (
            [upload(m, self.device) for m in maps]
            if self.noise_mode == "random"
            else self.noise_mode
        )
        return Start(
            upload(z, self.device), None if labels is None else upload(labels, self.device), noise
        )

    def styles(self, z: Tensor, labels: Tensor | None, psi: float | None = None) -> Tensor:
        """Return the truncated styles [n, num_ws, w_dim] of a generator with w; by the sampler's
        psi unless said.
        """
        generator, psi = (
            cast(StyledGenerator, self.generator),
            self.truncation_psi if psi is None else psi,
        )
        ws = generator.mapping(z, labels)[:, None].expand(-1, generator.num_ws, -1)
        return generator.truncate(
            ws, psi, self.truncation_cutoff, labels=labels, mean=self.truncation_mean
        )


def with_styles(generator: ImageGenerator, what: str) -> StyledGenerator:
    """The generator, if there is a w between z and the image; UserError naming `what` needs one if
    there is none.
    """
    if not generator.has_styles:
        raise UserError(
            f"{what} works on w, which this generator does not have (one that is still growing does not show it); "
            "it can do grid, interpolate --space z and dataset, without truncation"
        )
    return cast(StyledGenerator, generator)


def chosen_classes(names: str, classes: Sequence[str], most: int | None = None) -> list[int]:
    """Labels of `all` classes (the first `most`), or of those named with commas between. Raises
    UserError for an unknown or a repeated class, and for any name where there are no `classes`.
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

COLUMNS = 8  # of a grid without classes
# px that small images are enlarged to; the picture, Pillow's copy, and samples and file
CELL, COPIES = 64, 3


def draw_grid(
    sampler: Sampler, out: Path, *, count: int | None = None, names: Sequence[str] = ()
) -> int:
    """Write `count` images to a PNG file, or one by one into a folder (`save_image`), as many of
    each class or one less; returns how many they are. A single image has seed, index (of its key)
    and class, of `names`, in its name and text chunks. Raises UserError for a picture that memory
    does not hold.
    """
    kinds, spec = len(sampler.chosen), sampler.generator.spec
    count = count or GRID[0] * kinds or GRID[1]
    height, width = (max(side, CELL) for side in spec.size)  # of a picture's cell, about
    fits = available_bytes() // (COPIES * 3 * height * width)
    picture = out.suffix.lower() == ".png"
    if picture and count > fits:
        raise UserError(
            f"--n {count}: memory holds a picture of about {fits:,}; --out FOLDER writes any number, one by one"
        )
    bar: Iterable[range] = Bar(sampler.batches(count), "samples", unit="batch", delay=1)
    if not picture:
        for numbers in bar:
            words = captions(sampler, names, numbers) if kinds else [""] * len(numbers)
            for index, word, image in zip(
                sampler.indices(numbers), words, sampler.images(numbers), strict=True
            ):
                about = {"seed": str(sampler.seed), "index": str(index)} | (
                    {"class": word} if word else {}
                )
                name = "-".join(
                    f"{key}{value}" if key != "class" else value for key, value in about.items()
                )
                save_image(
                    image.permute(1, 2, 0).numpy(), spec, out / name.replace("/", "_"), about
                )
        return count
    images = [image for numbers in bar for image in sampler.images(numbers)]
    rows = [images[start::kinds] for start in range(min(kinds, count))] if kinds else [images]
    columns = max(len(row) for row in rows) if len(rows) > 1 else min(COLUMNS, len(rows[0]))
    save_rows(rows, out, columns=columns, spec=spec)
    return count


def draw_truncation(
    sampler: Sampler,
    names: Sequence[str],
    out: Path,
    *,
    psis: Sequence[float],
    count: int | None = None,
) -> int:
    """Write a PNG: a row for each psi, in each column the same latents and noise; returns how many
    samples it shows.

    StyleGAN, section 4 and appendix B: mean + psi (w - mean), of the sample's class unless the
    sampler says otherwise.
    Raises UserError for a generator without w.
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
    """Write a PNG: sources A down the left, sources B along the top, at the crossing A with B's
    styles at `layers`.

    Style mixing of StyleGAN, section 3.1. Noise follows its layer's style, so that all layers give
    B itself and none A.
    Returns the number of sources on a side. Raises UserError for a generator without w.
    """
    with_styles(sampler.generator, "mix")
    count = count or default_count(sampler, most=8)
    kinds = max(1, len(sampler.chosen))
    sides = [
        [(2 * (i // kinds) + side) * kinds + i % kinds for i in range(count)] for side in (0, 1)
    ]
    a, b = (truncated_styles(sampler, numbers) for numbers in sides)
    rows: list[list[Tensor | None]] = [[None, *synthesize(sampler, b)]]
    for row, source in enumerate(synthesize(sampler, a)):
        rows.append([source, *synthesize(sampler, mixed(a, b, row, layers))])
    down, along = (
        ["", *(f"{side} {name}" for name in captions(sampler, names, numbers))]
        for side, numbers in zip("AB", sides, strict=True)
    )
    save_table(
        rows,
        out,
        row_heads=down,
        column_heads=along,
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
    """Write truncation.png and mixing.png into the folder `out`; returns the names, none for a
    generator without w.
    """
    generator = generator_from(checkpoint, device, several=True)
    if not generator.has_styles:
        return []
    names = generator.label_names(checkpoint["classes"])
    sampler = Sampler(
        generator=generator, chosen=range(generator.kinds), seed=seed, truncation_mean=mean
    )
    draw_truncation(sampler, names, out / "truncation.png", psis=(0, 0.3, 0.5, 0.7, 1), count=10)
    draw_mix(
        sampler,
        names,
        out / "mixing.png",
        layers=range(cast(StyledGenerator, generator).num_ws // 2),
        count=6,
    )
    return ["truncation.png", "mixing.png"]


@dataclass(frozen=True)
class Start:
    """What images are drawn from; an edit leaves what does not change with w or z as it is."""

    code: Tensor  # the styles [n, num_ws, w_dim], or z [n, z_dim]
    # int64 [n] beside z; None without classes, and beside w, which has the class in it
    labels: Tensor | None
    noise: list[Tensor] | NoiseMode  # maps [n, 1, H, W] for each layer, or the mode's name

    def __len__(self) -> int:
        return len(self.code)

    def take(self, rows: Any) -> "Start":
        """Some of the images: a slice, numbers or a mask."""
        noise = self.noise if isinstance(self.noise, str) else [level[rows] for level in self.noise]
        return Start(self.code[rows], None if self.labels is None else self.labels[rows], noise)

    def batches(self, size: int) -> Iterator["Start"]:
        """All images in parts of at most `size`."""
        return (self.take(slice(first, first + size)) for first in range(0, len(self), size))

    @staticmethod
    def join(parts: Sequence["Start"]) -> "Start":
        """All images of several; they are of one generator and one mode of noise."""
        labels = [part.labels for part in parts if part.labels is not None]
        noise = parts[0].noise
        if not isinstance(noise, str):
            noise = [
                torch.cat(levels) for levels in zip(*(part.noise for part in parts), strict=True)
            ]
        return Start(
            torch.cat([part.code for part in parts]), torch.cat(labels) if labels else None, noise
        )


def truncated_styles(sampler: Sampler, numbers: Sequence[int], psi: float | None = None) -> Start:
    """The truncated styles and the noise of samples of a generator with w; the sampler's psi unless
    one is given.
    """
    start = sampler.latents(numbers)
    with torch.no_grad(), full_float32(sampler.device):
        return Start(sampler.styles(start.code, start.labels, psi), None, start.noise)


def mixed(a: Start, b: Start, row: int, layers: Sequence[int]) -> Start:
    """Source `row` of A with the styles and noise of each source of B at `layers`."""
    own = a.take([row] * len(b))
    own.code[:, layers] = b.code[:, layers]
    if isinstance(own.noise, str) or isinstance(b.noise, str):
        return own
    return replace(
        own, noise=[b.noise[i] if i in layers else level for i, level in enumerate(own.noise)]
    )


def synthesize(sampler: Sampler, start: Start) -> list[Tensor]:
    """Images [C, H, W] on the CPU, as files have them, of styles; batch by batch."""
    images: list[Tensor] = []
    for part in start.batches(sampler.batch_size):
        with torch.no_grad(), full_float32(sampler.device):
            floats = cast(StyledGenerator, sampler.generator).synthesis(part.code, part.noise)
            images += sampler.generator.spec.from_float(floats).cpu()
    return images


def default_count(sampler: Sampler, most: int = 16) -> int:
    """Samples that are shown unless said: 8, or one of each class if that is more, but no more than
    `most`.
    """
    return min(max(8, len(sampler.chosen)), most)


def captions(sampler: Sampler, names: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """The names of the samples' classes; the samples' numbers where there are none."""
    return [names[label] for label in sampler.classes(numbers)] or [
        str(number) for number in numbers
    ]


def parse_layers(text: str, count: int) -> list[int]:
    """Layers like `0-3,6`, ascending. Raises UserError for what is none, or lies outside 0 to
    `count` - 1.
    """
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise UserError(
                f"--layers {text}: {part.strip()!r} is neither a layer nor a range; write it like 0-3,6"
            )
        low, high = int(first), int(last or first)
        if not low <= high < count:
            raise UserError(
                f"--layers {text}: {part.strip()} is not within this generator's layers 0-{count - 1}"
            )
        layers.update(range(low, high + 1))
    return sorted(layers)
