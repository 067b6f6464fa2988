"""The GAN task: networks, a training step of both, the saved state, and the evaluation."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, read_batch
from duetgan.metrics.evaluate_gan import evaluate_generator
from duetgan.metrics.features.extractors import RealFeatures, build, shared_pass
from duetgan.metrics.features.precision import evaluating
from duetgan.metrics.figures import GAN, history
from duetgan.models.gan import ImageGenerator, StageGenerator, generate
from duetgan.models.registry import architecture_of
from duetgan.training.base.config import Shape
from duetgan.training.base.data import check_same_classes, label_frequencies
from duetgan.training.base.phases import phase
from duetgan.training.base.task import Networks, Outline, Stateful, Task
from duetgan.training.base.teacher import Teacher
from duetgan.training.gan.ada import Ada
from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.context import Context, GanDraws, Images, StepSlice
from duetgan.training.gan.diagnostics import Watch
from duetgan.training.gan.discriminator_step import DiscriminatorStep
from duetgan.training.gan.generator_step import GeneratorStep
from duetgan.training.optim.config import OptimizerConfig
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.images import grid
from duetgan.utils.machine import upload
from duetgan.utils.runlog.run_log import say_main
from duetgan.utils.seeding import forked

LOGIT_IMAGES = 512  # largest number of images of each kind for the mean logits of an evaluation
SEARCHED_PER_SAMPLE = 4  # training images per sample that an evaluation searches for copies


class GanTask(Task):
    """The training of a GAN: generator, discriminator, their optimizers, and the step of both."""

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
        self.label_sets = dataset.meta.sets if self.shape["classes"] else None
        # The classes must agree because an evaluation draws samples with the validation labels.
        if val_dataset is not None and val_dataset.classes and self.shape["classes"]:
            check_same_classes(config.data, dataset, val_dataset)
        self._stage = self.stages.at(0)
        self._build_networks()
        self.precision = Precision(config.precision, device)
        schedule_images = self.stages.images_at(config.steps)
        if config.schedule_kimg is not None:
            schedule_images = max(1, round(config.schedule_kimg * 1000))
        spec = self.generator.spec
        ada = Ada(
            config.ada,
            seed=config.seed,
            channels=spec.channels,
            alpha=spec.alpha,
            device=device,
            schedule_images=schedule_images,
            transfer=config.init_from is not None,
        )
        label_sets = None
        if self.label_sets is not None:
            label_sets = torch.tensor(dataset.meta.multi_hot, dtype=torch.float32, device=device)
        self.context = Context(
            config,
            device,
            self.generator,
            self.discriminator,
            self.precision,
            GanDraws(config.seed, device, label_frequencies(config.data, dataset)),
            ada,
            schedule_images,
            label_sets,
        )
        teacher = None
        if config.loss.classifier is not None:
            teacher = Teacher("loss.classifier", config.loss.classifier, dataset, device)
        self.teacher_lineage = Lineage.of() if teacher is None else teacher.lineage
        self.discriminator_step = DiscriminatorStep(
            self.context, self._updater(self.discriminator, config.discriminator_optimizer)
        )
        self.generator_step = GeneratorStep(
            self.context,
            self._updater(self.generator, config.generator_optimizer),
            self.ema,
            teacher,
            self.discriminator_step,
        )
        self.watch = Watch(config.watch, config.loss.functions)
        # Distances of different extractors cannot be compared, so the name includes the extractor.
        self.best_metric = f"frechet/{config.evaluation.extractor}"
        self._real = RealFeatures(batch_size=config.evaluation.batch_size)
        # Built before training, so that an error does not wait until the first evaluation.
        self._extractors = collectives.main_first(
            lambda: build(
                [config.evaluation.extractor],
                device=device,
                spec=spec,
                weights=config.evaluation.weights,
            )
        )

    def _updater(self, network: nn.Module, optimizer: OptimizerConfig) -> Updater:
        return Updater(
            network,
            optimizer,
            self.precision,
            self.config.schedule_steps,
            growing=self.stages.growing,
            compress=self.config.distributed.compress,
        )

    @staticmethod
    def outline(config: GanConfig, shape: Shape) -> Outline:
        """Return the networks that the config describes, with their numbers of copies.

        These are weights, gradients and Adam's two moments; for G also the moving average.
        """
        networks = architecture_of(config.architecture)
        generator = networks.network("generator", config.generator, **shape)
        discriminator = networks.network("discriminator", config.discriminator, **shape)
        return {"generator": (generator, 4), "discriminator": (discriminator, 3)}

    def _build_networks(self) -> None:
        """Build the generator, its moving average and the discriminator.

        Each network is initialised from its own seed key.
        """
        config, networks = self.config, architecture_of(self.config.architecture)
        with forked(config.seed, "init", "generator"):
            generator = networks.network("generator", config.generator, **self.shape)
        with forked(config.seed, "init", "discriminator"):
            shape = self.shape
            if self.stages.growing:
                shape = shape | {"progressive": True}
            discriminator = networks.network("discriminator", config.discriminator, **shape)
        if config.loss.auxiliary_weight:
            if self.shape["classes"] < 2:
                raise UserError(
                    "loss.auxiliary_weight needs images of two classes or more: leave it out"
                )
            with forked(config.seed, "init", "auxiliary"):
                discriminator.add_auxiliary()
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        if self.label_sets is not None:
            order = np.argsort(np.negative(self.dataset.meta.histogram), kind="stable")
            generator.label_sets = [self.label_sets[label] for label in order]
        self.generator = generator.to(self.device, memory_format=layout)
        self.discriminator = discriminator.to(self.device, memory_format=layout)
        self.ema = EMA(self.generator, buffers="copy")

    def images_at(self, step: int) -> int:
        return self.stages.images_at(step)

    def describe(self) -> dict[str, str]:
        rows = {f"growth {number}": row for number, row in enumerate(self.stages.describe(), 1)}
        if self.dataset.classes and not self.shape["classes"]:
            rows = {"labels": "not used: the GAN is unconditional"} | rows
        return rows

    def lineage(self) -> Lineage:
        return self.teacher_lineage

    def provenance(self) -> dict[str, object]:
        provenance: dict[str, object] = {
            "teachers": self.teacher_lineage.teachers,
            "stage": [self._stage.resolution, self._stage.alpha],
        }
        if self.label_sets is not None:
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
        step_slice = self._begin(step)
        self.generator_step.updater.zero_grad()
        self.discriminator_step.updater.zero_grad()
        reals = self.context.reals(next(batches), step_slice)
        fakes = self.generator_step.run(step_slice, reals)
        if not self.config.loss.same_images:
            reals = self.context.reals(next(batches), step_slice, "discriminator")
            fakes = self._discriminator_samples(step_slice, reals)
        self.discriminator_step.run(
            step_slice, reals, fakes, one_pass=self.generator_step.one_pass(step_slice)
        )
        self.precision.update_scale()
        return step_slice.metrics

    def _discriminator_samples(
        self, step_slice: StepSlice, reals: Sequence[Images]
    ) -> list[Images]:
        fakes = []
        with phase("discriminator/samples"), torch.no_grad(), self.precision.autocast():
            latents, noise = self.context.latents(step_slice, "discriminator", reals)
            for rows, real in zip(step_slice.micro_batches(), reals, strict=True):
                images, _, _ = self.context.sample(latents, noise, rows, step_slice.stage)
                fakes.append(Images(images, real.labels))
        return fakes

    def typical_steps(self, first: int) -> dict[int, float]:
        """Return one step for each combination of penalties that are due in the same step."""
        loss, steps = self.config.loss, range(first, first + 240)
        kinds = [(loss.penalty_due(step), loss.path_length_due(step)) for step in steps]
        return {
            first + kinds.index(kind): count / len(steps)
            for kind, count in Counter(kinds).most_common()
        }

    def _begin(self, step: int) -> StepSlice:
        """Return the slice of update number `step`.

        At a new stage of growth, reset the optimizers if the config says so.
        """
        self._stage = self.stages.at(step)
        if step == self._stage.first_step > 0:
            say_main(self.stages.announcement(step))
            if self.config.progressive.reset_optimizer:
                self.generator_step.updater.reset()
                self.discriminator_step.updater.reset()
        batch, seen = self._stage.batch_size, self.stages.images_at(step)
        size = batch // collectives.world_size()
        micro = min(self.config.micro_limit or size, size)
        return StepSlice(step, seen, self._stage, batch, size, micro, collectives.rank() * size, {})

    def average_generator(self) -> ImageGenerator:
        """Return the moving average of the generator, at the current stage of growth."""
        stage, full = self._stage, self.dataset.spec.side
        if not self.stages.growing or (stage.resolution == full and stage.alpha == 1):
            return self.ema.model
        return StageGenerator(self.ema.model, stage.resolution, stage.alpha, display_size=full)

    def warnings(self, step: int, row: Mapping[str, float]) -> list[str]:
        return self.watch.observe(step, row)

    def sample_grid(self, step: int) -> np.ndarray | None:
        """Return a uint8 image [H, W, C] of samples with fixed latents.

        It has one row for each of the first 20 labels.
        """
        rows = columns = 8
        labels = None
        if self.generator.num_labels:
            rows, columns = min(20, self.generator.num_labels), 10
            labels = self.generator.conditions(torch.arange(rows).repeat_interleave(columns))
        samples = generate(
            self.average_generator(),
            labels=labels,
            indices=range(rows * columns),
            seed=self.config.seed,
        )
        return grid(samples, columns=columns, spec=self.generator.spec)

    def evaluate(self) -> dict[str, float]:
        """Compute the distance between samples of the average generator and validation images.

        Without a validation set, the distance to the training images is computed.
        """
        config = self.config.evaluation
        document = evaluate_generator(
            self.average_generator(),
            self.val_dataset or self.dataset,
            n=config.n,
            seed=self.config.seed,
            extractors=self._extractors,
            train_dataset=self.dataset if self.val_dataset else None,
            real=self._real,
            batch_size=config.batch_size,
            floor=False,
            details=False,
            searched=SEARCHED_PER_SAMPLE * config.n,
        )
        self.best_interval = document["distances"][0].get("frechet_interval")
        metrics = {"n": document["n"]}
        for key, value in history(GAN, document["distances"][0]).items():
            metrics[f"{key}/{config.extractor}"] = value
        if copies := document["memorisation"]:
            metrics[f"memorised/{copies['extractor']}"] = copies["share"]
            metrics[f"memorised_p/{copies['extractor']}"] = copies["p_value"]
        return metrics | self._mean_logits()

    def _mean_logits(self) -> dict[str, float]:
        """Return the mean logits of D for validation images, training images and samples.

        None are augmented. If validation images have the logits of samples, D has memorised the
        training images. Empty without validation images, and before the full network of progressive
        growing.
        """
        val_dataset = self.val_dataset
        if val_dataset is None or self.average_generator() is not self.ema.model:
            return {}
        group = self.config.discriminator.group
        count = min(LOGIT_IMAGES, len(val_dataset), len(self.dataset)) // group * group
        if not count:
            return {}

        def read(dataset: Dataset, rows: range) -> Batch:
            # Images from all over the file are read, because files are often sorted by class.
            records = np.linspace(0, len(dataset) - 1, count).astype(np.int64)
            batch = read_batch(dataset, records[rows.start : rows.stop])
            batch.labels = torch.from_numpy(dataset.meta.conditions(batch.labels.numpy()))
            return batch

        def logits_of(batch: Batch) -> Tensor:
            images = self.discriminator.spec.to_float(upload(batch.images, self.device))
            return self.discriminator(images, upload(batch.labels, self.device)).flatten().cpu()

        def logits_of_rows(rows: range) -> Tensor:
            held_out, real = read(val_dataset, rows), read(self.dataset, rows)
            labels = real.labels if self.generator.classes else None
            samples = generate(self.ema.model, labels=labels, indices=rows, seed=self.config.seed)
            batches = (held_out, real, Batch(samples, real.labels))
            return torch.stack([logits_of(batch) for batch in batches])

        with evaluating(self.discriminator):
            logits = list(
                shared_pass(
                    count,
                    logits_of_rows,
                    side=self.dataset.spec.side,
                    batch_size=self.config.evaluation.batch_size,
                    multiple=group,
                )
            )
        means = collectives.from_main_process(
            lambda: torch.cat(logits, 1).double().mean(1).tolist()
        )
        return dict(zip(("logits/held_out", "logits/real", "logits/fake"), means, strict=True))
