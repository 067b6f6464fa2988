"""Define the entry points of hubconf.py for torch.hub. Each loads a trained network.

torch.hub imports this module into the user's process. All modules of Duet are in the package
`duetgan`, so they cannot collide with a `utils.py`, `models.py` or `data/` of the user (pytorch
issue 65881). If the user has imported an installed `duetgan` before, torch.hub uses the installed
one. To store a network, save its state dict or use export.py. A pickle of the whole network can be
read only where Duet is available.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from duetgan.models import registry, restore
from duetgan.utils.errors import UserError

dependencies = ["torch", "torchvision", "numpy", "safetensors", "pydantic", "yaml"]


def resnet_classifier(checkpoint: str, *, which: str = "last", device: str = "cpu") -> nn.Module:
    """Load a trained classifier in evaluation mode.

    The network maps images, float [N, channels, height, width] in [-1, 1], to logits [N, classes].

    Args:
        checkpoint: a run folder of train.py, a checkpoint file, a .safetensors file of export.py,
            or a ready-made classifier (`torchvision:NAME`, `timm:NAME`, a state dict). The average
            (EMA) weights are loaded. No code in the file is executed.
        which: "last" or "best" checkpoint of a run folder.
        device: the device of the network: "cpu", "cuda", ...

    Returns the network. Its attribute `class_names` lists the class names in the order of the
    logits. `image_shape` is the (channels, height, width) of its images, and `image_range` is
    (-1.0, 1.0).

    Raises ValueError, whose message is one line with the remedy, if the checkpoint is missing or
    damaged, or is not of a classifier with one label per image.
    """
    content = restore.open_checkpoint(checkpoint, which)[1]
    return _described(restore.classifier_from(content, device), content["classes"])


_GENERATOR = """Load a trained {} generator in evaluation mode.

    Call the network as `model(z, labels)`. z, [N, z_dim], is drawn from a standard normal
    distribution. `labels` are int64 [N] (multi-hot [N, classes] if images have several labels), or
    None for an unconditional generator. The result is images [N, channels, height, width] in about
    [-1, 1].

    StyleGAN2 also takes `model(z, labels, truncation_psi=1.0, noise="const")`, where `noise` is
    "const", "none" or a list of maps with the shapes of `model.noise_shapes()`. Its two halves are
    `model.mapping` and `model.synthesis`. If the checkpoint is of a progressively growing run that
    has not reached its full resolution, the network has only `forward`, and its images are enlarged
    to the full resolution.

    Arguments, attributes of the result, and errors are those of `resnet_classifier`.
    """


def _generator(name: str) -> Callable[..., nn.Module]:
    def entry(checkpoint: str, *, which: str = "last", device: str = "cpu") -> nn.Module:
        content = restore.open_checkpoint(checkpoint, which)[1]
        saved = content["config"].get("architecture", registry.DEFAULT)
        if content["task"] == "gan" and saved != name:
            raise UserError(
                f"{checkpoint}: its generator is of architecture {saved}; load {saved!r}"
            )
        model = restore.generator_from(content, device, several=True)
        return _described(model, content["classes"] if model.classes else ())

    entry.__name__, entry.__doc__ = name, _GENERATOR.format(name)
    return entry


def _described(model: Any, class_names: Iterable[str]) -> Any:
    """Set `class_names`, `image_shape` and `image_range` of a network, and return the network."""
    model.class_names = list(class_names)
    model.image_shape = model.spec.shape
    model.image_range = (-1.0, 1.0)
    return model


dcgan = _generator("dcgan")
r3gan = _generator("r3gan")
stylegan2 = _generator("stylegan2")
