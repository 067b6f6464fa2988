"""The generator's half of a GAN's step: its losses, apart or summed, path-length regularisation,
its averages.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from duetgan.models.gan import label_loss
from duetgan.models.layers.convolution import penalised
from duetgan.training.base.phases import phase
from duetgan.training.base.teacher import Teacher
from duetgan.training.gan import losses
from duetgan.training.gan.context import Context, Images, StepShare
from duetgan.training.gan.discriminator_step import DiscriminatorStep
from duetgan.training.optim.config import cosine
from duetgan.training.optim.ema import EMA, half_life_beta
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils.distributed import collectives


class PathLength(torch.nn.Module):
    """The moving mean of path lengths: a buffer without a graph, the same on all ranks (StyleGAN2,
    section 3.2).
    """

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.mean = torch.nn.Buffer(torch.zeros([]))

    @torch.no_grad()
    def update(self, batch_mean: Tensor) -> Tensor:
        """Move towards a (global) batch's mean length and return the new mean; a non-finite one
        changes nothing.
        """
        moved = self.mean.lerp(batch_mean.to(self.mean.dtype), self.decay)
        self.mean.copy_(torch.where(torch.isfinite(moved), moved, self.mean))
        return moved


class PerLossGradients:
    """Gathers the gradients of a step's losses in the parameters' `.grad`; apart, also each loss's
    own (docs/gan.md).

    Gradients are taken outside any hooks of DDP and added up over the ranks afterwards
    (docs/distributed.md).

    Args: `parameters` that train; `apart`: take each loss's gradient by itself, so that `finish`
    can tell their norms and the cosines between them. The sum is the same either way, up to
    rounding.
    """

    def __init__(self, parameters: Sequence[Tensor], precision: Precision, *, apart: bool) -> None:
        self.parameters, self.precision, self.apart = list(parameters), precision, apart
        # name -> gradient of each parameter, of this rank's share
        self.by_loss: dict[str, list[Tensor | None]] = {}

    def backward(self, terms: Mapping[str, Tensor]) -> None:
        """Add the gradients of `terms`, weighted 0-d losses that may share a graph; the graph is
        used up.
        """
        if not self.apart:
            self.precision.backward(torch.stack(list(terms.values())).sum(), self.parameters)
            return
        last = list(terms)[-1]
        for name, loss in terms.items():
            gradients = torch.autograd.grad(
                loss * self.precision.scale(),
                self.parameters,
                retain_graph=name != last,
                allow_unused=True,
            )
            before = self.by_loss.get(name, [None] * len(self.parameters))
            self.by_loss[name] = [
                _sum([old, new]) for old, new in zip(before, gradients, strict=True)
            ]

    def finish(self, name: str) -> dict[str, Tensor]:
        """Put the sum into `.grad`, and tell `gradient_norm/NAME/LOSS` and
        `gradient_cosine/NAME/LOSS~LOSS`.

        The figures are of the global gradients, unscaled; every rank contributes its part of the
        sum.
        """
        if not self.apart:
            return {}
        for index, parameter in enumerate(self.parameters):
            parameter.grad = _sum([gradients[index] for gradients in self.by_loss.values()])
        flat = {}  # one vector of all gradients, zeros where there is none
        for loss, gradients in self.by_loss.items():
            pairs = zip(self.parameters, gradients, strict=True)
            vector = torch.cat(
                [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs]
            )
            flat[loss] = collectives.all_reduce_sum_(vector) / self.precision.scale()
        norms, world = (
            {loss: gradient.norm() for loss, gradient in flat.items()},
            collectives.world_size(),
        )
        figures = {f"gradient_norm/{name}/{loss}": norm / world for loss, norm in norms.items()}
        for a, b in combinations(flat, 2):
            cosine = (
                flat[a]
                @ flat[b]
                / (norms[a] * norms[b]).clamp_min(torch.finfo(norms[a].dtype).tiny)
            )
            figures[f"gradient_cosine/{name}/{a}~{b}"] = cosine / world
        return figures


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Of those that there are; None if there is none: the optimizer leaves such a parameter alone."""
    given = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(given).sum(dim=0) if given else None


