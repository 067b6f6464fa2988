"""Build feature extractors by name, and compute features in passes that all processes share."""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.precision import device_of, evaluating, full_float32
from duetgan.metrics.features.selection import Selection
from duetgan.models.backbones.base import normalize
from duetgan.models.backbones.torchvision import RESNET
from duetgan.models.classifier import Classifier
from duetgan.models.preparation import fit_images
from duetgan.models.restore import classifier_from, fingerprint, read
from duetgan.models.weights import file_hash, fit_state, read_state_dict
from duetgan.utils import extras
from duetgan.utils.checkpoint import resolve
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.images import visible
from duetgan.utils.machine import upload
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.text import did_you_mean


@dataclass
class Extractor:
    """A deterministic function from unnormalised images, [n, C, H, W], to features, [n, dim]."""

    name: str  # shown beside its metrics, such as `resnet50`
    dim: int  # number of features
    compute: Callable[[Tensor], Tensor]
    device: torch.device  # of the computation
    source: str = ""  # file or hash of its weights; empty if it has none
    lineage: Lineage = field(default_factory=Lineage.of)  # data that its weights were trained on
    classifier: Classifier | None = None  # the classifier whose features they are, if any

    def __call__(self, images: Tensor) -> Tensor:
        """Compute the features of images in full float32; return them on the CPU, [n, dim].

        Raises UserError if a feature is not finite.
        """
        with torch.no_grad(), full_float32(self.device):
            features = self.compute(images).cpu()
        if not torch.isfinite(features).all():
            raise UserError(
                f"extractor {self.name} gives features that are not finite; its weights are broken"
            )
        return features


def pixel_features(spec: ImageSpec) -> Extractor:
    """Return the extractor `pixels`: its features are the image itself, averaged down to 8x8 px.

    The features are in [0, 1]; colours are multiplied by alpha. The extractor needs no weights and
    hardly any time, but its metrics are rough. It is meant for evaluations during training.
    """

    def compute(images: Tensor) -> Tensor:
        images = images.cpu()
        floats = images.float() / 255 if spec.plain else (spec.to_float(images).float() + 1) / 2
        return F.adaptive_avg_pool2d(floats, 8).flatten(1)

    return Extractor("pixels", spec.channels * 64, compute, torch.device("cpu"))


# Backgrounds behind transparent images. There are two, because opaque pixels in the colour of a
# background look transparent on it.
BACKGROUNDS = {"grey": 128, "white": 255}


def photographs(extractor: Extractor, spec: ImageSpec) -> Extractor:
    """Return an extractor for images of `spec`, made from one for 8-bit grey or RGB images.

    If images of `spec` are 8-bit grey or RGB, `extractor` itself is returned. Otherwise `visible`
    converts the images. Transparent images are laid on each of BACKGROUNDS, and the features on all
    backgrounds are concatenated. The new extractor's name includes the channels and the
    backgrounds.
    """
    if spec.plain:
        return extractor
    backgrounds = BACKGROUNDS if spec.alpha else {"": None}
    name = extractor.name
    if spec.colours not in (1, 3):
        name += f", channels 1 to {min(3, spec.colours - 1)}"
    if spec.alpha:
        name += f", on {' and '.join(BACKGROUNDS)}"

    def compute(images: Tensor) -> Tensor:
        views = [visible(images, spec, background) for background in backgrounds.values()]
        return torch.cat([extractor.compute(view) for view in views], dim=1)

    return replace(extractor, name=name, dim=extractor.dim * len(backgrounds), compute=compute)


def classifier_features(classifier: Classifier, *, name: str) -> Extractor:
    """Return an extractor of a classifier's pooled features, which are the input of its head.

    `name` has the form `classifier:RUN`.
    """

    def compute(images: Tensor) -> Tensor:
        with evaluating(classifier):
            return classifier.features(classifier_input(classifier, images)).float()

    return Extractor(
        name,
        classifier.feature_dim,
        compute,
        device_of(classifier),
        fingerprint(classifier),
        classifier.lineage,
        classifier,
    )


