"""The classifier task: networks, a training step, the saved state, and the evaluation."""

import time
from collections.abc import Hashable, Iterator, Sequence
from functools import partial, reduce
from operator import add
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.cached_features import CachedFeatures
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, read_batch
from duetgan.metrics.evaluate_classifier import evaluate_classifier
from duetgan.metrics.figures import CLASSIFIER, LABELS, history
from duetgan.training.base.config import Shape
from duetgan.training.base.data import label_frequencies
from duetgan.training.base.graphs import MANY, Graphs, outside, value
from duetgan.training.base.phases import phase
from duetgan.training.base.task import Networks, Outline, Stateful, Task
from duetgan.training.classifier.config import ClassifierConfig, check_run
from duetgan.training.classifier.finetune import FineTuning, layer_table
from duetgan.training.classifier.frozen import FrozenStages
from duetgan.training.classifier.inputs import Inputs, Samples
from duetgan.training.classifier.loss import Criterion
from duetgan.training.classifier.network import build_network
from duetgan.training.classifier.probe import (
    FeatureScale,
    Probe,
    ProbeSummary,
    fit,
    look_alike_groups,
)
from duetgan.training.classifier.replica import Replica
from duetgan.training.classifier.resizing import Resizing
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils.checkpoint.provenance import Lineage, join
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.collectives import Snapshot
from duetgan.utils.images import grid
from duetgan.utils.runlog.run_log import say_main


