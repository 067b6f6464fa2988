"""The GAN task: what one step does to the generator and the discriminator, what is saved, how it is evaluated."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset
from data.loader import Batch
from data.transforms import Augment, draw_and_apply, to_float
from metrics.evaluate_gan import evaluate_generator
from metrics.extractors import Extractor, Options, build
from metrics.features import RealFeatures
from models.restore import classifier_from
from models.sampling import generate
from models.stylegan2 import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from training import losses
from training.config import RunConfig
from training.data import check_same_classes, label_shares
from training.draws import GanDraws, mix_styles
from training.ema import EMA, half_life_beta
from training.optim import Mixed, OptimizerConfig, Updater
from utils import distributed
from utils.checkpoint import load, resolve
from utils.errors import UserError
from utils.images import grid
from utils.seeding import forked


@dataclass(kw_only=True)
class GanLossConfig:
    """The objective: non-saturating logistic loss with lazy R1."""

    r1_gamma: float = 1.0  # rule of thumb: 0.0002 * resolution^2 / batch_size; try x2, x4, /2, /4
    r1_interval: int = 16  # steps between penalties, each with gain `r1_interval`; 0: no R1
    style_mixing: float = 0.9  # probability
    mismatch_weight: float = 0.0  # conditional: weight of real pictures with a wrong label as fakes (1605.05396)

    def __post_init__(self) -> None:
        if self.r1_gamma < 0 or self.r1_interval < 0 or self.mismatch_weight < 0:
            raise UserError("loss: r1_gamma, r1_interval and mismatch_weight must be 0 or more")
        if not 0 <= self.style_mixing <= 1:
            raise UserError(f"loss.style_mixing {self.style_mixing} is a probability: it must lie in [0, 1]")


@dataclass(kw_only=True)
class GanEmaConfig:
    """The moving average of the generator: the network that is shown and evaluated."""

    half_life_kimg: float | None = None  # thousand images; None: batch_size * 10 / 32
    ramp: float | None = 0.05  # half-life at most this share of the images seen; None: no ramp


def _adam() -> OptimizerConfig:
    return OptimizerConfig(name="adam", lr=0.0025, betas=[0.0, 0.99])


@dataclass(kw_only=True)
class GanConfig(RunConfig):
    """Everything a GAN's training can be told."""

    task: Literal["gan"] = "gan"
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    discriminator: DiscriminatorConfig = field(default_factory=DiscriminatorConfig)
    loss: GanLossConfig = field(default_factory=GanLossConfig)
    generator_optimizer: OptimizerConfig = field(default_factory=_adam)
    discriminator_optimizer: OptimizerConfig = field(default_factory=_adam)
    ema: GanEmaConfig = field(default_factory=GanEmaConfig)
    augment: Augment = field(default_factory=Augment)

    def check_groups(self, world_size: int) -> None:
        """Raise UserError unless every forward pass holds whole minibatch-std groups."""
        group, micro = self.discriminator.minibatch_std_group, self.micro(world_size)
        if micro % group:
            raise UserError(
                f"discriminator.minibatch_std_group {group} does not divide the {micro} samples of a forward pass; "
                f"make batch_size / processes or micro_batch a multiple of {group}"
            )


