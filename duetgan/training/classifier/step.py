"""Make a classifier's training step: passes in micro-batches, update, and moving average."""

from collections.abc import Hashable, Iterator, Sequence
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor

from duetgan.data.reading.loader import Batch
from duetgan.training.base import graphs
from duetgan.training.base.phases import phase
from duetgan.training.classifier.inputs import Samples
from duetgan.training.classifier.parts import ClassifierParts
from duetgan.utils.distributed import collectives


class ClassifierStep(ClassifierParts):
    """The part of a classifier's task that makes the updates. `ClassifierTask` adds the rest."""

    loss_metric = "loss/classifier"

    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        batch = next(batches)
        self.set_up(step)
        self.inputs.micro.find(lambda: self.attempt(self.samples(batch, step)))
        return self.graphs.run(self.update, [batch], step, kind=self.kind, structure=self.structure)

    def update(self, batches: Sequence[Batch], step: int) -> dict[str, Tensor]:
        """Make update number `step` from one batch, and return the metrics.

        `set_up` must have been called for this update.
        """
        samples = graphs.value(lambda step: self.samples(batches[0], step), step)
        statistics = collectives.Snapshot(self.replica.statistics)
        loss, correct = self.gradients(samples)
        with phase("optimizer"):
            update = self.updater.step(step)
            # The NaN of a masked step must not remain in the running statistics.
            statistics.restore(update.applied)
            passes = len(self.inputs.micro.slices())
            self.replica.count_batches(update.applied, passes)
            self.replica.average_statistics()
            self.precision.update_scale()
        with phase("ema"):
            graphs.outside(partial(self._average, update.skipped), step)
        metrics = {"loss/classifier": loss, "accuracy/train": correct / self.config.batch_size}
        return metrics | update.metrics("classifier")

    def _average(self, skipped: Tensor, step: int) -> None:
        """Update the moving average of the weights."""
        average = self.updater.average(self.model.parameters())
        decay = min(self.config.ema.decay, (1 + step) / (10 + step))
        self.ema.update(self.model, decay, skipped, average)

    def kind(self, step: int) -> Hashable:
        """Return a key for CUDA graphs, which is equal for steps that launch the same kernels.

        Return None for a step with hooks on layers, which run on the host and cannot be captured.
        """
        return None if self.config.log.layers_due(step) else "update"

    def structure(self, step: int) -> Hashable:
        """Return the sizes and objects that determine the kernels of a step, besides its kind.

        `set_up` must have been called for update number `step`.
        """
        modes = [module.training for module in self.model.modules()]
        trained = [parameter.requires_grad for parameter in self.model.parameters()]
        sizes = (self.model.side, self.inputs.micro.size, self.frozen.begin)
        return sizes, *modes, *trained, self.precision.scaler, self.updater.optimizer

    def samples(self, batch: Batch, step: int) -> Samples:
        """Augment `batch`, this process's part of the global batch."""
        with phase("augment"):
            return self.inputs.augmented(batch, step, self.inputs.first_row)

    def set_up(self, step: int) -> None:
        """Set the trained parameters, label smoothing and image size for update number `step`.

        It is called several times per update, for example before the batch is read and again before
        the forward pass. A repeated call for the same update changes nothing.
        """
        self.finetuning.at(step)
        self.criterion.at(step)
        # Both sides of `|` are called, unlike those of `or`.
        if self.resizing.at(step) | self.replica.wrap():
            self.inputs.micro.is_stale = True

    def gradients(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the mean loss over the global batch, in micro-batches.

        Return this process's part of the mean loss and its number of correct predictions, 0-d.
        """
        self.updater.zero_grad()
        losses: list[Tensor] = []
        correct: list[Tensor] = []
        for part in self.inputs.micro_batches(samples):
            with self.replica.accumulating(last=part.is_last):
                with phase("forward"):
                    with self.precision.autocast():
                        logits = self.replica(part.images, part.begin)
                    logits = logits.to(torch.get_default_dtype())
                    loss = self.criterion(logits, part.targets, part.images)
                    loss = loss / self.config.batch_size
                with phase("backward"):
                    self.precision.backward(loss)
            losses.append(loss.detach())
            correct.append(part.targets.correct(logits.detach()))
        self.replica.sum_gradients()
        return reduce(add, losses), reduce(add, correct)

    def attempt(self, samples: Samples) -> None:
        """Compute a step's gradients to see if memory suffices; discard them, change no state."""
        statistics = collectives.Snapshot(self.replica.statistics)
        try:
            self.gradients(samples)
        finally:
            self.updater.zero_grad()
            statistics.restore()
