"""Load trained networks, and apply them to images."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn

from duetgan.data.opening import dataset_for_model
from duetgan.inference.inputs import Image, Transform
from duetgan.inference.latents import Latents
from duetgan.inference.projection import Projection, find
from duetgan.inference.samples import Sampler, load_sources
from duetgan.inference.settings import ProjectionConfig, label_of
from duetgan.metrics.evaluate_classifier import (
    answers_of,
    check_classes,
    classify,
    document_of,
    draw_records,
)
from duetgan.metrics.evaluate_gan import evaluate_generator, judge_images
from duetgan.metrics.features.extractors import build
from duetgan.metrics.features.precision import device_of
from duetgan.metrics.protocol import GAN_IMAGES
from duetgan.metrics.results import Evaluation
from duetgan.models.gan import ImageGenerator, NoiseMode, TruncationMean
from duetgan.models.restore import classifier_from, generator_from, open_checkpoint
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError
from duetgan.utils.images import grid
from duetgan.utils.machine import cores
from duetgan.utils.runlog.frames import data_frame
from duetgan.utils.runlog.progress import Bar

if TYPE_CHECKING:
    import pandas

BATCH = 64  # images


@dataclass(frozen=True)
class Predictions:
    """The labels and probabilities that a classifier predicts for n images."""

    labels: list[str]  # the most probable class of each image
    probabilities: Tensor  # float64 [n, classes] on the CPU, in the order of `class_names`
    class_names: list[str]
    files: list[str]  # the file name of each image; "" for an image that was not given as a file

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with a row for each image.

        The columns are `file`, `label`, `probability` (of the label), and one for the probability
        of each class. Raises UserError if pandas is not installed.
        """
        best = self.probabilities.amax(1).tolist()
        columns = {"file": self.files, "label": self.labels, "probability": best}
        for name, values in zip(self.class_names, self.probabilities.T.tolist(), strict=True):
            columns[f"class {name}" if name in columns else name] = values
        return data_frame(columns)


