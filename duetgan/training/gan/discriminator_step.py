"""The discriminator's half of a GAN step: adversarial loss, gradient penalties, change of ADA."""

from collections.abc import Sequence

import torch
from torch import Tensor

from duetgan.models.gan import conditioning_vectors
from duetgan.models.layers.convolution import penalised
from duetgan.training.base.phases import phase
from duetgan.training.gan import losses
from duetgan.training.gan.context import Context, DiscriminatorOutput, Images, StepSlice
from duetgan.training.optim.config import cosine
from duetgan.training.optim.updater import Updater
from duetgan.utils.distributed import collectives

# kind of the images -> name and function of the penalty that is computed from them
PENALTIES = {
    "real": ("r1", losses.squared_gradient_norm),
    "fake": ("r2", losses.squared_gradient_norm),
    "between": ("gradient_penalty", losses.gradient_penalty),
}


class DiscriminatorStep:
    """One update of the discriminator, and of the strength of adaptive augmentation."""

    def __init__(self, context: Context, updater: Updater) -> None:
        self.context = context
        self.updater = updater
        self.loss = context.config.loss
        self.objective = context.config.loss.functions

    def run(
        self,
        step_slice: StepSlice,
        reals: Sequence[Images],
        fakes: Sequence[Images],
        *,
        one_pass: bool,
    ) -> None:
        """Update D and the strength of ADA.

        Args:
            fakes: Micro-batches of samples, without graphs.
            one_pass: True if the generator's half has already called `learn` for these
                micro-batches.
        """
        context, metrics = self.context, step_slice.metrics
        for rows, real, fake in zip(step_slice.micro_batches(), reals, fakes, strict=True):
            if not one_pass:
                self.learn(
                    step_slice, rows, self.discriminate(step_slice, rows, fake, "fake"), real
                )
            if "gradient_penalty" in self.penalty_weights(step_slice):
                weights = context.draws.interpolation_weights(
                    step_slice.step, step_slice.batch_size
                )[rows]
                interpolated = losses.interpolate(real.images, fake.images, weights)
                output = self.discriminate(
                    step_slice, rows, Images(interpolated, real.labels), "between"
                )
                # This pass has a penalty but no adversarial loss.
                self._backward(step_slice, rows, torch.zeros_like(output.logits), [output])
        with phase("discriminator/optimizer"):
            update = self.updater.step(step_slice.step)
            context.discriminator.after_update()
        if context.ada.active:
            sign = collectives.all_reduce_sum_(metrics["logits/real_sign"].clone())
            context.ada.update(
                step_slice.images_seen + step_slice.batch_size,
                step_slice.step,
                sign,
                step_slice.batch_size,
            )
            metrics["ada/p"] = context.ada.p.clone() / collectives.world_size()
        metrics["logits/margin"] = metrics["logits/real"] - metrics["logits/fake"]
        metrics.update(update.metrics("discriminator"))

    def learn(
        self,
        step_slice: StepSlice,
        rows: slice,
        fake_output: DiscriminatorOutput,
        real: Images | DiscriminatorOutput,
    ) -> None:
        """Accumulate the gradients of D's adversarial loss and penalties on a micro-batch.

        Args:
            fake_output: Output of D for the samples.
            real: Real images, or for a paired objective the output of D for them.
        """
        step_slice.add("logits/fake", fake_output.logits.sum() / step_slice.batch_size)
        if self.objective.paired:
            if isinstance(real, Images):
                real = self.discriminate(step_slice, rows, real, "real")
            values = self.objective.real(real.logits - fake_output.logits)
            self._backward(step_slice, rows, values, [real, fake_output])
        else:
            self._backward(step_slice, rows, self.objective.fake(fake_output.logits), [fake_output])
            self._learn_reals(step_slice, rows, Images(real.images, real.labels))

    def penalty_weights(self, step_slice: StepSlice) -> dict[str, float]:
        """Return the weights of the penalties of this step, not yet multiplied by their interval."""
        loss, final = self.loss, self.loss.gamma_final
        if not loss.penalty_due(step_slice.step):
            return {}
        weights = {}
        for name, gamma in (("r1", loss.r1_gamma), ("r2", loss.r2_gamma)):
            if gamma and final is not None:
                gamma = cosine(gamma, final, step_slice.images_seen, self.context.schedule_images)
            weights[name] = gamma / 2
        weights["gradient_penalty"] = loss.gradient_penalty_weight
        return {name: weight for name, weight in weights.items() if weight > 0}

    def _learn_reals(self, step_slice: StepSlice, rows: slice, real: Images) -> None:
        output = self.discriminate(step_slice, rows, real, "real")
        mismatch: Tensor | float = 0.0
        context, num_labels = self.context, len(self.context.draws.class_weights)
        if self.loss.mismatch_weight and context.discriminator.classes and num_labels > 1:
            offsets = context.draws.label_offsets(step_slice.step, step_slice.batch_size)[rows]
            wrong_labels = (real.labels + offsets) % num_labels
            logits = context.discriminator.project(
                output.features, conditioning_vectors(wrong_labels, context.label_sets)
            )
            mismatch = self.objective.fake(logits).sum() * (
                self.loss.mismatch_weight / step_slice.batch_size
            )
        self._backward(step_slice, rows, self.objective.real(output.logits), [output], mismatch)

    def discriminate(
        self, step_slice: StepSlice, rows: slice, batch: Images, name: str
    ) -> DiscriminatorOutput:
        """Return the output of D, with a graph, for a micro-batch of images of the kind `name`.

        The graph includes the images if a penalty on them is due.
        """
        due = PENALTIES[name][0] in self.penalty_weights(step_slice)
        batch = Images(batch.images.detach().requires_grad_(due), batch.labels)
        with phase("discriminator/forward"), penalised(due):
            output = self.context.discriminate(batch, step_slice, rows, name, compiled=not due)
        if name == "real":
            step_slice.add("logits/real", output.logits.sum() / step_slice.batch_size)
            step_slice.add("logits/real_sign", output.logits.sign().sum() / step_slice.batch_size)
        return output

    def _backward(
        self,
        step_slice: StepSlice,
        rows: slice,
        values: Tensor,
        outputs: Sequence[DiscriminatorOutput],
        mismatch: Tensor | float = 0.0,
    ) -> None:
        """Accumulate gradients in the parameters of D.

        The loss is the mean of `values` [n], which come from `outputs`, plus `mismatch` (0-d), the
        auxiliary loss and the penalties that are due.

        R1, R2 and the gradient penalty are multiplied by their interval. As one update serves loss
        and penalties, this factor alone makes up for the steps without penalties, and Adam's lr and
        betas do not change.
        """
        loss = values.sum() / step_slice.batch_size
        step_slice.add("loss/discriminator", loss)
        weights = self.penalty_weights(step_slice)
        auxiliary: Tensor | float = 0
        for output in outputs:
            if output.name == "real" or (output.name == "fake" and self.loss.auxiliary_fakes):
                auxiliary = auxiliary + self.context.auxiliary_loss(output, step_slice)
        loss = loss + mismatch + auxiliary
        due = [output for output in outputs if PENALTIES[output.name][0] in weights]
        with (
            phase("discriminator/penalty" if due else "discriminator/backward"),
            penalised(bool(due)),
        ):
            for output in due:
                name, penalty = PENALTIES[output.name]
                values = penalty(output.logits, output.images, self.context.precision.scale())
                mean = values.sum() / step_slice.batch_size
                step_slice.add(f"loss/{name}", mean * weights[name])
                loss = loss + mean * (weights[name] * self.loss.r1_interval)
            final = "between" if "gradient_penalty" in weights else "real"
            self.updater.overlap(last=step_slice.is_last(rows) and outputs[0].name == final)
            self.context.precision.backward(loss, self.updater.parameters)
