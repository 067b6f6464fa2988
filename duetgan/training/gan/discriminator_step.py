"""The discriminator's half of a GAN step: adversarial loss, gradient penalties, strength of ADA."""

from collections.abc import Sequence

import torch
from torch import Tensor

from duetgan.models.layers import convolution
from duetgan.training.base import graphs
from duetgan.training.base.phases import phase
from duetgan.training.gan import losses, terms
from duetgan.training.gan.batch import DiscriminatorOutput, Images, StepSlice
from duetgan.training.gan.context import Context
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
    """The half of a GAN step that updates the discriminator D and the strength of ADA."""

    def __init__(self, context: Context, updater: Updater) -> None:
        self.context = context
        self.updater = updater
        self.loss = context.config.loss
        self.objective = context.config.loss.functions

    def run(self, step_slice: StepSlice, reals: Sequence[Images], fakes: Sequence[Images]) -> None:
        """Update D and the strength of ADA from micro-batches of real images and of samples.

        `fakes` are the samples, detached from the graph of the generator.
        """
        in_one_pass = self._in_one_pass(step_slice)
        for rows, real, fake in zip(step_slice.micro_batches(), reals, fakes, strict=True):
            real_output = None
            if in_one_pass:
                pair = Images(*(torch.cat(parts) for parts in zip(real[:2], fake[:2], strict=True)))
                output = self.discriminate(step_slice, rows, pair, "real", "fake")
                real_output, fake_output = output.split("real", "fake")
            else:
                fake_output = self.discriminate(step_slice, rows, fake, "fake")
            self.backward(step_slice, rows, fake_output, real, real_output)
            self.penalise_between(step_slice, rows, real, fake)
        self.update(step_slice)

    def _in_one_pass(self, step_slice: StepSlice) -> bool:
        """Return True if real images and samples go through D in one pass.

        A paired objective needs the graphs of both at the same time, and one pass launches half as
        many operators. But two passes are needed if a penalty is due for only one kind of images,
        because the penalty would also differentiate the other kind, or if an output of D depends on
        all images of the pass. Other objectives always have two passes.
        """
        due = self.penalty_weights(step_slice.step).keys() & {"r1", "r2"}
        return (
            self.objective.paired and len(due) != 1 and self.context.discriminator.has_local_groups
        )

    def discriminate(
        self, step_slice: StepSlice, rows: slice, batch: Images, *names: str
    ) -> DiscriminatorOutput:
        """Return the output of D, with a graph, for a micro-batch of images.

        `names` are the kinds of images in `batch` ("real", "fake", "between"), which holds one kind
        after another. If a penalty is due for them, the graph includes the images, and D is not
        compiled, because compiled graphs have no second derivatives.
        """
        due = PENALTIES[names[0]][0] in self.penalty_weights(step_slice.step)
        batch = Images(batch.images.detach().requires_grad_(due), batch.labels)
        with phase("discriminator/forward"), convolution.penalised(due):
            return self.context.discriminate(batch, step_slice, rows, *names, compiled=not due)

    def backward(
        self,
        step_slice: StepSlice,
        rows: slice,
        fake_output: DiscriminatorOutput,
        real: Images,
        real_output: DiscriminatorOutput | None = None,
    ) -> None:
        """Accumulate the gradients of D's losses and penalties on a micro-batch.

        A paired objective compares samples with real images, so both share one backward pass.
        With other objectives the samples have their own backward pass, which comes first and frees
        their graph. If `real_output` is None, it is computed from `real`.
        """
        step_slice.add("logits/fake", fake_output.logits.sum() / step_slice.batch_size)
        if not self.objective.paired:
            values = self.objective.fake(fake_output.logits)
            self._backward(step_slice, rows, values.sum(), [fake_output])
        if real_output is None:
            real_output = self.discriminate(step_slice, rows, real, "real")
        step_slice.add("logits/real", real_output.logits.sum() / step_slice.batch_size)
        step_slice.add("logits/real_sign", real_output.logits.sign().sum() / step_slice.batch_size)
        if self.objective.paired:
            values = self.objective.real(real_output.logits - fake_output.logits)
            self._backward(step_slice, rows, values.sum(), [real_output, fake_output])
        else:
            values = self.objective.real(real_output.logits)
            self._backward(step_slice, rows, values.sum(), [real_output])

    def penalise_between(
        self, step_slice: StepSlice, rows: slice, real: Images, fake: Images
    ) -> None:
        """Accumulate the gradients of WGAN-GP's penalty, if it is due.

        The penalty is computed at random interpolations of `real` and `fake`.
        """
        if "gradient_penalty" not in self.penalty_weights(step_slice.step):
            return
        draws = self.context.draws
        weights = draws.interpolation_weights(step_slice.step, step_slice.batch_size)[rows]
        images = losses.interpolate(real.images, fake.images, weights)
        output = self.discriminate(step_slice, rows, Images(images, real.labels), "between")
        # This pass has a penalty but no adversarial loss.
        self._backward(step_slice, rows, torch.zeros_like(output.logits).sum(), [output])

    def update(self, step_slice: StepSlice) -> None:
        """Update D from the accumulated gradients, then the strength of ADA.

        Add the metrics of both to `step_slice`.
        """
        context, metrics = self.context, step_slice.metrics
        with phase("discriminator/optimizer"):
            update = self.updater.step(step_slice.step)
            context.discriminator.after_update()
        if context.ada.active:
            step = step_slice.step
            sign = collectives.all_reduce_sum_(metrics["logits/real_sign"].clone())
            context.ada.update(context.images_at, step, sign, step_slice.batch_size)
            metrics["ada/p"] = context.ada.p / collectives.world_size()
        metrics["logits/margin"] = metrics["logits/real"] - metrics["logits/fake"]
        metrics.update(update.metrics("discriminator"))

    def penalty_weights(self, step: int) -> dict[str, float]:
        """Return a dict from name to weight, with the penalties that are due in a step.

        The weights are not yet multiplied by the interval between penalties.
        """
        loss = self.loss
        if not loss.penalty_due(step):
            return {}
        weights = {"gradient_penalty": loss.gradient_penalty_weight}
        for name, gamma in (("r1", loss.r1_gamma), ("r2", loss.r2_gamma)):
            if gamma and loss.gamma_final is not None:
                seen = self.context.images_at(step)
                gamma = cosine(gamma, loss.gamma_final, seen, self.context.schedule_images)
            weights[name] = gamma / 2
        return {name: weight for name, weight in weights.items() if weight > 0}

    def _weight(
        self, name: str, step_slice: StepSlice, penalty: Tensor, factor: int
    ) -> float | Tensor:
        """Return the weight of the penalty `name` in this step, multiplied by `factor`.

        While a CUDA graph is recorded, the weight is a 0-d tensor with the dtype and device of
        `penalty`.
        """
        return graphs.number(
            lambda step: self.penalty_weights(step)[name] * factor,
            step_slice.step,
            penalty,
        )

    def _backward(
        self,
        step_slice: StepSlice,
        rows: slice,
        adversarial: Tensor,
        outputs: Sequence[DiscriminatorOutput],
    ) -> None:
        """Accumulate the gradients of a loss in the parameters of D.

        The loss is the sum of three terms: `adversarial` divided by the global batch size, the
        label losses of `outputs` (`terms.label_losses`), and the penalties of `outputs` that are
        due. `adversarial` is 0-d, a sum over samples, and was computed from `outputs`.

        R1, R2 and the gradient penalty are multiplied by their common interval, `loss.r1_interval`,
        to make up for the steps without penalties. The logged metrics of the penalties are not
        multiplied. Adam's lr and betas need no correction, because loss and penalties share one
        update.
        """
        loss = adversarial / step_slice.batch_size
        step_slice.add("loss/discriminator", loss)
        for output in outputs:
            loss = loss + terms.label_losses(self.context, step_slice, rows, output)
        weights = self.penalty_weights(step_slice.step)
        due = [output for output in outputs if PENALTIES[output.name][0] in weights]
        with (
            phase("discriminator/penalty" if due else "discriminator/backward"),
            convolution.penalised(bool(due)),
        ):
            for output, values in zip(due, self._penalties(due), strict=True):
                name, _ = PENALTIES[output.name]
                mean = values.sum() / step_slice.batch_size
                step_slice.add(f"loss/{name}", mean * self._weight(name, step_slice, mean, 1))
                loss = loss + mean * self._weight(name, step_slice, mean, self.loss.r1_interval)
            # Kind of the first output in the last backward pass of a micro-batch.
            final = "between" if "gradient_penalty" in weights else "real"
            self.updater.overlap(last=step_slice.is_last(rows) and outputs[0].name == final)
            self.context.precision.backward(loss, self.updater.parameters)

    def _penalties(self, outputs: Sequence[DiscriminatorOutput]) -> list[Tensor]:
        """Return a tensor [n] for each of `outputs`, with the penalty of each image.

        Outputs that were split from one pass have the same tensor `images`. Their penalties are
        computed together.
        """
        passes: dict[int, list[DiscriminatorOutput]] = {}
        for output in outputs:
            passes.setdefault(id(output.images), []).append(output)
        values: list[Tensor] = []
        for parts in passes.values():
            _, penalty = PENALTIES[parts[0].name]
            logits = parts[0].logits
            if len(parts) > 1:
                logits = torch.cat([part.logits for part in parts])
            images = parts[0].images
            values += penalty(logits, images, self.context.precision.scale()).chunk(len(parts))
        return values
