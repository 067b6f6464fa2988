"""Build the parts of a classifier's step, such as the network, its average and the optimizer."""

import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.data import label_frequencies
from duetgan.training.base.graphs import Graphs
from duetgan.training.base.task import Task
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.finetune import FineTuning
from duetgan.training.classifier.frozen import FrozenStages
from duetgan.training.classifier.inputs import Inputs
from duetgan.training.classifier.loss import Criterion
from duetgan.training.classifier.network import build_network
from duetgan.training.classifier.replica import Replica
from duetgan.training.classifier.resizing import Resizing
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Precision, Updater


class ClassifierParts(Task):
    """Base class of a classifier's task. Its constructor builds the parts from the config.

    `ClassifierStep` uses these parts.
    """

    def __init__(self, config: ClassifierConfig, dataset: Dataset, device: torch.device) -> None:
        self.config = config
        self.dataset = dataset
        self.precision = Precision(config.precision, device)
        self.model = build_network(config, dataset, device)
        self.ema = EMA(self.model, buffers="average")
        several = "" if config.model.split == "off" else "model.split uses several devices"
        self.graphs = Graphs(config.graphs, device, obstacle=several)
        captured = not self.graphs.obstacle
        self.replica = Replica(self.model, config, device, captured=captured)
        self.resizing = Resizing(config.resizing, self.model, config.steps)
        self.finetuning = FineTuning(
            self.model, config.finetune, steps_per_epoch=len(dataset) / config.batch_size
        )
        self.frozen = FrozenStages(config, dataset, self.finetuning, self.resizing, self.precision)
        self.inputs = Inputs(config, dataset, self.frozen, device)
        frequencies = label_frequencies(config.data, dataset)
        self.criterion = Criterion(config.loss, dataset, frequencies, self.precision, config.steps)
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
