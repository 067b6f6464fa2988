"""The classifier task: one step of a ResNet, what is saved, how it is evaluated."""

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from duetgan.data.augment.transforms import (
    Mixing,
    draw_and_apply,
    draw_mixing,
    mix_images,
    partners,
)
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, Source, read_batch
from duetgan.metrics.evaluate_classifier import evaluate_classifier
from duetgan.metrics.figures import CLASSIFIER, LABELS, history
from duetgan.metrics.lineage import lineage_of
from duetgan.metrics.samples.spreading import spread_to
from duetgan.models.batchnorm import synchronise_batchnorm
from duetgan.models.classifier import Classifier
from duetgan.models.model_parallel import Share, place
from duetgan.training.base.compiled import Compiled
from duetgan.training.base.data import label_shares
from duetgan.training.base.phases import phase
from duetgan.training.base.task import Networks, Outline, Task
from duetgan.training.base.teacher import Teacher
from duetgan.training.classifier.config import ClassifierConfig, check_batches, check_classes
from duetgan.training.classifier.consistency import Unlabelled
from duetgan.training.classifier.finetune import FineTuning, layer_table, plain
from duetgan.training.classifier.frozen import Frozen, image_features
from duetgan.training.classifier.loss import (
    Targets,
    by_class,
    classifier_loss,
    distilled,
    sample_weights,
)
from duetgan.training.classifier.micro_batch import MicroBatch
from duetgan.training.classifier.network import initialise, widen_narrow_maps
from duetgan.training.classifier.probe import Probe, Probed, alike, fit, looked_at
from duetgan.training.classifier.resizing import Resizing
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.collectives import Snapshot, by_kind
from duetgan.utils.errors import UserError
from duetgan.utils.images import grid
from duetgan.utils.memory import ran_out
from duetgan.utils.provenance import Lineage, join
from duetgan.utils.runlog.run_log import say_main
from duetgan.utils.seeding import forked

# a process's share of a step: augmented images, of 8 bits uint8, what they show, and with which and
# how they are mixed
Prepared = tuple[Tensor, Targets, tuple[Tensor, Mixing] | None]


