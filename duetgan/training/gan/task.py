"""The GAN task: what one step does to the generator and the discriminator, what is saved, how it is
evaluated.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, read_batch
from duetgan.metrics.evaluate_gan import evaluate_generator
from duetgan.metrics.features.extractors import RealFeatures, build, shared_pass
from duetgan.metrics.features.precision import evaluating
from duetgan.metrics.figures import GAN, history
from duetgan.models.gan import StageGenerator, generate
from duetgan.models.registry import architecture_of
from duetgan.training.base.data import check_same_classes, label_shares
from duetgan.training.base.phases import phase
from duetgan.training.base.task import Networks, Outline, Task
from duetgan.training.base.teacher import Teacher
from duetgan.training.gan.ada import Ada
from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.context import Context, GanDraws, Images, StepShare
from duetgan.training.gan.diagnostics import Watch
from duetgan.training.gan.discriminator_step import DiscriminatorStep
from duetgan.training.gan.generator_step import GeneratorStep
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.images import grid
from duetgan.utils.memory import upload
from duetgan.utils.provenance import Lineage
from duetgan.utils.runlog.run_log import say_main
from duetgan.utils.seeding import forked

LOGIT_IMAGES = 512  # images of which the discriminator's mean logit is taken at an evaluation
SEARCHED_PER_SAMPLE = 4  # training images among which an evaluation looks for copies


class GanTask(Task):
    """Generator, discriminator, their optimizers, and one step of both."""

    best_is_lower, loss_metric = True, "loss/discriminator"
    no_rate_search = (
        "the losses of a GAN measure two networks against each other and do not fall where a rate is good; set "
        "generator_optimizer.lr and discriminator_optimizer.lr (0.002 is usual) and compare short runs by their "
        "Frechet distance"
    )

    def __init__(
        self, config: GanConfig, reader: Dataset, val_reader: Dataset | None, device: torch.device
    ) -> None:
        self.stages = config.stages(reader.resolution)
        config.check_batches(self.stages, collectives.world_size())
        self.config, self.reader, self.val_reader, self.device = config, reader, val_reader, device
        self.shape = config.shape(reader)
        self.sets = reader.meta.sets if self.shape["classes"] else None
        # samples are drawn by its labels
        if val_reader is not None and val_reader.classes and self.shape["classes"]:
            check_same_classes(config.data, reader, val_reader)
        self._stage = self.stages.at(0)
        self._build_networks()
        self.precision = Precision(config.precision, device)
        kimg = config.schedule_kimg  # in which scheduled settings reach their ends
        schedule_images = (
            self.stages.images_at(config.steps) if kimg is None else max(1, round(kimg * 1000))
        )
        draws = GanDraws(config.seed, device, label_shares(config.data, reader))
        spec = self.generator.spec
        given: Any = {
            "seed": config.seed,
            "channels": spec.channels,
            "alpha": spec.alpha,
            "device": device,
        }
        ada = Ada(
            config.ada,
            **given,
            schedule_images=schedule_images,
            transfer=config.init_from is not None,
        )
        networks = (self.generator, self.discriminator)
        hot = (
            None
            if self.sets is None
            else torch.tensor(reader.meta.multi_hot, dtype=torch.float32, device=device)
        )
        self.context = Context(
            config, device, *networks, self.precision, draws, ada, schedule_images, hot
        )
        more: Any = {"growing": self.stages.growing, "compress": config.distributed.compress}
        optimizers = (config.generator_optimizer, config.discriminator_optimizer)
        for_generator, for_discriminator = (
            Updater(network, optimizer, self.precision, config.schedule_steps, **more)
            for network, optimizer in zip(networks, optimizers, strict=True)
        )
        run = config.loss.classifier
        teacher = None if run is None else Teacher("loss.classifier", run, reader, device)
        self.learnt_from = Lineage.of() if teacher is None else teacher.lineage
        self.discriminator_step = DiscriminatorStep(self.context, for_discriminator)
        self.generator_step = GeneratorStep(
            self.context, for_generator, self.ema, teacher, self.discriminator_step
        )
        self.watch = Watch(config.watch, config.loss.functions)
        # a distance means nothing without its extractor
        self.best_metric = f"frechet/{config.evaluation.extractor}"
        self._real = RealFeatures(batch_size=config.evaluation.batch_size)
        # now, not at the first evaluation: it may be refused
        given = {"device": device, "spec": spec, "weights": config.evaluation.weights}
        self._extractors = collectives.main_first(
            lambda: build([config.evaluation.extractor], **given)
        )

    @staticmethod
    def outline(config: GanConfig, shape: Mapping[str, Any]) -> Outline:
        """Each weight has its gradient and the optimizer's moments besides; the generator's its
        average too.
        """
        networks = architecture_of(config.architecture)
        generator = networks.network("generator", config.generator, **shape)
        discriminator = networks.network("discriminator", config.discriminator, **shape)
        return {"generator": (generator, 4), "discriminator": (discriminator, 3)}

    def _build_networks(self) -> None:
        """Generator, its moving average and discriminator, initialised by their keys."""
        config, networks = self.config, architecture_of(self.config.architecture)
        with forked(config.seed, "init", "generator"):
            generator = networks.network("generator", config.generator, **self.shape)
        with forked(config.seed, "init", "discriminator"):
            growing = {"progressive": True} if self.stages.growing else {}
            discriminator = networks.network(
                "discriminator", config.discriminator, **self.shape, **growing
            )
        if config.loss.auxiliary_weight:
            if self.shape["classes"] < 2:
                raise UserError(
                    "loss.auxiliary_weight needs images of two classes or more: leave it out"
                )
            with forked(config.seed, "init", "auxiliary"):
                discriminator.add_auxiliary()
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        if self.sets is not None:
            order = np.argsort(np.negative(self.reader.meta.histogram), kind="stable")
            generator.sets = [self.sets[label] for label in order]
        self.generator = generator.to(self.device, memory_format=layout)
        self.discriminator = discriminator.to(self.device, memory_format=layout)
        self.ema = EMA(self.generator, buffers="copy")

    def images_at(self, step: int) -> int:
        return self.stages.images_at(step)

    def describe(self) -> dict[str, str]:
        unread = (
            {"labels": "not looked at: unconditional"}
            if self.reader.classes and not self.shape["classes"]
            else {}
        )
        return unread | {
            f"growth {number}": text for number, text in enumerate(self.stages.describe(), 1)
        }

    def lineage(self) -> Lineage:
        return self.learnt_from

    def provenance(self) -> dict[str, Any]:
        several = {} if self.sets is None else {"sets": self.generator.sets}
        return {
            "teachers": self.learnt_from.teachers,
            "stage": [self._stage.resolution, self._stage.alpha],
        } | several

    def registry(self) -> dict[str, Any]:
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
        images = torch.zeros(group, *self.reader.spec.shape, device=self.device)
        return {
            "generator": (self.generator, (z, labels)),
            "discriminator": (self.discriminator, (images, labels)),
        }

    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        share = self._begin(step)
        for part in (self.generator_step, self.discriminator_step):
            part.updater.zero_grad()
        reals = self.context.reals(next(batches), share)
        fakes = self.generator_step.run(share, reals)
        if not self.config.loss.same_images:  # D has pairs of its own
            reals = self.context.reals(next(batches), share, "discriminator")
            with phase("discriminator/samples"), torch.no_grad(), self.precision.autocast():
                latents, noise = self.context.latents(share, "discriminator", reals)
                samples = [
                    self.context.sample(latents, noise, part, share.stage)[0]
                    for part in share.micro_batches()
                ]
            fakes = [Images(part, real.labels) for part, real in zip(samples, reals, strict=True)]
        self.discriminator_step.run(
            share, reals, fakes, one_pass=self.generator_step.one_pass(share)
        )
        self.precision.update_scale()
        return share.metrics

    def typical_steps(self, first: int) -> dict[int, float]:
        """One with each combination of the lazy penalties that are due together."""
        loss, steps = self.config.loss, range(first, first + 240)
        kinds = [(loss.penalty_due(step), loss.path_length_due(step)) for step in steps]
        return {
            first + kinds.index(kind): count / len(steps)
            for kind, count in Counter(kinds).most_common()
        }

    def _begin(self, step: int) -> StepShare:
        """The step's sizes; at a new stage of growth also what the config says of the optimizers."""
        self._stage = self.stages.at(step)
        if step == self._stage.first_step > 0:
            say_main(self.stages.announcement(step))
            if self.config.progressive.reset_optimizer:
                self.generator_step.updater.reset()
                self.discriminator_step.updater.reset()
        batch, seen = self._stage.batch_size, self.stages.images_at(step)
        size = batch // collectives.world_size()
        micro = min(self.config.micro_limit or size, size)
        return StepShare(step, seen, self._stage, batch, size, micro, collectives.rank() * size, {})

    def shown(self) -> Any:
        """The average generator as the last step's stage has it: what is shown and evaluated."""
        stage, full = self._stage, self.reader.spec.side
        if not self.stages.growing or (stage.resolution == full and stage.alpha == 1):
            return self.ema.model
        return StageGenerator(self.ema.model, stage.resolution, stage.alpha, shown=full)

    def warnings(self, step: int, row: Mapping[str, float]) -> list[str]:
        return self.watch.observe(step, row)

    def sample_grid(self, step: int) -> np.ndarray | None:
        """uint8 image [H, W, C]: the average generator's samples at the fixed seed, a row a class
        (the first 20).
        """
        rows, columns = (min(20, self.generator.kinds), 10) if self.generator.kinds else (8, 8)
        asked = self.generator.conditions(torch.arange(rows).repeat_interleave(columns))
        labels = asked if self.generator.kinds else None
        samples = generate(
            self.shown(), labels=labels, indices=range(rows * columns), seed=self.config.seed
        )
        return grid(samples, columns=columns, spec=self.generator.spec)

    def evaluate(self) -> dict[str, float]:
        """Distance of the average generator's samples to held-out (else training) images, which the
        ranks share.
        """
        config = self.config.evaluation
        document = evaluate_generator(
            self.shown(),
            self.val_reader or self.reader,
            n=config.n,
            seed=self.config.seed,
            extractors=self._extractors,
            train_reader=self.reader if self.val_reader else None,
            real=self._real,
            batch_size=config.batch_size,
            floor=False,
            details=False,
            searched=SEARCHED_PER_SAMPLE * config.n,
        )
        self.best_interval = document["distances"][0].get("frechet_interval")
        followed = history(GAN, document["distances"][0])
        figures = {"n": document["n"]} | {
            f"{key}/{config.extractor}": value for key, value in followed.items()
        }
        if copies := document["memorisation"]:
            figures[f"memorised/{copies['extractor']}"] = copies["share"]
            figures[f"memorised_p/{copies['extractor']}"] = copies["p_value"]
        return figures | self._mean_logits()

    def _mean_logits(self) -> dict[str, float]:
        """D's mean logit of held-out images, training images and samples, none of them augmented:
        where the held-out ones have those of samples, it knows the training images by heart. Empty
        without held-out images.
        """
        # a stage of growth has smaller images
        if self.val_reader is None or self.shown() is not self.ema.model:
            return {}
        group = self.config.discriminator.group
        count = min(LOGIT_IMAGES, len(self.val_reader), len(self.reader)) // group * group
        if not count:
            return {}

        def logits_of(batch: Batch) -> Tensor:
            images, labels = (upload(part, self.device) for part in (batch.images, batch.labels))
            floats = self.discriminator.spec.to_float(images)
            # labels may count for nothing
            return self.discriminator(floats, labels).flatten().cpu()

        def work(rows: range) -> Tensor:
            held_out, real = (
                read_batch(part, each[rows.start : rows.stop]) for part, each in records
            )
            for part, batch in zip(readers, (held_out, real), strict=True):
                batch.labels = torch.from_numpy(part.meta.conditions(batch.labels.numpy()))
            labels = real.labels if self.generator.classes else None
            samples = generate(self.ema.model, labels=labels, indices=rows, seed=self.config.seed)
            return torch.stack(
                [logits_of(batch) for batch in (held_out, real, Batch(samples, real.labels))]
            )

        readers, size = (self.val_reader, self.reader), self.config.evaluation.batch_size
        # spread over the files, which are often packed class by class
        records = [
            (part, np.linspace(0, len(part) - 1, count).astype(np.int64)) for part in readers
        ]
        with evaluating(self.discriminator):
            logits = list(
                shared_pass(
                    count, work, side=self.reader.spec.side, batch_size=size, multiple=group
                )
            )
        means = collectives.from_main_process(
            lambda: torch.cat(logits, 1).double().mean(1).tolist()
        )
        return dict(zip(("logits/held_out", "logits/real", "logits/fake"), means, strict=True))
