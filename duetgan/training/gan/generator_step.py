"""The generator's half of a GAN step: losses, path-length penalty, update, and moving averages."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from duetgan.models.gan import label_loss
from duetgan.models.layers.convolution import penalised
from duetgan.training.base.phases import phase
from duetgan.training.base.teacher import Teacher
from duetgan.training.gan import losses
from duetgan.training.gan.context import Context, Images, StepSlice
from duetgan.training.gan.discriminator_step import DiscriminatorStep
from duetgan.training.optim.config import cosine
from duetgan.training.optim.ema import EMA, half_life_beta
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils.distributed import collectives


class PathLength(torch.nn.Module):
    """Moving mean of the path lengths, the same on all ranks (StyleGAN2, section 3.2)."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.mean = torch.nn.Buffer(torch.zeros([]))

    @torch.no_grad()
    def update(self, batch_mean: Tensor) -> Tensor:
        """Move the mean towards the mean length of a global batch, 0-d, and return the result.

        A result that is not finite is not stored.
        """
        moved = self.mean.lerp(batch_mean.to(self.mean.dtype), self.decay)
        self.mean.copy_(torch.where(torch.isfinite(moved), moved, self.mean))
        return moved


class PerLossGradients:
    """Accumulates the gradients of a step's losses in `.grad` of the parameters.

    If `per_loss` is True, the gradient of each loss is computed separately, so that `finish` can
    return the norms of these gradients and the cosines between them (docs/gan.md). Their sum is the
    same up to rounding. They are computed outside the hooks of DDP and added up over the ranks
    afterwards (docs/distributed.md).
    """

    def __init__(
        self, parameters: Sequence[Tensor], precision: Precision, *, per_loss: bool
    ) -> None:
        self.parameters = list(parameters)
        self.precision = precision
        self.per_loss = per_loss
        # loss -> gradient with respect to each parameter, of this rank's samples only
        self.by_loss: dict[str, list[Tensor | None]] = {}

    def backward(self, terms: Mapping[str, Tensor]) -> None:
        """Add the gradients of the losses `terms`, and free their graph.

        The losses are 0-d and weighted, and may share a graph.
        """
        if not self.per_loss:
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
            previous = self.by_loss.get(name, [None] * len(self.parameters))
            self.by_loss[name] = [
                _sum([old, new]) for old, new in zip(previous, gradients, strict=True)
            ]

    def finish(self, name: str) -> dict[str, Tensor]:
        """Store the sum of the gradients in `.grad`, and return their metrics.

        The metrics are `gradient_norm/NAME/LOSS` and `gradient_cosine/NAME/LOSS~LOSS` of the
        global, unscaled gradients, divided by the number of ranks, so that they add up over the
        ranks.
        """
        if not self.per_loss:
            return {}
        for index, parameter in enumerate(self.parameters):
            parameter.grad = _sum([gradients[index] for gradients in self.by_loss.values()])
        world = collectives.world_size()
        flat: dict[str, Tensor] = {}
        norms: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        for loss, gradients in self.by_loss.items():
            parts = []
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                gradient = torch.zeros_like(parameter) if gradient is None else gradient
                parts.append(gradient.reshape(-1))
            flat[loss] = collectives.all_reduce_sum_(torch.cat(parts)) / self.precision.scale()
            norms[loss] = flat[loss].norm()
            metrics[f"gradient_norm/{name}/{loss}"] = norms[loss] / world
        for a, b in combinations(flat, 2):
            product = (norms[a] * norms[b]).clamp_min(torch.finfo(norms[a].dtype).tiny)
            metrics[f"gradient_cosine/{name}/{a}~{b}"] = flat[a] @ flat[b] / product / world
        return metrics


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the gradients that are not None.

    Return None if all are, because the optimizer then skips the parameter.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(present).sum(dim=0) if present else None


