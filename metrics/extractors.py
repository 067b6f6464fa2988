"""Named feature extractors: images in, feature vectors out. The name is given with every figure."""

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.augment.transforms import to_float
from metrics.precision import device_of, evaluating, exact_float32
from metrics.resnet50 import ResNet50Features
from models.classifier import Classifier, fit_images
from models.weights import read_state_dict
from utils.cli import did_you_mean
from utils.errors import UserError


class Extractor(Protocol):
    """A deterministic function of images: uint8 [n, C, H, W] on any device -> float32 [n, dim]."""

    name: str  # which figures carry, e.g. `resnet50`
    dim: int  # number of features
    source: str  # where its weights come from; empty if it has none
    device: torch.device  # where it computes

    def __call__(self, images: Tensor) -> Tensor: ...


class PixelFeatures:
    """Images averaged down to 8x8 pixels, in [0, 1]: no weights and no time, for quick looks during training only."""

    name = "pixels"
    source = ""
    device = torch.device("cpu")

    def __init__(self, channels: int) -> None:
        self.dim = channels * 64

    def __call__(self, images: Tensor) -> Tensor:
        inputs = images.to(self.device, torch.float32) / 255
        return F.adaptive_avg_pool2d(inputs, 8).flatten(1)


class ClassifierFeatures:
    """Pooled features of one of our classifiers, before its head."""

    def __init__(self, classifier: Classifier, *, name: str) -> None:
        """Args: `classifier` a `models` Classifier whose weights stay as they are; `name` as in `classifier:runs/x`."""
        self.name = name
        self.source = fingerprint(classifier)
        self.device = device_of(classifier)
        self._classifier = classifier
        self.dim = classifier.feature_dim

    def __call__(self, images: Tensor) -> Tensor:
        with evaluating(self._classifier):
            return self._classifier.features(classifier_input(self._classifier, images)).float()


def fingerprint(module: nn.Module) -> str:
    """A short hash of a module's weights: two modules with one fingerprint give the same features."""
    digest = hashlib.sha256()
    for key, value in module.state_dict().items():
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{digest.hexdigest()[:12]}"


def classifier_input(classifier: Classifier, images: Tensor) -> Tensor:
    """Images uint8 [n, C, H, W] as the classifier wants them: its size, its channels, [-1, 1], on its device; see
    `fit_images`.
    """
    inputs = to_float(images.to(device_of(classifier)))
    return fit_images(inputs, classifier.resolution, classifier.channels)


class InceptionFeatures:
    """2048 pooled features of the Inception network that published FID figures use, through torch-fidelity.

    It does its own scaling to 299 px, bit for bit as the TensorFlow original.
    """

    name = "inception"
    dim = 2048

    def __init__(self, weights: str | Path | None = None, *, device: torch.device | str = "cpu") -> None:
        try:
            library = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3")
        except ImportError as error:
            raise UserError("extractor inception needs torch-fidelity; `pip install torch-fidelity`") from error
        self.device = torch.device(device)
        self.source = Path(weights).name if weights else "torch-fidelity's download"
        if weights:
            read_state_dict(Path(weights))  # torch-fidelity itself would unpickle anything
        path = str(weights) if weights else None
        try:
            network = library.FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=path)
        except (OSError, RuntimeError) as error:  # no network (URLError is an OSError), or not Inception's state dict
            raise UserError(
                f"Inception's weights could not be downloaded ({str(error).splitlines()[0]}); give torch-fidelity's "
                "weights-inception-2015-12-05-6726825d.pth with --weights, or take --extractor resnet50"
            ) from error
        self._network = network.to(self.device)

    def __call__(self, images: Tensor) -> Tensor:
        inputs = images.to(self.device)
        with torch.no_grad():
            return self._network(inputs.expand(-1, 3, -1, -1))[0].float()


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the builders of extractors may use."""

    device: torch.device
    channels: int  # of the images: 1 or 3
    weights: str | Path | None = None  # a weights file, for the extractors that read one
    classifier: str | None = None  # run or file that a bare `classifier` means
    load_classifier: Callable[[str], Classifier] | None = None  # run or file -> classifier on the device


def _build_classifier(argument: str, options: Options) -> Extractor:
    run = argument or options.classifier
    if not run or options.load_classifier is None:
        raise UserError("extractor classifier: which one? give --classifier RUN, or --extractor classifier:RUN")
    return ClassifierFeatures(options.load_classifier(run), name=f"classifier:{run}")


BUILDERS: dict[str, Callable[[str, Options], Extractor]] = {
    "classifier": _build_classifier,
    "resnet50": lambda _, options: ResNet50Features(options.weights, device=options.device),
    "inception": lambda _, options: InceptionFeatures(options.weights, device=options.device),
    "pixels": lambda _, options: PixelFeatures(options.channels),
}
WITH_WEIGHTS = ("resnet50", "inception")


def build(specs: list[str], options: Options) -> list[Extractor]:
    """Extractors from their names: `resnet50`, `inception`, `pixels`, `classifier`, `classifier:RUN_OR_FILE`.

    Raises:
        UserError: an unknown name (the near one is told), one that comes twice, a weights file that fits no or two of
            them, or something that the extractor needs is missing.
    """
    kinds = [spec.partition(":")[0] for spec in specs]
    for spec, kind in zip(specs, kinds, strict=True):
        if kind not in BUILDERS or (":" in spec and kind != "classifier"):
            near = did_you_mean(kind, list(BUILDERS))
            raise UserError(f"no extractor {spec!r}{near}; there are {', '.join(BUILDERS)}")
    readers = [kind for kind in kinds if kind in WITH_WEIGHTS]
    if options.weights and len(readers) != 1:
        raise UserError(
            f"--weights is for one extractor of {', '.join(WITH_WEIGHTS)}, but {' and '.join(readers) or 'none'} is "
            "named; name one with --extractor"
        )
    built = [BUILDERS[kind](spec.partition(":")[2], options) for spec, kind in zip(specs, kinds, strict=True)]
    names = [extractor.name for extractor in built]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"extractor {name} is named twice; name it once")
    return built


def extract(extractor: Extractor, images: Tensor) -> Tensor:
    """Features float32 [n, dim] on the CPU, computed in full float32.

    Raises:
        UserError: a feature is not finite.
    """
    with exact_float32(extractor.device):
        features = extractor(images).cpu()
    if not torch.isfinite(features).all():
        raise UserError(f"extractor {extractor.name} gives features that are not finite; its weights are broken")
    return features
