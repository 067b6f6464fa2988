"""A GAN step in which both networks learn from one pass of the discriminator over the samples.

The weights of the discriminator D are the same in both halves of a step. So one pass is enough if
both halves use the same images, ADA is off, the generator G has no losses besides the adversarial
and the auxiliary one, and R2 is not due. With the relativistic objective, this step takes about
0.75 of the time of a step with two halves.
"""

from collections.abc import Sequence

import torch

from duetgan.training.base.phases import phase
from duetgan.training.gan.batch import Images, StepSlice
from duetgan.training.gan.discriminator_step import DiscriminatorStep
from duetgan.training.gan.generator_step import GeneratorStep
from duetgan.training.gan.terms import Judged


class JointStep:
    """A GAN step that updates both networks from one pass of the discriminator over the samples."""

    def __init__(
        self, generator_step: GeneratorStep, discriminator_step: DiscriminatorStep
    ) -> None:
        self.generator_step = generator_step
        self.discriminator_step = discriminator_step
        self.context = generator_step.context
        self.loss = generator_step.loss
        self.is_possible = (
            self.loss.same_images
            and generator_step.terms.keys() <= {"adversarial", "auxiliary"}
            and not self.context.ada.active
        )

    def is_due(self, step: int) -> bool:
        """Return True if one pass of D over the samples is enough for update number `step`."""
        has_r2 = self.loss.r2_gamma > 0 and self.loss.penalty_due(step)
        return self.is_possible and not has_r2

    def run(self, step_slice: StepSlice, reals: Sequence[Images]) -> None:
        """Update D, G and the moving average of G from this rank's micro-batches of real images."""
        fakes = []
        for rows, real, fake in self.generator_step.samples(step_slice, reals, compiled=True):
            self._backward(step_slice, rows, fake, real)
            fakes.append(fake.detached())
        self.generator_step.update(step_slice, fakes)
        for rows, real, fake in zip(step_slice.micro_batches(), reals, fakes, strict=True):
            self.discriminator_step.penalise_between(step_slice, rows, real, fake)
        self.discriminator_step.update(step_slice)

    def _backward(self, step_slice: StepSlice, rows: slice, fake: Images, real: Images) -> None:
        """Accumulate the gradients of the losses of both networks on a micro-batch.

        D's graph begins at detached samples. The gradient of G's losses with respect to these
        samples is passed on to G's own graph. `retain_graph` keeps D's graph, because the losses of
        D need it afterwards.
        """
        detached = Images(fake.images.detach().requires_grad_(), fake.labels)
        with phase("discriminator/forward"):
            output = self.context.discriminate(detached, step_slice, rows, "generator")
        real_output = None
        partner = None
        if self.discriminator_step.objective.paired:
            real_output = self.discriminator_step.discriminate(step_slice, rows, real, "real")
            partner = real_output._replace(logits=real_output.logits.detach())
        judged = Judged(step_slice, detached, output, partner)
        terms = [loss(judged) for loss in self.generator_step.terms.values()]
        total = self.context.precision.scaler.scale(torch.stack(terms).sum())
        self.generator_step.overlap(step_slice, rows)
        with phase("generator/backward"):
            (gradient,) = torch.autograd.grad(total, detached.images, retain_graph=True)
            fake.images.backward(gradient, inputs=self.generator_step.updater.parameters)
        # The names of outputs choose the penalties and the losses of labels.
        fake_output = output._replace(name="fake")
        self.discriminator_step.backward(step_slice, rows, fake_output, real, real_output)
