"""The discriminator's half of a GAN's step: real against generated images, gradient penalties, what ADA watches."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.base.phases import phase
from training.gan import losses
from training.gan.context import Context, DiscriminatorOutput, Images, StepShare
from training.optim.updater import Updater
from utils.distributed import collectives

# name of the images -> the penalty that is taken of them, and its value for each image, of the logits and the images
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

    def run(self, share: StepShare, reals: Sequence[Images], fakes: Sequence[Images], *, one_pass: bool) -> None:
        """Update D from micro-batches of real and generated images (without graphs); G stays as it is.

        `one_pass`: D has its gradients on the samples from the generator's half already; they are added to.
        """
        context, metrics = self.context, share.metrics
        for rows, real, fake in zip(share.micro_batches(), reals, fakes, strict=True):
            if self.objective.paired:
                self._pairs(share, rows, real, fake)
            else:
                if not one_pass:
                    self._fakes(share, rows, fake)
                self._reals(share, rows, real)
            if "gradient_penalty" in self.penalty_weights(share):
                self._between(share, rows, real, fake)
        with phase("discriminator/optimizer"):
            update = self.updater.step(share.step)
            context.discriminator.after_update()
        if context.ada.active:
            sign = collectives.all_reduce_sum_(metrics["logits/real_sign"].clone())
            context.ada.update(share.images_seen + share.batch_size, share.step, sign, share.batch_size)
            metrics["ada/p"] = context.ada.p.clone() / collectives.world_size()
        metrics["logits/margin"] = metrics["logits/real"] - metrics["logits/fake"]
        metrics.update(update.metrics("discriminator"))

    def penalty_weights(self, share: StepShare) -> dict[str, float]:
        """The penalties of this step, each with its weight before the gain of the interval, which `_backward` gives."""
        loss = self.loss
        if not loss.penalty_due(share.step):
            return {}
        scale = loss.gamma_scale(share.images_seen, self.context.schedule_images)
        weights = {"r1": scale * loss.r1_gamma / 2, "r2": scale * loss.r2_gamma / 2}
        weights["gradient_penalty"] = loss.gradient_penalty_weight
        return {name: weight for name, weight in weights.items() if weight > 0}

    # --- one graph and one backward pass each

    def _fakes(self, share: StepShare, rows: slice, fake: Images) -> None:
        output = self._discriminate(share, rows, fake, "fake")
        self._backward(share, rows, self.objective.fake(output.logits), [output])

    def _reals(self, share: StepShare, rows: slice, real: Images) -> None:
        output = self._discriminate(share, rows, real, "real")
        mismatch: Tensor | float = 0.0
        classes = self.context.discriminator.classes
        if self.loss.mismatch_weight and classes > 1:
            offsets = self.context.draws.label_offsets(share.step, share.batch_size)[rows]
            logits = self.context.discriminator.project(output.features, (real.labels + offsets) % classes)
            mismatch = self.objective.fake(logits).sum() * (self.loss.mismatch_weight / share.batch_size)
        self._backward(share, rows, self.objective.real(output.logits), [output], mismatch)

    def _pairs(self, share: StepShare, rows: slice, real: Images, fake: Images) -> None:
        of_fake = self._discriminate(share, rows, fake, "fake")
        of_real = self._discriminate(share, rows, real, "real")
        self._backward(share, rows, self.objective.real(of_real.logits - of_fake.logits), [of_real, of_fake])

    def _between(self, share: StepShare, rows: slice, real: Images, fake: Images) -> None:
        """The penalty of images on the way from a sample to an image, with the image's label."""
        ratio = self.context.draws.shares(share.step, share.batch_size)[rows]
        images = Images(losses.between(real.images, fake.images, ratio), real.labels)
        output = self._discriminate(share, rows, images, "between")
        self._backward(share, rows, torch.zeros_like(output.logits), [output])

    # --- what they have in common

    def _discriminate(self, share: StepShare, rows: slice, batch: Images, name: str) -> DiscriminatorOutput:
        due = PENALTIES[name][0] in self.penalty_weights(share)
        batch = Images(batch.images.detach().requires_grad_(due), batch.labels)
        with phase("discriminator/forward"):
            output = self.context.discriminate(batch, share, rows, name, compiled=not due)
        if name != "between":
            share.add(f"logits/{name}", output.logits.sum() / share.batch_size)
        if name == "real":
            share.add("logits/real_sign", output.logits.sign().sum() / share.batch_size)
        return output

    def _auxiliary_loss(self, output: DiscriminatorOutput, share: StepShare) -> Tensor | float:
        """The weighted cross entropy of the auxiliary head on images and, where it learns from them, on samples."""
        taught = output.name == "real" or (output.name == "fake" and self.loss.auxiliary_fakes)
        if not (self.loss.auxiliary_weight and taught):
            return 0.0
        class_logits = self.context.discriminator.auxiliary(output.hidden)
        loss = F.cross_entropy(class_logits, output.labels, reduction="sum") / share.batch_size
        if output.name == "real":
            share.add("loss/auxiliary_real", loss)
            share.add("accuracy/auxiliary", (class_logits.argmax(1) == output.labels).sum() / share.batch_size)
        return loss * self.loss.auxiliary_weight

    def _backward(
        self, share: StepShare, rows: slice, values: Tensor, outputs: Sequence[DiscriminatorOutput], more: Any = 0.0
    ) -> None:
        """Gradients of the objective (`values` [n] of the `outputs`, and `more`, 0-d), the auxiliary loss and the
        penalties that are due, in D's parameters alone.

        R1, R2 and the gradient penalty are multiplied by their interval. One update serves them all, so this gain alone
        makes up for the steps without them (no change of Adam's lr and betas).
        """
        weights, loss = self.penalty_weights(share), values.sum() / share.batch_size
        share.add("loss/discriminator", loss)
        loss = loss + more + sum(self._auxiliary_loss(output, share) for output in outputs)
        due = [output for output in outputs if PENALTIES[output.name][0] in weights]
        with phase("discriminator/penalty" if due else "discriminator/backward"):
            for output in due:
                name, penalty = PENALTIES[output.name]
                mean = penalty(output.logits, output.images, self.context.precision.scale()).sum() / share.batch_size
                share.add(f"loss/{name}", mean * weights[name])
                loss = loss + mean * (weights[name] * self.loss.r1_interval)
            final = "between" if "gradient_penalty" in weights else "real"
            self.updater.overlap(last=share.is_last(rows) and outputs[0].name == final)
            self.context.precision.backward(loss, self.updater.parameters)
