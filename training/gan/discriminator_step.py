"""The discriminator's half of a GAN's step: real against generated images, gradient penalties, what ADA watches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from training.gan import objectives
from training.gan.context import Images, Parts, Work
from training.optim.updater import Updater
from training.profile.ranges import phase
from utils.distributed import collectives


class DiscriminatorPhase:
    """One update of the discriminator, and of the strength of adaptive augmentation."""

    def __init__(self, parts: Parts, updater: Updater) -> None:
        self.parts, self.updater = parts, updater
        self.loss = parts.config.loss
        self._judged = False  # whether this step's samples have been judged in the generator's half

    def run(
        self, work: Work, reals: Sequence[Images], fakes: Sequence[Images], metrics: dict[str, Tensor]
    ) -> None:
        """Update D from micro-batches of real and generated images (without graphs); G stays as it is.

        Where `metrics` tell that D has judged the samples already, its gradients on them are kept and added to.
        """
        names = ["loss/discriminator", "logits/real", "logits/fake", "logits/real_sign"]
        gamma = self._gamma(work) if self.loss.penalty_due(work.step) else 0.0
        names += ["loss/r1"] * (self.penalty("r1", gamma) > 0) + ["loss/r2"] * (self.penalty("r2", gamma) > 0)
        sums = {name: torch.zeros((), device=self.parts.device) for name in names}
        judge = self._judge_pairs if self.loss.objective == "relativistic" else self._judge_apart
        self._judged = "logits/fake" in metrics
        if not self._judged:
            self.updater.zero_grad()
        else:
            sums |= {name: metrics[name] for name in ("loss/discriminator", "logits/fake")}
        for piece, real, fake in zip(work.pieces(), reals, fakes, strict=True):
            judge(work, piece, real, fake, gamma, sums)
        with phase("discriminator/optimizer"):
            update = self.updater.step(work.step)
        if self.parts.ada.active:
            sign = collectives.all_reduce_sum_(sums["logits/real_sign"].clone())
            self.parts.ada.update(work.images_seen + work.batch_size, work.step, sign, work.batch_size)
            metrics["ada/p"] = self.parts.ada.p.clone() / collectives.world_size()
        sums["logits/margin"] = sums["logits/real"] - sums["logits/fake"]
        metrics.update(sums | update.metrics("discriminator"))

    def _gamma(self, work: Work) -> float:
        """What the configured gammas are multiplied by at this step: their schedule."""
        return self.loss.gamma_scale(work.images_seen, self.parts.schedule_images)

    def penalty(self, name: str, scale: float) -> float:
        """gamma of penalty "r1" or "r2" at this step, 0 where it is not due."""
        return scale * (self.loss.r1_gamma if name == "r1" else self.loss.r2_gamma)

    def _judge_apart(
        self, work: Work, piece: slice, real: Images, fake: Images, gamma: float, sums: dict[str, Tensor]
    ) -> None:
        """Non-saturating loss: fakes, then reals, each with its own graph and backward pass."""
        parts, batch = self.parts, work.batch_size
        if not self._judged:
            images, logits, _ = self._judge(work, piece, fake, "fake", self.penalty("r2", gamma))
            self._note(sums, "fake", logits, batch)
            fake_loss = objectives.discriminator_fake(logits).sum() / batch
            self._backward(fake_loss, [("r2", logits, images)], gamma, work, sums)
        images, logits, features = self._judge(work, piece, real, "real", self.penalty("r1", gamma))
        self._note(sums, "real", logits, batch)
        loss = objectives.discriminator_real(logits).sum() / batch
        mismatch: Tensor | float = 0.0
        if self.loss.mismatch_weight and parts.discriminator.classes > 1:
            offsets = parts.draws.label_offsets(work.step, batch)[work.rows(piece)]
            wrong = (real.labels + offsets) % parts.discriminator.classes
            mismatched = objectives.discriminator_fake(parts.discriminator.project(features, wrong))
            mismatch = mismatched.sum() * (self.loss.mismatch_weight / batch)
        self._backward(loss, [("r1", logits, images)], gamma, work, sums, unlogged=mismatch)

    def _judge_pairs(
        self, work: Work, piece: slice, real: Images, fake: Images, gamma: float, sums: dict[str, Tensor]
    ) -> None:
        """Relativistic loss: both in one graph."""
        batch = work.batch_size
        fake_images, fake_logits, _ = self._judge(work, piece, fake, "fake", self.penalty("r2", gamma))
        real_images, real_logits, _ = self._judge(work, piece, real, "real", self.penalty("r1", gamma))
        self._note(sums, "fake", fake_logits, batch)
        self._note(sums, "real", real_logits, batch)
        loss = objectives.discriminator_relativistic(real_logits, fake_logits).sum() / batch
        judged = [("r1", real_logits, real_images), ("r2", fake_logits, fake_images)]
        self._backward(loss, judged, gamma, work, sums)

    def _judge(
        self, work: Work, piece: slice, batch: Images, name: str, gamma: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The images before augmentation (requiring gradients for a penalty), their logits and features."""
        parts = self.parts
        images = batch.images.detach().requires_grad_(gamma > 0)
        with phase("discriminator/forward"):
            seen = parts.augmented(Images(images, batch.labels), work, piece, name)
            features = parts.features(parts.hidden(seen, work.stage, fast=gamma == 0))
            return images, parts.discriminator.project(features, batch.labels), features

    def _note(self, sums: dict[str, Tensor], name: str, logits: Tensor, batch_size: int) -> None:
        sums[f"logits/{name}"] += logits.detach().sum() / batch_size
        if name == "real":
            sums["logits/real_sign"] += logits.detach().sign().sum() / batch_size

    def _backward(
        self,
        loss: Tensor,
        judged: list[tuple[str, Tensor, Tensor]],  # penalty, logits, and the images they are the logits of
        gamma: float,
        work: Work,
        sums: dict[str, Tensor],
        *,
        unlogged: Tensor | float = 0.0,
    ) -> None:
        """Gradients of a loss and the penalties that are due, in D's parameters alone.

        One update serves them all, so the interval's gain alone makes up for its steps (no change of Adam's lr and
        betas).
        """
        sums["loss/discriminator"] += loss.detach()
        loss = loss + unlogged
        due = [(name, logits, images) for name, logits, images in judged if self.penalty(name, gamma) > 0]
        with phase("discriminator/penalty" if due else "discriminator/backward"):
            for name, logits, images in due:
                norms = objectives.squared_gradient_norm(logits, images, self.parts.mixed.scale())
                norm = norms.sum() / work.batch_size
                half = self.penalty(name, gamma) / 2
                sums[f"loss/{name}"] += norm.detach() * half
                loss = loss + norm * (half * self.loss.r1_interval)
            self.parts.mixed.backward(loss, self.updater.parameters)