def classifier_input(classifier: Classifier, images: Tensor) -> Tensor:
    """Convert unnormalised images [n, C, H, W] to the classifier's size, range and device.

    Grey images become RGB, or RGB images grey, if the classifier takes that. Raises UserError if
    channels or data type do not fit.
    """
    spec, channels = classifier.spec, images.shape[1]
    fits = channels == spec.channels or (spec.plain and channels in (1, 3))
    if not fits or images.dtype != getattr(torch, spec.depth):
        raise UserError(
            f"{images.dtype} of {channels} channels: the classifier takes {spec.words}; give another one"
        )
    return fit_images(
        replace(spec, channels=channels).to_float(upload(images, device_of(classifier))),
        classifier.resolution,
        classifier.channels,
    )


FILE_NAME = "resnet50-imagenet.safetensors"
CHECKOUT = Path(__file__).resolve().parents[3]
PLACES = (
    Path("weights") / FILE_NAME,
    CHECKOUT / "weights" / FILE_NAME,
    CHECKOUT.parent / "shared" / "weights" / FILE_NAME,
)


def find_weights(weights: str | Path | None) -> Path | None:
    """Return the path of a ResNet-50 weights file, or None if there is none.

    The path is `weights`, else the environment variable DUET_WEIGHTS, else the first of PLACES that
    exists. Raises UserError if `weights` or the variable is set to a file that does not exist.
    """
    for source, name in (("--weights", weights), ("$DUET_WEIGHTS", os.environ.get("DUET_WEIGHTS"))):
        if name:
            if not Path(name).is_file():
                raise UserError(
                    f"{source} {name}: no such file; give {FILE_NAME} or another ResNet-50 state dict"
                )
            return Path(name)
    return next((place for place in PLACES if place.is_file()), None)


HOW_TO_GET = (
    f"put {FILE_NAME} into weights/, or give one with --weights (torchvision's will do: "
    "torchvision.models.ResNet50_Weights.IMAGENET1K_V1.url has its address)"
)


def needed_weights(weights: str | Path | None, purpose: str, alternative: str = "") -> Path:
    """Return the path of a ResNet-50 weights file, as `find_weights` does.

    Raises UserError if there is no file. The message consists of `purpose`, HOW_TO_GET and
    `alternative`.
    """
    if (path := find_weights(weights)) is None:
        raise UserError(f"{purpose}: {HOW_TO_GET}{alternative}")
    return path


def resnet50_features(
    weights: str | Path | None = None, *, device: torch.device | str = "cpu"
) -> Extractor:
    """Return an extractor of the 2048 pooled features of a ResNet-50 trained on ImageNet.

    Images whose sides are at most 64 px are scaled bilinearly to 64x64 px, others to 224x224 px.
    Grey images are repeated to three channels.
    """
    path = needed_weights(weights, "extractor resnet50 needs a weights file")
    device = torch.device(device)
    weights_hash = file_hash(path)
    network = load_resnet50(path).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def compute(images: Tensor) -> Tensor:
        inputs = upload(images, device).float() / 255  # [n, C, H, W] in [0, 1]
        side = 64 if max(inputs.shape[-2:]) <= 64 else 224
        if inputs.shape[-2:] != (side, side):
            # antialias matters for downscaling only, where it avoids aliasing
            inputs = F.interpolate(
                inputs, size=(side, side), mode="bilinear", align_corners=False, antialias=True
            )
        return network(normalize(inputs).contiguous(memory_format=torch.channels_last))

    return Extractor(
        "resnet50",
        2048,
        compute,
        device,
        f"{path.name} {weights_hash}",
        Lineage.of(pretrained=[weights_hash]),
    )


