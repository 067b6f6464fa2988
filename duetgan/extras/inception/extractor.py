"""Features of torch-fidelity's Inception network."""

import importlib
from pathlib import Path

import torch
from torch import Tensor

from duetgan.metrics.features.extractors import WITH_WEIGHTS, Extractor
from duetgan.models.weights import read_state_dict
from duetgan.utils.errors import explained


def inception_features(
    weights: str | Path | None = None, *, device: torch.device | str = "cpu"
) -> Extractor:
    """Return the extractor of the 2048 pooled Inception features that published FIDs use.

    The network is torch-fidelity's, which scales images to 299 px like TensorFlow's original.
    torch-fidelity downloads the weights if `weights` is None. Raises UserError if torch-fidelity is
    not installed or the weights cannot be loaded.
    """
    with explained(
        ImportError, "extractor inception needs torch-fidelity; `pip install torch-fidelity`"
    ):
        library = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3")
    path = None
    source = "torch-fidelity's download"
    device = torch.device(device)
    if weights:
        path = str(weights)
        source = Path(weights).name
        read_state_dict(Path(weights))  # a safe check first: torch-fidelity unpickles anything
    remedy = (
        "give torch-fidelity's weights-inception-2015-12-05-6726825d.pth with --weights, or take "
        "--extractor resnet50"
    )
    with explained(  # no network (URLError is an OSError), or not Inception's state dict
        (OSError, RuntimeError),
        lambda error: (
            f"Inception's weights could not be downloaded ({str(error).splitlines()[0]}); {remedy}"
        ),
    ):
        network = library.FeatureExtractorInceptionV3(
            "inception", ["2048"], feature_extractor_weights_path=path
        )
    network = network.to(device)

    def compute(images: Tensor) -> Tensor:
        return network(images.to(device).expand(-1, 3, -1, -1))[0].float()

    return Extractor("inception", 2048, compute, device, source)


WITH_WEIGHTS["inception"] = inception_features