class GanTask:
    """Generator, discriminator, their optimizers, and one step of both."""

    best_is_lower = True

    def __init__(
        self, config: GanConfig, reader: Dataset, val_reader: Dataset | None, device: torch.device
    ) -> None:
        world = distributed.world_size()
        config.check_groups(world)
        if val_reader is not None and val_reader.classes and reader.classes:  # its evaluation draws samples by label
            check_same_classes(config.data, reader, val_reader)
        self.config, self.reader, self.val_reader, self.device = config, reader, val_reader, device
        self.share, self.micro = config.share(world), config.micro(world)
        self.first = distributed.rank() * self.share  # global position of this rank's first sample
        meta = reader.meta
        self.shape = {"channels": meta.channels, "classes": len(meta.classes), "resolution": reader.resolution}
        with forked(config.seed, "init", "generator"):
            generator = Generator(config.generator, **self.shape)
        with forked(config.seed, "init", "discriminator"):
            discriminator = Discriminator(config.discriminator, **self.shape)
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        self.generator = generator.to(device, memory_format=layout)  # type: ignore[call-overload]
        self.discriminator = discriminator.to(device, memory_format=layout)  # type: ignore[call-overload]
        self.ema = EMA(self.generator, buffers="copy")
        self.mixed = Mixed(config.precision, device)
        self.generator_updater = Updater(self.generator, config.generator_optimizer, self.mixed, config.steps)
        self.discriminator_updater = Updater(
            self.discriminator, config.discriminator_optimizer, self.mixed, config.steps
        )
        shares = label_shares(config.data, reader)
        self.draws = GanDraws(config.seed, config.batch_size, self.generator, device, shares)
        self.best_metric = f"frechet/{config.evaluation.extractor}"  # a distance means nothing without its extractor
        self._real = RealFeatures(batch_size=config.evaluation.batch_size)
        self._extractors: list[Extractor] = []
        distributed.on_main(self._build_extractors)  # now, not at the first evaluation: it may be refused

    def registry(self) -> dict[str, Any]:
        """Name -> object with a state dict: all that a checkpoint must hold."""
        return {
            "generator": self.generator,
            "discriminator": self.discriminator,
            "generator_ema": self.ema,
            "generator_optimizer": self.generator_updater,
            "discriminator_optimizer": self.discriminator_updater,
            "scaler": self.mixed,
        }

    def networks(self) -> dict[str, tuple[torch.nn.Module, tuple[Tensor, ...]]]:
        """Name -> network and example inputs, for summaries and TensorBoard's graph."""
        group = self.config.discriminator.minibatch_std_group
        labels = torch.zeros(group, dtype=torch.int64, device=self.device)
        z = torch.zeros(group, self.generator.z_dim, device=self.device)
        size = self.shape["resolution"]
        images = torch.zeros(group, self.shape["channels"], size, size, device=self.device)
        return {"generator": (self.generator, (z, labels)), "discriminator": (self.discriminator, (images, labels))}

    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        """One update of each network at the global batch; the returned values add up over the ranks."""
        batch = next(batches)
        metrics: dict[str, Tensor] = {}
        fakes = self._generator_phase(step, metrics)
        self._discriminator_phase(step, batch, fakes, metrics)
        self.mixed.update_scale()
        return metrics

    def _slices(self) -> list[slice]:
        """This rank's micro-batches as slices of its share."""
        return [slice(start, start + self.micro) for start in range(0, self.share, self.micro)]

    def _generator_phase(self, step: int, metrics: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Update G and its average; returns the fakes (detached) and their labels, which D judges next."""
        updater, generator = self.generator_updater, self.generator
        latents = self.draws.latents(step, "generator", self.config.loss.style_mixing)
        noise = self.draws.noise(step, "generator")
        updater.zero_grad()
        self.discriminator.requires_grad_(False)  # its gradients are not this phase's business
        fakes, loss_sum, w_sum = [], torch.zeros((), device=self.device), torch.zeros_like(generator.w_avg)
        for piece in self._slices():
            rows = slice(self.first + piece.start, self.first + piece.stop)
            labels = latents.labels[rows] if generator.classes else None
            with self.mixed.autocast():
                ws, w = mix_styles(generator, latents, rows)
                images = generator.synthesis(ws, [layer[rows] for layer in noise])
                logits = self.discriminator(images, labels)
            loss = losses.generator_nonsaturating(logits).sum() / self.config.batch_size
            self.mixed.backward(loss)
            loss_sum += loss.detach()
            w_sum += w.detach().sum(dim=0)
            fakes.append((images.detach(), latents.labels[rows]))
        self.discriminator.requires_grad_(True)
        update = updater.step(step)
        generator.update_w_avg(distributed.all_reduce_sum_(w_sum) / self.config.batch_size)
        self.ema.update(generator, self._ema_beta(step), update.skipped)
        metrics.update({"loss/generator": loss_sum} | update.metrics("generator"))
        return fakes

    def _ema_beta(self, step: int) -> float:
        ema, batch = self.config.ema, self.config.batch_size
        kimg = ema.half_life_kimg if ema.half_life_kimg is not None else batch * 10 / 32
        return half_life_beta(batch, (step + 1) * batch, kimg * 1000, ema.ramp)

    def _discriminator_phase(
        self, step: int, batch: Batch, fakes: list[tuple[Tensor, Tensor]], metrics: dict[str, Tensor]
    ) -> None:
        loss_config, updater = self.config.loss, self.discriminator_updater
        penalise = loss_config.r1_interval > 0 and loss_config.r1_gamma > 0 and step % loss_config.r1_interval == 0
        updater.zero_grad()
        names = ("loss/discriminator", "logits/real", "logits/fake", "logits/real_sign") + (
            ("loss/r1",) if penalise else ()
        )
        sums = {name: torch.zeros((), device=self.device) for name in names}
        for piece, (fake, fake_labels) in zip(self._slices(), fakes, strict=True):
            augmented = draw_and_apply(  # in uint8: a quarter of the memory
                batch.images[piece],
                self.config.augment,
                seed=self.config.seed,
                step=step,
                start=self.first + piece.start,
                global_batch=self.config.batch_size,
            )
            real = to_float(augmented, channels_last=self.config.channels_last)
            self._judge_fakes(fake, fake_labels, sums)
            labels = batch.labels[piece]
            rows = slice(self.first + piece.start, self.first + piece.stop)
            self._judge_reals(real, labels, self._wrong(labels, step, rows), penalise, sums)
        metrics.update(sums | updater.step(step).metrics("discriminator"))

    def _wrong(self, labels: Tensor, step: int, rows: slice) -> Tensor | None:
        """Uniform labels other than the true ones, or None where mismatched pairs are not part of the loss."""
        if self.config.loss.mismatch_weight == 0 or self.shape["classes"] < 2:
            return None
        return (labels + self.draws.label_offsets(step)[rows]) % self.shape["classes"]

    def _judge_fakes(self, images: Tensor, labels: Tensor, sums: dict[str, Tensor]) -> None:
        with self.mixed.autocast():
            logits = self.discriminator(images, labels)
        loss = losses.discriminator_fake(logits).sum() / self.config.batch_size
        self.mixed.backward(loss)
        sums["loss/discriminator"] += loss.detach()
        sums["logits/fake"] += logits.detach().sum() / self.config.batch_size

    def _judge_reals(
        self, images: Tensor, labels: Tensor, wrong_labels: Tensor | None, penalise: bool, sums: dict[str, Tensor]
    ) -> None:
        config, batch_size = self.config.loss, self.config.batch_size
        with self.mixed.autocast():
            features = self.discriminator.features(images.requires_grad_(penalise))
        logits = self.discriminator.project(features, labels)
        loss = losses.discriminator_real(logits).sum() / batch_size
        if wrong_labels is not None:
            mismatched = losses.discriminator_fake(self.discriminator.project(features, wrong_labels))
            loss = loss + mismatched.sum() * (config.mismatch_weight / batch_size)
        sums["loss/discriminator"] += loss.detach()
        sums["logits/real"] += logits.detach().sum() / batch_size
        sums["logits/real_sign"] += logits.detach().sign().sum() / batch_size
        if penalise:
            r1 = losses.squared_gradient_norm(logits, images, self.mixed.scale()).sum() / batch_size
            # one update serves both terms, so the gain alone makes up for the interval (no change of Adam's lr and
            # betas)
            loss = loss + r1 * (config.r1_gamma / 2 * config.r1_interval)
            sums["loss/r1"] += r1.detach() * (config.r1_gamma / 2)
        self.mixed.backward(loss)

    def sample_grid(self, step: int) -> np.ndarray | None:
        """uint8 picture [H, W, C]: the average generator's samples at the fixed seed, a row a class (the first 20)."""
        rows, columns = (min(20, self.shape["classes"]), 10) if self.shape["classes"] else (8, 8)
        count = rows * columns
        labels = torch.arange(rows).repeat_interleave(columns) if self.shape["classes"] else None
        return grid(
            generate(self.ema.model, labels=labels, indices=range(count), seed=self.config.seed), columns=columns
        )

    def warnings(self, step: int, row: Mapping[str, float]) -> list[str]:
        """Nothing is watched yet."""
        return []

    def _build_extractors(self) -> None:
        config = self.config.evaluation
        options = Options(
            weights=config.weights,
            device=self.device,
            channels=self.shape["channels"],
            load_classifier=lambda run: classifier_from(load(resolve(run)), self.device),
        )
        self._extractors = build([config.extractor], options)

    def evaluate(self) -> dict[str, float]:
        """Distance of the average generator's samples to held-out pictures (training pictures where there are none).

        Rank 0 computes, the others wait.
        """
        return distributed.on_main(self._evaluate_here)

    def _evaluate_here(self) -> dict[str, float]:
        config = self.config.evaluation
        found = evaluate_generator(
            self.ema.model,
            self.val_reader or self.reader,
            n=config.n,
            seed=self.config.seed,
            extractors=self._extractors,
            real=self._real,
            batch_size=config.batch_size,
        )
        names = ("frechet", "kernel", "diversity_ratio")
        return {f"{name}/{config.extractor}": found["distances"][0][name] for name in names}
