"""Build the network of a classifier: pretrained weights, fitted first filters, padding."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.models.classifier import Classifier
from duetgan.models.registry import TRAINED_BACKBONES
from duetgan.models.weights import load_pretrained
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.utils import extras
from duetgan.utils.config.cli import entry
from duetgan.utils.distributed import collectives
from duetgan.utils.runlog.run_log import say_main
from duetgan.utils.seeding import forked

IMAGES = 5000  # largest number of images to which the first filters are fitted
PART, PIXELS = 256, 1 << 22  # largest numbers of images and of pixels in memory at a time


def build_network(config: ClassifierConfig, dataset: Dataset, device: torch.device) -> Classifier:
    """Build the classifier with which a training begins, on the device.

    All ranks must call this. Raises UserError for weights that are missing or do not fit.
    """
    with forked(config.seed, "init", "classifier"):
        model = Classifier(config.model, **config.shape(dataset))
    initialise(model, dataset)
    if config.loss.several:
        model.add_thresholds()
    model = model.to(
        memory_format=torch.channels_last if config.channels_last else torch.contiguous_format
    )
    if config.model.split == "off":
        return model.to(device)
    entry(PLACEMENTS, "split", "model.split")(model, config, device)
    return model


# Functions that move a network to several devices if `model.split` is not off. An extra adds one.
PLACEMENTS: dict[str, Callable[[Classifier, ClassifierConfig, torch.device], None]] = {}


def initialise(model: Classifier, dataset: Dataset) -> None:
    """Load the weights that the config key `model.weights` names.

    If the key is null, fit the first filters to the images instead.
    """
    if model.config.weights is None:
        fit_first_filters(model, dataset)
        return
    with collectives.raising_together():  # Nodes may have different files.
        trained = TRAINED_BACKBONES.get(model.config.name)
        if trained is None:
            message = load_pretrained(model, dataset.meta.classes)
        else:
            message = trained.load(model)
    say_main(message)


@torch.no_grad()
def fit_first_filters(model: Classifier, dataset: Dataset) -> None:
    """Fit the filters of the first convolution to the images, if the backbone has a method for it.

    Up to IMAGES images are used. They are spread over the data set and not augmented. All ranks get
    the filters of rank 0.
    """
    if (first_filters := model.backbone.first_filters) is None:
        return

    def filters() -> list[float]:
        rows = np.linspace(0, len(dataset) - 1, min(IMAGES, len(dataset))).astype(np.int64)
        size = max(1, min(PART, PIXELS // max(*dataset.spec.size, model.side or 0) ** 2))
        parts = (
            read_batch(dataset, rows[start : start + size]).images
            for start in range(0, len(rows), size)
        )
        inputs = (model.prepare(dataset.spec.to_float(part)) for part in parts)
        return first_filters(inputs).flatten().tolist()

    weight = model.network.get_submodule(model.backbone.first).weight
    weight.copy_(
        torch.tensor(collectives.from_main_process(filters), dtype=weight.dtype).view_as(weight)
    )


def widen_narrow_maps(model: nn.Module) -> None:
    """Make strided convolutions pad inputs that are narrower than the stride, under CPU autocast.

    For such inputs oneDNN (torch 2.15, AVX-512) leaves a part of the weight gradient uninitialised.
    With 3x3 kernels and stride 2, this part is the taps that see only padding. The zeros that are
    added at the side do not change the output. Only convolutions with odd kernels and zero padding
    of half their width are changed, such as those of torchvision's networks.
    """

    def widened(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        assert isinstance(module, nn.Conv2d)
        (x,), stride = inputs, module.stride[1]
        if x.shape[-1] >= stride or not torch.is_autocast_enabled("cpu"):
            return None
        return (F.pad(x, (0, stride - x.shape[-1])),)

    for module in model.modules():
        if not (isinstance(module, nn.Conv2d) and isinstance(module.padding, tuple)):
            continue
        # Such a kernel gives 1 px with and without the additional zeros.
        keeps_size = module.kernel_size[1] == 2 * module.padding[1] + 1
        if module.stride[1] > 1 and keeps_size and module.padding_mode == "zeros":
            module.register_forward_pre_hook(widened)


extras.attach(__name__)
