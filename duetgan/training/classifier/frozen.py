"""Compute the outputs of a classifier's first stages, those nearest to the input, once per image.

While these stages are frozen, training reads their outputs instead of the images. The probe
(probe.py) is a regression on the outputs of all stages.
"""

from collections.abc import Iterator
from itertools import chain, groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.cached_features import CachedFeatures
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.metrics.features.extractors import classifier_input
from duetgan.metrics.features.precision import device_of, evaluating
from duetgan.models.classifier import Classifier
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.finetune import FineTuning
from duetgan.training.classifier.resizing import Resizing
from duetgan.training.optim.updater import Precision
from duetgan.utils.distributed import collectives
from duetgan.utils.machine import MIB, available_bytes, local_processes
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.runlog.run_log import say_main

BLOCK, PIXELS = 256, 1 << 21  # largest numbers of images and of pixels in a forward pass


def blocks(count: int, side: int) -> list[np.ndarray]:
    """Divide the record numbers 0..count-1 into batches for forward passes.

    `side` is the side of the images in px. The division depends on nothing else, because the last
    bits of a convolution may depend on the other images of the batch.
    """
    size = max(1, min(BLOCK, PIXELS // side**2))
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


def outputs(
    model: Classifier, dataset: Dataset, records: np.ndarray, mirror: bool, end: int | None = None
) -> Tensor:
    """Return the outputs of the first `end` stages for the images numbered `records`, on the CPU.

    The result is [n, ..., 1], or with `mirror` [n, ..., 2]: the outputs for the image and for its
    mirror image. If `end` is None, all stages and the pooling are applied. The caller sets
    evaluation mode and precision, and turns gradients off.
    """
    images = classifier_input(model, read_batch(dataset, records).images)
    views = [images, images.flip(3)] if mirror else [images]
    return torch.stack([model.features(view, end) for view in views], -1).cpu()


def image_features(
    model: Classifier,
    dataset: Dataset,
    *,
    mirror: bool,
    records: np.ndarray | None = None,
    progress: str = "",
) -> tuple[Tensor, Tensor]:
    """Return the pooled features of images, which are the input of the head, and the labels.

    Repeated calls give the same bits.

    Args:
        dataset: Images, which are converted to the model's size and channels, without random crops.
        mirror: Compute features of the mirror images too.
        records: int64 [n], the numbers of the images; None for all.
        progress: Text of a progress bar; empty for no bar.

    Returns:
        Features float32 [n, V, F] on the CPU, where view 0 is the image and view 1 (with `mirror`)
            the mirror image, and labels int64 [n].
    """
    if records is None:
        records = np.arange(len(dataset))
    parts = []
    with (
        evaluating(model),
        Bar(total=len(records), desc=progress, unit="image", disable=not progress) as bar,
    ):
        for rows in blocks(len(records), model.side or model.spec.side):
            parts.append(outputs(model, dataset, records[rows], mirror).float())
            bar.update(len(rows))
    return torch.cat(parts).mT.contiguous(), torch.tensor(dataset.labels()[records])


# --- training with frozen stages


class Span(NamedTuple):
    """A range of steps in which the same stages, counted from the input, are frozen."""

    start: int  # first step
    stop: int  # the step after the last
    stages: int  # number of stages that are frozen


class FrozenStages:
    """A cache of the outputs of the frozen first stages, which training reads instead of images.

    Images must be the same in every epoch, except for mirroring. The cache is used as long as the
    same stages are frozen. It is not saved with the run. After a resume it is computed again, with
    the same bits for any number of processes.
    """

    def __init__(
        self,
        config: ClassifierConfig,
        dataset: Dataset,
        finetuning: FineTuning,
        sizes: Resizing,
        precision: Precision,
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.model = finetuning.model
        self.precision = precision
        self.mirror = bool(config.augment.flip)
        self.datasets = [dataset]
        if dataset.synthetic is not None:
            self.datasets.append(dataset.synthetic)
        self.count = sum(map(len, self.datasets))
        self.spans: list[Span] = []
        if config.finetune.cache and self._is_cacheable():
            # A cache does not pay in a span with fewer samples than images, unless the probe needs
            # it.
            samples = 0 if config.finetune.probe else self.count * (1 + self.mirror)
            for span in self._frozen_spans(finetuning, sizes):
                if (span.stop - span.start) * config.batch_size > samples:
                    self.spans.append(span)
        self.begin = 0  # number of stages whose outputs the batches hold
        self.shape = torch.Size()  # shape of these outputs for a sample
        self._span: Span | None = None
        self._source: CachedFeatures | None = None  # the cache for this span

    def _is_cacheable(self) -> bool:
        """Return True if a cache can replace the images.

        Images must differ between epochs only by mirroring, and only the model may use them.
        """
        config, augment = self.config, self.config.augment
        for dataset in self.datasets:
            if not isinstance(dataset, Dataset) or dataset.crop:
                return False
        if augment.shift or augment.trivial_augment or augment.erase or augment.own:
            return False
        if augment.mixes or config.log.layers or config.model.split != "off":
            return False
        return config.loss.teacher is None

    def _frozen_spans(self, finetuning: FineTuning, sizes: Resizing) -> Iterator[Span]:
        """Yield the spans of steps in which the same stages are frozen and images have one size.

        Steps without frozen stages are in no span.
        """
        changes = {*finetuning.begins.values(), *finetuning.ends.values(), *dict(sizes.spans)}
        steps = sorted(step for step in changes if step is not None and step < self.config.steps)
        groups = groupby(steps, lambda step: (finetuning.border(step), sizes.side_of(step)))
        starts = [(next(group), border) for (border, _), group in groups]
        for (start, border), (stop, _) in pairwise([*starts, (self.config.steps, 0)]):
            if border:
                yield Span(start, stop, border)

    def _span_of(self, step: int) -> Span | None:
        return next((span for span in self.spans if span.start <= step < span.stop), None)

    def _blocks(self, count: int) -> list[np.ndarray]:
        return blocks(count, self.model.side or self.model.spec.side)

    def outputs(self, images: Tensor, step: int) -> Tensor | None:
        """Return the outputs of the frozen stages for `images`, flattened to [n, F, 1, 1].

        Set the attributes `begin`, the number of these stages, and `shape`, the shape of their
        outputs for an image. Return None if update number `step` reads images.
        """
        if (span := self._span_of(step)) is None:
            return None
        with torch.no_grad():
            maps = self.model.features(classifier_input(self.model, images), span.stages)
        self.begin, self.shape = span.stages, maps.shape[1:]
        return maps.reshape(len(images), -1, 1, 1)

    def source(self, step: int) -> CachedFeatures | None:
        """Return the cached outputs that update number `step` reads instead of images.

        The first call in a span computes them. Return None if the update reads images.
        `ClassifierStep.set_up` must have been called for this step.
        """
        span = self._span_of(step)
        if span != self._span:
            self._span = span
            self._source = None  # This frees the previous cache.
            self.begin = 0
            if span:
                self._source = self._computed(span.stages)
        return self._source

    def features(self, source: CachedFeatures | None) -> tuple[Tensor, Tensor]:
        """Return the features and labels of all images, as `image_features` does.

        They are computed in the run's precision, and from the cached outputs in `source` instead of
        the images if it is not None.
        """
        with self.precision.autocast():
            if source is None:
                return image_features(
                    self.model, self.dataset, mirror=self.mirror, progress="features of"
                )
            device = device_of(self.model)
            parts = []
            with evaluating(self.model):
                for records in self._blocks(len(self.dataset)):
                    values = source.batch(records).features
                    assert values is not None
                    values = values.to(device)
                    views = [view.reshape(-1, *self.shape) for view in values.unbind(-1)]
                    features = [self.model.features(view, begin=self.begin) for view in views]
                    parts.append(torch.stack(features, 1).float().cpu())
        return torch.cat(parts), torch.tensor(self.dataset.labels())

    def _computed(self, end: int) -> CachedFeatures | None:
        """Compute the outputs of the first `end` stages for all images, and return them as a cache.

        Returns None if they need too much memory.
        """
        parts = self._parts(end)
        first = next(parts)
        sample_bytes, limit = first[0].nbytes, self.config.finetune.cache * 1024 * MIB
        # On accelerators it is faster to compute maps than to copy more bytes than the images have.
        if first.ndim > 3 and device_of(self.model).type != "cpu":
            limit = min(limit, self.count * self.dataset.spec.values)
        size = sample_bytes * self.count * local_processes()  # Each process caches all samples.
        is_too_large = collectives.all_reduce_max(int(size > min(available_bytes() / 4, limit)))
        stages = " to ".join(dict.fromkeys((self.model.stages[0], self.model.stages[end - 1])))
        of = f"of {self.count:,} images{' and their mirror images' * self.mirror}: {size / MIB:,.3g} MiB"
        if is_too_large:
            say_main(f"frozen: {stages} are computed in every step, outputs {of}, too much to keep")
            return None
        rows = (part.flatten(1).view(torch.uint8).numpy() for part in chain([first], parts))
        cached = np.concatenate(list(rows))
        say_main(f"frozen: {stages} computed once, outputs {of}, kept in memory")
        labels = self.dataset.label_numbers()
        for dataset in self.datasets[1:]:
            labels = np.concatenate([labels, dataset.labels()])
        self.begin, self.shape = end, first.shape[1:-1]
        real_images = None if len(self.datasets) == 1 else len(self.dataset)
        return CachedFeatures(cached, first.dtype, first.shape[-1], labels, real_images)

    def _parts(self, end: int) -> Iterator[Tensor]:
        """Yield the outputs of the first `end` stages for each block of images, in order.

        The processes divide the work, and each of them gets all outputs.
        """
        records, world = self._blocks(self.count), collectives.world_size()
        with Bar(
            total=self.count,
            desc="frozen stages of",
            unit="image",
            disable=not collectives.is_main(),
        ) as bar:
            for start in range(0, len(records), world):
                group = records[start : start + world]  # one block for each process
                part = None
                with (
                    collectives.raising_together(patient=False),
                    torch.no_grad(),
                    self.precision.autocast(),
                ):
                    if collectives.rank() < len(group):
                        block = group[collectives.rank()]
                        part = outputs(self.model, self.dataset, block, self.mirror, end)
                for gathered in collectives.gather_objects(part, patient=False):
                    if gathered is not None:
                        yield gathered
                bar.update(sum(map(len, group)))
