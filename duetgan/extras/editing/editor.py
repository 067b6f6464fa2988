"""Edits: move images of a generator from one class of a classifier towards another, along a
direction in w or z that changes little else.

The slope of a class is the mean gradient of its logit by w or z. The direction n from class a to b
maximises (g n)^2 / n A n with g = slope_b - slope_a and

    A = 1 + pixel_weight * mean change of pixels + keep_weight * change of the other classes

where 1 is the identity and each change is scaled to a trace of `size`, the dimension of w or z.
With both weights 0, n is g itself (InterFaceGAN's normal, 1907.10786, is that of a linear model).
With pixel_weight 0 and an infinite keep_weight, n is g without its component along the other
classes, InterFaceGAN's conditional manipulation (section 2.3).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import torch
from torch import Tensor

from duetgan.extras.editing.config import EditConfig
from duetgan.inference.samples import Sampler, Start, truncated_styles, with_styles
from duetgan.inference.settings import label_of
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.metrics.features.precision import full_float32
from duetgan.models.classifier import Classifier
from duetgan.models.gan import StyledGenerator
from duetgan.models.preparation import fit_images
from duetgan.utils.distributed.collectives import widest
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import generator as keyed_generator
from duetgan.utils.seeding import seed_of

# number of other classes whose logits an edit preserves: the most probable ones of the samples
PRESERVED = 8
DRAWS = 4  # random vectors for each image that estimate the change of its pixels
PATIENCE = 50  # largest number of samples to draw for each sample that is needed of a class
GRID = 24  # equal steps at which the probability of the target class is checked


@dataclass(frozen=True)
class Direction:
    """A direction from one class to another; a step of 1 adds `vector` to w or z."""

    source: int
    target: int
    # float32 [size of w or z]; its length is the spread of the samples it was computed from
    vector: Tensor


class Editor:
    """Directions from class to class, and edits of images along them. An edit in w moves the styles
    of all layers; an edit in z leaves the generator's label unchanged. Results are deterministic
    for the sampler's seed.
    """

    def __init__(
        self,
        sampler: Sampler,
        classifier: Classifier,
        names: Sequence[str],
        config: EditConfig | None = None,
    ) -> None:
        """Set up the editor; `names` are the names of the classifier's classes. Raises UserError
        for a space that the generator does not have.
        """
        self.sampler = sampler
        self.classifier = classifier
        self.names = list(names)
        self.config = config or EditConfig()
        self.device = sampler.device
        self.generator = sampler.generator
        self.generator.spec.need_plain("an edit")
        self.space = self.config.space or ("w" if self.generator.has_styles else "z")
        if self.space == "w":
            self.size = with_styles(self.generator, "--space w").w_avg.numel()
        else:
            self.size = self.generator.z_dim
        self.direction = cache(self._direction)
        # Directions are computed from other samples than those that are edited.
        seed = seed_of(sampler.seed, "edit") % 2**32
        self._samples = cache(lambda label: self.starts(label, self.config.samples, seed=seed))

    # --- images

    def start(self, sampler: Sampler, numbers: Sequence[int]) -> Start:
        """Return samples by number: z, or truncated styles if the space is w."""
        if self.space == "w":
            return truncated_styles(sampler, numbers)
        sampler.refuse_latents("leave out --space z")
        return sampler.latents(numbers)

    def moved(self, start: Start, offsets: Tensor) -> Tensor:
        """Return the images [n, C, H, H] in about [-1, 1], moved by `offsets` [n, size];
        differentiable.
        """
        offsets = offsets.to(start.code.dtype)
        if self.space == "z":
            return self.generator(
                start.code + offsets, start.labels, noise=start.noise, **self.sampler.truncation
            )
        return cast(StyledGenerator, self.generator).synthesis(
            start.code + offsets[:, None], start.noise
        )

    def starts(self, label: int, count: int, *, seed: int | None = None) -> Start:
        """Return the first `count` samples that the classifier predicts as `label`. `seed` replaces
        the sampler's seed.

        A conditional generator draws samples of the class `label` alone. Raises UserError if fewer
        than `count` are found among PATIENCE times as many.
        """
        sampler = self.sampler if seed is None else replace(self.sampler, seed=seed)
        if sampler.chosen:
            sampler = replace(sampler, chosen=[label])
        parts: list[Start] = []
        missing, first = count, 0
        while missing and first < PATIENCE * count:
            batch = self.start(sampler, range(first, first + sampler.batch_size))
            first += sampler.batch_size
            is_label = self.probabilities(self.images(batch)).argmax(1) == label
            rows = is_label.nonzero()[:missing, 0].to(self.device)
            parts.append(batch.take(rows))
            missing -= len(rows)
        if missing:
            raise UserError(
                f"the classifier predicts only {count - missing} of {first:,} samples as "
                f"{self.names[label]}, and {count} are needed; choose other classes, or a generator "
                "that draws this one"
            )
        return Start.join(parts)

    def images(
        self, start: Start, direction: Direction | None = None, steps: Tensor | float = 0.0
    ) -> Tensor:
        """Generate images uint8 [n, C, H, H] on the CPU, moved along `direction` by `steps`: [n],
        or one step for all.
        """
        row_steps = torch.as_tensor(steps, dtype=torch.float32).expand(len(start)).to(self.device)
        vector = torch.zeros(self.size) if direction is None else direction.vector
        offsets = row_steps[:, None] * vector.to(self.device)
        images, size = [], self.sampler.batch_size
        with torch.no_grad(), full_float32(self.device):
            for part, offset in zip(start.batches(size), offsets.split(size), strict=True):
                images.append(self.generator.spec.from_float(self.moved(part, offset)).cpu())
        return torch.cat(images)

    def probabilities(self, images: Tensor, classifier: Classifier | None = None) -> Tensor:
        """Return the probabilities float64 [n, K] on the CPU that the editor's classifier, or
        another one, gives images uint8 [n, C, H, H].
        """
        classifier = classifier or self.classifier
        parts = images.split(self.sampler.batch_size)
        return torch.cat([judge_images(classifier, part) for part in parts])

    def reach(self, start: Start, direction: Direction) -> tuple[Tensor, Tensor]:
        """Find the first step, on a grid up to `config.limit`, at which the target's probability
        reaches `config.reach`. Returns the steps, float64 [n], and bool [n]: True for images that
        reach it.
        """

        def target_probability(rows: Tensor, step: float) -> Tensor:
            images = self.images(start.take(rows.to(self.device)), direction, step)
            return self.probabilities(images)[:, direction.target]

        steps = [self.config.limit * number / GRID for number in range(1, GRID + 1)]
        thresholds = torch.full([len(start)], self.config.reach, dtype=torch.float64)
        return first_reached(target_probability, thresholds, steps)

    # --- directions

    def _direction(self, source: int, target: int) -> Direction:
        """Compute the direction from a class to another. Raises UserError if there is none."""
        parts = [self._samples(label) for label in (source, target)]
        start = Start.join(parts)
        mean = self.probabilities(self.images(start)).mean(0)
        mean[[source, target]] = -1
        order = mean.sort(descending=True, stable=True).indices
        preserved = order[: min(PRESERVED, len(mean) - 2)].tolist()
        slopes, pixels = self._sensitivity(start, [source, target, *preserved])
        config = self.config
        unit = steer(
            slopes, pixels, pixel_weight=config.pixel_weight, keep_weight=config.keep_weight
        )
        if not unit.any():
            raise UserError(f"nothing moves {self.names[source]} towards {self.names[target]}")
        # The spread is the root of the total variance within the classes, averaged over both.
        variances = []
        for part in parts:
            code = part.code.mean(1) if self.space == "w" else part.code
            variances.append(code.float().cpu().var(0, correction=0))
        spread = float(torch.stack(variances).mean(0).sqrt().double().norm())
        return Direction(source, target, (unit * spread).float())

    def _sensitivity(self, start: Start, labels: list[int]) -> tuple[Tensor, Tensor]:
        """Return the slopes of the logits of `labels`, float64 [k, size], and the `pixel_rows` of
        all images, float64 [m, size]; m is 0 if `pixel_weight` is 0.
        """
        slopes = torch.zeros(len(labels), self.size, dtype=torch.float64)
        rows = [torch.zeros(0, self.size, dtype=torch.float64)]
        for number, part in enumerate(start.batches(self.sampler.batch_size)):
            with full_float32(self.device):
                offsets = torch.zeros(len(part), self.size, device=self.device).requires_grad_()
                images = self.moved(part, offsets)
                if self.config.pixel_weight:
                    key = keyed_generator(self.sampler.seed, "edit", "pixels", number)
                    draws = (torch.randn(images.shape, generator=key) for _ in range(DRAWS))
                    rows.append(pixel_rows(images, offsets, draws))
                fitted = fit_images(images, self.classifier.resolution, self.classifier.channels)
                slopes += gradient_slopes(self.classifier(fitted)[:, labels], offsets)
        return slopes / len(start), torch.cat(rows)


def pair_of(names: Sequence[str], source: str, target: str) -> tuple[int, int]:
    """Return the labels of two classes. Raises UserError if one is unknown or both are equal."""
    labels = label_of(source, names, "from"), label_of(target, names, "to")
    if source == target:
        raise UserError(f"from {source} to {target} is no edit; name two classes")
    return labels


# --- pure functions


def gradient_slopes(logits: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of each logit, summed over images, float64 [k, size]. The logits [n, k]
    depend on `offsets` [n, size].
    """
    wide = widest(offsets.device)
    count = logits.shape[1]
    rows = []
    for k in range(count):
        total = logits[:, k].sum()
        (gradient,) = torch.autograd.grad(total, offsets, retain_graph=k + 1 < count)
        rows.append(gradient.to(wide).sum(0))
    return torch.stack(rows).cpu()


