"""The discriminator's half of a GAN's step: real against generated images, gradient penalties, what
ADA watches.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from duetgan.models.gan import asked
from duetgan.models.layers.convolution import penalised
from duetgan.training.base.phases import phase
from duetgan.training.gan import losses
from duetgan.training.gan.context import Context, DiscriminatorOutput, Images, StepShare
from duetgan.training.optim.config import cosine
from duetgan.training.optim.updater import Updater
from duetgan.utils.distributed import collectives

# name of the images -> the penalty that is taken of them, and its value for each image, of the
# logits and the images
PENALTIES = {
    "real": ("r1", losses.squared_gradient_norm),
    "fake": ("r2", losses.squared_gradient_norm),
    "between": ("gradient_penalty", losses.gradient_penalty),
}


class DiscriminatorStep:
    """One update of the discriminator, and of the strength of adaptive augmentation."""

    def __init__(self, context: Context, updater: Updater) -> None:
        self.context, self.updater = context, updater
        self.loss, self.objective = context.config.loss, context.config.loss.functions

    def run(
        self, share: StepShare, reals: Sequence[Images], fakes: Sequence[Images], *, one_pass: bool
    ) -> None:
        """Update D from micro-batches of real and generated images (without graphs); G stays as it
        is.

        `one_pass`: D has learnt from them in the generator's half already.
        """
        context, metrics = self.context, share.metrics
        for rows, real, fake in zip(share.micro_batches(), reals, fakes, strict=True):
            if not one_pass:
                self.learn(share, rows, self.discriminate(share, rows, fake, "fake"), real)
            # of images between a sample and an image, its label
            if "gradient_penalty" in self.penalty_weights(share):
                ratio = context.draws.shares(share.step, share.batch_size)[rows]
                images = losses.between(real.images, fake.images, ratio)
                output = self.discriminate(share, rows, Images(images, real.labels), "between")
                self._backward(share, rows, torch.zeros_like(output.logits), [output])
        with phase("discriminator/optimizer"):
            update = self.updater.step(share.step)
            context.discriminator.after_update()
        if context.ada.active:
            sign = collectives.all_reduce_sum_(metrics["logits/real_sign"].clone())
            context.ada.update(
                share.images_seen + share.batch_size, share.step, sign, share.batch_size
            )
            metrics["ada/p"] = context.ada.p.clone() / collectives.world_size()
        metrics["logits/margin"] = metrics["logits/real"] - metrics["logits/fake"]
        metrics.update(update.metrics("discriminator"))

    def learn(
        self,
        share: StepShare,
        rows: slice,
        of_fake: DiscriminatorOutput,
        real: Images | DiscriminatorOutput,
    ) -> None:
        """Gradients on a micro-batch: what D makes of samples, and real images, or what D makes of
        these.
        """
        share.add("logits/fake", of_fake.logits.sum() / share.batch_size)
        if self.objective.paired:
            of_real = (
                self.discriminate(share, rows, real, "real") if isinstance(real, Images) else real
            )
            self._backward(
                share,
                rows,
                self.objective.real(of_real.logits - of_fake.logits),
                [of_real, of_fake],
            )
        else:
            self._backward(share, rows, self.objective.fake(of_fake.logits), [of_fake])
            self._reals(share, rows, Images(real.images, real.labels))

    def penalty_weights(self, share: StepShare) -> dict[str, float]:
        """The penalties of this step, each with its weight before the gain of the interval, which
        `_backward` gives.
        """
        loss, seen = self.loss, (share.images_seen, self.context.schedule_images)
        if not loss.penalty_due(share.step):
            return {}
        gammas, end = {"r1": loss.r1_gamma, "r2": loss.r2_gamma}, loss.gamma_final
        weights = {
            key: (g if end is None else cosine(g, end, *seen)) / 2 for key, g in gammas.items() if g
        }
        weights["gradient_penalty"] = loss.gradient_penalty_weight
        return {name: weight for name, weight in weights.items() if weight > 0}

    def _reals(self, share: StepShare, rows: slice, real: Images) -> None:
        output = self.discriminate(share, rows, real, "real")
        mismatch: Tensor | float = 0.0
        context, kinds = self.context, len(self.context.draws.class_weights)
        if self.loss.mismatch_weight and context.discriminator.classes and kinds > 1:
            wrong = (
                real.labels + context.draws.label_offsets(share.step, share.batch_size)[rows]
            ) % kinds
            logits = context.discriminator.project(output.features, asked(wrong, context.sets))
            mismatch = self.objective.fake(logits).sum() * (
                self.loss.mismatch_weight / share.batch_size
            )
        self._backward(share, rows, self.objective.real(output.logits), [output], mismatch)

    def discriminate(
        self, share: StepShare, rows: slice, batch: Images, name: str
    ) -> DiscriminatorOutput:
        """What D makes of a micro-batch of `name`, with a graph, to the images too if a penalty of
        them is due.
        """
        due = PENALTIES[name][0] in self.penalty_weights(share)
        batch = Images(batch.images.detach().requires_grad_(due), batch.labels)
        with phase("discriminator/forward"), penalised(due):
            output = self.context.discriminate(batch, share, rows, name, compiled=not due)
        if name == "real":
            share.add("logits/real", output.logits.sum() / share.batch_size)
            share.add("logits/real_sign", output.logits.sign().sum() / share.batch_size)
        return output

    def _backward(
        self,
        share: StepShare,
        rows: slice,
        values: Tensor,
        outputs: Sequence[DiscriminatorOutput],
        more: Any = 0.0,
    ) -> None:
        """Gradients of the objective (`values` [n] of the `outputs`, and `more`, 0-d), the
        auxiliary loss and the penalties that are due, in D's parameters alone.

        R1, R2 and the gradient penalty are multiplied by their interval. One update serves them
        all, so this gain alone makes up for the steps without them (no change of Adam's lr and
        betas).
        """
        loss = values.sum() / share.batch_size
        share.add("loss/discriminator", loss)
        # what the auxiliary head learns from
        taught = ("real", "fake") if self.loss.auxiliary_fakes else ("real",)
        weights = self.penalty_weights(share)
        loss = (
            loss
            + more
            + sum(self.context.auxiliary_loss(o, share) for o in outputs if o.name in taught)
        )
        due = [output for output in outputs if PENALTIES[output.name][0] in weights]
        with (
            phase("discriminator/penalty" if due else "discriminator/backward"),
            penalised(bool(due)),
        ):
            for output in due:
                name, penalty = PENALTIES[output.name]
                mean = (
                    penalty(output.logits, output.images, self.context.precision.scale()).sum()
                    / share.batch_size
                )
                share.add(f"loss/{name}", mean * weights[name])
                loss = loss + mean * (weights[name] * self.loss.r1_interval)
            final = "between" if "gradient_penalty" in weights else "real"
            self.updater.overlap(last=share.is_last(rows) and outputs[0].name == final)
            self.context.precision.backward(loss, self.updater.parameters)
