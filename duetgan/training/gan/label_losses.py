"""Losses of the images' labels: a classification head on the discriminator, and wrong labels."""

from torch import Tensor

from duetgan.models.gan import conditioning_vectors, count_correct, label_loss
from duetgan.training.gan.context import Context, DiscriminatorOutput, StepSlice


def label_losses(
    context: Context, step_slice: StepSlice, rows: slice, output: DiscriminatorOutput
) -> Tensor | float:
    """Return D's weighted losses of the labels of a micro-batch, 0-d; 0 if there are none."""
    loss = context.config.loss
    total: Tensor | float = 0.0
    learns = output.name == "real" or (output.name == "fake" and loss.auxiliary_fakes)
    if learns and loss.auxiliary_weight:
        total = auxiliary_loss(context, output, step_slice)
    if output.name == "real" and loss.mismatch_weight:
        total = total + mismatch_loss(context, step_slice, rows, output)
    return total


def auxiliary_loss(context: Context, output: DiscriminatorOutput, step_slice: StepSlice) -> Tensor:
    """Return the weighted loss of D's classification head (AC-GAN, 1610.09585), 0-d.

    It is divided by the global batch size.
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
    """Return the weighted loss of real images with wrong labels, as fakes (1605.05396), 0-d.

    Return 0 for networks with fewer than two labels.
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