def pixel_rows(images: Tensor, offsets: Tensor, draws: Iterator[Tensor]) -> Tensor:
    """Return random rows r [n * draws, size]; the mean of r r^T estimates J^T J / pixels.

    J is the Jacobian of an image by its offset. A row is J^T v with v from N(0, 1 / pixels).

    Args:
        images: [n, C, H, W], which depend on `offsets` [n, size].
        draws: standard normal tensors of the images' shape.
    """
    pixels = images[0].numel()
    rows: list[Tensor] = []
    for draw in draws:
        v = draw.to(images) / pixels**0.5
        rows += torch.autograd.grad(images, offsets, v, retain_graph=True)
    return torch.cat(rows).cpu().double()


def steer(
    # float64 [2 + k, size]: slopes of the logits of the source, the target, and k classes to
    # preserve
    slopes: Tensor,
    pixels: Tensor,  # float64 [m, size], the result of `pixel_rows`
    *,
    pixel_weight: float,
    keep_weight: float,
) -> Tensor:
    """Return the direction from source to target, float64 [size], of length 1; zeros if no
    dimension separates the two classes.
    """
    size = slopes.shape[1]
    gain = slopes[1] - slopes[0]
    # relative to source and target, because softmax ignores a constant that is added to all logits
    preserved = slopes[2:] - (slopes[0] + slopes[1]) / 2
    penalties = []
    for rows, weight in ((pixels, pixel_weight), (preserved, keep_weight)):
        if len(rows) and rows.any():
            penalties.append(weight**0.5 * rows / (rows.square().sum() / size).sqrt())
    stacked = torch.cat([*penalties, gain.new_zeros(0, size)])  # A = 1 + stacked^T stacked
    direction = torch.linalg.solve(torch.eye(size, dtype=gain.dtype) + stacked.T @ stacked, gain)
    return direction / direction.norm().clamp_min(torch.finfo(direction.dtype).tiny)


def first_reached(
    value_at: Callable[[Tensor, float], Tensor],  # (indices of rows, step) -> the rows' values
    thresholds: Tensor,  # [n], for each row
    steps: list[float],  # ascending
) -> tuple[Tensor, Tensor]:
    """Find the first of `steps` at which the value of each row reaches its threshold.

    Returns the steps, float64 [n], and bool [n]: True for rows that reach their threshold. The step
    of a row that does not is the one with its largest value.
    """
    count = len(thresholds)
    result = torch.zeros(count, dtype=torch.float64)
    best = torch.full([count], -torch.inf, dtype=torch.float64)
    for step in steps:
        rows = (best < thresholds).nonzero()[:, 0]
        if not len(rows):
            break
        values = value_at(rows, step).double()
        result[rows[values > best[rows]]] = step
        best[rows] = best[rows].maximum(values)
    return result, best >= thresholds
