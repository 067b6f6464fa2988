"""The discriminator's half of a GAN's step: real against generated images, gradient penalties, what ADA watches."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.gan import penalties
from training.gan.context import Context, Images, Work
from training.optim.updater import Updater
from training.profile.ranges import phase
from utils.distributed import collectives

# penalty -> its value for each image, of the logits and the images they are of
PENALTIES = {
    "r1": penalties.squared_gradient_norm,  # of real images
    "r2": penalties.squared_gradient_norm,  # of samples
    "gradient_penalty": penalties.gradient_penalty,  # of images between both
}


class Judged(NamedTuple):
    """Images that the discriminator has seen."""

    penalty: str  # what is taken of them where it is due
    images: Tensor  # [n, C, R, R] before augmentation, requiring gradients where the penalty is due
    logits: Tensor  # [n]
    features: Tensor  # [n, F], what the logits are made from
    misnamed: Tensor | float  # the auxiliary head's loss on them, weighted, as its share of the mean; 0: none


class DiscriminatorStep:
    """One update of the discriminator, and of the strength of adaptive augmentation."""

    def __init__(self, context: Context, updater: Updater) -> None:
        self.context, self.updater = context, updater
        self.loss, self.game = context.config.loss, context.config.loss.game
        self._weights: dict[str, float] = {}  # of the penalties that are due in this step
        self._sums: dict[str, Tensor] = {}  # this step's metrics

    def run(self, work: Work, reals: Sequence[Images], fakes: Sequence[Images], metrics: dict[str, Tensor]) -> None:
        """Update D from micro-batches of real and generated images (without graphs); G stays as it is.

        Where `metrics` tell that D has judged the samples already, its gradients on them are kept and added to.
        """
        context, self._weights = self.context, self._due(work)
        names = ["loss/discriminator", "logits/real", "logits/fake", "logits/real_sign"]
        names += [f"loss/{name}" for name in self._weights]
        names += ["loss/auxiliary_real", "accuracy/auxiliary"] if self.loss.auxiliary_weight else []
        sums = self._sums = {name: torch.zeros((), device=context.device) for name in names}
        judged = "logits/fake" in metrics
        if judged:
            sums |= {name: metrics[name] for name in ("loss/discriminator", "logits/fake")}
        else:
            self.updater.zero_grad()
        for piece, real, fake in zip(work.pieces(), reals, fakes, strict=True):
            if self.game.paired:
                self._judge_pairs(work, piece, real, fake)
            else:
                self._judge_apart(work, piece, real, None if judged else fake)
            if "gradient_penalty" in self._weights:
                self._judge_between(work, piece, real, fake)
        with phase("discriminator/optimizer"):
            update = self.updater.step(work.step)
            context.discriminator.after_update()
        if context.ada.active:
            sign = collectives.all_reduce_sum_(sums["logits/real_sign"].clone())
            context.ada.update(work.images_seen + work.batch_size, work.step, sign, work.batch_size)
            metrics["ada/p"] = context.ada.p.clone() / collectives.world_size()
        sums["logits/margin"] = sums["logits/real"] - sums["logits/fake"]
        metrics.update(sums | update.metrics("discriminator"))

    def _due(self, work: Work) -> dict[str, float]:
        """What each penalty of this step is weighed with."""
        loss = self.loss
        if not loss.penalty_due(work.step):
            return {}
        scale = loss.gamma_scale(work.images_seen, self.context.schedule_images)
        weights = {"r1": scale * loss.r1_gamma / 2, "r2": scale * loss.r2_gamma / 2}
        weights["gradient_penalty"] = loss.gradient_penalty_weight
        return {name: weight for name, weight in weights.items() if weight > 0}

    def _judge_apart(self, work: Work, piece: slice, real: Images, fake: Images | None) -> None:
        """Samples (unless they are judged), then images, each with their own graph and backward pass."""
        context, batch = self.context, work.batch_size
        if fake is not None:
            judged = self._judge(work, piece, fake, "fake", "r2")
            self._backward(self.game.fake(judged.logits).sum() / batch, [judged], work)
        judged = self._judge(work, piece, real, "real", "r1")
        mismatch: Tensor | float = 0.0
        if self.loss.mismatch_weight and context.discriminator.classes > 1:
            offsets = context.draws.label_offsets(work.step, batch)[work.rows(piece)]
            wrong = (real.labels + offsets) % context.discriminator.classes
            mismatched = self.game.fake(context.discriminator.project(judged.features, wrong))
            mismatch = mismatched.sum() * (self.loss.mismatch_weight / batch)
        self.updater.overlap(last=piece.stop == work.share and "gradient_penalty" not in self._weights)
        self._backward(self.game.real(judged.logits).sum() / batch, [judged], work, unlogged=mismatch)

    def _judge_pairs(self, work: Work, piece: slice, real: Images, fake: Images) -> None:
        """Both in one graph."""
        sample = self._judge(work, piece, fake, "fake", "r2")
        image = self._judge(work, piece, real, "real", "r1")
        loss = self.game.pair_loss(image.logits, sample.logits).sum() / work.batch_size
        self.updater.overlap(last=piece.stop == work.share and "gradient_penalty" not in self._weights)
        self._backward(loss, [image, sample], work)

    def _judge_between(self, work: Work, piece: slice, real: Images, fake: Images) -> None:
        """The penalty of images on the way from a sample to an image, judged with the image's label."""
        share = self.context.draws.shares(work.step, work.batch_size)[work.rows(piece)]
        mixed = Images(penalties.between(real.images, fake.images, share), real.labels)
        judged = self._judge(work, piece, mixed, "between", "gradient_penalty")
        self.updater.overlap(last=piece.stop == work.share)
        self._backward(torch.zeros_like(self._sums["loss/discriminator"]), [judged], work)

    def _judge(self, work: Work, piece: slice, batch: Images, name: str, penalty: str) -> Judged:
        context, sums = self.context, self._sums
        due = penalty in self._weights
        images = batch.images.detach().requires_grad_(due)
        with phase("discriminator/forward"):
            hidden = context.hidden(Images(images, batch.labels), work, piece, name, fast=not due)
            features = context.discriminator.output(hidden)
            logits = context.discriminator.project(features, batch.labels)
        if name != "between":
            sums[f"logits/{name}"] += logits.detach().sum() / work.batch_size
        if name == "real":
            sums["logits/real_sign"] += logits.detach().sign().sum() / work.batch_size
        misnamed = self._misnamed(hidden, batch.labels, work, name) if self.loss.auxiliary_weight else 0.0
        return Judged(penalty, images, logits, features, misnamed)

    def _misnamed(self, hidden: Tensor, labels: Tensor, work: Work, name: str) -> Tensor | float:
        """The auxiliary head's cross entropy on images and, where it learns from them, on samples."""
        if name != "real" and not (name == "fake" and self.loss.auxiliary_fakes):
            return 0.0
        named, sums = self.context.named(hidden), self._sums
        loss = F.cross_entropy(named, labels, reduction="sum") / work.batch_size
        if name == "real":
            sums["loss/auxiliary_real"] += loss.detach()
            sums["accuracy/auxiliary"] += (named.argmax(1) == labels).sum() / work.batch_size
        return loss * self.loss.auxiliary_weight

    def _backward(self, loss: Tensor, judged: Sequence[Judged], work: Work, *, unlogged: Tensor | float = 0.0) -> None:
        """Gradients of a loss and the penalties that are due, in D's parameters alone.

        One update serves them all, so the interval's gain alone makes up for its steps (no change of Adam's lr and
        betas).
        """
        sums, context = self._sums, self.context
        sums["loss/discriminator"] += loss.detach()
        loss = loss + unlogged + sum(one.misnamed for one in judged)
        due = [one for one in judged if one.penalty in self._weights]
        with phase("discriminator/penalty" if due else "discriminator/backward"):
            for name, images, logits, *_ in due:
                values = PENALTIES[name](logits, images, context.precision.scale())
                mean, weight = values.sum() / work.batch_size, self._weights[name]
                sums[f"loss/{name}"] += mean.detach() * weight
                loss = loss + mean * (weight * self.loss.r1_interval)
            context.precision.backward(loss, self.updater.parameters)
