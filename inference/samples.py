"""Which samples a command shows, and what they are made from: numbers -> classes and keys -> latents -> images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from metrics.precision import device_of, exact_float32
from models.gan import ImageGenerator, NoiseMode, StyledGenerator
from models.sampling import draw, generate
from utils.cli import did_you_mean
from utils.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A generator and how it is sampled. Samples have numbers, from 0, which go round the chosen classes.

    Number i of K chosen classes is the (i // K)-th sample of class `chosen[i % K]`. That sample depends on the seed,
    its class and i // K alone: not on what else is chosen, nor on how many are drawn. Raises UserError for a
    truncation that the generator cannot do.
    """

    generator: ImageGenerator
    chosen: Sequence[int] = ()  # labels of a conditional generator's classes
    seed: int = 0
    truncation_psi: float = 1.0
    truncation_cutoff: int | None = None  # layers that are truncated; None: all
    noise_mode: NoiseMode = "random"
    batch_size: int = 64  # changes speed and memory only

    def __post_init__(self) -> None:
        if bool(self.chosen) != bool(self.generator.classes):
            raise ValueError("classes are chosen from a conditional generator, and only from one")
        truncated = self.truncation_psi != 1 or self.truncation_cutoff is not None
        if truncated:
            layers = with_styles(self.generator, "--truncation-psi or --truncation-cutoff").num_ws
            if not 0 <= (self.truncation_cutoff or 0) <= layers:
                raise UserError(
                    f"--truncation-cutoff {self.truncation_cutoff}: give 0 to {layers}, this generator's layers"
                )

    @property
    def device(self) -> torch.device:
        """Where the generator computes."""
        return device_of(self.generator)

    def labels(self, numbers: Sequence[int]) -> Tensor | None:
        """The samples' classes int64 [n] on the CPU; None if the generator is unconditional."""
        if not self.chosen:
            return None
        return torch.tensor([self.chosen[number % len(self.chosen)] for number in numbers], dtype=torch.int64)

    def indices(self, numbers: Sequence[int]) -> list[int]:
        """The samples' indices in their keys (seed, "eval", index)."""
        if not self.chosen:
            return list(numbers)
        count = len(self.chosen)
        return [number // count * self.generator.classes + self.chosen[number % count] for number in numbers]

    def images(self, numbers: Sequence[int]) -> Tensor:
        """The samples, uint8 [n, C, H, W] on the CPU."""
        with exact_float32(self.device):
            return generate(
                self.generator,
                labels=self.labels(numbers),
                indices=self.indices(numbers),
                seed=self.seed,
                truncation_psi=self.truncation_psi,
                truncation_cutoff=self.truncation_cutoff,
                noise_mode=self.noise_mode,
                batch_size=self.batch_size,
            )

    def latents(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor | None, list[Tensor] | NoiseMode]:
        """z [n, z_dim], labels [n] or None, and the noise (maps [n, 1, H, W] for each layer, or the mode's name)."""
        z, maps = draw(self.generator, self.indices(numbers), self.seed)
        labels = self.labels(numbers)
        noise = [m.to(self.device) for m in maps] if self.noise_mode == "random" else self.noise_mode
        return z.to(self.device), None if labels is None else labels.to(self.device), noise


def with_styles(generator: ImageGenerator, what: str) -> StyledGenerator:
    """The generator, if there is a w between z and the image; UserError naming `what` needs one if there is none."""
    if not generator.has_styles:
        raise UserError(
            f"{what} works on w, which this generator does not have (one that is still growing does not show it); "
            "it can do grid, interpolate --space z and dataset, without truncation"
        )
    return cast(StyledGenerator, generator)


def chosen_classes(names: str, classes: Sequence[str], *, conditional: bool = True) -> list[int]:
    """Labels of `all` classes, or of those named with commas between; none where the generator is not conditional.

    Raises UserError for an unknown or a repeated class, and for any name where there are no classes.
    """
    if not conditional:
        if names != "all":
            raise UserError(f"--classes {names}: this generator is unconditional and has none; leave it out")
        return []
    if names == "all":
        return list(range(len(classes)))
    chosen = []
    for name in (part.strip() for part in names.split(",")):
        if name not in classes:
            near = did_you_mean(name, classes)
            raise UserError(f"--classes: no class {name!r}{near}; there are {', '.join(classes)}")
        chosen.append(classes.index(name))
    if len(set(chosen)) < len(chosen):
        raise UserError(f"--classes {names}: a class is named twice; name it once")
    return chosen
