"""The GAN task: both networks, their training step, the saved state, and the evaluation."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch
from duetgan.models.gan import ImageDiscriminator, ImageGenerator
from duetgan.models.layers import fused
from duetgan.models.registry import architecture_of
from duetgan.training.base.config import Shape
from duetgan.training.base.data import check_same_classes
from duetgan.training.base.graphs import MANY, Graphs
from duetgan.training.base.phases import phase
from duetgan.training.base.task import Networks, Outline, Stateful, Task
from duetgan.training.base.teacher import Teacher
from duetgan.training.gan.batch import Images, StepSlice
from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.context import Context
from duetgan.training.gan.diagnostics import Watch
from duetgan.training.gan.diagnostics.loss_gradients import LossGradients
from duetgan.training.gan.discriminator_step import DiscriminatorStep
from duetgan.training.gan.evaluation import GanEvaluation
from duetgan.training.gan.generator_step import GeneratorStep
from duetgan.training.gan.growth import Growth
from duetgan.training.gan.joint_step import JointStep
from duetgan.training.gan.terms import further_terms
from duetgan.training.optim.config import OptimizerConfig
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Updater
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked


class GanTask(Task):
    """The training of a GAN: its two networks, their optimizers, and the step that updates both."""

    best_is_lower, loss_metric = True, "loss/discriminator"
    lr_find_unsupported_reason = (
        "the losses of a GAN measure two networks against each other and do not fall where a rate is good; set "
        "generator_optimizer.lr and discriminator_optimizer.lr (0.002 is usual) and compare short runs by their "
        "Frechet distance"
    )

    def __init__(
        self, config: GanConfig, dataset: Dataset, val_dataset: Dataset | None, device: torch.device
    ) -> None:
        self.stages = config.stages(dataset.resolution)
        config.check_batches(self.stages, collectives.world_size())
        self.config = config
        self.dataset = dataset
        self.val_dataset = val_dataset
        self.device = device
        self.shape = config.shape(dataset)
        fused.setting = config.kernels
        # The classes must agree because an evaluation draws samples with the validation labels.
        if val_dataset is not None and self.shape["classes"]:
            check_same_classes(config.data, dataset, val_dataset)
        self.generator, self.discriminator = build_networks(config, dataset, device)
        self.ema = EMA(self.generator, buffers="copy")
        self.growth = None
        if self.stages.growing:
            networks = (self.generator, self.ema.model, self.discriminator)
            self.growth = Growth(self.stages, networks, device)
        self.context = Context(
            config, dataset, self.generator, self.discriminator, device, self.growth
        )
        self.precision = self.context.precision
        self.teacher: Teacher | None = None
        if config.loss.classifier is not None:
            self.teacher = Teacher("loss.classifier", config.loss.classifier, dataset, device)
        self.generator_step = GeneratorStep(
            self.context,
            self._updater(self.generator, config.generator_optimizer),
            self.ema,
            further_terms(self.context, self.teacher),
        )
        self.discriminator_step = DiscriminatorStep(
            self.context, self._updater(self.discriminator, config.discriminator_optimizer)
        )
        self.joint_step = JointStep(self.generator_step, self.discriminator_step)
        self.loss_gradients = LossGradients(self.generator_step)
        self.watch = Watch(config.watch, config.loss.functions)
        self.graphs = Graphs(config.graphs, device, obstacle="")
        # Distances of different extractors cannot be compared, so the name includes the extractor.
        self.best_metric = f"frechet/{config.evaluation.extractor}"
        # Built before training, so that an error does not wait until the first evaluation.
        self.evaluation = GanEvaluation(config, dataset, device)

    def _updater(self, network: nn.Module, optimizer: OptimizerConfig) -> Updater:
        return Updater(
            network,
            optimizer,
            self.precision,
            self.config.schedule_steps(self.dataset.resolution),
            growing=self.stages.growing,
            compress=self.config.distributed.compress,
        )

    @staticmethod
    def outline(config: GanConfig, shape: Shape) -> Outline:
        """Return both networks, each with a lower bound of the number of its copies in memory.

        See `Task.outline`. Copies are the weights, their gradients, the optimizer's moments and,
        for the generator, the moving average.
        """
        networks = architecture_of(config.architecture)
        generator = networks.network("generator", config.generator, **shape)
        discriminator = networks.network("discriminator", config.discriminator, **shape)
        return {"generator": (generator, 4), "discriminator": (discriminator, 3)}

    def images_at(self, step: int) -> int:
        return self.stages.images_at(step)

    def describe(self) -> dict[str, str]:
        rows = {f"growth {number}": row for number, row in enumerate(self.stages.describe(), 1)}
        if self.dataset.classes and not self.shape["classes"]:
            rows = {"labels": "not used: the GAN is unconditional"} | rows
        if self.device.type != "cpu":
            rows["kernels"] = fused.describe(self.device)
        rows["graphs"] = self.graphs.describe(map(self.kind, range(MANY)))
        return rows

    def lineage(self) -> Lineage:
        return Lineage.of() if self.teacher is None else self.teacher.lineage

    def provenance(self) -> dict[str, object]:
        stage = self.stages.at(0) if self.growth is None else self.growth.stage
        provenance: dict[str, object] = {
            "teachers": self.lineage().teachers,
            "stage": [stage.resolution, stage.alpha],
        }
        if self.generator.label_sets is not None:
            provenance["sets"] = self.generator.label_sets
        return provenance

    def registry(self) -> dict[str, Stateful]:
        return {
            "generator": self.generator,
            "discriminator": self.discriminator,
            "generator_ema": self.ema,
            "generator_optimizer": self.generator_step.updater,
            "discriminator_optimizer": self.discriminator_step.updater,
            "scaler": self.precision,
            "path_length": self.generator_step.path_length,
            "ada": self.context.ada,
            "watch": self.watch,
        }

    def networks(self) -> Networks:
        group = self.config.discriminator.group
        labels = torch.zeros(group, dtype=torch.int64, device=self.device)
        z = torch.zeros(group, self.generator.z_dim, device=self.device)
        images = torch.zeros(group, *self.dataset.spec.shape, device=self.device)
        return {
            "generator": (self.generator, (z, labels)),
            "discriminator": (self.discriminator, (images, labels)),
        }

    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        self._begin(step)
        read = [next(batches) for _ in range(self.config.batches_per_step)]
        return self.graphs.run(self.update, read, step, kind=self.kind, structure=self.structure)

    def update(self, batches: Sequence[Batch], step: int) -> dict[str, Tensor]:
        """Make update number `step` of both networks, and return its metrics.

        `batches` holds the one or two batches that a step reads. `_begin` must have been called.
        """
        step_slice = self._slice(step)
        reals = self.context.reals(batches[0], step_slice, None)
        self.loss_gradients.measure(step_slice, reals)
        if self.joint_step.is_due(step):
            self.joint_step.run(step_slice, reals)
        else:
            fakes = self.generator_step.run(step_slice, reals)
            if not self.config.loss.same_images:
                reals = self.context.reals(batches[1], step_slice, "discriminator")
                fakes = self._discriminator_samples(step_slice, reals)
            self.discriminator_step.run(step_slice, reals, fakes)
        self.precision.update_scale()
        return step_slice.metrics

    def _begin(self, step: int) -> None:
        """Enter the stage of growth of update number `step`, and clear the gradients."""
        updaters = (self.generator_step.updater, self.discriminator_step.updater)
        if self.growth is not None:
            self.growth.begin(step, updaters)
        for updater in updaters:
            updater.zero_grad()

    def kind(self, step: int) -> Hashable:
        """Return a key for CUDA graphs, which is equal for steps that launch the same kernels.

        Return None for a step with diagnostics, which run on the host and cannot be captured.
        """
        loss = self.config.loss
        if loss.gradients_due(step) or self.config.log.layers_due(step):
            return None
        penalties = self.discriminator_step.penalty_weights(step)
        due = (
            loss.penalty_due(step),
            loss.path_length_due(step),
            self.context.ada.is_changed(step),
        )
        return *due, *penalties

    def structure(self, step: int) -> Hashable:
        """Return the sizes and objects that determine the kernels of a step, besides its kind."""
        stage = self.stages.at(step)
        optimizers = (
            self.generator_step.updater.optimizer,
            self.discriminator_step.updater.optimizer,
        )
        sizes = (stage.resolution, stage.batch_size, stage.alpha == 1)
        return sizes, self.precision.scaler, *optimizers

    def _slice(self, step: int) -> StepSlice:
        batch = self.stages.at(step).batch_size
        size = batch // collectives.world_size()
        micro = min(self.config.micro_limit or size, size)
        return StepSlice(step, batch, size, micro, collectives.rank() * size, {})

    def _discriminator_samples(
        self, step_slice: StepSlice, reals: Sequence[Images]
    ) -> list[Images]:
        """Return this rank's samples for the update of the discriminator, without graphs.

        They have the labels of `reals`, the real images of the same update.
        """
        with phase("discriminator/samples"), torch.no_grad():
            latents, noise = self.context.latents(step_slice, "discriminator", reals)
            return [
                self.context.sample(latents, noise, rows) for rows in step_slice.micro_batches()
            ]

    def typical_steps(self, first: int) -> dict[int, float]:
        """Return a dict from step number to fraction, with one step for each kind of step.

        Steps are of one kind if the same penalties are due in them. Each value is the fraction of
        steps that are of this kind. The most frequent kind comes first. The step numbers are
        `first` or higher.
        """
        loss, steps = self.config.loss, range(first, first + 240)
        kinds = [(loss.penalty_due(step), loss.path_length_due(step)) for step in steps]
        return {
            first + kinds.index(kind): count / len(steps)
            for kind, count in Counter(kinds).most_common()
        }

    def average_generator(self) -> ImageGenerator:
        """Return the moving average of the generator, at the current stage of growth."""
        if self.growth is None or self.growth.is_complete:
            return self.ema.model
        return self.growth.average

    def warnings(self, step: int, row: Mapping[str, float]) -> list[str]:
        return self.watch.observe(step, row)

    def sample_grid(self, step: int) -> np.ndarray | None:
        return self.evaluation.sample_grid(self.average_generator())

    def evaluate(self) -> dict[str, float]:
        metrics = self.evaluation.metrics(self.average_generator(), self.val_dataset)
        self.best_interval = self.evaluation.interval
        is_complete = self.growth is None or self.growth.is_complete
        if self.val_dataset is not None and is_complete:
            metrics |= self.evaluation.mean_logits(
                self.ema.model, self.discriminator, self.val_dataset
            )
        return metrics


def build_networks(
    config: GanConfig, dataset: Dataset, device: torch.device
) -> tuple[ImageGenerator, ImageDiscriminator]:
    """Build the generator and the discriminator of the config for the images of `dataset`.

    The initial weights of each network are drawn with a different seed key. Raises UserError if the
    auxiliary loss is on and there are fewer than two classes.
    """
    shape = config.shape(dataset)
    networks = architecture_of(config.architecture)
    if config.progressive.start is not None:
        assert networks.growing is not None  # The config refuses other architectures.
        networks = networks.growing
    with forked(config.seed, "init", "generator"):
        generator = networks.network("generator", config.generator, **shape)
    with forked(config.seed, "init", "discriminator"):
        discriminator = networks.network("discriminator", config.discriminator, **shape)
    if config.loss.auxiliary_weight:
        if shape["classes"] < 2:
            raise UserError(
                "loss.auxiliary_weight needs images of two classes or more: leave it out"
            )
        with forked(config.seed, "init", "auxiliary"):
            discriminator.add_auxiliary()
    if dataset.meta.sets is not None and shape["classes"]:
        order = np.argsort(np.negative(dataset.meta.histogram), kind="stable")
        generator.label_sets = [dataset.meta.sets[label] for label in order]
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return (
        generator.to(device, memory_format=layout),
        discriminator.to(device, memory_format=layout),
    )
