"""What the first stages of a classifier give for every image, computed once: for training that
leaves them as they are, and for whoever fits something of their own to a network's features.
"""

import tempfile
from collections.abc import Callable, Iterator
from itertools import chain, groupby, pairwise
from pathlib import Path
from shutil import disk_usage

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, Source, read_batch
from duetgan.metrics.features.extractors import classifier_input
from duetgan.metrics.features.precision import device_of, evaluating
from duetgan.models.classifier import Classifier
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.finetune import FineTuning
from duetgan.training.classifier.resizing import Resizing
from duetgan.training.optim.updater import Precision
from duetgan.utils.distributed import collectives
from duetgan.utils.files import writing
from duetgan.utils.memory import MIB, available_bytes, local_processes
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.runlog.run_log import say_main

BLOCK, PIXELS = 256, 1 << 21  # images that are computed together, and their pixels, at most


def blocks(count: int, side: int) -> list[np.ndarray]:
    """The records of images of `side` px that are computed together: always the same ones, for the
    last bits of a convolution may depend on the others of its batch.
    """
    size = max(1, min(BLOCK, PIXELS // side**2))
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


def outputs(
    model: Classifier, dataset: Dataset, records: np.ndarray, mirror: bool, end: int | None = None
) -> Tensor:
    """What the first `end` stages (None: all, then the pooling) give for images as they are stored
    and, with `mirror`, mirrored left-right: [n, ..., 1 or 2] on the CPU. Modes, precision and
    gradients are the caller's.
    """
    images = classifier_input(model, read_batch(dataset, records).images)
    views = [images, images.flip(3)] if mirror else [images]
    return torch.stack([model.features(view, end) for view in views], -1).cpu()


def image_features(
    model: Classifier,
    dataset: Dataset,
    *,
    mirror: bool = True,
    records: np.ndarray | None = None,
    what: str = "",
) -> tuple[Tensor, Tensor]:
    """Pooled features, which the head takes, of every image of a data set and of its mirror image:
    float32 [n, 2, F] on the CPU (without `mirror` [n, 1, F]), and labels int64 [n]. `records`: of
    these alone, int64 [n].

    `features[:, 0]` are the images', `features[:, 1]` the mirror images'. Images are brought to the
    model's size and channels, without random crops, and computed where it lies. The same call gives
    the same bits. `what`: the images on a progress bar; empty: there is none.
    """
    records = np.arange(len(dataset)) if records is None else records
    every = blocks(len(records), model.side or model.spec.side)
    parts = []
    with (
        evaluating(model),
        Bar(total=len(records), desc=what, unit="image", disable=not what) as bar,
    ):
        for rows in every:
            parts.append(outputs(model, dataset, records[rows], mirror).float())
            bar.update(len(rows))
    return torch.cat(parts).mT.contiguous(), torch.tensor(dataset.labels()[records])


# --- training behind what is frozen


class Frozen:
    """Where training begins in its network, step by step: behind the first stages that are frozen,
    where images come again as they were or mirrored. What these give is computed once and kept,
    until the border moves. What is computed together is the same after a resume and for any number
    of processes: it is no part of a run's state.
    """

    def __init__(
        self,
        config: ClassifierConfig,
        reader: Dataset,
        finetuning: FineTuning,
        sizes: Resizing,
        precision: Precision,
    ) -> None:
        self.config, self.reader, self.model, self.precision = (
            config,
            reader,
            finetuning.model,
            precision,
        )
        augment, second = config.augment, reader.synthetic
        self.mirror, self.readers = (
            bool(augment.flip),
            [reader] if second is None else [reader, second],
        )
        self.count = sum(map(len, self.readers))
        stored = all(
            isinstance(each, Dataset) and not each.crop and each.on_damage == "stop"
            for each in self.readers
        )
        random = (
            augment.shift
            or augment.trivial_augment
            or augment.erase
            or augment.own
            or augment.mixes
        )
        barred = random or not stored or config.log.layers or config.model.split != "off"
        barred = (
            barred
            or bool(config.unlabelled.path and config.unlabelled.weight)
            or config.loss.teacher is not None
        )
        # first step, the one after the last, stages that nothing changes
        self.spans: list[tuple[int, int, int]] = []
        if config.finetune.cache and not barred:
            changes = {*finetuning.begins.values(), *finetuning.ends.values(), *dict(sizes.spans)}
            steps = sorted(step for step in changes if step is not None and step < config.steps)
            kinds = groupby(steps, lambda step: (finetuning.border(step), sizes.side_of(step)))
            firsts = [(next(group), border) for (border, _), group in kinds]
            every = [
                (a, b, border)
                for (a, border), (b, _) in pairwise([*firsts, (config.steps, 0)])
                if border
            ]
            # in fewer samples many images would be computed in vain, unless a regression needs them
            # all
            seen = 0 if config.finetune.probe else self.count * (1 + self.mirror)
            self.spans = [span for span in every if (span[1] - span[0]) * config.batch_size > seen]
        # stages that what is read has been through, a sample's shape there
        self.begin, self.shape = 0, torch.Size()
        self._span: tuple[int, int, int] | None = None
        self._source: Source | None = None  # of that span

    def _span_of(self, step: int) -> tuple[int, int, int] | None:
        return next((span for span in self.spans if span[0] <= step < span[1]), None)

    def outputs(self, images: Tensor, step: int) -> Tensor:
        """What update number `step` reads in place of images, were they all; images themselves
        where it reads them.
        """
        if (span := self._span_of(step)) is None:
            return images
        with torch.no_grad():
            first = self.model.features(classifier_input(self.model, images), span[2])
        self.begin, self.shape = span[2], first.shape[1:]
        return first.reshape(len(images), -1, 1, 1)

    def source(self, step: int, folder: Path) -> Source | None:
        """What update number `step`, which the model is set up for, reads in place of images; None:
        them.
        """
        span = self._span_of(step)
        if span != self._span:
            self._span, self._source, self.begin = span, None, 0
            self._source = self._computed(span[2], folder) if span else None
        return self._source

    def features(self, source: Source | None) -> tuple[Tensor, Tensor]:
        """As `image_features`, in the run's precision and from what is kept, if anything is."""
        with self.precision.autocast():
            if source is None:
                return image_features(
                    self.model, self.reader, mirror=self.mirror, what="features of"
                )
            every, device = (
                blocks(len(self.reader), self.model.side or self.model.spec.side),
                device_of(self.model),
            )
            self.model.begin = self.begin
            with evaluating(self.model):
                parts = [self._features(source(records).images.to(device)) for records in every]
        self.model.begin = 0
        return torch.cat(parts), torch.tensor(self.reader.labels())

    def _features(self, values: Tensor) -> Tensor:
        """float32 [n, V, F] on the CPU, of what is kept of n images."""
        views = [self.model.features(view.reshape(-1, *self.shape)) for view in values.unbind(-1)]
        return torch.stack(views, 1).float().cpu()

    def _computed(self, end: int, folder: Path) -> Source | None:
        """What the first `end` stages give, by index; None where it takes too much."""
        parts = self._parts(end)
        first = next(parts)
        item, limit = first[0].nbytes, self.config.finetune.cache * 1024 * MIB
        # maps of more bytes than images are faster made
        if first.ndim > 3 and device_of(self.model).type != "cpu":
            limit = min(limit, self.count * self.reader.spec.values)
        size = item * self.count * local_processes()  # each keeps all
        rooms = (available_bytes() / 4, disk_usage(folder).free / 1.1)
        fits = (place for place, room in enumerate(rooms) if size <= min(room, limit))
        place = collectives.all_reduce_max(next(fits, len(rooms)))
        stages = " to ".join(dict.fromkeys((self.model.stages[0], self.model.stages[end - 1])))
        of = f"of {self.count:,} images{' and their mirror images' * self.mirror}: {size / MIB:,.3g} MiB"
        if place == len(rooms):
            say_main(f"frozen: {stages} are computed in every step, outputs {of}, too much to keep")
            return None
        rows = (part.flatten(1).view(torch.uint8).numpy() for part in chain([first], parts))
        gather = on_disk(rows, item, folder) if place else np.concatenate(list(rows)).__getitem__
        say_main(
            f"frozen: {stages} computed once, outputs {of} {'on the disk' if place else 'in memory'}"
        )
        labels = np.concatenate(
            [self.reader.label_numbers(), *(second.labels() for second in self.readers[1:])]
        )

        def source(indices: np.ndarray) -> Batch:
            values = (
                torch.from_numpy(gather(indices))
                .view(first.dtype)
                .view(len(indices), -1, 1, first.shape[-1])
            )
            drawn = torch.from_numpy(indices >= len(self.reader)) if len(self.readers) > 1 else None
            return Batch(values, torch.from_numpy(labels[indices]), drawn)

        self.begin, self.shape = end, first.shape[1:-1]
        return source

    def _parts(self, end: int) -> Iterator[Tensor]:
        """Outputs of all blocks in order; the processes compute them in turn."""
        every, world = (
            blocks(self.count, self.model.side or self.model.spec.side),
            collectives.world_size(),
        )
        self.model.begin = 0
        with Bar(
            total=self.count,
            desc="frozen stages of",
            unit="image",
            disable=not collectives.is_main(),
        ) as bar:
            for start in range(0, len(every), world):
                own = None
                with (
                    collectives.raising_together(patient=False),
                    torch.no_grad(),
                    self.precision.autocast(),
                ):
                    for records in every[start : start + world][collectives.rank() :][:1]:
                        own = outputs(self.model, self.reader, records, self.mirror, end)
                yield from (
                    part
                    for part in collectives.gather_objects(own, patient=False)
                    if part is not None
                )
                bar.update(sum(len(records) for records in every[start : start + world]))


def on_disk(
    rows: Iterator[np.ndarray], item: int, folder: Path
) -> Callable[[np.ndarray], np.ndarray]:
    """Rows uint8 [n, item] by number, from a nameless file that ends with the process. UserError
    for a full disk.
    """
    with writing(folder / "frozen"), tempfile.TemporaryFile(dir=folder) as file:
        for part in rows:
            file.write(part.data)
        file.flush()
        return np.memmap(file, np.uint8, "r").reshape(-1, item).__getitem__
