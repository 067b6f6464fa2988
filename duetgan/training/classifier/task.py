"""The classifier task: networks, a training step, the saved state, and the evaluation."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

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
from duetgan.data.reading.cached_features import CachedFeatures
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, read_batch
from duetgan.metrics.evaluate_classifier import evaluate_classifier
from duetgan.metrics.figures import CLASSIFIER, LABELS, history
from duetgan.metrics.lineage import lineage_of
from duetgan.metrics.samples.spreading import spread_to
from duetgan.models.batchnorm import synchronise_batchnorm
from duetgan.models.classifier import Classifier
from duetgan.models.model_parallel import DevicePart, place
from duetgan.training.base.compiled import Compiled, CompileSetting
from duetgan.training.base.config import Shape
from duetgan.training.base.data import label_frequencies
from duetgan.training.base.phases import phase
from duetgan.training.base.task import Networks, Outline, Stateful, Task
from duetgan.training.base.teacher import Teacher
from duetgan.training.classifier.config import ClassifierConfig, check_batches, check_classes
from duetgan.training.classifier.consistency import Unlabelled
from duetgan.training.classifier.finetune import FineTuning, layer_table, plain
from duetgan.training.classifier.frozen import Frozen, image_features
from duetgan.training.classifier.loss import (
    Targets,
    add_distillation,
    class_weights_and_prior,
    classifier_loss,
    sample_weights,
)
from duetgan.training.classifier.micro_batch import MicroBatch
from duetgan.training.classifier.network import initialise, widen_narrow_maps
from duetgan.training.classifier.probe import (
    Probe,
    ProbeSummary,
    fit,
    look_alike_groups,
    preview_records,
)
from duetgan.training.classifier.resizing import Resizing
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils.checkpoint.provenance import Lineage, join
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.collectives import Snapshot, by_kind
from duetgan.utils.errors import UserError
from duetgan.utils.images import grid
from duetgan.utils.machine import ran_out
from duetgan.utils.runlog.run_log import say_main
from duetgan.utils.seeding import forked


class Prepared(NamedTuple):
    """The batch of one process after augmentation; images are mixed later, in micro-batches."""

    images: Tensor  # [n, C, H, W]; uint8 if the data set has 8 bits
    targets: Targets
    partners: Tensor | None = None  # [n, C, H, W]: the images to mix in; None if none are
    mixing: Mixing | None = None


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
        world = collectives.world_size()
        check_classes(config, dataset, val_dataset)
        self.config = config
        self.dataset = dataset
        self.val_dataset = val_dataset
        self.device = device
        check_batches(config, world)
        if config.early_stopping.patience is not None and val_dataset is None:
            raise UserError("early_stopping.patience needs validation images; give data.val_path")
        self.rank_batch = config.rank_batch(world)
        self.first_row = collectives.rank() * self.rank_batch  # first row of the global batch
        self.unlabelled = Unlabelled(config, dataset) if config.unlabelled.path else None
        # None with weight 0: then unlabelled images do not train, but standardise the probe.
        self.unlabelled_stream = self.unlabelled if config.unlabelled.weight else None
        samples = self.rank_batch
        if self.unlabelled_stream:
            samples += self.unlabelled_stream.rank_batch
        self.micro = MicroBatch(config.micro_batch, samples)
        self.shape = config.shape(dataset)
        with forked(config.seed, "init", "classifier"):
            model = Classifier(config.model, **self.shape)
        initialise(model, dataset)
        self.metric_rows = CLASSIFIER
        if config.loss.several:
            model.add_thresholds()
            self.metric_rows = LABELS
            self.best_metric = "average_precision"
            # float [labels, classes]: the classes of each label set
            self.label_vectors = torch.tensor(
                dataset.meta.multi_hot, dtype=torch.float32, device=device
            )
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        model = model.to(memory_format=layout)
        self.device_parts: list[DevicePart] = []  # parts of a model that is split over devices
        if config.model.split == "off":
            model = model.to(device)
        else:
            self.device_parts = place(
                model,
                collectives.own_devices(device),
                samples=self.micro.size,
                reduced=config.precision not in ("auto", "fp32"),
            )
        self.ema = EMA(model, buffers="average")
        is_synchronised = world > 1 and config.sync_bn == "auto"
        self.local_batchnorm = world > 1 and not is_synchronised
        self.model = synchronise_batchnorm(model, device) if is_synchronised else model
        if device.type == "cpu":
            widen_narrow_maps(self.model)
        self.model.train()  # It stays in training mode: only the average is evaluated.
        self.resizing = Resizing(config.resizing, self.model, config.steps)
        self.statistics = list(self.model.buffers())  # running statistics of BatchNorm
        self.replica: DistributedDataParallel | None = None  # the model for several processes
        self.forward: Compiled | None = None  # the model or its replica, compiled
        self._wrapped_for: list[bool] = []  # `requires_grad` of the parameters at the last `_wrap`
        frequencies = np.array(label_frequencies(config.data, dataset))
        if config.loss.several:
            frequencies = frequencies @ dataset.meta.multi_hot / frequencies.sum()
        self.class_weights, self.prior = class_weights_and_prior(
            config.loss, dataset.meta.classes, frequencies.tolist(), device
        )
        self.precision = Precision(config.precision, device)
        self.probe = ProbeSummary()
        self.teacher: Teacher | None = None
        if config.loss.teacher:
            self.teacher = Teacher("loss.teacher", config.loss.teacher, dataset, device)
        self.finetuning = FineTuning(
            self.model, config.finetune, steps_per_epoch=len(dataset) / config.batch_size
        )
        self.frozen = Frozen(config, dataset, self.finetuning, self.resizing, self.precision)
        optimizer = config.optimizer.for_batch(config.batch_size)
        self.updater = Updater(
            self.model,
            optimizer,
            self.precision,
            config.steps,
            exchange=False,
            head=model.head.parameters(),
            groups=self.finetuning.groups(optimizer.weight_decay),
        )

    @staticmethod
    def outline(config: ClassifierConfig, shape: Shape) -> Outline:
        """Return a hidden head after the narrowest backbone, counted twice: weights and average.

        Backbones are left out because their sizes cannot be configured.
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
        if self.unlabelled_stream:
            registry["unlabelled"] = self.unlabelled_stream
        if self.micro.auto:
            registry["micro_batch"] = self.micro
        return registry

    def begin(self, folder: Path) -> None:
        """Fit a logistic regression and start with it as the head, if `finetune.probe` is set.

        Rank 0 computes it and sends it to the other ranks.
        """
        if not self.config.finetune.probe:
            return
        start = time.perf_counter()
        classes, seed = self.shape["classes"], self.config.seed
        groups = np.empty(0)
        preview = preview_records(len(self.dataset), classes, seed)
        if collectives.is_main():
            groups = look_alike_groups(self.dataset)
            if preview is not None:
                probe = self.probe_subset(preview, groups)
                low, high = probe.interval
                say_main(
                    f"probe: a first look at {len(preview):,} of {len(self.dataset):,} images: "
                    f"accuracy {probe.accuracy:.3f} ({low:.3f} to {high:.3f})"
                )
        source = self.source(0, folder)

        def fitted() -> tuple[Probe, Tensor | None, float]:
            features, labels = self.frozen.features(source)
            unlabelled_features, propagated_labels = None, None
            if self.unlabelled is not None:
                with self.precision.autocast():
                    unlabelled_features = image_features(
                        self.model,
                        self.unlabelled.images,
                        mirror=False,
                        progress="unlabelled features of",
                    )[0][:, 0]
                if self.unlabelled.settings.spread:
                    propagated_labels = spread_to(
                        unlabelled_features, features[:, 0], labels, classes
                    ).float()
            probe = fit(
                features,
                labels,
                classes,
                seed=seed,
                groups=groups,
                unlabelled_features=unlabelled_features,
            )
            return probe, propagated_labels, round(time.perf_counter() - start, 3)

        probe, propagated_labels, self.probe.seconds = collectives.from_main_process(fitted)
        self.probe.install(probe, [self.model.head, self.ema.model.head])
        self.updater.reset()  # A schedule-free optimizer holds a copy of the replaced weights.
        if self.unlabelled is not None and propagated_labels is not None:
            self.unlabelled.propagated_labels = propagated_labels
        say_main(f"probe: {self.probe}; training begins there")

    def probe_subset(self, records: np.ndarray, groups: np.ndarray) -> Probe:
        """Fit the logistic regression to the images `records`, int64 [n].

        `groups` [len(dataset)] are the groups of images that belong in one fold.
        """
        with self.precision.autocast():
            features, labels = image_features(
                self.model, self.dataset, mirror=False, records=records
            )
        return fit(
            features,
            labels,
            self.shape["classes"],
            seed=self.config.seed,
            groups=groups[records],
        )

    def lineage(self) -> Lineage:
        lineages = [self.model.lineage]
        if self.unlabelled is not None:
            lineages.append(lineage_of(self.unlabelled.images))
        if self.teacher is not None:
            lineages += [self.teacher.lineage, self.teacher.network.lineage]
        return join(*lineages)

    def networks(self) -> Networks:
        return {
            "classifier": (
                self.ema.model,
                (torch.zeros(1, *self.dataset.spec.shape, device=self.device),),
            )
        }

    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        """Make one update from the next global batch; the returned metrics add up over the ranks."""
        batch = next(batches)
        self._set_up(step)
        self._wrap()
        self.model.begin = 0 if batch.features is None else self.frozen.begin
        statistics = Snapshot(self.statistics)
        stream = self.unlabelled_stream
        used = stream.draw(step, self.ema.model, self.precision, self.device) if stream else {}
        loss, correct = self._gradients(batch, step, statistics)
        with phase("optimizer"):
            update = self.updater.step(step)
            # The NaN of a masked step must not remain in the running statistics.
            statistics.restore(update.skipped)
            if self.local_batchnorm:
                self._average_statistics()
            self.precision.update_scale()
        with phase("ema"):
            average = self.updater.average(self.model.parameters())
            decay = min(self.config.ema.decay, (1 + step) / (10 + step))
            self.ema.update(self.model, decay, update.skipped, average)
        metrics = {"loss/classifier": loss, "accuracy/train": correct / self.config.batch_size}
        return metrics | used | update.metrics("classifier")

    def _average_statistics(self) -> None:
        running: list[Tensor] = []
        for module in self.model.modules():
            if isinstance(module, torch.nn.BatchNorm2d) and module.training:
                running += [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        collectives.average_(running)

    def source(self, step: int, folder: Path) -> CachedFeatures | None:
        self._set_up(step)
        return self.frozen.source(step, folder)

    def as_read(self, batch: Batch, step: int) -> Batch:
        self._set_up(step)
        features = self.frozen.outputs(batch.images, step)
        return batch if features is None else Batch(batch.images, batch.labels, features=features)

    def _set_up(self, step: int) -> None:
        self.finetuning.at(step)
        if self.resizing.at(step):
            self.micro.retry()

    def _wrap(self) -> None:
        """Compile the model, in DDP for several processes; again if other parameters train."""
        trains = [parameter.requires_grad for parameter in self.model.parameters()]
        if trains == self._wrapped_for:
            return
        is_first = not self._wrapped_for
        self._wrapped_for = trains
        self.replica = self.forward = None  # This frees the previous buckets.
        self.updater.zero_grad()
        self.micro.retry()
        if collectives.world_size() > 1:
            # Inputs are on the right device already, so no device_ids are needed. Rank 0 sends its
            # weights the first time only, since they are equal on all ranks later.
            self.replica = DistributedDataParallel(
                self.model, gradient_as_bucket_view=True, init_sync=is_first
            )
            # This task synchronises BatchNorm itself. The name of the constructor's option depends
            # on the version of torch.
            self.replica.broadcast_buffers = False
            if self.config.distributed.compress == "bf16":
                self.replica.register_comm_hook(None, bf16_compress_hook)
        # A compiled network must be on one device.
        setting: CompileSetting = "off" if self.device_parts else self.config.compile
        self.forward = Compiled(
            self.replica or self.model, "classifier", setting=setting, device=self.device
        )

    def _gradients(self, batch: Batch, step: int, statistics: Snapshot) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the global batch, in smaller micro-batches if memory runs out.

        Several processes must agree on the micro-batches before one of them sends gradients, so
        they first try without sending. `statistics` are the running statistics from before the
        step, which failed tries have changed.

        Returns:
            The loss and the number of correct predictions of this process, 0-d.
        """
        self.updater.zero_grad()
        must_try = self.micro.auto and (self.replica is None or self.micro.tries > 0)
        while must_try:
            result = self._try_gradients(batch, step)
            ran_out_anywhere = collectives.all_reduce_max(int(result is None))
            if result is not None and self.replica is None:
                return result
            del result
            self.updater.zero_grad()
            statistics.restore()
            if not ran_out_anywhere:
                self.micro.tries -= 1
                break
            if self.device.type != "cpu":
                torch.accelerator.empty_cache()
            say_main(self.micro.halve())
        return self._accumulate(batch, step)

    def _try_gradients(self, batch: Batch, step: int) -> tuple[Tensor, Tensor] | None:
        """Return the result of `_accumulate` without sending gradients.

        Return None if memory runs out; the tensors of the failed pass are then released.
        """
        try:
            return self._accumulate(batch, step, send=False)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
        return None

    def _accumulate(self, batch: Batch, step: int, *, send: bool = True) -> tuple[Tensor, Tensor]:
        """Accumulate the gradients of this process's batch in micro-batches.

        If `send` is True, DDP adds them up over the processes during the last backward pass.
        Returns the loss and the number of correct predictions of this process, 0-d.
        """
        assert self.forward is not None
        loss_sum = torch.zeros((), device=self.device)
        correct = torch.zeros((), device=self.device)
        with phase("augment"):
            prepared = self._prepared(batch, step, self.first_row)
            if self.unlabelled_stream:
                images, targets = self.unlabelled_stream.append_to(
                    prepared.images, prepared.targets
                )
                prepared = Prepared(images, targets)
        micro_batches = self.micro.slices()
        for rows in micro_batches:
            with phase("augment"):
                images, targets = self._micro_batch(prepared, rows)
            sends = send and rows is micro_batches[-1]
            with nullcontext() if self.replica is None or sends else self.replica.no_sync():
                with phase("forward"):
                    with self.precision.autocast():
                        logits = self.forward(images)
                        teacher_logits = None if self.teacher is None else self.teacher(images)
                    logits = logits.to(loss_sum.dtype)
                    loss = classifier_loss(
                        logits, targets, self.config.loss, self.class_weights, self.prior
                    )
                    loss = add_distillation(
                        loss, logits, teacher_logits, targets, self.config.loss, self.class_weights
                    )
                    loss = loss / self.config.batch_size
                with phase("backward"):
                    self.precision.backward(loss)
            loss_sum += loss.detach()
            # Unlabelled images come last and have no accuracy.
            labelled = slice(0, max(0, self.rank_batch - rows.start))
            correct += targets.rows(labelled).correct(logits[labelled].detach())
        if send and self.replica is not None:
            self._sum_gradients()
        return loss_sum, correct

    def _sum_gradients(self) -> None:
        """Turn DDP's mean gradients over the processes into sums.

        Larger losses would give the same sums, but make logged gradients and the overflow of fp16
        depend on the number of processes.
        """
        gradients: list[Tensor] = []
        unused: list[str] = []
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                unused.append(plain(name))
            else:
                gradients.append(parameter.grad)
        if unused:  # DDP has not sent all gradients: it was still waiting for these.
            raise UserError(
                f"no gradient reaches {', '.join(unused[:4])}{', ...' * (len(unused) > 4)}: several processes cannot "
                "train such parameters; name them in finetune.freeze"
            )
        for (group,) in by_kind(gradients).values():
            torch._foreach_mul_(group, collectives.world_size())

    def _prepared(self, batch: Batch, step: int, start: int) -> Prepared:
        """Augment a batch, the rows [start, start + n) of the global batch.

        8-bit images stay uint8, in a quarter of the memory.
        """
        config, spec = self.config, self.model.spec
        images, labels = batch.images, batch.labels
        if batch.features is not None:
            images = batch.features
        if config.loss.several:
            labels = self.label_vectors[labels]
        if spec.deep and batch.features is None:
            images = spec.to_float(images, config.channels_last)
        images = draw_and_apply(
            images,
            config.augment,
            seed=config.seed,
            step=step,
            start=start,
            global_batch=config.batch_size,
        )
        prepared = Prepared(images, Targets(labels))
        if config.augment.mixes:
            mixing = draw_mixing(
                config.augment,
                seed=config.seed,
                step=step,
                start=start,
                count=len(images),
                global_batch=config.batch_size,
                size=(images.shape[2], images.shape[3]),
                device=images.device,
            )
            targets = Targets(labels, partners(labels), mixing.label_weights)
            prepared = Prepared(images, targets, partners(images), mixing)
        if batch.synthetic is None or config.data.synthetic.weight == 1:
            return prepared
        weights = sample_weights(
            batch.synthetic,
            config.data.synthetic.weight,
            partners(batch.synthetic) if prepared.mixing else None,
            prepared.targets.fraction,
        )
        return prepared._replace(targets=prepared.targets._replace(weights=weights))

    def _micro_batch(self, prepared: Prepared, rows: slice) -> tuple[Tensor, Targets]:
        """Return rows of a prepared batch as targets and inputs: mixed float images, or features."""
        spec, targets = self.model.spec, prepared.targets.rows(rows)
        images = prepared.images[rows]
        if images.shape[2] == 1:  # Features: the random flip has chosen the view that comes first.
            return images[..., 0].reshape(-1, *self.frozen.shape), targets
        if not spec.deep:
            images = spec.to_float(images, self.config.channels_last)
        if prepared.partners is not None and prepared.mixing is not None:
            partner_images = prepared.partners[rows]
            if not spec.deep:
                partner_images = spec.to_float(partner_images, self.config.channels_last)
            images = mix_images(images, partner_images, prepared.mixing.rows(rows))
        return images, targets

    def sample_grid(self, step: int) -> np.ndarray | None:
        """Return the first training images as the network sees them, at step 0; later None."""
        if step:
            return None
        count = min(64, len(self.dataset), self.config.batch_size)
        if self.config.augment.mixes:
            count -= count % 2
        batch = read_batch(self.dataset, np.arange(count)).to(self.device)
        images, _ = self._micro_batch(self._prepared(batch, 0, 0), slice(0, count))
        spec = self.model.spec
        return grid(spec.from_float(images).cpu(), spec=spec)

    def images_at(self, step: int) -> int:
        return step * self.config.batch_size

    def typical_steps(self, first: int) -> dict[int, float]:
        return self.resizing.typical_steps() if self.resizing.on else {first: 1.0}

    def describe(self) -> dict[str, str]:
        rows = self.resizing.describe()
        if self.device_parts:
            rows["split"] = "; ".join(map(str, self.device_parts))
        if self.config.loss.teacher:
            rows["taught by"] = self.config.loss.teacher
        if trains := self.finetuning.describe():
            rows["what trains"] = "; ".join(trains)
        return rows

    def layer_table(self, name: str) -> str:
        network, inputs = self.networks()[name]
        return layer_table(network, inputs, self.finetuning, self.updater.config)

    def trains(self, name: str, parameter: str) -> bool:
        return self.finetuning.begins[parameter] is not None

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
        return history(self.metric_rows, document)
