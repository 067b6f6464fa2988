"""The generator's half of a GAN step: losses, path-length penalty, update, and moving averages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from duetgan.models.layers import convolution
from duetgan.training.base import graphs
from duetgan.training.base.phases import phase
from duetgan.training.gan import terms
from duetgan.training.gan.batch import Images, StepSlice
from duetgan.training.gan.context import Context
from duetgan.training.optim.config import cosine
from duetgan.training.optim.ema import EMA, half_life_beta
from duetgan.training.optim.updater import Updater
from duetgan.utils.distributed import collectives


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Set `requires_grad` of all parameters to False in the block, and to True after it."""
    network.requires_grad_(False)
    try:
        yield
    finally:
        network.requires_grad_(True)


class GeneratorStep:
    """The half of a GAN step that updates the generator G and its moving average."""

    def __init__(
        self, context: Context, updater: Updater, ema: EMA, further_terms: Mapping[str, terms.Term]
    ) -> None:
        self.context = context
        self.updater = updater
        self.ema = ema
        self.loss = context.config.loss
        self.objective = context.config.loss.functions
        self.path_length = terms.PathLength(self.loss.path_length_decay).to(context.device)
        self.terms: dict[str, terms.Term] = {"adversarial": self._adversarial, **further_terms}
        self.compares = self.objective.paired or "feature_matching" in self.terms

    def run(self, step_slice: StepSlice, reals: Sequence[Images]) -> list[Images]:
        """Update G and its moving average; return the detached samples for D's half of the step."""
        fakes = []
        with frozen(self.context.discriminator):
            for rows, real, fake in self.samples(step_slice, reals, compiled=True):
                with phase("generator/forward"):
                    loss_terms = self.losses(step_slice, rows, fake, real, compiled=True)
                self.overlap(step_slice, rows)
                with phase("generator/backward"):
                    total = torch.stack(list(loss_terms.values())).sum()
                    self.context.precision.backward(total, self.updater.parameters)
                fakes.append(fake.detached())
        self.update(step_slice, fakes)
        return fakes

    def samples(
        self, step_slice: StepSlice, reals: Sequence[Images], *, compiled: bool
    ) -> Iterator[tuple[slice, Images, Images]]:
        """Yield, for each micro-batch, its rows (a slice of the batch), real images, and samples.

        The samples are not detached, so that the losses can be differentiated. If `compiled` is
        True, the generator runs compiled if the config allows it; only one backward pass is then
        possible. With a paired objective, the samples get the labels of the real images.
        """
        partners = reals if self.objective.paired else ()
        latents, noise = self.context.latents(step_slice, "generator", partners)
        for rows, real in zip(step_slice.micro_batches(), reals, strict=True):
            # The parameters are scaled once for all passes of the micro-batch. They do not change
            # before the caller, who runs at `yield`, has the gradients.
            with self.context.scaled(self.context.generator, self.context.discriminator):
                with phase("generator/forward"):
                    fake = self.context.sample(latents, noise, rows, compiled=compiled)
                yield rows, real, fake

    def losses(
        self, step_slice: StepSlice, rows: slice, fake: Images, real: Images, *, compiled: bool
    ) -> dict[str, Tensor]:
        """Return a dict from the name of a loss to its weighted value for a micro-batch, 0-d.

        Each value is a sum over samples, divided by the global batch size.
        """
        discriminate = self.context.discriminate
        output = discriminate(fake, step_slice, rows, "generator", compiled=compiled)
        real_output = None
        if self.compares:
            with torch.no_grad():  # The output for real images does not depend on G.
                real_output = discriminate(real, step_slice, rows, "generator/real")
        judged = terms.Judged(step_slice, fake, output, real_output)
        return {name: loss(judged) for name, loss in self.terms.items()}

    def overlap(self, step_slice: StepSlice, rows: slice) -> None:
        """Prepare for the backward pass of the losses of the micro-batch `rows`.

        If it is G's last backward pass of the step, the exchange of gradients will overlap with it.
        """
        has_path_length = self.loss.path_length_due(step_slice.step)
        self.updater.overlap(last=step_slice.is_last(rows) and not has_path_length)

    def update(self, step_slice: StepSlice, fakes: Sequence[Images]) -> None:
        """Add the gradients of the path-length penalty if it is due, and update G and its averages.

        The averages are those of G's weights and of w; `fakes` are the samples of this step.
        """
        if self.loss.path_length_due(step_slice.step):
            with phase("generator/path_length"), convolution.penalised():
                for rows, penalty in self.path_length.penalties(
                    self.context, step_slice, is_trial=False
                ):
                    self.updater.overlap(last=step_slice.half().is_last(rows))
                    self.context.precision.backward(penalty, self.updater.parameters)
        with phase("generator/optimizer"):
            update = self.updater.step(step_slice.step)
        with phase("ema"):
            self._average(step_slice, fakes, update.skipped)
        step_slice.metrics.update(update.metrics("generator"))

    def _average(self, step_slice: StepSlice, fakes: Sequence[Images], skipped: Tensor) -> None:
        """Update the moving averages of w and of G's weights."""
        if self.context.styled is not None:
            sums = [fake.w.sum(dim=0) for fake in fakes if fake.w is not None]
            w_sum = collectives.all_reduce_sum_(sum(sums[1:], sums[0]))
            self.context.styled.update_w_avg(w_sum / step_slice.batch_size)
        graphs.outside(
            partial(self._average_weights, step_slice.batch_size, skipped), step_slice.step
        )

    def _average_weights(self, batch: int, skipped: Tensor, step: int) -> None:
        # It runs outside of graphs, because a replay does not change the versions of tensors by
        # which `class_styles` detects new weights.
        context, config = self.context, self.context.config
        seen = context.images_at(step)
        # The default is StyleGAN2-ADA's: a half-life of 10,000 images for a batch of 32.
        kimg = batch * 10 / 32 if config.ema.ema_kimg is None else config.ema.ema_kimg
        if config.ema.ema_kimg_start is not None:
            kimg = cosine(config.ema.ema_kimg_start, kimg, seen, context.schedule_images)
        # A pretrained generator needs no limit of the half-life.
        rampup = None if config.init_from else config.ema.ema_rampup
        beta = half_life_beta(batch, seen, kimg * 1000, rampup)
        self.ema.update(context.generator, beta, skipped)

    def _adversarial(self, judged: terms.Judged) -> Tensor:
        logits = judged.output.logits
        if self.objective.paired and judged.real_output is not None:
            logits = logits - judged.real_output.logits
        loss = self.objective.generator(logits).sum() / judged.step_slice.batch_size
        judged.step_slice.add("loss/generator", loss)
        return loss