class Classifier(nn.Module):
    """A trained classifier.

    The attribute `network` is its nn.Module with the average (EMA) weights, in evaluation mode.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        """Build the classifier from a checkpoint's content, as `utils.checkpoint.load` returns it.

        Raises UserError for the checkpoint of a GAN.
        """
        super().__init__()
        self.network = classifier_from(checkpoint, device)
        self.class_names: list[str] = list(checkpoint["classes"])
        self.transform = Transform.of(checkpoint)
        self.image_shape, self.image_range = self.transform.spec.shape, (-1.0, 1.0)
        self._checkpoint = checkpoint | {"state": {}}

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [N, classes] of images, float [N, C, H, W] in [-1, 1].

        `transform` converts an image file to this form, without the dimension N.
        """
        return self.network(images)

    def predict(self, images: "Image | Iterable[Image]", *, progress: bool = False) -> Predictions:
        """Return the predicted labels and probabilities of one image or of many.

        Args:
            images: anything that `transform` accepts, an array [N, H, W, C], a tensor [N, C, H, W],
                or an iterable of these, which is read batch by batch.
            progress: True to show a progress bar.

        Raises UserError for an image that cannot be read.
        """
        items = _single_images(images)
        total = len(images) if isinstance(images, list | tuple) else None
        files: list[str] = []
        rows = [torch.empty(0, len(self.class_names), dtype=torch.float64)]
        with (
            ThreadPoolExecutor(cores(), "decode") as pool,
            Bar(total=total, desc="predicting", unit="image", disable=not progress) as bar,
        ):
            while batch := list(itertools.islice(items, BATCH)):
                pixels = torch.stack(list(pool.map(self.transform.pixels, batch)))
                rows.append(judge_images(self.network, pixels))
                files += [
                    str(item) if isinstance(item, str | os.PathLike) else "" for item in batch
                ]
                bar.update(len(batch))
        probabilities = torch.cat(rows)
        labels = [self.class_names[i] for i in probabilities.argmax(1).tolist()]
        return Predictions(labels, probabilities, list(self.class_names), files)

    def evaluate(
        self,
        images: str | Path,
        *,
        n: int | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> Evaluation:
        """Evaluate the classifier on labelled images. The metrics are those of evaluate.py.

        Args:
            images: anything that `duet train` reads.
            n: number of images, which are drawn with `seed`; None: all images.
            progress: True to show a progress bar.

        Raises UserError if images or labels do not fit the classifier.
        """
        with dataset_for_model(images, self._checkpoint) as dataset:
            check_classes(self.network, dataset)
            records = draw_records(dataset, n, seed)
            logits = classify(
                self.network, dataset, records=records, progress="images" if progress else ""
            )
            answers = answers_of(self.network, dataset, logits, records)
        return Evaluation.of(document_of(answers, seed=seed))


class Samples(NamedTuple):
    """Images that `Generator.sample` drew.

    Image i depends only on its class, `seeds[i]` and `indices[i]`. If `sample` was called with
    `seeds`, image i depends only on its class and `seeds[i]`. An image that was drawn from saved
    latents depends on these instead.
    """

    # uint8, uint16 or float32 [n, channels, H, W] on the CPU; alpha is not multiplied into colours
    images: Tensor
    # the class of each image, "" for latents without one; empty for an unconditional generator
    labels: list[str]
    seeds: list[int]  # 0 for saved latents
    indices: list[int]

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with a row for each image and the columns `label`, `seed` and `index`.

        Raises UserError if pandas is not installed.
        """
        labels = self.labels or [""] * len(self.seeds)
        return data_frame({"label": labels, "seed": self.seeds, "index": self.indices})


class Generator(nn.Module):
    """A trained generator of any architecture.

    The attribute `network` is its nn.Module with the average (EMA) weights, in evaluation mode.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        """Build the generator from a checkpoint's content, as `utils.checkpoint.load` returns it.

        Raises UserError for the checkpoint of a classifier.
        """
        super().__init__()
        self.network: ImageGenerator = generator_from(checkpoint, device, several=True)
        self.class_names: list[str] = list(checkpoint["classes"]) if self.network.classes else []
        # The names that `sample` accepts: classes, or sets of classes.
        self.label_names = self.network.label_names(self.class_names)
        self.z_dim = self.network.z_dim
        self.transform = Transform.of(checkpoint)
        self.image_shape, self.image_range = self.transform.spec.shape, (-1.0, 1.0)
        self._checkpoint = checkpoint | {"state": {}}

    def forward(self, z: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        """Return images [N, channels, H, W] in about [-1, 1].

        Args:
            z: [N, z_dim], drawn from a standard normal distribution.
            labels: int64 [N], indices into `class_names`; or class weights [N, classes], for
                mixtures of classes and for images with several labels; None for an unconditional
                generator.
            options: keyword arguments for the network: noise, truncation_psi, truncation_cutoff,
                truncation_mean.
        """
        return self.network(z, labels, **options)

    def sample(
        self,
        n: int = 1,
        *,
        # names of the classes, which the samples cycle through; "cat; dog" for a set of labels;
        # None: all classes
        classes: str | Sequence[str] | None = None,
        seed: int = 0,
        # in place of `n` and `seed`: seeds, each of which gives one sample of each class; files of
        # latents and results of `project`, each of which gives one sample
        seeds: Sequence[int | str | Path | Latents] = (),
        psi: float = 1.0,  # truncation of w, if the generator has a w: 1: none; 0: the mean image
        # truncate w towards the mean of the sample's class, or of all samples ("global")
        truncation_mean: TruncationMean = "class",
        noise: NoiseMode = "random",
        progress: bool = False,  # show a progress bar on stderr
    ) -> Samples:
        """Draw `n` images. A larger `n` adds images and leaves the first ones unchanged.

        Raises UserError for n < 1, an unknown class, seeds and files that cannot be read, and a
        truncation that the generator does not support.
        """
        if (n < 1 and not len(seeds)) or noise not in get_args(NoiseMode):
            modes = ", ".join(get_args(NoiseMode))
            raise UserError(f"sample: {n} images with noise {noise!r}; give 1 or more, {modes}")
        sampler = self._sampler(
            classes, seed, noise_mode=noise, truncation_psi=psi, truncation_mean=truncation_mean
        )
        sources = load_sources(seeds, self.network, self.label_names, times=len(sampler.chosen))
        sampler = replace(sampler, sources=sources)
        numbers = range(len(sources) or n)
        batches = Bar(sampler.batches(len(numbers)), "samples", unit="batch", disable=not progress)
        images = torch.cat([sampler.images(batch) for batch in batches])
        names = [self.label_names[label] for label in sampler.classes(numbers)]
        for row, latents in sampler.saved(numbers).items() if names else ():
            names[row] = "" if latents.label is None else self.label_names[latents.label]
        return Samples(images, names, sampler.seeds(numbers), sampler.indices(numbers))

    def grid(
        self, n: int | None = None, *, columns: int | None = None, **options: Any
    ) -> PIL.Image.Image:
        """Draw `n` samples and return them as a grid in one picture.

        Args:
            n: number of samples. None: 8 for each class, or 64 for an unconditional generator.
            columns: number of columns. None: one for each class; for an unconditional generator,
                the grid is about square.
            options: keyword arguments of `sample`.
        """
        classes = options.get("classes") or self.label_names
        count = 1 if isinstance(classes, str) else len(classes)
        images = self.sample(n or 8 * count or 64, **options).images
        pixels = grid(images, columns=columns or count or None, spec=self.network.spec)
        return PIL.Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def project(
        self,
        image: Image,
        *,
        space: Literal["w", "w+"] = "w+",
        # the search starts from the mean w of one of these classes; None: of any class
        classes: str | Sequence[str] | None = None,
        seed: int = 0,
        steps: int = 500,
        # None: resnet50 if its weights are present, else pixels
        features: Literal["resnet50", "pixels"] | None = None,
    ) -> Projection:
        """Find the w from which the generator draws the image nearest to `image`.

        The method is that of StyleGAN2, appendix D. Returns a Projection: `ws`, [num_ws, w_dim], is
        the w that was found, and `image`, uint8, is the image that the generator draws from it.
        Raises UserError for a generator without w.
        """
        if space not in ("w", "w+") or features not in ("resnet50", "pixels", None):
            raise UserError(
                f"project: space {space!r} is w or w+, features {features!r} resnet50 or pixels"
            )
        target = self.transform.pixels(image)[None]
        sampler = self._sampler(classes, seed)
        config = ProjectionConfig(
            space="both" if space == "w+" else "w", steps=steps, features=features
        )
        return find(sampler, target, config).spaces[space]

    def evaluate(
        self,
        images: str | Path,
        *,
        training: str | Path | None = None,
        extractors: Sequence[str] = ("resnet50",),
        weights: str | Path | None = None,
        n: int = GAN_IMAGES,
        seed: int = 0,
        progress: bool = False,
    ) -> Evaluation:
        """Compare samples with real test images. The metrics are those of evaluate.py.

        Args:
            images: the test images, anything that `duet train` reads.
            training: the training images. They are needed for the floors (metrics between two sets
                of real images) and for the search for copies.
            extractors, weights: as for `compare_images`.
            n: number of samples; at most the number of test images.
            progress: True to show progress bars.

        Raises UserError if images or classes do not fit the generator.
        """
        with ExitStack() as stack:
            paths = [images] if training is None else [images, training]
            datasets = [
                stack.enter_context(dataset_for_model(path, self._checkpoint)) for path in paths
            ]
            device, spec = device_of(self.network), datasets[0].spec
            document = evaluate_generator(
                self.network,
                datasets[0],
                n=n,
                seed=seed,
                extractors=build(extractors, device=device, spec=spec, weights=weights),
                train_dataset=None if training is None else datasets[1],
                show=progress,
            )
        return Evaluation.of(document)

    def _sampler(self, classes: str | Sequence[str] | None, seed: int, **options: Any) -> Sampler:
        names = [classes] if isinstance(classes, str) else classes
        if names is None:
            names = self.label_names
        elif not names:
            raise UserError("classes: none is named; give one or more, or None for all")
        chosen = [label_of(name, self.label_names, "classes") for name in names]
        return Sampler(
            generator=self.network, chosen=chosen, seed=seed, batch_size=BATCH, **options
        )


Which: TypeAlias = Literal["last", "best"]


def load(
    checkpoint: str | Path, *, which: Which = "last", device: str | None = None
) -> Classifier | Generator:
    """Load a trained classifier or generator, in evaluation mode, with its average (EMA) weights.

    Args:
        checkpoint: a run folder, a checkpoint file, a .safetensors file of `duet export`, or a
            ready-made classifier: `torchvision:NAME`, `timm:NAME`, a state dict, a folder that timm
            wrote for its hub. No code in it is executed.
        which: "last" or "best" checkpoint of a run folder.
        device: "cpu", "cuda", ...; None: the accelerator if the machine has one, else the CPU.

    Raises UserError, a ValueError whose message is one line with the remedy, if the checkpoint is
    missing or damaged, or if the device does not exist.
    """
    content = open_checkpoint(checkpoint, which)[1]
    model = Classifier if content["task"] == "classifier" else Generator
    return model(content, choose_device(device))


def load_classifier(
    checkpoint: str | Path, *, which: Which = "last", device: str | None = None
) -> Classifier:
    """Load a trained classifier, as `load` does. Raises UserError for a generator."""
    return Classifier(open_checkpoint(checkpoint, which)[1], choose_device(device))


def load_generator(
    checkpoint: str | Path, *, which: Which = "last", device: str | None = None
) -> Generator:
    """Load a trained generator, as `load` does. Raises UserError for a classifier."""
    return Generator(open_checkpoint(checkpoint, which)[1], choose_device(device))


def _single_images(images: "Image | Iterable[Image]") -> Iterator[Image]:
    if isinstance(images, str | os.PathLike | PIL.Image.Image):
        yield images
    elif isinstance(images, np.ndarray | Tensor):
        yield from images if images.ndim == 4 else [images]
    else:
        for part in images:
            yield from _single_images(part)