class ClassifierTask(Task):
    """A ResNet, its optimizer and average, and one step."""

    best_metric, best_is_lower, loss_metric = "accuracy", False, "loss/classifier"

    def __init__(
        self,
        config: ClassifierConfig,
        reader: Dataset,
        val_reader: Dataset | None,
        device: torch.device,
    ) -> None:
        world = collectives.world_size()
        check_classes(config, reader, val_reader)
        self.config, self.reader, self.val_reader, self.device = config, reader, val_reader, device
        check_batches(config, world)
        if config.early_stopping.patience is not None and val_reader is None:
            raise UserError("early_stopping.patience needs held-out images; give data.val_path")
        self.share = config.share(world)
        self.unlabelled = Unlabelled(config, reader) if config.unlabelled.path else None
        self.beside = self.unlabelled if config.unlabelled.weight else None
        self.micro = MicroBatch(
            config.micro_batch, self.share + (self.beside.share if self.beside else 0)
        )
        self.first = collectives.rank() * self.share
        self.shape = config.shape(reader)
        with forked(config.seed, "init", "classifier"):
            model = Classifier(config.model, **self.shape)
        initialise(model, reader)
        self.rows, self.shown = CLASSIFIER, torch.empty(0)
        if config.loss.several:
            model.add_thresholds()
            self.rows, self.best_metric = LABELS, "average_precision"
            # by label numbers
            self.shown = torch.tensor(reader.meta.multi_hot, dtype=torch.float32, device=device)
        model = model.to(
            memory_format=torch.channels_last if config.channels_last else torch.contiguous_format
        )
        self.shares: list[Share] = []  # of several devices
        if config.model.split == "off":
            model = model.to(device)
        else:
            devices, reduced = (
                collectives.own_devices(device),
                config.precision not in ("auto", "fp32"),
            )
            self.shares = place(model, devices, samples=self.micro.size, reduced=reduced)
        self.ema, synced = EMA(model, buffers="average"), world > 1 and config.sync_bn == "auto"
        self.model = synchronise_batchnorm(model, device) if synced else model
        # each process normalises by its own share's statistics
        self.apart = world > 1 and not synced
        if device.type == "cpu":
            widen_narrow_maps(self.model)
        self.model.train()  # and it stays so: only the average is evaluated
        self.resizing = Resizing(config.resizing, self.model, config.steps)
        self.statistics = list(self.model.buffers())  # BatchNorm's running ones
        # the model where there are several processes
        self.replica: DistributedDataParallel | None = None
        self.forward: Any = None  # the model or its replica, compiled where that is asked for
        self._wrapped_for: list[bool] = []  # which parameters trained when `_wrap` was last called
        shares = np.array(label_shares(config.data, reader))
        if config.loss.several:
            shares = shares @ reader.meta.multi_hot / shares.sum()
        self.by_class = by_class(config.loss, reader.meta.classes, shares.tolist(), device)
        self.precision = Precision(config.precision, device)
        self.probe = Probed()
        self.teacher = (
            Teacher("loss.teacher", config.loss.teacher, reader, device)
            if config.loss.teacher
            else None
        )
        self.finetuning = FineTuning(
            self.model, config.finetune, steps_per_epoch=len(reader) / config.batch_size
        )
        rates, head = config.optimizer.for_batch(config.batch_size), model.head.parameters()
        self.frozen = Frozen(config, reader, self.finetuning, self.resizing, self.precision)
        more: Any = {
            "head": head,
            "groups": self.finetuning.groups(rates.weight_decay),
            "exchange": False,
        }
        self.updater = Updater(self.model, rates, self.precision, config.steps, **more)

    @staticmethod
    def outline(config: ClassifierConfig, shape: Mapping[str, int]) -> Outline:
        """Backbones have their known sizes: the layer of a hidden head, after the smallest of them,
        and its average.
        """
        wide = config.model.head_width if config.model.head == "hidden" else 1
        return {"model": (torch.nn.Linear(128, wide), 2)}

    def registry(self) -> dict[str, Any]:
        parts = {
            "model": self.model,
            "model_ema": self.ema,
            "optimizer": self.updater,
            "scaler": self.precision,
        }
        parts |= {"probe": self.probe} if self.config.finetune.probe else {}
        parts |= {"unlabelled": self.beside} if self.beside else {}
        return parts | ({"micro_batch": self.micro} if self.micro.auto else {})

    def begin(self, folder: Path) -> None:
        """With `finetune.probe` the head becomes the regression; the other ranks get it from the
        first.
        """
        if self.config.finetune.probe:
            begun, classes, seed = time.perf_counter(), self.shape["classes"], self.config.seed
            groups = alike(self.reader) if collectives.is_main() else np.empty(0)
            some = looked_at(len(self.reader), classes, seed)
            if some is not None and collectives.is_main():
                look = self.look(some, groups)
                first, (low, high) = f"{len(some):,} of {len(self.reader):,} images", look.interval
                say_main(
                    f"probe: a first look at {first}: accuracy {look.accuracy:.3f} ({low:.3f} to {high:.3f})"
                )
            source = self.source(0, folder)

            def fitted() -> tuple[Probe, Tensor | None, float]:
                features, labels = self.frozen.features(source)
                like = said = None
                if self.unlabelled is not None:
                    with self.precision.autocast():
                        images, what = self.unlabelled.images, "unlabelled features of"
                        like = image_features(self.model, images, mirror=False, what=what)[0][:, 0]
                    if self.unlabelled.about.spread:
                        said = spread_to(like, features[:, 0], labels, classes).float()
                probe = fit(features, labels, classes, seed=seed, groups=groups, like=like)
                return probe, said, round(time.perf_counter() - begun, 3)

            probe, said, self.probe.seconds = collectives.from_main_process(fitted)
            self.probe.take(probe, [self.model.head, self.ema.model.head])
            self.updater.reset()  # a schedule-free optimizer holds the weights as they were
            if self.unlabelled is not None and said is not None:
                self.unlabelled.said = said
            say_main(f"probe: {self.probe}; training begins there")

    def look(self, records: np.ndarray, groups: np.ndarray) -> Probe:
        """The regression on features of some of the images, see `probe.fit`; `groups`: of all of
        them.
        """
        with self.precision.autocast():
            found = image_features(self.model, self.reader, mirror=False, records=records)
        return fit(*found, self.shape["classes"], seed=self.config.seed, groups=groups[records])

    def lineage(self) -> Lineage:
        more = [] if self.unlabelled is None else [lineage_of(self.unlabelled.images)]
        more += [] if self.teacher is None else [self.teacher.lineage, self.teacher.network.lineage]
        return join(self.model.lineage, *more)

    def networks(self) -> Networks:
        return {
            "classifier": (
                self.ema.model,
                (torch.zeros(1, *self.reader.spec.shape, device=self.device),),
            )
        }

    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        """One update at the global batch; the returned values add up over the ranks."""
        batch = next(batches)
        self._set_up(step)
        self._wrap()
        self.model.begin = self.frozen.begin if batch.images.shape[2] == 1 else 0
        before = Snapshot(self.statistics)
        used = (
            self.beside.look(step, self.ema.model, self.precision, self.device)
            if self.beside
            else {}
        )
        loss, correct = self._gradients(batch, step, before)
        with phase("optimizer"):
            update = self.updater.step(step)
            # a masked step's NaN must not stay in running statistics
            before.restore(update.skipped)
            if self.apart:  # the running means and variances that this step has moved
                norms = [
                    m
                    for m in self.model.modules()
                    if isinstance(m, torch.nn.BatchNorm2d) and m.training
                ]
                collectives.average_(
                    b for norm in norms for b in norm.buffers() if b.is_floating_point()
                )
            self.precision.update_scale()
        with phase("ema"):
            average = self.updater.average(self.model.parameters())
            decay = min(self.config.ema.decay, (1 + step) / (10 + step))
            self.ema.update(self.model, decay, update.skipped, average)
        figures = {"loss/classifier": loss, "accuracy/train": correct / self.config.batch_size}
        return figures | used | update.metrics("classifier")

    def source(self, step: int, folder: Path) -> Source | None:
        self._set_up(step)
        return self.frozen.source(step, folder)

    def as_read(self, batch: Batch, step: int) -> Batch:
        self._set_up(step)
        return Batch(self.frozen.outputs(batch.images, step), batch.labels)

    def _set_up(self, step: int) -> None:
        self.finetuning.at(step)
        if self.resizing.at(step):
            self.micro.look_again()

    def _wrap(self) -> None:
        """Over several processes, put the model into DDP, which must know what trains: anew where
        that has changed.
        """
        trains = [parameter.requires_grad for parameter in self.model.parameters()]
        if trains == self._wrapped_for:
            return
        first, self._wrapped_for = not self._wrapped_for, trains
        self.replica = self.forward = None  # the buckets of before go first
        self.updater.zero_grad()
        self.micro.look_again()
        if collectives.world_size() > 1:
            # no device_ids, be it one device or several: inputs are where they belong
            # weights travel once: later they are equal
            self.replica = DistributedDataParallel(
                self.model, gradient_as_bucket_view=True, init_sync=first
            )
            # BatchNorm's are in step; the option's name depends on the version
            self.replica.broadcast_buffers = False
            if self.config.distributed.compress == "bf16":
                self.replica.register_comm_hook(None, bf16_compress_hook)
        # a compiled network lies on one device
        setting = self.config.compile if not self.shares else "off"
        self.forward = Compiled(
            self.replica or self.model, "classifier", setting=setting, device=self.device
        )

    def _gradients(self, batch: Batch, step: int, before: Snapshot) -> tuple[Tensor, Tensor]:
        """Gradients of the global batch, in smaller parts if memory runs out and the config allows
        it. `before` are the statistics to begin with. Returns the loss and how many were right, of
        this process's share.

        Several processes must agree on the parts before one of them sends anything: they try
        without sending.
        """
        self.updater.zero_grad()
        trying = self.micro.auto and (self.replica is None or self.micro.tries > 0)
        while trying:
            result = self._try_gradients(batch, step)
            short = collectives.all_reduce_max(int(result is None))
            if result is not None and self.replica is None:
                return result
            del result
            self.updater.zero_grad()
            before.restore()
            if not short:
                self.micro.tries -= 1
                break
            if self.device.type != "cpu":
                torch.accelerator.empty_cache()
            say_main(self.micro.halve())
        return self._accumulate(batch, step)

    def _try_gradients(self, batch: Batch, step: int) -> tuple[Tensor, Tensor] | None:
        """None: memory ran out. (By the time of the return what the failed pass held is free
        again.)
        """
        try:
            return self._accumulate(batch, step, send=False)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
        return None

    def _accumulate(self, batch: Batch, step: int, *, send: bool = True) -> tuple[Tensor, Tensor]:
        """Forward and backward passes of this process's share; DDP sends the gradients in the last
        of them.
        """
        loss_sum, correct = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        with phase("augment"):
            prepared = self._prepared(batch, step, self.first)
            if self.beside:
                prepared = (*self.beside.beside(*prepared[:2]), None)
        parts = self.micro.parts()
        for rows in parts:
            with phase("augment"):
                images, targets = self._part(prepared, rows)
            sends = send and rows is parts[-1]
            with nullcontext() if self.replica is None or sends else self.replica.no_sync():
                with phase("forward"):
                    with self.precision.autocast():
                        logits = self.forward(images)
                        answers = None if self.teacher is None else self.teacher(images)
                    logits = logits.to(loss_sum.dtype)
                    loss = classifier_loss(logits, targets, self.config.loss, *self.by_class)
                    loss = distilled(
                        loss, logits, answers, targets, self.config.loss, self.by_class[0]
                    )
                    loss = loss / self.config.batch_size
                with phase("backward"):
                    self.precision.backward(loss)
            loss_sum += loss.detach()
            own = slice(0, max(0, self.share - rows.start))  # labelled ones
            correct += targets.rows(own).correct(logits[own].detach())
        if send and self.replica is not None:
            self._sum_gradients()
        return loss_sum, correct

    def _sum_gradients(self) -> None:
        """Make sums over the processes of DDP's means. Not by weights of the losses: what layers
        are logged to receive, and what fp16 can hold, would depend on the number of processes.
        """
        trained = [(plain(name), p) for name, p in self.model.named_parameters() if p.requires_grad]
        unused = [name for name, p in trained if p.grad is None]
        if unused:  # DDP has waited for them in vain, and has not sent all
            raise UserError(
                f"no gradient reaches {', '.join(unused[:4])}{', ...' * (len(unused) > 4)}: several processes cannot "
                "train such parameters; name them in finetune.freeze"
            )
        for (gradients,) in by_kind(p.grad for _, p in trained if p.grad is not None).values():
            torch._foreach_mul_(gradients, collectives.world_size())

    def _prepared(self, batch: Batch, step: int, start: int) -> Prepared:
        """Augment rows [start, start + n) of the global batch: if they can in uint8, a quarter of
        the memory.
        """
        config, labels = (
            self.config,
            self.shown[batch.labels] if self.config.loss.several else batch.labels,
        )
        targets = Targets(labels)
        draw: Any = {
            "seed": config.seed,
            "step": step,
            "start": start,
            "global_batch": config.batch_size,
        }
        spec, images = self.model.spec, batch.images
        images = (
            spec.to_float(images, config.channels_last)
            if spec.deep and images.shape[2] > 1
            else images
        )
        images = draw_and_apply(images, config.augment, **draw)
        mixed = None
        if config.augment.mixes:
            size = (images.shape[2], images.shape[3])
            mixing = draw_mixing(
                config.augment, count=len(images), size=size, device=images.device, **draw
            )
            mixed = partners(images), mixing
            targets = Targets(labels, partners(labels), mixing.own)
        if batch.synthetic is not None and (weight := config.data.synthetic.weight) != 1:
            others = partners(batch.synthetic) if mixed else None
            targets = targets._replace(
                weights=sample_weights(batch.synthetic, weight, others, targets.own)
            )
        return images, targets, mixed

    def _part(self, prepared: Prepared, rows: slice) -> tuple[Tensor, Targets]:
        (share, targets, mixed), spec = prepared, self.model.spec
        if share.shape[2] == 1:  # frozen stages' outputs, and the mirror image's
            return share[rows][..., 0].reshape(-1, *self.frozen.shape), targets.rows(rows)
        parts = [share[rows]] if mixed is None else [share[rows], mixed[0][rows]]
        images, *others = [
            part if spec.deep else spec.to_float(part, self.config.channels_last) for part in parts
        ]
        if mixed is not None:
            images = mix_images(images, others[0], mixed[1].rows(rows))
        return images, targets.rows(rows)

    def sample_grid(self, step: int) -> np.ndarray | None:
        """At the start, the first training images as the network will see them; later nothing new."""
        if step:
            return None
        count = min(64, len(self.reader), self.config.batch_size)
        count -= count % 2 if self.config.augment.mixes else 0
        batch = read_batch(self.reader, np.arange(count)).to(self.device)
        images, _ = self._part(self._prepared(batch, 0, 0), slice(0, count))
        return grid((spec := self.model.spec).from_float(images).cpu(), spec=spec)

    def images_at(self, step: int) -> int:
        return step * self.config.batch_size

    def typical_steps(self, first: int) -> dict[int, float]:
        return self.resizing.typical_steps() if self.resizing.on else {first: 1.0}

    def describe(self) -> dict[str, str]:
        rows = self.resizing.describe() | (
            {"split": "; ".join(map(str, self.shares))} if self.shares else {}
        )
        trains, teacher = "; ".join(self.finetuning.describe()), self.config.loss.teacher
        rows |= {"taught by": teacher} if teacher else {}
        return rows | ({"what trains": trains} if trains else {})

    def layer_table(self, name: str) -> str:
        """Every layer with its rate, weight decay and when it trains."""
        network, inputs = self.networks()[name]
        return layer_table(network, inputs, self.finetuning, self.updater.config)

    def trains(self, name: str, parameter: str) -> bool:
        return self.finetuning.begins[parameter] is not None

    def evaluate(self) -> dict[str, float]:
        """Of the average model, the ranks sharing the held-out images; empty without a val_path."""
        if self.val_reader is None:
            return {}
        size = self.config.evaluation.batch_size
        document = evaluate_classifier(
            self.ema.model, self.val_reader, batch_size=size, details=False
        )
        if self.model.thresholds is not None and self.ema.model.thresholds is not None:
            # its average stays what was chosen
            self.model.thresholds.copy_(self.ema.model.thresholds)
        self.best_interval = document.get(f"{self.best_metric}_interval")
        return history(self.rows, document)