class GeneratorStep:
    """One update of the generator and of its moving average."""

    def __init__(
        self,
        context: Context,
        updater: Updater,
        ema: EMA,
        teacher: Teacher | None,
        discriminator_step: DiscriminatorStep,
    ) -> None:
        self.context = context
        self.updater = updater
        self.ema = ema
        self.teacher = teacher
        self.discriminator_step = discriminator_step
        self.loss = context.config.loss
        self.objective = context.config.loss.functions
        self.path_length = PathLength(self.loss.path_length_decay).to(context.device)

    def one_pass(self, step_slice: StepSlice) -> bool:
        """Return True if one pass of D over this step's samples can give both networks' gradients.

        D has the same weights in both halves of a step. So one pass is enough if both halves use
        the same images, no other loss of G is added, and no penalty on samples is due.
        """
        loss = self.loss
        if loss.feature_matching_weight or (self.teacher is not None and loss.classifier_weight):
            return False
        if loss.gradients_due(step_slice.step) or self.context.ada.active:
            return False
        has_r2 = loss.r2_gamma > 0 and loss.penalty_due(step_slice.step)
        return loss.same_images and not has_r2

    def run(self, step_slice: StepSlice, reals: Sequence[Images]) -> list[Images]:
        """Update G and its average; return samples without graphs, for the discriminator's half.

        The parameters of D do not change. If `one_pass` is True for this step, the gradients of D
        are set to those of its own losses; otherwise they do not change.
        """
        context, ema = self.context, self.context.config.ema
        per_loss = self.loss.gradients_due(step_slice.step)
        gradients = PerLossGradients(self.updater.parameters, context.precision, per_loss=per_loss)
        context.discriminator.requires_grad_(self.one_pass(step_slice))
        try:
            fakes, w_sums = self._adversarial(step_slice, reals, gradients)
            if self.loss.path_length_due(step_slice.step):
                with phase("generator/path_length"):
                    self._regularise_path_length(step_slice, gradients)
        finally:
            context.discriminator.requires_grad_(True)
        with phase("generator/optimizer"):
            step_slice.metrics.update(gradients.finish("generator"))
            update = self.updater.step(step_slice.step)
        with phase("ema"):
            if context.styled:
                w_sum = collectives.all_reduce_sum_(sum(w_sums[1:], w_sums[0]))
                context.styled.update_w_avg(w_sum / step_slice.batch_size)
            batch, seen = step_slice.batch_size, step_slice.images_seen
            kimg = batch * 10 / 32 if ema.ema_kimg is None else ema.ema_kimg
            if ema.ema_kimg_start is not None:
                kimg = cosine(ema.ema_kimg_start, kimg, seen, context.schedule_images)
            # A pretrained generator needs no limit of the half-life.
            rampup = None if context.config.init_from else ema.ema_rampup
            beta = half_life_beta(batch, seen, kimg * 1000, rampup)
            self.ema.update(context.generator, beta, update.skipped)
        step_slice.metrics.update(update.metrics("generator"))
        return fakes

    def _adversarial(
        self, step_slice: StepSlice, reals: Sequence[Images], gradients: PerLossGradients
    ) -> tuple[list[Images], list[Tensor]]:
        """Backpropagate all losses but the path-length penalty, in one pass per micro-batch.

        Returns:
            Micro-batches of samples without graphs, and the sum of w [w_dim] over each of them
            (empty for a generator without styles).
        """
        context = self.context
        partners = reals if self.objective.paired else ()
        latents, noise = context.latents(step_slice, "generator", partners)
        per_loss = gradients.per_loss
        is_final_backward = not per_loss and not self.loss.path_length_due(step_slice.step)
        fakes: list[Images] = []
        w_sums: list[Tensor] = []
        for rows, real in zip(step_slice.micro_batches(), reals, strict=True):
            with phase("generator/forward"), context.precision.autocast():
                images, _, w = context.sample(
                    latents, noise, rows, step_slice.stage, compiled=not per_loss
                )
            fake = Images(images, latents.labels[rows])
            self.updater.overlap(last=step_slice.is_last(rows) and is_final_backward)
            if self.one_pass(step_slice):
                self._backward_of_both(step_slice, rows, fake, real)
            else:
                with phase("generator/forward"):
                    terms = self._terms(step_slice, rows, fake, real)
                with phase("generator/backward"):
                    gradients.backward(terms)
            if w is not None:
                w_sums.append(w.detach().sum(dim=0))
            fakes.append(Images(images.detach(), fake.labels))
        return fakes, w_sums

    def _backward_of_both(
        self, step_slice: StepSlice, rows: slice, fake: Images, real: Images
    ) -> None:
        """Accumulate the gradients of both networks' losses from one pass of D over the samples."""
        context = self.context
        detached = Images(fake.images.detach().requires_grad_(), fake.labels)
        with phase("discriminator/forward"):
            output = context.discriminate(detached, step_slice, rows, "generator")
            auxiliary = context.auxiliary_loss(output, step_slice)
        logits, real_output = output.logits, None
        if self.objective.paired:
            real_output = self.discriminator_step.discriminate(step_slice, rows, real, "real")
            logits = logits - real_output.logits.detach()
        with phase("generator/backward"):
            adversarial = self.objective.generator(logits).sum() / step_slice.batch_size
            total = (adversarial + auxiliary) * context.precision.scale()
            (gradient,) = torch.autograd.grad(total, detached.images, retain_graph=True)
            fake.images.backward(gradient, inputs=self.updater.parameters)
        step_slice.add("loss/generator", adversarial)
        fake_output = output._replace(name="fake")
        self.discriminator_step.learn(step_slice, rows, fake_output, real_output or real)

    def _terms(
        self, step_slice: StepSlice, rows: slice, fake: Images, real: Images
    ) -> dict[str, Tensor]:
        """Return the weighted losses of a micro-batch by name, divided by the global batch size."""
        context, loss = self.context, self.loss
        batch = step_slice.batch_size
        # Separate gradients of losses retain the graph, which a compiled network does not allow.
        output = context.discriminate(
            fake, step_slice, rows, "generator", compiled=not loss.gradients_due(step_slice.step)
        )
        logits = output.logits
        if self.objective.paired or loss.feature_matching_weight:
            with torch.no_grad():  # The output for real images does not depend on G.
                real_output = context.discriminate(real, step_slice, rows, "generator/real")
            if self.objective.paired:
                logits = logits - real_output.logits
        terms = {"adversarial": self.objective.generator(logits).sum() / batch}
        step_slice.add("loss/generator", terms["adversarial"])
        if self.teacher is not None and loss.classifier_weight:
            with context.precision.autocast():
                class_logits = self.teacher(fake.images)
            class_logits = class_logits.to(fake.images.dtype)
            class_loss = label_loss(class_logits, fake.labels, context.label_sets) / batch
            step_slice.add("loss/classifier", class_loss)
            terms["classifier"] = class_loss * loss.classifier_weight
        auxiliary = context.auxiliary_loss(output, step_slice)
        if isinstance(auxiliary, Tensor):
            terms["auxiliary"] = auxiliary
        if loss.feature_matching_weight:
            group = loss.feature_matching_group
            distances = losses.feature_matching(output.hidden, real_output.hidden, group)
            distance = distances.sum() * (group / batch)
            step_slice.add("loss/feature_matching", distance)
            terms["feature_matching"] = distance * loss.feature_matching_weight
        return terms

    @penalised()
    def _regularise_path_length(self, step_slice: StepSlice, gradients: PerLossGradients) -> None:
        """Backpropagate StyleGAN2's path-length penalty of half a batch, times its interval.

        The moving mean is updated first, from the lengths of the whole global half batch. If that
        is more than one micro-batch a rank, lengths are computed twice: without a graph for the
        mean, and with one for the penalty.
        """
        context, half = self.context, step_slice.half()
        latents, maps = context.latents(half, "path")
        shape = context.generator.spec.at(step_slice.stage.resolution).shape
        noise = context.draws.path_noise(step_slice.step, half.batch_size, shape)

        def path_lengths(rows: slice, *, create_graph: bool) -> Tensor:
            with context.precision.autocast():
                images, ws, _ = context.sample(latents, maps, rows, step_slice.stage)
            assert ws is not None  # the config refuses path lengths for generators without styles
            return losses.path_lengths(
                images, ws, noise[rows], context.precision.scale(), create_graph=create_graph
            )

        micro_batches = half.micro_batches()
        is_single = len(micro_batches) == 1
        lengths = [path_lengths(rows, create_graph=is_single) for rows in micro_batches]
        total = torch.stack([part.detach().sum() for part in lengths]).sum()
        batch_mean = collectives.all_reduce_sum_(total) / half.batch_size
        mean = self.path_length.update(batch_mean)
        weight = self.loss.path_length_weight * self.loss.path_length_interval
        for rows, part in zip(micro_batches, lengths, strict=True):
            if not is_single:
                part = path_lengths(rows, create_graph=True)
            penalty = losses.path_length_penalty(
                part, mean, batch_mean, self.path_length.decay, half.batch_size
            )
            step_slice.add("loss/path_length", penalty)
            self.updater.overlap(last=half.is_last(rows) and not gradients.per_loss)
            gradients.backward({"path_length": penalty * weight})
        step_slice.metrics["path_length/mean"] = mean / collectives.world_size()