class ClassifierTask(Task):
    """The training of a classifier: network, optimizer, moving average, and the step."""

    best_metric = "accuracy"
    best_is_lower = False
    loss_metric = "loss/classifier"

    def __init__(
        self,
        config: ClassifierConfig,
        dataset: Dataset,
        val_dataset: Dataset | None,
        device: torch.device,
    ) -> None:
        check_run(config, dataset, val_dataset)
        self.config = config
        self.dataset = dataset
        self.val_dataset = val_dataset
        self.shape = config.shape(dataset)
        self.precision = Precision(config.precision, device)
        self.model = build_network(config, dataset, device)
        self.ema = EMA(self.model, buffers="average")
        self.replica = Replica(self.model, config, device)
        self.resizing = Resizing(config.resizing, self.model, config.steps)
        self.finetuning = FineTuning(
            self.model, config.finetune, steps_per_epoch=len(dataset) / config.batch_size
        )
        self.frozen = FrozenStages(config, dataset, self.finetuning, self.resizing, self.precision)
        self.inputs = Inputs(config, dataset, self.frozen, device)
        frequencies = label_frequencies(config.data, dataset)
        self.criterion = Criterion(config.loss, dataset, frequencies, self.precision, config.steps)
        self.probe = ProbeSummary()
        optimizer = config.optimizer.for_batch(config.batch_size)
        self.updater = Updater(
            self.model,
            optimizer,
            self.precision,
            config.steps,
            exchange=False,
            head=self.model.head.parameters(),
            groups=self.finetuning.groups(optimizer.weight_decay),
        )
        several = "" if config.model.split == "off" else "model.split uses several devices"
        self.graphs = Graphs(config.graphs, device, obstacle=several)
        if config.loss.several:
            self.best_metric = "average_precision"

    @staticmethod
    def outline(config: ClassifierConfig, shape: Shape) -> Outline:
        """Return the hidden head, if any, after the narrowest backbone, as a lower bound.

        It is counted twice: weights and average. Backbones are left out because their sizes cannot
        be configured.
        """
        width = 1
        if config.model.head == "hidden":
            width = config.model.head_width
        return {"model": (torch.nn.Linear(128, width), 2)}

    def registry(self) -> dict[str, Stateful]:
        registry: dict[str, Stateful] = {
            "model": self.model,
            "model_ema": self.ema,
            "optimizer": self.updater,
            "scaler": self.precision,
        }
        if self.config.finetune.probe:
            registry["probe"] = self.probe
        if self.inputs.micro.auto:
            registry["micro_batch"] = self.inputs.micro
        return registry

    def begin(self, folder: Path) -> None:
        """Fit a logistic regression and start with it as the head, if `finetune.probe` is set.

        Rank 0 computes it and sends it to the other ranks.
        """
        if not self.config.finetune.probe:
            return
        start = time.perf_counter()
        source = self.source(0, folder)

        def fitted() -> tuple[Probe, float]:
            features, labels = self.frozen.features(source)
            probe = fit(
                features,
                labels,
                self.shape["classes"],
                seed=self.config.seed,
                groups=look_alike_groups(self.dataset),
                scale=self.feature_scale(),
            )
            return probe, round(time.perf_counter() - start, 3)

        probe, self.probe.seconds = collectives.from_main_process(fitted)
        self.probe.install(probe, [self.model.head, self.ema.model.head])
        self.updater.reset()  # A schedule-free optimizer holds a copy of the replaced weights.
        say_main(f"probe: {self.probe}; training begins there")

    def feature_scale(self) -> FeatureScale | None:
        """Return the mean and deviation by which the probe standardises; None: its images' own."""
        return None

    def lineage(self) -> Lineage:
        if self.criterion.teacher is None:
            return self.model.lineage
        teacher = self.criterion.teacher
        return join(self.model.lineage, teacher.lineage, teacher.network.lineage)

    def networks(self) -> Networks:
        image = torch.zeros(1, *self.dataset.spec.shape, device=self.precision.device)
        return {"classifier": (self.ema.model, (image,))}

    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        """Make one update from the next global batch; the returned metrics add up over the ranks."""
        batch = next(batches)
        self.set_up(step)
        self.inputs.micro.find(lambda: self.attempt(self.samples(batch, step)))
        return self.graphs.run(self.update, [batch], step, kind=self.kind, structure=self.structure)

    def update(self, batches: Sequence[Batch], step: int) -> dict[str, Tensor]:
        """Make update number `step` from a batch, after `set_up`."""
        samples = value(lambda step: self.samples(batches[0], step), step)
        statistics = Snapshot(self.replica.statistics)
        loss, correct = self.gradients(samples)
        with phase("optimizer"):
            update = self.updater.step(step)
            # The NaN of a masked step must not remain in the running statistics.
            statistics.restore(update.skipped)
            passes = len(self.inputs.micro.slices())
            self.replica.count_batches(update.skipped < 1, passes)
            self.replica.average_statistics()
            self.precision.update_scale()
        with phase("ema"):
            outside(partial(self._average, update.skipped), step)
        metrics = {"loss/classifier": loss, "accuracy/train": correct / self.config.batch_size}
        return metrics | update.metrics("classifier")

    def _average(self, skipped: Tensor, step: int) -> None:
        """Update the moving average of the weights."""
        average = self.updater.average(self.model.parameters())
        decay = min(self.config.ema.decay, (1 + step) / (10 + step))
        self.ema.update(self.model, decay, skipped, average)

    def kind(self, step: int) -> Hashable:
        """Return the kind of a step; None if hooks, which run on the host, are due."""
        return None if self.config.log.layers_due(step) else "update"

    def structure(self, step: int) -> Hashable:
        """Return what the kernels of a step depend on besides its kind, after `set_up`."""
        modes = [module.training for module in self.model.modules()]
        trained = [parameter.requires_grad for parameter in self.model.parameters()]
        sizes = (self.model.side, self.inputs.micro.size, self.frozen.begin)
        return sizes, *modes, *trained, self.precision.scaler, self.updater.optimizer

    def samples(self, batch: Batch, step: int) -> Samples:
        """Augment this process's part of the global batch."""
        with phase("augment"):
            return self.inputs.augmented(batch, step, self.inputs.first_row)

    def set_up(self, step: int) -> None:
        """Prepare update number `step`: what trains, label smoothing, and the size of the images."""
        self.finetuning.at(step)
        self.criterion.at(step)
        if self.resizing.at(step) | self.replica.wrap():
            self.inputs.micro.is_stale = True

    def gradients(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the global batch, this process's part in micro-batches.

        Returns this process's loss and number of correct predictions, 0-d.
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
        """Take the memory of a step with these samples, and change nothing."""
        statistics = Snapshot(self.replica.statistics)
        try:
            with self.replica.alone():
                self.gradients(samples)
        finally:
            self.updater.zero_grad()
            statistics.restore()

    def source(self, step: int, folder: Path) -> CachedFeatures | None:
        self.set_up(step)
        return self.frozen.source(step, folder)

    def as_read(self, batch: Batch, step: int) -> Batch:
        self.set_up(step)
        features = self.frozen.outputs(batch.images, step)
        return batch if features is None else Batch(batch.images, batch.labels, features=features)

    def sample_grid(self, step: int) -> np.ndarray | None:
        """Return the first training images as the network sees them, at step 0; later None."""
        if step:
            return None
        count = min(64, len(self.dataset), self.config.batch_size)
        if self.config.augment.mixes:
            count -= count % 2
        batch = read_batch(self.dataset, np.arange(count)).to(self.precision.device)
        images, _ = self.inputs.rows(self.inputs.augmented(batch, 0, 0), slice(0, count))
        spec = self.dataset.spec
        return grid(spec.from_float(images).cpu(), spec=spec)

    def images_at(self, step: int) -> int:
        return step * self.config.batch_size

    def typical_steps(self, first: int) -> dict[int, float]:
        return self.resizing.typical_steps() if self.resizing.on else {first: 1.0}

    def describe(self) -> dict[str, str]:
        rows = self.resizing.describe()
        if self.model.parts:
            rows["split"] = "; ".join(map(str, self.model.parts))
        if self.config.loss.teacher:
            rows["taught by"] = self.config.loss.teacher
        if trains := self.finetuning.describe():
            rows["what trains"] = "; ".join(trains)
        return rows

    def graph_text(self) -> str:
        return self.graphs.describe(map(self.kind, range(MANY)))

    def layer_table(self, name: str) -> str:
        network, inputs = self.networks()[name]
        return layer_table(network, inputs, self.finetuning, self.updater.config)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the average model on the validation images; return {} without data.val_path."""
        if self.val_dataset is None:
            return {}
        document = evaluate_classifier(
            self.ema.model,
            self.val_dataset,
            batch_size=self.config.evaluation.batch_size,
            details=False,
        )
        if self.model.thresholds is not None and self.ema.model.thresholds is not None:
            # The evaluation has set the average's thresholds. The model gets the same ones, so that
            # averaging keeps them.
            self.model.thresholds.copy_(self.ema.model.thresholds)
        self.best_interval = document.get(f"{self.best_metric}_interval")
        return history(LABELS if self.config.loss.several else CLASSIFIER, document)
