"""The norms of the gradients of the generator's individual losses, and the cosines between them.

Every `loss.gradients_every` steps the generator's half of the step is computed a second time to
measure them. This does not change the training (docs/gan.md).
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from duetgan.models.layers.convolution import penalised
from duetgan.training.gan.batch import Images, StepSlice
from duetgan.training.gan.generator_step import GeneratorStep, frozen
from duetgan.utils.distributed import collectives

Gradients = dict[str, Tensor]  # loss -> its gradient with respect to all parameters, flat


def separate_gradients(losses: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> Gradients:
    """Return a dict from loss name to the loss's gradient, a flat tensor for all `parameters`.

    The losses must share one graph, whose activations are freed after the last loss. The gradient
    is zero for parameters on which a loss does not depend.
    """
    last = list(losses)[-1]
    gradients: Gradients = {}
    for name, loss in losses.items():
        parts = torch.autograd.grad(
            loss,
            parameters,
            retain_graph=name != last,
            allow_unused=True,
            materialize_grads=True,
        )
        gradients[name] = torch.cat([part.reshape(-1) for part in parts])
    return gradients


class LossGradients:
    """A diagnostic that measures and compares the gradients of the generator's losses.

    It measures the norm of each loss's gradient, and the cosine between the gradients of each pair
    of losses.
    """

    def __init__(self, generator_step: GeneratorStep) -> None:
        self.generator_step = generator_step

    def measure(self, step_slice: StepSlice, reals: Sequence[Images]) -> None:
        """Measure the gradients if they are due in this step, and add the metrics to `step_slice`.

        Call this before the updates of the step. The metrics are `gradient_norm/generator/LOSS` and
        `gradient_cosine/generator/LOSS~LOSS`. They are computed from the gradients of the global
        batch, without fp16's loss scale. Each is divided by the number of ranks, because metrics
        are added up over the ranks.
        """
        step = self.generator_step
        if not step.loss.gradients_due(step_slice.step):
            return
        total: Gradients = {}
        aside = step_slice._replace(metrics={})
        with frozen(step.context.discriminator):
            # Compiled graphs free their activations even with `retain_graph`.
            for rows, real, fake in step.samples(aside, reals, compiled=False):
                self._add(total, step.losses(aside, rows, fake, real, compiled=False))
        if step.loss.path_length_due(step_slice.step):
            with penalised():
                for _, penalty in step.path_length.penalties(step.context, aside, is_trial=True):
                    self._add(total, {"path_length": penalty})
        step_slice.metrics.update(self._metrics(total))

    def _add(self, total: Gradients, losses: Mapping[str, Tensor]) -> None:
        scale = self.generator_step.context.precision.scale()
        scaled = {name: loss * scale for name, loss in losses.items()}
        parameters = self.generator_step.updater.parameters
        for name, gradient in separate_gradients(scaled, parameters).items():
            total[name] = total[name] + gradient if name in total else gradient

    def _metrics(self, total: Gradients) -> dict[str, Tensor]:
        world = collectives.world_size()
        scale = self.generator_step.context.precision.scale()
        gradients = {
            name: collectives.all_reduce_sum_(gradient) / scale for name, gradient in total.items()
        }
        norms = {name: gradient.norm() for name, gradient in gradients.items()}
        metrics = {f"gradient_norm/generator/{name}": norm / world for name, norm in norms.items()}
        for a, b in combinations(gradients, 2):
            product = (norms[a] * norms[b]).clamp_min(torch.finfo(norms[a].dtype).tiny)
            cosine = gradients[a] @ gradients[b] / product
            metrics[f"gradient_cosine/generator/{a}~{b}"] = cosine / world
        return metrics