def load_resnet50(path: Path) -> nn.Module:
    """Load a ResNet-50 without its head, float32, in evaluation mode.

    Args:
        path: A `.safetensors` or `.pth` file with torchvision's parameter names. The strides of 2
            are in the layers `conv2`, as in torchvision. If the metadata of a safetensors file says
            `stride: conv1 ...`, they are in `conv1`, as in He's original network.

    Raises:
        UserError: If the file cannot be read, or a key or a shape does not fit.
    """
    state, metadata = read_state_dict(path)
    he_strides = metadata.get("stride", "").startswith("conv1")
    with torch.device("meta"):  # skips an initialisation that would be overwritten
        network = RESNET.build("resnet50", he_strides=he_strides)
    state = fit_state(state, network.state_dict(), path, "resnet50")
    network.load_state_dict(state, assign=True)
    network.set_submodule(RESNET.head, nn.Identity())  # the pooled features are the output
    return network.eval().requires_grad_(False)


# Functions that make an extractor of 8-bit grey or RGB images, by name; extras add functions.
WITH_WEIGHTS = {"resnet50": resnet50_features}


def build(
    names: Sequence[str],
    *,
    device: torch.device,
    spec: ImageSpec,  # of the images
    weights: str | Path | None = None,  # weights file for an extractor of WITH_WEIGHTS
    classifier: str | None = None,  # run or checkpoint file for the extractor `classifier`
    judge: Classifier | None = None,  # the classifier of that run, if it is loaded already
) -> list[Extractor]:
    """Build extractors from their names.

    Names are `pixels`, `classifier`, `classifier:RUN_OR_FILE` and the keys of WITH_WEIGHTS.

    Raises:
        UserError: If a name is unknown or occurs twice; if `weights` is given, but not exactly one
            name is in WITH_WEIGHTS; or if a file or package that an extractor needs is missing.
    """
    choices = ("classifier", "pixels", *WITH_WEIGHTS)
    if weights and sum(name in WITH_WEIGHTS for name in names) != 1:
        raise UserError(
            f"--weights is for one extractor of {', '.join(WITH_WEIGHTS)}; name one with --extractor"
        )
    built: dict[str, Extractor] = {}
    for name in names:
        kind, _, argument = name.partition(":")
        if kind == "classifier":
            run = argument or classifier
            if not run:
                raise UserError(
                    "extractor classifier: which one? give --classifier RUN, or --extractor classifier:RUN"
                )
            network = judge if run == classifier else None
            network = network or classifier_from(read(resolve(run)), device, several=True)
            extractor = classifier_features(network, name=f"classifier:{run}")
        elif name == "pixels":
            extractor = pixel_features(spec)
        elif name in WITH_WEIGHTS:
            extractor = photographs(WITH_WEIGHTS[name](weights, device=device), spec)
        else:
            near = did_you_mean(name, choices)
            raise UserError(f"no extractor {name!r}{near}; there are {', '.join(choices)}")
        if extractor.name in built:
            raise UserError(f"extractor {extractor.name} is named twice; name it once")
        built[extractor.name] = extractor
    return list(built.values())


def build_extractors(
    options: Namespace, spec: ImageSpec, device: torch.device, judge: Classifier | None
) -> list[Extractor]:
    """Build the extractors that command-line options name.

    By default, these are `classifier` if a classifier is given, and `resnet50` if its weights are
    available. Raises UserError if there is none.
    """
    run, weights = options.classifier, options.weights
    if options.extractor:
        names = [name.strip() for text in options.extractor for name in text.split(",")]
    else:
        names = ["classifier"] * bool(run) + ["resnet50"] * (find_weights(weights) is not None)
    if not names:
        raise UserError(
            "no feature extractor is available; give --classifier RUN, or a ResNet-50 weights file with --weights, "
            "or --extractor pixels for a rough metric"
        )
    return build(names, device=device, spec=spec, weights=weights, classifier=run, judge=judge)


T = TypeVar("T")

LEAST_CHUNK, LARGEST_CHUNK = 4, 64  # images
CHUNK_PIXELS = 2**20  # between the bounds, so that memory does not grow with the image size


