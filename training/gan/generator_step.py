"""The generator's half of a GAN's step: its losses, apart or summed, path-length regularisation, its averages."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.classifier import Classifier, fit_images
from training.gan import penalties
from training.gan.context import Context, Images, Work
from training.optim.ema import EMA, half_life_beta
from training.optim.schedules import cosine
from training.optim.updater import Precision, Updater
from training.profile.ranges import phase
from utils.distributed import collectives


class PathLength(torch.nn.Module):
    """The moving mean of path lengths: a buffer without a graph, the same on all ranks (StyleGAN2, section 3.2)."""

    mean: Tensor

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("mean", torch.zeros([]))

    @torch.no_grad()
    def update(self, batch_mean: Tensor) -> Tensor:
        """Move towards a (global) batch's mean length and return the new mean; a non-finite one changes nothing."""
        moved = self.mean.lerp(batch_mean.to(self.mean.dtype), self.decay)
        self.mean.copy_(torch.where(torch.isfinite(moved), moved, self.mean))
        return moved


class PerLossGradients:
    """Gathers the gradients of a step's losses in the parameters' `.grad`; apart, also each loss's own.

    Gradients are taken outside any hooks of DDP and added up over the ranks afterwards (docs/distributed.md).

    Args: `parameters` that train; `apart`: take each loss's gradient by itself, so that `finish` can tell their norms
    and the cosines between them. The sum is the same either way, up to rounding.
    """

    def __init__(self, parameters: Sequence[Tensor], precision: Precision, *, apart: bool) -> None:
        self.parameters, self.precision, self.apart = list(parameters), precision, apart
        self.own: dict[str, list[Tensor | None]] = {}  # name -> gradient of each parameter, of this rank's share

    def backward(self, terms: Mapping[str, Tensor]) -> None:
        """Add the gradients of `terms`, weighted 0-d losses that may share a graph; the graph is used up."""
        if not self.apart:
            self.precision.backward(torch.stack(list(terms.values())).sum(), self.parameters)
            return
        last = list(terms)[-1]
        for name, loss in terms.items():
            gradients = torch.autograd.grad(
                loss * self.precision.scale(), self.parameters, retain_graph=name != last, allow_unused=True
            )
            kept = self.own.get(name, [None] * len(self.parameters))
            self.own[name] = [_sum([mine, new]) for mine, new in zip(kept, gradients, strict=True)]

    def finish(self, name: str) -> dict[str, Tensor]:
        """Put the sum into `.grad`, and tell `gradient_norm/NAME/LOSS` and `gradient_cosine/NAME/LOSS~LOSS`.

        The figures are of the global gradients, unscaled; every rank contributes its part of the sum.
        """
        if not self.apart:
            return {}
        for index, parameter in enumerate(self.parameters):
            parameter.grad = _sum([gradients[index] for gradients in self.own.values()])
        flat = {}  # one vector of all gradients, zeros where there is none
        for loss, gradients in self.own.items():
            pairs = zip(self.parameters, gradients, strict=True)
            vector = torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs])
            flat[loss] = collectives.all_reduce_sum_(vector) / self.precision.scale()
        norms, world = {loss: gradient.norm() for loss, gradient in flat.items()}, collectives.world_size()
        found = {f"gradient_norm/{name}/{loss}": norm / world for loss, norm in norms.items()}
        for a, b in combinations(flat, 2):
            cosine = flat[a] @ flat[b] / (norms[a] * norms[b]).clamp_min(torch.finfo(norms[a].dtype).tiny)
            found[f"gradient_cosine/{name}/{a}~{b}"] = cosine / world
        return found


