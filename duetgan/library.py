"""Trained networks, ready to use: `load`, `Classifier`, `Generator`."""

import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn

from duetgan.inference.inputs import Image, Transform
from duetgan.inference.projection import Projection, find
from duetgan.inference.samples import Sampler
from duetgan.inference.settings import ProjectionConfig, label_of
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.models.gan import ImageGenerator, NoiseMode, TruncationMean
from duetgan.models.restore import classifier_from, generator_from, open_checkpoint
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError
from duetgan.utils.images import grid
from duetgan.utils.memory import cores, ran_out

BATCH = 64  # images at first; halved where memory runs out
# generated images leave [-1, 1] by a little; what leaves it by more is in another range
FARTHEST = 2.0


class Predictions(NamedTuple):
    """What a classifier says of n images."""

    labels: list[str]  # the most probable class of each
    # float64 [n, classes] on the CPU, in the order of the classifier's `class_names`
    probabilities: Tensor


class Classifier(nn.Module):
    """A trained classifier. `network` is the nn.Module with its EMA weights, in evaluation mode."""

    def __init__(self, checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Args: `checkpoint` as `utils.checkpoint.load` gives it. Raises UserError for a GAN's."""
        super().__init__()
        self.network = classifier_from(checkpoint, device)
        self.class_names: list[str] = list(checkpoint["classes"])
        self.transform = Transform.of(checkpoint)
        self.image_shape, self.image_range = self.transform.spec.shape, (-1.0, 1.0)
        self._batch = BATCH

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of images float [N, C, H, H] in [-1, 1], as `transform` gives them.

        Raises UserError for another type, shape or range.
        """
        _check_images(images, self.image_shape)
        return self.network(images)

    def predict(self, images: "Image | Iterable[Image]") -> Predictions:
        """Labels and probabilities of one image or many: whatever `transform` takes, also arrays
        [N, H, W, C] and tensors [N, C, H, W], or an iterable of them, which is read batch by batch.

        Raises UserError for an image that cannot be read.
        """
        items, rows = _each(images), [torch.empty(0, len(self.class_names), dtype=torch.float64)]
        with ThreadPoolExecutor(cores(), "decode") as pool:
            while batch := list(itertools.islice(items, self._batch)):
                rows.append(
                    self._probabilities(torch.stack(list(pool.map(self.transform.pixels, batch))))
                )
        probabilities = torch.cat(rows)
        return Predictions(
            [self.class_names[i] for i in probabilities.argmax(1).tolist()], probabilities
        )

    def _probabilities(self, pixels: Tensor) -> Tensor:
        try:
            return judge_images(self.network, pixels)
        except (RuntimeError, MemoryError) as error:
            if len(pixels) == 1 or not ran_out(error):
                raise
        self._batch = len(pixels) // 2
        return torch.cat([self._probabilities(part) for part in pixels.split(self._batch)])


class Samples(NamedTuple):
    """What a generator drew. Sample i depends on `seed`, its class and `indices[i]` alone."""

    # [n, channels, H, W] on the CPU, as files have them: uint8, uint16 or float32; alpha not
    # multiplied
    images: Tensor
    labels: list[str]  # each one's class; empty for an unconditional generator
    seed: int
    indices: list[int]


class Generator(nn.Module):
    """A trained generator of any architecture. `network` is the nn.Module with its EMA weights, in
    evaluation mode.
    """

    def __init__(self, checkpoint: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Args: `checkpoint` as `utils.checkpoint.load` gives it. Raises UserError for a
        classifier's.
        """
        super().__init__()
        self.network: ImageGenerator = generator_from(checkpoint, device, several=True)
        self.class_names: list[str] = list(checkpoint["classes"]) if self.network.classes else []
        # what can be asked for: classes, or sets of them
        self.label_names = self.network.label_names(self.class_names)
        self.z_dim = self.network.z_dim
        self.transform = Transform.of(checkpoint)
        self.image_shape, self.image_range = self.transform.spec.shape, (-1.0, 1.0)

    def forward(self, z: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        """Images [N, channels, H, H] in about [-1, 1] of z [N, z_dim] (normal) and labels int64
        [N], places in `class_names`; None without classes. `options` (noise, truncation_psi,
        truncation_cutoff, truncation_mean): as the network's.

        Raises UserError for another type or shape, and for labels of no class.
        """
        if not z.is_floating_point() or z.ndim != 2 or z.shape[1] != self.z_dim:
            raise UserError(f"z: {_kind(z)} was given; it is normal: torch.randn(N, {self.z_dim})")
        classes = len(self.class_names)
        if (labels is None) != (classes == 0):
            wanted = (
                f"int64 [N], 0 to {classes - 1}"
                if classes
                else "None: this generator is unconditional"
            )
            raise UserError(f"labels: give {wanted}")
        if labels is not None and not labels.is_floating_point() and len(labels):
            low, high = (int(value) for value in labels.aminmax())
            if not 0 <= low <= high < classes:
                raise UserError(f"labels: {low} to {high} were given; they are 0 to {classes - 1}")
        return self.network(z, labels, **options)

    def sample(
        self,
        n: int = 1,
        *,
        # by name ("cat; dog" of several labels), in turn; None: all
        classes: str | Sequence[str] | None = None,
        seed: int = 0,
        psi: float = 1.0,  # truncation: 1 none, 0 the mean image; for generators with w
        # of its class or of all ("global"), towards which w is truncated
        truncation_mean: TruncationMean = "class",
        noise: NoiseMode = "random",
    ) -> Samples:
        """`n` images. The same seed gives the same images, however many are drawn.

        Raises UserError for no image, an unknown class, and for a truncation that the generator
        cannot do.
        """
        if n < 1 or noise not in get_args(NoiseMode):
            raise UserError(
                f"sample: {n} images with noise {noise!r}; give 1 or more, {', '.join(get_args(NoiseMode))}"
            )
        truncation = {"truncation_psi": psi, "truncation_mean": truncation_mean}
        sampler = self._sampler(classes, seed, noise_mode=noise, **truncation)
        names = [self.label_names[label] for label in sampler.classes(range(n))]
        return Samples(sampler.images(range(n)), names, seed, sampler.indices(range(n)))

    def grid(
        self, n: int | None = None, *, columns: int | None = None, **options: Any
    ) -> PIL.Image.Image:
        """`n` samples as one picture; unless said 64, or 8 of each class, a column a class.
        `options` as `sample`.
        """
        chosen = options.get("classes")
        kinds = len([chosen] if isinstance(chosen, str) else chosen or self.label_names)
        pixels = grid(
            self.sample(n or 8 * kinds or 64, **options).images,
            columns=columns or kinds or None,
            spec=self.network.spec,
        )
        return PIL.Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def project(
        self,
        image: Image,
        *,
        space: Literal["w", "w+"] = "w+",
        classes: str | Sequence[str] | None = None,  # where the search may start
        seed: int = 0,
        steps: int = 500,
        # None: resnet50 where its weights are, else pixels
        features: Literal["resnet50", "pixels"] | None = None,
    ) -> Projection:
        """The w whose image is nearest to `image` (StyleGAN2, appendix D): `ws` [num_ws, w_dim],
        `image` uint8.

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

    def _sampler(self, classes: str | Sequence[str] | None, seed: int, **options: Any) -> Sampler:
        names = (
            [classes]
            if isinstance(classes, str)
            else self.label_names
            if classes is None
            else classes
        )
        if not names and classes is not None:
            raise UserError("classes: none is named; give one or more, or None for all")
        chosen = [label_of(name, self.label_names, "classes") for name in names]
        return Sampler(
            generator=self.network, chosen=chosen, seed=seed, batch_size=BATCH, **options
        )


Which: TypeAlias = Literal["last", "best"]


def load(
    checkpoint: str | Path, *, which: Which = "last", device: str | None = None
) -> Classifier | Generator:
    """A trained classifier or generator, in evaluation mode, with its average (EMA) weights.

    Args:
        checkpoint: a run folder, a checkpoint file, a .safetensors file of `duet export`, or a
            ready-made classifier: `torchvision:NAME`, `timm:NAME`, a state dict, a folder of the
            hub. Nothing in it is executed.
        which: checkpoint of a run folder.
        device: "cpu", "cuda", ...; None: the accelerator where there is one.

    Raises UserError (a ValueError; one line with the remedy) where it is missing, damaged, or the
    device is not there.
    """
    content = open_checkpoint(checkpoint, which)[1]
    return (Classifier if content["task"] == "classifier" else Generator)(
        content, choose_device(device)
    )


def load_classifier(
    checkpoint: str | Path, *, which: Which = "last", device: str | None = None
) -> Classifier:
    """`load` where it must be a classifier: raises UserError for a generator."""
    return Classifier(open_checkpoint(checkpoint, which)[1], choose_device(device))


def load_generator(
    checkpoint: str | Path, *, which: Which = "last", device: str | None = None
) -> Generator:
    """`load` where it must be a generator: raises UserError for a classifier."""
    return Generator(open_checkpoint(checkpoint, which)[1], choose_device(device))


def _each(images: "Image | Iterable[Image]") -> Iterator[Image]:
    if isinstance(images, str | os.PathLike | PIL.Image.Image):
        yield images
    elif isinstance(images, np.ndarray | Tensor):
        yield from images if images.ndim == 4 else [images]
    else:
        for part in images:
            yield from _each(part)


def _check_images(images: Tensor, shape: tuple[int, int, int]) -> None:
    """Raise UserError for what is no batch of images in [-1, 1] of this shape; warn of what looks
    like [0, 1].
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return  # a program is made of the network: nothing is looked at
    wanted = f"float [N, {', '.join(map(str, shape))}] in [-1, 1], as `transform` gives; `predict` takes any image"
    if not images.is_floating_point() or images.ndim != 4 or tuple(images.shape[1:]) != shape:
        raise UserError(f"images: {_kind(images)} was given; the network takes {wanted}")
    if not len(images):
        return
    low, high = (float(value) for value in images.detach().aminmax())
    if not (low >= -FARTHEST and high <= FARTHEST):
        raise UserError(
            f"images: values from {low:.3g} to {high:.3g} were given; the network takes {wanted}"
        )
    if low >= 0 and high > 0:
        warnings.warn(
            f"no pixel is below 0: are these images in [0, 1]? The network takes {wanted}",
            stacklevel=3,
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