class GeneratorStep:
    """One update of the generator and of its moving average."""

    def __init__(
        self,
        context: Context,
        updater: Updater,
        ema: EMA,
        teacher: Teacher | None,
        other: DiscriminatorStep,
    ) -> None:
        """Args: `other`: the discriminator's half, which learns in this one where one pass is
        enough for both.
        """
        self.context, self.updater, self.ema, self.teacher, self.other = (
            context,
            updater,
            ema,
            teacher,
            other,
        )
        self.loss, self.objective = context.config.loss, context.config.loss.functions
        self.path_length = PathLength(self.loss.path_length_decay).to(context.device)

    def one_pass(self, share: StepShare) -> bool:
        """Whether one pass of D over this step's samples gives both networks' gradients.

        Its weights are the same for both. So where both see the same images, no other loss goes
        through D and no penalty is taken of samples, the gradients are those of two passes.
        """
        loss = self.loss
        more = loss.feature_matching_weight or (self.teacher is not None and loss.classifier_weight)
        penalised = loss.r2_gamma > 0 and loss.penalty_due(share.step)
        alone = loss.same_images and not more and not loss.gradients_due(share.step)
        return alone and not penalised and not self.context.ada.active

    def run(self, share: StepShare, reals: Sequence[Images]) -> list[Images]:
        """Update G and its average; returns the samples (detached), which D may be shown next.

        `reals`: real images in micro-batches. D's parameters stay as they are, and so do its
        gradients, except in `one_pass`: there they become those of its own losses.
        """
        context, ema, apart = (
            self.context,
            self.context.config.ema,
            self.loss.gradients_due(share.step),
        )
        gradients = PerLossGradients(self.updater.parameters, context.precision, apart=apart)
        # else its gradients are not this phase's business
        context.discriminator.requires_grad_(self.one_pass(share))
        try:
            fakes, w_sums = self._adversarial(share, reals, gradients)
            if self.loss.path_length_due(share.step):
                with phase("generator/path_length"):
                    self._regularise_path_length(share, gradients)
        finally:
            context.discriminator.requires_grad_(True)
        with phase("generator/optimizer"):
            share.metrics.update(gradients.finish("generator"))
            update = self.updater.step(share.step)
        with phase("ema"):
            if w_sums:
                context.generator.update_w_avg(
                    collectives.all_reduce_sum_(sum(w_sums[1:], w_sums[0])) / share.batch_size
                )
            kimg = ema.ema_kimg if ema.ema_kimg is not None else share.batch_size * 10 / 32
            if ema.ema_kimg_start is not None:
                kimg = cosine(ema.ema_kimg_start, kimg, share.images_seen, context.schedule_images)
            # a transfer's generator is trained already
            ramp = None if context.config.init_from else ema.ema_rampup
            beta = half_life_beta(share.batch_size, share.images_seen, kimg * 1000, ramp)
            self.ema.update(context.generator, beta, update.skipped)
        share.metrics.update(update.metrics("generator"))
        return fakes

    def _adversarial(
        self, share: StepShare, reals: Sequence[Images], gradients: PerLossGradients
    ) -> tuple[list[Images], list[Tensor]]:
        """Backward of all losses of one forward pass a micro-batch; the samples, and their w's sum,
        of each.
        """
        context = self.context
        latents, noise = context.latents(share, "generator", reals if self.objective.paired else ())
        # backward passes that are not here
        more = gradients.apart or self.loss.path_length_due(share.step)
        fakes: list[Images] = []
        w_sums: list[Tensor] = []
        for rows, real in zip(share.micro_batches(), reals, strict=True):
            with phase("generator/forward"), context.precision.autocast():
                images, _, w = context.sample(
                    latents, noise, rows, share.stage, compiled=not gradients.apart
                )
            fake = Images(images, latents.labels[rows])
            self.updater.overlap(last=share.is_last(rows) and not more)
            if self.one_pass(share):
                self._backward_of_both(share, rows, fake, real)
            else:
                with phase("generator/forward"):
                    terms = self._terms(share, rows, fake, real)
                with phase("generator/backward"):
                    gradients.backward(terms)
            if w is not None:
                w_sums.append(w.detach().sum(dim=0))
            fakes.append(Images(images.detach(), fake.labels))
        return fakes, w_sums

    def _backward_of_both(self, share: StepShare, rows: slice, fake: Images, real: Images) -> None:
        """Gradients of both networks' losses from one pass of D: G's in G's parameters, D's in D's."""
        context, batch = self.context, share.batch_size
        seen = Images(fake.images.detach().requires_grad_(), fake.labels)
        with phase("discriminator/forward"):
            output = context.discriminate(seen, share, rows, "generator")
            auxiliary = context.auxiliary_loss(output, share)
        of_real = (
            self.other.discriminate(share, rows, real, "real") if self.objective.paired else None
        )
        with phase("generator/backward"):
            logits = output.logits - of_real.logits.detach() if of_real else output.logits
            adversarial = self.objective.generator(logits).sum() / batch
            total = (adversarial + auxiliary) * context.precision.scale()
            (gradient,) = torch.autograd.grad(total, seen.images, retain_graph=True)
            fake.images.backward(gradient, inputs=self.updater.parameters)
        share.add("loss/generator", adversarial)
        self.other.learn(share, rows, output._replace(name="fake"), of_real or real)

    def _terms(
        self, share: StepShare, rows: slice, fake: Images, real: Images
    ) -> dict[str, Tensor]:
        """The losses of a micro-batch by name, weighted, as its share of the global batch's means."""
        context, loss, batch = self.context, self.loss, share.batch_size
        # several losses taken apart retain their graph, which a compiled network does not allow
        output = context.discriminate(
            fake, share, rows, "generator", compiled=not loss.gradients_due(share.step)
        )
        logits = output.logits
        if self.objective.paired or loss.feature_matching_weight:
            with torch.no_grad():  # G has no part in them
                of_real = context.discriminate(real, share, rows, "generator/real")
            logits = logits - of_real.logits if self.objective.paired else logits
        terms = {"adversarial": self.objective.generator(logits).sum() / batch}
        share.add("loss/generator", terms["adversarial"])
        if self.teacher is not None and loss.classifier_weight:
            with context.precision.autocast():
                class_logits = self.teacher(fake.images)
            wrong = (
                label_loss(class_logits.to(fake.images.dtype), fake.labels, context.sets) / batch
            )
            share.add("loss/classifier", wrong)
            terms["classifier"] = wrong * loss.classifier_weight
        if isinstance(auxiliary := context.auxiliary_loss(output, share), Tensor):
            terms["auxiliary"] = auxiliary
        if loss.feature_matching_weight:
            group = loss.feature_matching_group
            distance = losses.feature_matching(output.hidden, of_real.hidden, group).sum() * (
                group / batch
            )
            share.add("loss/feature_matching", distance)
            terms["feature_matching"] = distance * loss.feature_matching_weight
        return terms

    @penalised()
    def _regularise_path_length(self, share: StepShare, gradients: PerLossGradients) -> None:
        """Backward of StyleGAN2's path-length penalty on half a batch, with the gain of its
        interval.

        The moving mean is updated first, and needs the lengths of the whole (global) half batch:
        where that is more than one micro-batch, they are computed once without and once with a
        graph.
        """
        context, half = self.context, share.half()
        latents, maps = context.latents(half, "path")
        shape = context.generator.spec.at(share.stage.resolution).shape
        noise = context.draws.path_noise(share.step, half.batch_size, shape)

        def path_lengths(rows: slice, *, create_graph: bool) -> Tensor:
            with context.precision.autocast():
                images, ws, _ = context.sample(latents, maps, rows, share.stage)
            assert ws is not None  # the config refuses path lengths for generators without styles
            return losses.path_lengths(
                images, ws, noise[rows], context.precision.scale(), create_graph=create_graph
            )

        micro_batches = half.micro_batches()
        once = len(micro_batches) == 1
        lengths = [path_lengths(rows, create_graph=once) for rows in micro_batches]
        total = collectives.all_reduce_sum_(
            torch.stack([part.detach().sum() for part in lengths]).sum()
        )
        batch_mean, decay = total / half.batch_size, self.path_length.decay
        mean = self.path_length.update(batch_mean)
        for rows, part in zip(micro_batches, lengths, strict=True):
            part = part if once else path_lengths(rows, create_graph=True)
            penalty = losses.path_length_penalty(part, mean, batch_mean, decay, half.batch_size)
            share.add("loss/path_length", penalty)
            self.updater.overlap(last=half.is_last(rows) and not gradients.apart)
            weight = self.loss.path_length_weight * self.loss.path_length_interval
            gradients.backward({"path_length": penalty * weight})
        share.metrics["path_length/mean"] = mean / collectives.world_size()
