"""Moves images of a generator from one class of a classifier towards another, along a direction in
w or z that raises the one class against the other while the rest stays.

How steeply each class's logit rises is known from gradients. The direction n from class a to b
maximises (g n)^2 / n A n with g = slope_b - slope_a and

    A = 1 + pixel_weight * mean change of pixels + keep_weight * change of the other classes

each term scaled to a trace of `size`. Without the weights it is g itself (InterFaceGAN's normal,
1907.10786, is that of a linear model); with keep_weight towards infinity it is g without its part
along the other classes, InterFaceGAN's conditional manipulation (section 2.3).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import torch
from torch import Tensor

from duetgan.inference.samples import Sampler, Start, truncated_styles, with_styles
from duetgan.inference.settings import EditConfig, label_of
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.metrics.features.precision import full_float32
from duetgan.models.classifier import Classifier, fit_images
from duetgan.models.gan import StyledGenerator
from duetgan.utils.distributed.collectives import widest
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import generator as keyed_generator
from duetgan.utils.seeding import seed_of

# classes at most whose logits shall stay: those that the classifier thinks of most often at these
# samples
OTHERS = 8
DRAWS = 4  # vectors for each image that tell how its pixels change
# samples are drawn for each one that is wanted; what is not found by then is not there
PATIENCE = 50
GRID = 24  # steps at which an image may arrive


@dataclass(frozen=True)
class Direction:
    """A way from one class to another: what a step of 1 adds."""

    source: int
    target: int
    # float32 [size of its space]; its length is the spread of the samples it was found on
    vector: Tensor


class Editor:
    """Finds directions from class to class and moves images along them: in w the style of every
    layer, in z all but the class that is asked for. Deterministic for the sampler's seed.
    """

    def __init__(
        self,
        sampler: Sampler,
        classifier: Classifier,
        names: Sequence[str],
        config: EditConfig | None = None,
    ) -> None:
        """Args: `names` of the classifier's classes. Raises UserError for a space that the
        generator does not have.
        """
        self.sampler, self.classifier, self.names = sampler, classifier, list(names)
        self.config = config or EditConfig()
        self.device, self.generator = sampler.device, sampler.generator
        self.generator.spec.need_plain("an edit")
        self.space = self.config.space or ("w" if self.generator.has_styles else "z")
        in_w = self.space == "w"
        self.size = (
            with_styles(self.generator, "--space w").w_avg.numel() if in_w else self.generator.z_dim
        )
        self.direction = cache(self._direction)  # what is found is kept
        # directions are learned from other samples than are shown
        other = seed_of(sampler.seed, "edit") % 2**32
        self._samples = cache(lambda label: self.starts(label, self.config.samples, seed=other))

    # --- images

    def start(self, sampler: Sampler, numbers: Sequence[int]) -> Start:
        """The sampler's images as a start."""
        return sampler.latents(numbers) if self.space == "z" else truncated_styles(sampler, numbers)

    def moved(self, start: Start, offsets: Tensor) -> Tensor:
        """The images [n, C, H, H] in about [-1, 1], moved by `offsets` [n, size]; differentiable."""
        offsets = offsets.to(start.code.dtype)
        if self.space == "z":
            return self.generator(
                start.code + offsets, start.labels, noise=start.noise, **self.sampler.truncation
            )
        return cast(StyledGenerator, self.generator).synthesis(
            start.code + offsets[:, None], start.noise
        )

    def starts(self, label: int, count: int, *, seed: int | None = None) -> Start:
        """The first `count` samples, of the sampler's seed or another, that the classifier names
        `label`.

        A conditional generator is asked for that class. Raises UserError if there are too few of
        them.
        """
        sampler = self.sampler if seed is None else replace(self.sampler, seed=seed)
        if sampler.chosen:
            sampler = replace(sampler, chosen=[label])
        parts: list[Start] = []
        missing, first = count, 0
        while missing and first < PATIENCE * count:
            numbers = range(first, first + sampler.batch_size)
            drawn, first = self.start(sampler, numbers), numbers.stop
            fitting = self.probabilities(self.images(drawn)).argmax(1) == label
            rows = fitting.nonzero()[:missing, 0].to(self.device)
            parts.append(drawn.take(rows))
            missing -= len(rows)
        if missing:
            raise UserError(
                f"the classifier names only {count - missing} of {first:,} samples {self.names[label]}, and {count} "
                "are wanted; take other classes, or a generator that draws this one"
            )
        return Start.join(parts)

    def images(
        self, start: Start, direction: Direction | None = None, steps: Tensor | float = 0.0
    ) -> Tensor:
        """The images uint8 [n, C, H, H] on the CPU, moved by a step each, [n] or one for all."""
        each = torch.as_tensor(steps, dtype=torch.float32).expand(len(start)).to(self.device)
        vector = torch.zeros(self.size) if direction is None else direction.vector
        offsets = each[:, None] * vector.to(self.device)
        drawn, size = [], self.sampler.batch_size
        with torch.no_grad(), full_float32(self.device):
            for part, offset in zip(start.batches(size), offsets.split(size), strict=True):
                drawn.append(self.generator.spec.from_float(self.moved(part, offset)).cpu())
        return torch.cat(drawn)

    def probabilities(self, images: Tensor, classifier: Classifier | None = None) -> Tensor:
        """What the classifier, or another one, says of images uint8 [n, C, H, H]: float64 [n, K] on
        the CPU.
        """
        size = self.sampler.batch_size
        return torch.cat(
            [judge_images(classifier or self.classifier, part) for part in images.split(size)]
        )

    def reach(self, start: Start, direction: Direction) -> tuple[Tensor, Tensor]:
        """`first_reached`, on a grid up to `config.limit`, of the target's probability
        `config.reach`: [n].
        """

        def share(rows: Tensor, step: float) -> Tensor:
            images = self.images(start.take(rows.to(self.device)), direction, step)
            return self.probabilities(images)[:, direction.target]

        steps = [self.config.limit * number / GRID for number in range(1, GRID + 1)]
        return first_reached(
            share, torch.full([len(start)], self.config.reach, dtype=torch.float64), steps
        )

    # --- directions

    def _direction(self, source: int, target: int) -> Direction:
        """The way from a class to another. Raises UserError where there is none."""
        parts = [self._samples(label) for label in (source, target)]
        start = Start.join(parts)
        likely = self.probabilities(self.images(start)).mean(0)
        likely[[source, target]] = -1
        others = (
            likely.sort(descending=True, stable=True)
            .indices[: min(OTHERS, len(likely) - 2)]
            .tolist()
        )
        slopes, pixels = self._sensitivity(start, [source, target, *others])
        config = self.config
        unit = steer(
            slopes, pixels, pixel_weight=config.pixel_weight, keep_weight=config.keep_weight
        )
        if not unit.any():
            raise UserError(f"nothing moves {self.names[source]} towards {self.names[target]}")
        points = [
            (part.code.mean(1) if self.space == "w" else part.code).float().cpu() for part in parts
        ]
        # the length of the deviations within the classes: root of the mean of their variances, of
        # all dimensions
        spread = float(
            torch.stack([p.var(0, correction=0) for p in points]).mean(0).sqrt().double().norm()
        )
        return Direction(source, target, (unit * spread).float())

    def _sensitivity(self, start: Start, labels: list[int]) -> tuple[Tensor, Tensor]:
        """How steeply the logits of `labels` rise, float64 [labels, size], and `pixel_rows`,
        float64 [m, size].
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
    """The labels of two classes. Raises UserError for an unknown one, and where they are the same."""
    labels = label_of(source, names, "from"), label_of(target, names, "to")
    if source == target:
        raise UserError(f"from {source} to {target} is no way; name two classes")
    return labels


# --- pure functions


def gradient_slopes(logits: Tensor, offsets: Tensor) -> Tensor:
    """The sum over images of each logit's gradient, float64 [k, size], of logits [n, k] made with
    offsets [n, size].
    """
    wide = widest(offsets.device)
    rows = [
        torch.autograd.grad(logits[:, k].sum(), offsets, retain_graph=k + 1 < logits.shape[1])[0]
        .to(wide)
        .sum(0)
        for k in range(logits.shape[1])
    ]
    return torch.stack(rows).cpu()


def pixel_rows(images: Tensor, offsets: Tensor, draws: Iterator[Tensor]) -> Tensor:
    """Rows r [n * draws, size] whose mean r r^T estimates how the mean square of the pixels changes
    with the offsets: r = J^T v with v of N(0, 1 / pixels). Images [n, C, H, W] and draws of their
    shape.
    """
    pixels = images[0].numel()
    rows = [
        torch.autograd.grad(images, offsets, draw.to(images) / pixels**0.5, retain_graph=True)[0]
        for draw in draws
    ]
    return torch.cat(rows).cpu().double()


def steer(
    # float64 [2 + others, size]: of the source's logit, the target's, and of others that shall stay
    slopes: Tensor,
    pixels: Tensor,  # float64 [m, size], of `pixel_rows`
    *,
    pixel_weight: float,
    keep_weight: float,
) -> Tensor:
    """The direction, float64 [size], of length 1; zeros where no dimension moves the two classes
    apart.
    """
    size = slopes.shape[1]
    gain = slopes[1] - slopes[0]
    # a softmax does not see what is added to all logits
    others = slopes[2:] - (slopes[0] + slopes[1]) / 2
    penalties = [
        weight**0.5 * rows / (rows.square().sum() / size).sqrt()
        for rows, weight in ((pixels, pixel_weight), (others, keep_weight))
        if len(rows) and rows.any()
    ]
    stacked = torch.cat([*penalties, gain.new_zeros(0, size)])  # A = 1 + stacked^T stacked
    direction = torch.linalg.solve(torch.eye(size, dtype=gain.dtype) + stacked.T @ stacked, gain)
    return direction / direction.norm().clamp_min(torch.finfo(direction.dtype).tiny)


def first_reached(
    height: Callable[[Tensor, float], Tensor],  # rows and a step -> how high each of them is there
    wanted: Tensor,  # [n], the height that each row shall reach
    steps: list[float],  # ascending
) -> tuple[Tensor, Tensor]:
    """The first of `steps` at which each row is as high as wanted, float64 [n], and whether it ever
    is, bool.

    A row that never is has the step at which it is highest.
    """
    count = len(wanted)
    result, best = (
        torch.zeros(count, dtype=torch.float64),
        torch.full([count], -torch.inf, dtype=torch.float64),
    )
    for step in steps:
        rows = (best < wanted).nonzero()[:, 0]
        if not len(rows):
            break
        heights = height(rows, step).double()
        result[rows[heights > best[rows]]] = step
        best[rows] = best[rows].maximum(heights)
    return result, best >= wanted