class GeneratorStep:
    """One update of the generator and of its moving average."""

    def __init__(self, context: Context, updater: Updater, ema: EMA, teacher: Classifier | None) -> None:
        self.context, self.updater, self.ema, self.teacher = context, updater, ema, teacher
        self.loss, self.game = context.config.loss, context.config.loss.game
        self.path_length = PathLength(self.loss.path_length_decay).to(context.device)
        self.sharing = True  # one pass of D over the samples serves both players where it can; see `one_pass`

    @property
    def needs_reals(self) -> bool:
        """Whether the generator's losses look at real images."""
        return self.game.paired or self.loss.feature_matching_weight > 0

    def one_pass(self, work: Work) -> bool:
        """Whether one pass of D over this step's samples gives both players' gradients.

        Its weights are the same for both. So where both see the same images, no other loss goes through D and no
        penalty is taken of samples, the gradients are those of two passes.
        """
        loss = self.loss
        more = loss.feature_matching_weight or (self.teacher is not None and loss.classifier_weight)
        penalised = loss.r2_gamma > 0 and loss.penalty_due(work.step)
        alone = not self.game.paired and not more and not loss.gradients_due(work.step)  # paired: D sees fresh samples
        return self.sharing and alone and not penalised and not self.context.ada.active

    def run(self, work: Work, reals: Sequence[Images], metrics: dict[str, Tensor]) -> list[Images]:
        """Update G and its average; returns the samples (detached), which D may judge next.

        `reals`: real images in micro-batches, where `needs_reals`. D's parameters stay as they are, and so do its
        gradients, except in `one_pass`: there they become those of its own loss on the samples, noted in `metrics`.
        """
        context, generator = self.context, self.context.generator
        apart = self.loss.gradients_due(work.step)
        gradients = PerLossGradients(self.updater.parameters, context.precision, apart=apart)
        self.updater.zero_grad()
        context.discriminator.requires_grad_(self.one_pass(work))  # else its gradients are not this phase's business
        try:
            fakes, w_sum = self._adversarial(work, reals, gradients, metrics)
            if self.loss.path_length_due(work.step):
                with phase("generator/path_length"):
                    self._regularise_path_length(work, gradients, metrics)
        finally:
            context.discriminator.requires_grad_(True)
        with phase("generator/optimizer"):
            metrics.update(gradients.finish("generator"))
            update = self.updater.step(work.step)
        with phase("ema"):
            if w_sum is not None:
                generator.update_w_avg(collectives.all_reduce_sum_(w_sum) / work.batch_size)
            self.ema.update(generator, self.ema_beta(work), update.skipped)
        metrics.update(update.metrics("generator"))
        return fakes

    def ema_beta(self, work: Work) -> float:
        """The average's decay at this step. A transfer starts from a trained generator and has no ramp."""
        ema, batch, over = self.context.config.ema, work.batch_size, self.context.schedule_images
        kimg = ema.ema_kimg if ema.ema_kimg is not None else batch * 10 / 32
        if ema.ema_kimg_start is not None:
            kimg = cosine(ema.ema_kimg_start, kimg, work.images_seen, over)
        ramp = None if self.context.config.init_from else ema.ema_rampup
        return half_life_beta(batch, work.images_seen, kimg * 1000, ramp)

    def _adversarial(
        self, work: Work, reals: Sequence[Images], gradients: PerLossGradients, metrics: dict[str, Tensor]
    ) -> tuple[list[Images], Tensor | None]:
        """Backward of all losses of one forward pass a micro-batch; the samples, and the sum of their w."""
        context = self.context
        latents, noise = context.latents(work, "generator", work.batch_size)
        if self.game.paired:  # a sample has the label of the image it is paired with
            latents.labels[work.rows(slice(0, work.share))] = torch.cat([real.labels for real in reals])
        fakes: list[Images] = []
        w_sum: Tensor | None = None
        for index, piece in enumerate(work.pieces()):
            rows = work.rows(piece)
            with phase("generator/forward"), context.precision.autocast():
                images, _, w = context.sample(latents, noise, rows, work.stage, fast=not gradients.apart)
            fake = Images(images, latents.labels[rows])
            more = gradients.apart or self.loss.path_length_due(work.step)
            self.updater.overlap(last=piece.stop == work.share and not more)
            if self.one_pass(work):
                self._judge_once(work, piece, fake, metrics)
            else:
                with phase("generator/forward"):
                    terms = self._terms(work, piece, fake, reals[index] if self.needs_reals else None, metrics)
                with phase("generator/backward"):
                    gradients.backward(terms)
            if w is not None:
                own = w.detach().sum(dim=0)
                w_sum = own if w_sum is None else w_sum + own
            fakes.append(Images(images.detach(), fake.labels))
        return fakes, w_sum

    def _judge_once(self, work: Work, piece: slice, fake: Images, metrics: dict[str, Tensor]) -> None:
        """Gradients of both players' losses on the samples from one pass of D: G's in G's parameters, D's in D's."""
        context, batch = self.context, work.batch_size
        seen = fake.images.detach().requires_grad_()
        misnamed: Tensor | float = 0.0
        with phase("discriminator/forward"):
            hidden = context.hidden(Images(seen, fake.labels), work, piece, "generator")
            logits = context.logits(hidden, fake.labels)
            if self.loss.auxiliary_weight:
                misnamed = self._misnamed(hidden, fake, batch, metrics)
        with phase("generator/backward"):
            adversarial = self.game.generator_loss(logits).sum() / batch
            wanted = (adversarial + misnamed) * context.precision.scale()
            (gradient,) = torch.autograd.grad(wanted, seen, retain_graph=True)
        with phase("discriminator/backward"):
            judged = self.game.fake(logits).sum() / batch
            taught = judged + misnamed if self.loss.auxiliary_fakes else judged
            context.precision.backward(taught, list(context.discriminator.parameters()))
        with phase("generator/backward"):
            fake.images.backward(gradient, inputs=self.updater.parameters)
        _add(metrics, "loss/generator", adversarial)
        _add(metrics, "loss/discriminator", judged)
        _add(metrics, "logits/fake", logits.sum() / batch)

    def _misnamed(self, hidden: Tensor, fake: Images, batch: int, metrics: dict[str, Tensor]) -> Tensor:
        """The auxiliary head's cross entropy on a micro-batch of samples, weighted, as its share of the mean."""
        loss = F.cross_entropy(self.context.named(hidden), fake.labels, reduction="sum") / batch
        _add(metrics, "loss/auxiliary", loss)
        return loss * self.loss.auxiliary_weight

    def _terms(
        self, work: Work, piece: slice, fake: Images, real: Images | None, metrics: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The losses of a micro-batch by name, weighted, as its share of the global batch's means."""
        context, loss, batch = self.context, self.loss, work.batch_size
        # several losses taken apart retain their graph, which a compiled network does not allow
        apart = loss.gradients_due(work.step)
        hidden = context.hidden(fake, work, piece, "generator", fast=not apart)
        real_hidden = partners = None
        if real is not None:
            with torch.no_grad():  # G has no part in them
                real_hidden = context.hidden(real, work, piece, "generator/real")
                partners = context.logits(real_hidden, real.labels) if self.game.paired else None
        logits = context.logits(hidden, fake.labels)
        terms = {"adversarial": self.game.generator_loss(logits, partners).sum() / batch}
        _add(metrics, "loss/generator", terms["adversarial"])
        if self.teacher is not None and loss.classifier_weight:
            with context.precision.autocast():
                named = self.teacher(fit_images(fake.images, self.teacher.resolution, self.teacher.channels))
            wrong = F.cross_entropy(named.to(fake.images.dtype), fake.labels, reduction="sum") / batch
            _add(metrics, "loss/classifier", wrong)
            terms["classifier"] = wrong * loss.classifier_weight
        if loss.auxiliary_weight:
            terms["auxiliary"] = self._misnamed(hidden, fake, batch, metrics)
        if loss.feature_matching_weight and real_hidden is not None:
            group = loss.feature_matching_group
            distance = penalties.feature_matching(hidden, real_hidden, group).sum() * (group / batch)
            _add(metrics, "loss/feature_matching", distance)
            terms["feature_matching"] = distance * loss.feature_matching_weight
        return terms

    def _regularise_path_length(self, work: Work, gradients: PerLossGradients, metrics: dict[str, Tensor]) -> None:
        """Backward of StyleGAN2's path-length penalty on half a batch, with the gain of its interval.

        The moving mean is updated first, and needs the lengths of the whole (global) half batch: where that is more
        than one micro-batch, they are computed once without and once with a graph.
        """
        context, half, batch = self.context, work.half(), work.batch_size // 2
        latents, maps = context.latents(work, "path", batch)
        shape = (context.generator.channels, work.stage.resolution, work.stage.resolution)
        noise = context.draws.path_noise(work.step, batch, shape)

        def lengths(row: slice, *, create_graph: bool) -> Tensor:
            with context.precision.autocast():
                images, ws, _ = context.sample(latents, maps, row, work.stage)
            assert ws is not None  # the config refuses path lengths for generators without styles
            return penalties.path_lengths(images, ws, noise[row], context.precision.scale(), create_graph=create_graph)

        rows = [half.rows(piece) for piece in half.pieces()]
        found = [lengths(row, create_graph=len(rows) == 1) for row in rows]
        total = collectives.all_reduce_sum_(torch.stack([own.detach().sum() for own in found]).sum())
        batch_mean, decay = total / batch, self.path_length.decay
        mean = self.path_length.update(batch_mean)
        for index, row in enumerate(rows):
            own = found[index] if len(rows) == 1 else lengths(row, create_graph=True)
            penalty = penalties.path_length_penalty(own, mean, batch_mean, decay, batch)
            _add(metrics, "loss/path_length", penalty)
            weight = self.loss.path_length_weight * self.loss.path_length_interval
            self.updater.overlap(last=index == len(rows) - 1 and not gradients.apart)
            gradients.backward({"path_length": penalty * weight})
        metrics["path_length/mean"] = mean / collectives.world_size()


def _add(metrics: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Add a micro-batch's share to a metric of the step."""
    metrics[name] = metrics[name] + value.detach() if name in metrics else value.detach()


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Of those that there are; None if there is none: the optimizer leaves such a parameter alone."""
    given = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(given).sum(dim=0) if given else None
