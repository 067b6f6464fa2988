"""Define the classifier's task: the step, saved state, the probe, the plan and the evaluation."""

import time

import numpy as np
import torch

from duetgan.data.reading.cached_features import CachedFeatures
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, read_batch
from duetgan.metrics.evaluate_classifier import evaluate_classifier
from duetgan.metrics.figures import CLASSIFIER, LABELS, history
from duetgan.training.base.config import Shape
from duetgan.training.base.graphs import MANY
from duetgan.training.base.task import Networks, Outline, Stateful
from duetgan.training.classifier.config import ClassifierConfig, check_run
from duetgan.training.classifier.probe import (
    FeatureScale,
    Probe,
    ProbeSummary,
    fit,
    look_alike_groups,
)
from duetgan.training.classifier.step import ClassifierStep
from duetgan.utils.checkpoint.provenance import Lineage, join
from duetgan.utils.distributed import collectives
from duetgan.utils.images import grid
from duetgan.utils.runlog.run_log import say_main


class ClassifierTask(ClassifierStep):
    """The task of training a classifier: step, saved state, probe, plan and evaluation."""

    best_metric = "accuracy"
    best_is_lower = False

    def __init__(
        self,
        config: ClassifierConfig,
        dataset: Dataset,
        val_dataset: Dataset | None,
        device: torch.device,
    ) -> None:
        check_run(config, dataset, val_dataset)
        super().__init__(config, dataset, device)
        self.val_dataset = val_dataset
        self.shape = config.shape(dataset)
        self.probe = ProbeSummary()
        if config.loss.several:
            self.best_metric = "average_precision"

    @staticmethod
    def outline(config: ClassifierConfig, shape: Shape) -> Outline:
        """Return a lower bound of the model: the head's hidden layer on the narrowest backbone.

        See `Task.outline`. Two copies are counted, the weights and their average. If the head has
        no hidden layer, a layer of one unit is returned. Backbones are left out because their sizes
        cannot be configured.
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

    def begin(self) -> None:
        """Fit a logistic regression as the initial head, if `finetune.probe` is set.

        Rank 0 fits it and sends it to the other ranks.
        """
        if not self.config.finetune.probe:
            return
        start = time.perf_counter()
        source = self.source(0)

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
        """Return the mean and deviation by which the probe standardises the features.

        None stands for the mean and deviation of the features to which the probe is fitted.
        """
        return None

    def lineage(self) -> Lineage:
        if self.criterion.teacher is None:
            return self.model.lineage
        teacher = self.criterion.teacher
        return join(self.model.lineage, teacher.lineage, teacher.network.lineage)

    def networks(self) -> Networks:
        image = torch.zeros(1, *self.dataset.spec.shape, device=self.precision.device)
        return {"classifier": (self.ema.model, (image,))}

    def source(self, step: int) -> CachedFeatures | None:
        self.set_up(step)
        return self.frozen.source(step)

    def as_read(self, batch: Batch, step: int) -> Batch:
        self.set_up(step)
        features = self.frozen.outputs(batch.images, step)
        return batch if features is None else Batch(batch.images, batch.labels, features=features)

    def sample_grid(self, step: int) -> np.ndarray | None:
        """Return a grid of the first training images, augmented and mixed; None after step 0."""
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
        rows["graphs"] = self.graphs.describe(map(self.kind, range(MANY)))
        return rows

    def evaluate(self) -> dict[str, float]:
        """Return metrics of the moving average of the model on the validation images.

        Return {} if there are no validation images.
        """
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
