"""Evaluation of a GAN during training: distances, copies of training images, and logits of D."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, read_batch
from duetgan.metrics.evaluate_gan import evaluate_generator
from duetgan.metrics.features.extractors import RealFeatures, build, shared_pass
from duetgan.metrics.features.precision import evaluating
from duetgan.metrics.figures import GAN, history
from duetgan.models.gan import ImageDiscriminator, ImageGenerator, generate
from duetgan.training.gan.config import GanConfig
from duetgan.utils.distributed import collectives
from duetgan.utils.images import grid
from duetgan.utils.machine import upload

LOGIT_IMAGES = 512  # largest number of images of each kind for the mean logits of an evaluation
SEARCHED_PER_SAMPLE = 4  # training images per sample that an evaluation searches for copies


class GanEvaluation:
    """The evaluator of a GAN in training.

    All evaluations share the feature extractors and the features of the real images.
    """

    interval: Sequence[float] | None = None  # 95 % interval of the last Frechet distance

    def __init__(self, config: GanConfig, dataset: Dataset, device: torch.device) -> None:
        self.config = config
        self.dataset = dataset
        self.device = device
        self.real = RealFeatures(batch_size=config.evaluation.batch_size)
        self.extractors = collectives.main_first(
            lambda: build(
                [config.evaluation.extractor],
                device=device,
                spec=dataset.spec,
                weights=config.evaluation.weights,
            )
        )

    def metrics(self, generator: ImageGenerator, val_dataset: Dataset | None) -> dict[str, float]:
        """Return a dict from name to metric of the generator's samples.

        The metrics are distances between samples and validation images, and the fraction of samples
        that are copies of training images. Without a validation set, the distances are to the
        training images, and there is no search for copies.
        """
        config = self.config.evaluation
        document = evaluate_generator(
            generator,
            val_dataset or self.dataset,
            n=config.n,
            seed=self.config.seed,
            extractors=self.extractors,
            train_dataset=self.dataset if val_dataset else None,
            real=self.real,
            batch_size=config.batch_size,
            floor=False,
            details=False,
            searched=SEARCHED_PER_SAMPLE * config.n,
        )
        self.interval = document["distances"][0].get("frechet_interval")
        metrics = {"n": document["n"]}
        for key, value in history(GAN, document["distances"][0]).items():
            metrics[f"{key}/{config.extractor}"] = value
        if copies := document["memorisation"]:
            metrics[f"memorised/{copies['extractor']}"] = copies["share"]
            metrics[f"memorised_p/{copies['extractor']}"] = copies["p_value"]
        return metrics

    def sample_grid(self, generator: ImageGenerator) -> np.ndarray:
        """Return a uint8 image [H, W, C] of samples in a grid, with the same latents at every call.

        The grid has a row of 10 samples for each of the first 20 labels. Without labels it has 8
        rows of 8.
        """
        rows = columns = 8
        labels = None
        if generator.num_labels:
            rows = min(20, generator.num_labels)
            columns = 10
            labels = generator.conditions(torch.arange(rows).repeat_interleave(columns))
        count = range(rows * columns)
        samples = generate(generator, labels=labels, indices=count, seed=self.config.seed)
        return grid(samples, columns=columns, spec=generator.spec)

    def mean_logits(
        self, generator: ImageGenerator, discriminator: ImageDiscriminator, val_dataset: Dataset
    ) -> dict[str, float]:
        """Return the mean logits of D for validation images, training images and samples.

        The result is a dict with the keys `logits/held_out`, `logits/real` and `logits/fake`. It is
        empty if a data set has fewer images than a group for D's minibatch statistics. The images
        are not augmented. If the mean for validation images is near the mean for samples, D has
        memorised the training images.
        """
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
            images = discriminator.spec.to_float(upload(batch.images, self.device))
            return discriminator(images, upload(batch.labels, self.device)).flatten().cpu()

        def logits_of_rows(rows: range) -> Tensor:
            held_out, real = read(val_dataset, rows), read(self.dataset, rows)
            labels = real.labels if generator.classes else None
            samples = generate(generator, labels=labels, indices=rows, seed=self.config.seed)
            batches = (held_out, real, Batch(samples, real.labels))
            return torch.stack([logits_of(batch) for batch in batches])

        with evaluating(discriminator):
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
