"""Edit a generator's images: move their w so that they change from one class to another.

The generator computes an image from w, its intermediate latent (StyleGAN). The slope of a class is
the mean gradient of a classifier's logit with respect to w. The direction from class a to class b
is the slope of b minus the slope of a. If the logits were linear in w, this direction would be the
normal of the boundary between the classes, as in InterFaceGAN (1907.10786).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from duetgan.inference.samples import Sampler, Start, truncated_styles, with_styles
from duetgan.inference.settings import label_of
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.metrics.features.precision import full_float32
from duetgan.models.classifier import Classifier
from duetgan.models.preparation import fit_images
from duetgan.utils.distributed.collectives import widest
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import seed_of

PATIENCE = 50  # largest number of samples to draw for each sample that is needed of a class
SAMPLES = 100  # samples of each of the two classes from which a direction is computed
REACH = 0.5  # probability of the target class that an edit aims at
LIMIT = 4.0  # the largest step, in units of the samples' spread
GRID = 24  # equal steps at which the probability of the target class is checked


@dataclass(frozen=True)
class Direction:
    """A direction from one class to another; a step of 1 adds `vector` to w."""

    source: int
    target: int
    # float32 [size of w]; its length is the spread of the samples it was computed from
    vector: Tensor


class Editor:
    """A tool that computes directions from class to class and moves images along them.

    `direction(source, target)` returns the `Direction` from one label to another, and caches it. An
    edit changes the styles of all layers. The sampler's seed determines all results.
    """

    def __init__(
        self,
        sampler: Sampler,
        classifier: Classifier,
        names: Sequence[str],
        samples: int = SAMPLES,
    ) -> None:
        """Set up the editor.

        `names` are the names of the classifier's classes. A direction is computed from `samples`
        samples of each of its two classes. Raises UserError if the generator has no w, or if its
        images are not 8-bit grey or RGB.
        """
        self.sampler = sampler
        self.classifier = classifier
        self.names = list(names)
        self.device = sampler.device
        self.generator = with_styles(sampler.generator, "an edit")
        self.generator.spec.need_plain("an edit")
        self.size = self.generator.w_avg.numel()
        self.direction = cache(self._direction)
        # Directions are computed from other samples than those that are edited.
        seed = seed_of(sampler.seed, "edit") % 2**32
        self._samples = cache(lambda label: self.starts(label, samples, seed=seed))

    # --- images

    def moved(self, start: Start, offsets: Tensor) -> Tensor:
        """Generate the images of `start` after adding `offsets` [n, size of w] to w.

        Returns images [n, C, H, H] in about [-1, 1]. They are differentiable.
        """
        offsets = offsets.to(start.code.dtype)
        return self.generator.synthesis(start.code + offsets[:, None], start.noise)

    def starts(self, label: int, count: int, *, seed: int | None = None) -> Start:
        """Return the inputs of the first `count` samples that the classifier predicts as `label`.

        A conditional generator draws only samples of this class. `seed` replaces the sampler's
        seed. Raises UserError if about PATIENCE * `count` samples contain fewer than `count` such
        samples.
        """
        sampler = self.sampler if seed is None else replace(self.sampler, seed=seed)
        if sampler.chosen:
            sampler = replace(sampler, chosen=[label])
        parts: list[Start] = []
        missing, first = count, 0
        while missing and first < PATIENCE * count:
            batch = truncated_styles(sampler, range(first, first + sampler.batch_size))
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
        """Generate the images of `start`, moved along `direction` by `steps`.

        Returns uint8 [n, C, H, H] on the CPU. `steps` is one step per image, [n], or one for all.
        Without a direction, the images are not moved.
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
        """Return the class probabilities of images uint8 [n, C, H, H], float64 [n, K] on the CPU.

        `classifier` predicts them; if it is None, the editor's classifier.
        """
        classifier = classifier or self.classifier
        parts = images.split(self.sampler.batch_size)
        return torch.cat([judge_images(classifier, part) for part in parts])

    def reach(self, start: Start, direction: Direction) -> tuple[Tensor, Tensor]:
        """Find each image's first step at which the probability of the target class reaches REACH.

        The steps form a grid up to LIMIT. Returns the steps, float64 [n], and bool [n]: True for
        images that reach this probability. Other images get the step with their largest
        probability.
        """

        def target_probability(rows: Tensor, step: float) -> Tensor:
            images = self.images(start.take(rows.to(self.device)), direction, step)
            return self.probabilities(images)[:, direction.target]

        steps = [LIMIT * number / GRID for number in range(1, GRID + 1)]
        thresholds = torch.full([len(start)], REACH, dtype=torch.float64)
        return first_reached(target_probability, thresholds, steps)

    # --- directions

    def _direction(self, source: int, target: int) -> Direction:
        """Compute the direction from the class `source` to the class `target`.

        Raises UserError if all gradients are zero.
        """
        parts = [self._samples(label) for label in (source, target)]
        gradient = torch.zeros(self.size, dtype=torch.float64)
        for part in Start.join(parts).batches(self.sampler.batch_size):
            with full_float32(self.device):
                offsets = torch.zeros(len(part), self.size, device=self.device).requires_grad_()
                images = self.moved(part, offsets)
                fitted = fit_images(images, self.classifier.resolution, self.classifier.channels)
                logits = self.classifier(fitted)
                gain = (logits[:, target] - logits[:, source]).sum()
                (slopes,) = torch.autograd.grad(gain, offsets)
            gradient += slopes.to(widest(self.device)).sum(0).cpu()
        if not gradient.any():
            raise UserError(f"nothing moves {self.names[source]} towards {self.names[target]}")
        # The spread is the root of the total variance within the classes, averaged over both.
        variances = [part.code.mean(1).float().cpu().var(0, correction=0) for part in parts]
        spread = float(torch.stack(variances).mean(0).sqrt().double().norm())
        return Direction(source, target, (gradient / gradient.norm() * spread).float())


def pair_of(names: Sequence[str], source: str, target: str) -> tuple[int, int]:
    """Return the labels of the classes named `source` and `target`.

    Raises UserError if a name is unknown or both are equal.
    """
    labels = label_of(source, names, "from"), label_of(target, names, "to")
    if source == target:
        raise UserError(f"from {source} to {target} is no edit; name two classes")
    return labels


def first_reached(
    value_at: Callable[[Tensor, float], Tensor],  # (indices of rows, step) -> the rows' values
    thresholds: Tensor,  # [n], for each row
    steps: list[float],  # ascending
) -> tuple[Tensor, Tensor]:
    """Find the first of `steps` at which the value of each row reaches the threshold of this row.

    `value_at(rows, step)` returns the values of some rows at a step. Returns the steps, float64
    [n], and bool [n]: True for rows that reach their threshold. Other rows get the step with their
    largest value.
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
