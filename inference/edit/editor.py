"""Moves images of a generator from one class of a classifier towards another."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inference.edit.directions import first_reached, gradient_slopes, pixel_rows, steer
from inference.edit.spaces import LatentSpace, Start, space_of
from inference.samples import Sampler
from inference.settings import EditConfig
from metrics.evaluate_gan import judge_images
from metrics.precision import full_float32
from models.classifier import Classifier, fit_images
from models.sampling import to_uint8
from utils.errors import UserError
from utils.seeding import generator as keyed_generator
from utils.seeding import seed_of

OTHERS = 8  # classes at most whose logits shall stay: those that the classifier thinks of most often at these samples
DRAWS = 4  # vectors for each image that tell how its pixels change
PATIENCE = 50  # samples are drawn for each one that is wanted; what is not found by then is not there
GRID = 24  # steps at which an image may arrive


@dataclass(frozen=True)
class Direction:
    """A way from one class to another: what a step of 1 adds."""

    source: int
    target: int
    vector: Tensor  # float32 [size of its space]; its length is the spread of the samples it was found on

    @property
    def length(self) -> float:
        return float(self.vector.norm())


class Editor:
    """Finds directions from class to class and moves images along them. Deterministic for the sampler's seed.

    Nothing of the generator and the classifier changes.
    """

    def __init__(
        self, sampler: Sampler, classifier: Classifier, names: Sequence[str], config: EditConfig | None = None
    ) -> None:
        """Args: `names` of the classifier's classes. Raises UserError for a space that the generator does not have."""
        self.sampler, self.classifier, self.names = sampler, classifier, list(names)
        self.config = config or EditConfig()
        self.space: LatentSpace = space_of(sampler.generator, self.config.space)
        self.device = sampler.device
        self._found: dict[tuple[int, int], Direction] = {}
        self._learned: dict[int, Start] = {}

    # --- images to start from

    def starts(self, label: int, count: int, *, seed: int | None = None) -> Start:
        """The first `count` samples, of the sampler's seed or another, that the classifier names `label`.

        A conditional generator is asked for that class. Raises UserError if there are too few of them.
        """
        sampler = self.sampler if seed is None else replace(self.sampler, seed=seed)
        if sampler.chosen:
            sampler = replace(sampler, chosen=[label])
        kept: list[Start] = []
        missing, first = count, 0
        while missing and first < PATIENCE * count:
            numbers = range(first, first + sampler.batch_size)
            drawn, first = self.space.start(sampler, numbers), numbers.stop
            named = self.probabilities(self.images(drawn)).argmax(1) == label
            rows = named.nonzero()[:missing, 0].to(self.device)
            if len(rows):
                kept.append(drawn.take(rows))
                missing -= len(rows)
        if missing:
            raise UserError(
                f"the classifier names only {count - missing} of {first:,} samples {self.names[label]}, and {count} "
                "are wanted; take other classes, or a generator that draws this one"
            )
        return Start.join(kept)

    def images(self, start: Start, direction: Direction | None = None, steps: Tensor | float = 0.0) -> Tensor:
        """The images uint8 [n, C, H, H] on the CPU, moved by a step each, [n] or one for all."""
        each = torch.as_tensor(steps, dtype=torch.float32).expand(len(start)).to(self.device)
        vector = torch.zeros(self.space.size) if direction is None else direction.vector
        offsets = each[:, None] * vector.to(self.device)
        drawn, size = [], self.sampler.batch_size
        with torch.no_grad(), full_float32(self.device):
            for part, moved in zip(start.batches(size), offsets.split(size), strict=True):
                drawn.append(to_uint8(self.space.images(part, moved.to(part.code.dtype))).cpu())
        return torch.cat(drawn)

    def probabilities(self, images: Tensor, classifier: Classifier | None = None) -> Tensor:
        """What the classifier, or another one, says of images uint8 [n, C, H, H]: float64 [n, K] on the CPU."""
        size = self.sampler.batch_size
        return torch.cat([judge_images(classifier or self.classifier, part) for part in images.split(size)])

    # --- directions

    def direction(self, source: int, target: int) -> Direction:
        """The way from a class to another; found once. Raises UserError where there is none."""
        if (source, target) not in self._found:
            self._found[source, target] = self._search(source, target)
        return self._found[source, target]

    def random(self, direction: Direction, seed: int = 0) -> Direction:
        """One as long as `direction` that knows nothing of classes."""
        key = keyed_generator(self.sampler.seed, "edit", "random", seed)
        vector = torch.randn(self.space.size, generator=key)
        return replace(direction, vector=vector * (direction.length / vector.norm()))

    def reach(self, start: Start, direction: Direction) -> tuple[Tensor, Tensor]:
        """The step float64 [n] at which each image has the target's probability `config.reach`, and whether it does.

        The first on a grid up to `config.limit`; where it never does, the one where it comes nearest.
        """

        def share(rows: Tensor, step: float) -> Tensor:
            images = self.images(start.take(rows.to(self.device)), direction, step)
            return self.probabilities(images)[:, direction.target]

        steps = [self.config.limit * number / GRID for number in range(1, GRID + 1)]
        return first_reached(share, torch.full([len(start)], self.config.reach, dtype=torch.float64), steps)

    def _samples(self, label: int) -> Start:
        """Those that directions are learned from: others than the same seed's samples that are shown."""
        if label not in self._learned:
            seed = seed_of(self.sampler.seed, "edit") % 2**32
            self._learned[label] = self.starts(label, self.config.samples, seed=seed)
        return self._learned[label]

    def _spread(self, *labels: int) -> float:
        """The length of the deviations within the classes: root of the mean of their variances, of all dimensions."""
        points = [self.space.points(self._samples(label)).float().cpu() for label in labels]
        return float(torch.stack([p.var(0, correction=0) for p in points]).mean(0).sqrt().double().norm())

    def _search(self, source: int, target: int) -> Direction:
        start = Start.join([self._samples(source), self._samples(target)])
        likely = self.probabilities(self.images(start)).mean(0)
        likely[[source, target]] = -1
        others = likely.sort(descending=True, stable=True).indices[: min(OTHERS, len(likely) - 2)].tolist()
        labels = [source, target, *others]
        weight = self.config.pixel_weight
        pixels = self._pixels(start if weight else start.take(slice(0)))
        slopes = self._slopes(start, labels)
        unit = steer(slopes, pixels, pixel_weight=weight, keep_weight=self.config.keep_weight)
        if not unit.any():
            raise UserError(f"nothing moves {self.names[source]} towards {self.names[target]}")
        return Direction(source, target, (unit * self._spread(source, target)).float())

    def _slopes(self, start: Start, labels: list[int]) -> Tensor:
        """How steeply the logits of `labels` rise, float64 [labels, size]."""
        total = torch.zeros(len(labels), self.space.size, dtype=torch.float64)
        for part in start.batches(self.sampler.batch_size):
            with full_float32(self.device):
                offsets = torch.zeros(len(part), self.space.size, device=self.device).requires_grad_()
                drawn = self.space.images(part, offsets.to(part.code.dtype))
                fitted = fit_images(drawn, self.classifier.resolution, self.classifier.channels)
                total += gradient_slopes(self.classifier(fitted)[:, labels], offsets)
        return total / len(start)

    def _pixels(self, start: Start) -> Tensor:
        """Rows that tell how the pixels change, float64 [m, size]."""
        shape = (self.sampler.generator.channels, *[self.sampler.generator.resolution] * 2)
        rows = [torch.zeros(0, self.space.size, dtype=torch.float64)]
        for number, part in enumerate(start.batches(self.sampler.batch_size)):
            key = keyed_generator(self.sampler.seed, "edit", "pixels", number)
            draws = (torch.randn(len(part), *shape, generator=key) for _ in itertools.repeat(None, DRAWS))
            with full_float32(self.device):
                offsets = torch.zeros(len(part), self.space.size, device=self.device).requires_grad_()
                rows.append(pixel_rows(self.space.images(part, offsets.to(part.code.dtype)), offsets, draws))
        return torch.cat(rows)
