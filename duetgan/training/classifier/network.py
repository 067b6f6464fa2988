"""What a classifier's network gets before the first step: a discriminator's weights, filters of
images, padding.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.metrics.lineage import provenance_of
from duetgan.models.backbones.discriminator import Trunk, form_of
from duetgan.models.classifier import Classifier
from duetgan.models.restore import discriminator_from, generator_from
from duetgan.models.weights import load_pretrained
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.provenance import Lineage, join, recorded
from duetgan.utils.runlog.run_log import say_main

IMAGES = 5000  # that are looked at, at most
PART, PIXELS = 256, 1 << 22  # images that are in memory at a time, and their pixels, at most
# the last ones: one start of a training builds several tasks
_last: dict[tuple[object, ...], list[float]] = {}


def initialise(model: Classifier, reader: Dataset) -> None:
    """Give a new network the weights that `model.weights` names, else first filters that fit the
    images. Collective.

    Raises UserError as `load_pretrained` and `load_discriminator`.
    """
    if model.config.weights is None:
        fit_first_filters(model, reader)
        return
    with collectives.raising_together():  # each node may have files of its own
        if model.config.discriminator is None:
            message = load_pretrained(model, reader.meta.classes)
        else:
            message = load_discriminator(model)
    say_main(message)


def load_discriminator(model: Classifier) -> str:
    """Copy the weights of the discriminator of the GAN's run that `model.config.weights` names, and
    leave the head new; returns what was taken, for a person.

    The discriminator has seen its generator's samples: the classifier's lineage says so, and it
    cannot judge any.
    Raises UserError for another task's checkpoint, and for a discriminator of another form than the
    config's.
    """
    run = model.config.weights
    assert run is not None
    path = resolve(run)
    content = load(path)
    state = Trunk(discriminator_from(content)).state_dict()
    taken = {name: value for name, value in state.items() if not name.startswith("fc.")}
    if form_of(content) != model.config.discriminator:
        raise UserError(
            f"model.weights {run}: its discriminator is not model.discriminator; leave that out"
        )
    model.network.load_state_dict(taken, strict=False)
    passport = provenance_of(
        generator_from(content), content, seed=content["config"].get("seed", 0)
    )
    model.lineage = join(recorded(content), Lineage.of(synthetic=[passport]))
    return f"weights from {path}: its discriminator up to 4 px, {len(taken)} tensors; head new"


@torch.no_grad()
def fit_first_filters(model: Classifier, reader: Dataset) -> None:
    """Where the backbone wants it, give the first convolution filters of images that lie evenly
    over the data, without augmentation; those that rank 0 finds, on all ranks. Another network
    stays as it is.
    """
    if (first_filters := model.backbone.first_filters) is None:
        return

    def filters() -> list[float]:
        data, config = (
            (reader.meta.content_hash, reader.resolution, reader.crop is None),
            model.config,
        )
        key = (*data, config.name, config.imagenet_normalised, model.side)
        if key not in _last:
            rows = np.linspace(0, len(reader) - 1, min(IMAGES, len(reader))).astype(np.int64)
            size = max(1, min(PART, PIXELS // max(*reader.spec.size, model.side or 0) ** 2))
            parts = (
                read_batch(reader, rows[start : start + size]).images
                for start in range(0, len(rows), size)
            )
            _last.clear()
            _last[key] = (
                first_filters(model.prepare(reader.spec.to_float(part)) for part in parts)
                .flatten()
                .tolist()
            )
        return _last[key]

    weight = model.network.get_submodule(model.backbone.first).weight
    weight.copy_(
        torch.tensor(collectives.from_main_process(filters), dtype=weight.dtype).view_as(weight)
    )


def widen_narrow_maps(model: nn.Module) -> None:
    """From now on the model's strided convolutions pad, in bf16 on CPUs, maps narrower than the
    stride up to it.

    oneDNN (torch 2.15, AVX-512) leaves parts of such a convolution's weight gradient as the memory
    was: of 3x3 with stride 2 those taps that see nothing but padding. Zeros beside the map are
    padding like any other, so the output stays as it is. Covered are odd kernels padded by half of
    them with zeros, as in torchvision's networks.
    """

    def widened(module: Any, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        (x,), stride = inputs, module.stride[1]
        if x.shape[-1] >= stride or not torch.is_autocast_enabled("cpu"):
            return None
        return (F.pad(x, (0, stride - x.shape[-1])),)

    for module in model.modules():
        if (
            not (isinstance(module, nn.Conv2d) and isinstance(module.padding, tuple))
            or module.padding_mode != "zeros"
        ):
            continue
        # the output has 1 px either way
        stays_narrow = module.kernel_size[1] == 2 * module.padding[1] + 1
        if module.stride[1] > 1 and stays_narrow:
            module.register_forward_pre_hook(widened)
