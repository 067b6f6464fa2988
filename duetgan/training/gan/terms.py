"""Losses besides the adversarial one: classification, wrong labels, feature matching, path lengths.

Each loss is multiplied by its weight and divided by the global batch size. Most functions also add
the unweighted loss to the metrics; `mismatch_loss` does not.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from duetgan.models.gan import conditioning_vectors, count_correct, label_loss
from duetgan.training.base.teacher import Teacher
from duetgan.training.gan.batch import DiscriminatorOutput, Images, StepSlice
from duetgan.training.gan.context import Context
from duetgan.training.gan.losses import feature_matching, path_length_penalty, path_lengths
from duetgan.utils.distributed import collectives


class Judged(NamedTuple):
    """The arguments of a generator loss: a micro-batch of samples and the discriminator's outputs.

    `output` is the output for the samples, and `real_output` that for real images.
    """

    step_slice: StepSlice
    fake: Images
    output: DiscriminatorOutput
    real_output: DiscriminatorOutput | None  # without a graph; None if no loss compares with it


Term = Callable[[Judged], Tensor]  # returns a weighted loss of the generator, 0-d


def further_terms(context: Context, teacher: Teacher | None) -> dict[str, Term]:
    """Return the generator's losses besides the adversarial one, as a dict from name to function.

    To add a loss, add an entry here.
    """
    loss = context.config.loss
    terms: dict[str, Term] = {}
    if teacher is not None and loss.classifier_weight:
        terms["classifier"] = partial(classifier_term, context, teacher)
    if loss.auxiliary_weight:
        terms["auxiliary"] = lambda judged: auxiliary_loss(
            context, judged.output, judged.step_slice
        )
    if loss.feature_matching_weight:
        terms["feature_matching"] = partial(feature_matching_term, context)
    return terms


def classifier_term(context: Context, teacher: Teacher, judged: Judged) -> Tensor:
    """Return the weighted cross entropy between the teacher's logits and the samples' labels, 0-d.

    The teacher is the trained classifier that `loss.classifier` names.
    """
    fake = judged.fake
    with context.precision.autocast():
        logits = teacher(fake.images)
    loss = label_loss(logits.to(fake.images.dtype), fake.labels, context.label_sets)
    loss = loss / judged.step_slice.batch_size
    judged.step_slice.add("loss/classifier", loss)
    return loss * context.config.loss.classifier_weight


def feature_matching_term(context: Context, judged: Judged) -> Tensor:
    """Return the weighted squared distance between D's mean features of samples and real images.

    The result is 0-d. The means are taken in groups of `feature_matching_group` images.
    """
    assert judged.real_output is not None
    loss = context.config.loss
    group = loss.feature_matching_group
    distances = feature_matching(judged.output.hidden, judged.real_output.hidden, group)
    distance = distances.sum() * (group / judged.step_slice.batch_size)
    judged.step_slice.add("loss/feature_matching", distance)
    return distance * loss.feature_matching_weight


def label_losses(
    context: Context, step_slice: StepSlice, rows: slice, output: DiscriminatorOutput
) -> Tensor | float:
    """Return the sum of D's label losses on a micro-batch, weighted, 0-d; 0 if there are none.

    The label losses are `auxiliary_loss` and `mismatch_loss`. The kind of images, `output.name`,
    decides which of them apply.
    """
    loss = context.config.loss
    total: Tensor | float = 0.0
    learns = output.name == "real" or (output.name == "fake" and loss.auxiliary_fakes)
    if learns and loss.auxiliary_weight:
        total = auxiliary_loss(context, output, step_slice)
    if output.name == "real" and loss.mismatch_weight:
        total = total + mismatch_loss(context, step_slice, rows, output)
    return total


def auxiliary_loss(context: Context, output: DiscriminatorOutput, step_slice: StepSlice) -> Tensor:
    """Return the weighted loss of D's classification head on a micro-batch, 0-d.

    It is a sum over images, divided by the global batch size. Source: AC-GAN, 1610.09585.
    """
    class_logits = context.discriminator.auxiliary(output.hidden)
    loss = label_loss(class_logits, output.labels, context.label_sets) / step_slice.batch_size
    if output.name == "real":
        correct = count_correct(class_logits, output.labels, context.label_sets)
        step_slice.add("loss/auxiliary_real", loss)
        step_slice.add("accuracy/auxiliary", correct / step_slice.batch_size)
    elif output.name == "generator":
        step_slice.add("loss/auxiliary", loss)
    return loss * context.config.loss.auxiliary_weight


def mismatch_loss(
    context: Context, step_slice: StepSlice, rows: slice, output: DiscriminatorOutput
) -> Tensor | float:
    """Return D's weighted loss for real images with wrong labels, treated as samples, 0-d.

    Source: 1605.05396. Returns 0 for an unconditional D, and if there are fewer than two labels.
    """
    num_labels = len(context.draws.class_weights)
    if not context.discriminator.classes or num_labels < 2:
        return 0.0
    offsets = context.draws.label_offsets(step_slice.step, step_slice.batch_size)[rows]
    wrong_labels = (output.labels + offsets) % num_labels
    conditions = conditioning_vectors(wrong_labels, context.label_sets)
    logits = context.discriminator.project(output.features, conditions)
    loss = context.config.loss
    return loss.functions.fake(logits).sum() * (loss.mismatch_weight / step_slice.batch_size)


class PathLength(torch.nn.Module):
    """StyleGAN2's path-length penalty (1912.04958, section 3.2).

    Its state is the moving mean of the path lengths, which is the same on all ranks.
    """

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.mean = torch.nn.Buffer(torch.zeros([]))

    @torch.no_grad()
    def update(self, batch_mean: Tensor) -> Tensor:
        """Move the moving mean towards `batch_mean`, the mean length in a global batch.

        Return the new mean, 0-d. If it is not finite, it is not stored.
        """
        moved = self.mean.lerp(batch_mean.to(self.mean.dtype), self.decay)
        self.mean.copy_(torch.where(torch.isfinite(moved), moved, self.mean))
        return moved

    def penalties(
        self, context: Context, step_slice: StepSlice, *, is_trial: bool
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows and the weighted penalty, 0-d, of each of this rank's micro-batches.

        The penalty is computed on a batch of half the global batch size. First the moving mean is
        updated from all path lengths of this batch. If a rank has more than
        one micro-batch, it computes the lengths twice: without a graph for the mean, then with a
        graph for the penalty. Penalties are multiplied by their interval, `path_length_interval`.
        If `is_trial` is True, the moving mean does not change.
        """
        half = step_slice.half()
        latents, maps = context.latents(half, "path")

        def lengths_of(rows: slice, *, create_graph: bool) -> Tensor:
            samples = context.sample(latents, maps, rows)
            assert samples.ws is not None  # the config refuses path lengths without styles
            noise = context.draws.path_noise(half.step, half.batch_size, samples.images.shape[1:])
            scale = context.precision.scale()
            return path_lengths(
                samples.images, samples.ws, noise[rows], scale, create_graph=create_graph
            )

        micro_batches = half.micro_batches()
        is_single = len(micro_batches) == 1
        lengths = [lengths_of(rows, create_graph=is_single) for rows in micro_batches]
        total = torch.stack([part.detach().sum() for part in lengths]).sum()
        batch_mean = collectives.all_reduce_sum_(total) / half.batch_size
        previous = self.mean.clone()
        mean = self.update(batch_mean)
        if is_trial:
            self.mean.copy_(previous)
        step_slice.metrics["path_length/mean"] = mean / collectives.world_size()
        loss = context.config.loss
        for rows, part in zip(micro_batches, lengths, strict=True):
            if not is_single:
                part = lengths_of(rows, create_graph=True)
            penalty = path_length_penalty(part, mean, batch_mean, self.decay, half.batch_size)
            step_slice.add("loss/path_length", penalty)
            yield rows, penalty * (loss.path_length_weight * loss.path_length_interval)