def chunk_size(side: int) -> int:
    """Return the number of images of `side` px in a chunk: 64 up to 128 px, 4 from 512 px on."""
    return max(LEAST_CHUNK, min(LARGEST_CHUNK, CHUNK_PIXELS // side**2))


def shared_pass(
    count: int,  # images
    work: Callable[[range], T],  # computes a chunk; returns plain data and tensors on the CPU
    *,
    side: int,  # shorter side of the images in px
    # images that a process computes before it sends the results; rounded down to whole chunks, at
    # least one
    batch_size: int,
    multiple: int = 1,  # the size of a chunk is a multiple of this
    progress: str = "",  # caption of the progress bar; if empty, there is no bar
) -> Iterator[T]:
    """Split images into chunks, share the chunks among the ranks, and yield the results of `work`.

    On rank 0, the iterator yields the result of every chunk in order; on other ranks it yields
    nothing. All ranks must exhaust it. A UserError on one rank is raised on all ranks.

    One process computes a whole chunk, and the chunks do not depend on `batch_size` or on the
    number of processes. Results would otherwise differ, because the last bits of float32 outputs
    depend on the images that are computed together.
    """
    size = max(1, chunk_size(side) // multiple) * multiple
    chunks = [range(start, min(start + size, count)) for start in range(0, count, size)]
    per_rank = max(1, batch_size // size)
    rank, world = collectives.rank(), collectives.world_size()
    is_shown = bool(progress) and rank == 0
    with Bar(total=count, desc=progress, unit="image", disable=not is_shown) as bar:
        for first in range(0, len(chunks), per_rank * world):
            start = first + rank * per_rank
            part = chunks[start : start + per_rank]
            for results in collectives.gather_to_main(
                lambda part=part: [work(rows) for rows in part]  # type: ignore[misc]
            ):
                for result in results:
                    yield result
                    bar.update(min(size, count - bar.n))


def compute_features(
    source: Callable[[range], Tensor],  # images of a range, uint8 [b, C, H, W]
    extractors: Sequence[Extractor],
    *,
    total: int,  # images
    side: int,  # of the images, in px
    batch_size: int = 64,
    progress: str = "",  # caption of the progress bar; if empty, there is no bar
) -> list[Tensor]:
    """Compute the features of images with all extractors, in one pass that the ranks share.

    Returns a list with the features of each extractor: [total, F] on rank 0, [0, F] on other ranks.
    All ranks must call this function.
    """
    parts = [[torch.empty(0, extractor.dim)] for extractor in extractors]

    def work(chunk: range) -> list[Tensor]:
        images = source(chunk)
        return [extractor(images) for extractor in extractors]

    for features in shared_pass(total, work, side=side, batch_size=batch_size, progress=progress):
        for part, chunk_features in zip(parts, features, strict=True):
            part.append(chunk_features)
    return [torch.cat(part) for part in parts]


@dataclass
class RealFeatures:
    """A cache of features of real images, for the repeated evaluations of a training run.

    Features are reused if the dataset's content, the selection of images, and the extractor's name
    and weights are the same.
    """

    batch_size: int
    show: bool = False  # if True, show a progress bar
    _cache: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    def get(
        self, dataset: Dataset, selection: Selection, extractors: Sequence[Extractor]
    ) -> list[Tensor]:
        """Return a list with the features of the selected images for each extractor.

        All ranks must call this method. Only rank 0 gets the features; other ranks get empty
        tensors.
        """
        keys = [
            (dataset.meta.content_hash, selection.key, extractor.name, extractor.source)
            for extractor in extractors
        ]
        pairs = zip(keys, extractors, strict=True)
        missing = {key: extractor for key, extractor in pairs if key not in self._cache}
        if missing:
            features = compute_features(
                partial(selection.images, dataset),
                list(missing.values()),
                total=len(selection.indices),
                side=dataset.spec.side,
                batch_size=self.batch_size,
                progress=f"real {selection.key.split()[0]} images" if self.show else "",
            )
            self._cache.update(zip(missing, features, strict=True))
        return [self._cache[key] for key in keys]


extras.attach(__name__)
