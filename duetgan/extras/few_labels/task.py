"""The task `classifier` with unlabelled images. It replaces the core's task of this name."""

from collections.abc import Iterator

import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch
from duetgan.extras.few_labels.spreading import spread_to
from duetgan.extras.few_labels.unlabelled import FewLabelsConfig, Unlabelled, joined
from duetgan.metrics.lineage import lineage_of
from duetgan.training.base.task import Stateful
from duetgan.training.classifier.frozen import image_features
from duetgan.training.classifier.inputs import MicroBatchSize, Samples
from duetgan.training.classifier.probe import FeatureScale, scale_of
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import TASKS, Entry
from duetgan.utils.checkpoint.provenance import Lineage, join
from duetgan.utils.distributed import collectives


class FewLabelsTask(ClassifierTask):
    """The training of a classifier, with unlabelled images if the config names some.

    If `unlabelled.weight` is 0, the unlabelled images are used only to standardise the features of
    the linear probe.
    """

    def __init__(
        self,
        config: FewLabelsConfig,
        dataset: Dataset,
        val_dataset: Dataset | None,
        device: torch.device,
    ) -> None:
        super().__init__(config, dataset, val_dataset, device)
        self.unlabelled: Unlabelled | None = None
        if config.unlabelled.path:
            self.unlabelled = Unlabelled(config, dataset)
        self.stream: Unlabelled | None = None  # set if they contribute to the loss
        if self.unlabelled is not None and config.unlabelled.weight:
            self.stream = self.unlabelled
            self.frozen.spans = []  # Steps also use images that the cache does not have.
            count = self.inputs.micro.count + self.stream.rank_batch
            self.inputs.micro = MicroBatchSize(config.micro_batch, count)

    def registry(self) -> dict[str, Stateful]:
        if self.stream is None:
            return super().registry()
        return {**super().registry(), "unlabelled": self.stream}

    def lineage(self) -> Lineage:
        if self.unlabelled is None:
            return super().lineage()
        return join(super().lineage(), lineage_of(self.unlabelled.images))

    def samples(self, batch: Batch, step: int) -> Samples:
        labelled = super().samples(batch, step)
        if self.stream is None:
            return labelled
        images, targets = self.stream.draw(step, self.ema.model, self.precision)
        return joined(labelled, images, targets)

    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        metrics = super().step(batches, step)
        if self.stream is None:
            return metrics
        return metrics | {"unlabelled/used": self.stream.used_fraction}

    # --- the probe

    def unlabelled_features(self) -> Tensor:
        """Return the features of the unlabelled images, float32 [n, F] on the CPU."""
        assert self.unlabelled is not None
        with self.precision.autocast():
            features, _ = image_features(
                self.model,
                self.unlabelled.images,
                mirror=False,
                progress="unlabelled features of",
            )
        return features[:, 0]

    def feature_scale(self) -> FeatureScale | None:
        return None if self.unlabelled is None else scale_of(self.unlabelled_features())

    def begin(self) -> None:
        super().begin()
        if self.unlabelled is None or not self.unlabelled.settings.spread:
            return
        source = self.source(0)
        classes = len(self.dataset.classes)

        def propagated() -> Tensor:
            features, labels = self.frozen.features(source)
            return spread_to(self.unlabelled_features(), features[:, 0], labels, classes).float()

        self.unlabelled.propagated_labels = collectives.from_main_process(propagated)


TASKS["classifier"] = Entry(lambda *_: FewLabelsConfig, FewLabelsTask)
