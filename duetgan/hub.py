"""Entry points of hubconf.py for torch.hub, which return trained networks.

torch.hub imports this module in the user's process. Every module of Duet is in the package
`duetgan`, so that none collides with a `utils.py`, `models.py` or `data/` of the user (pytorch
issue 65881). If the user has imported an installed `duetgan`, that one is used. To keep a model,
save its state dict or use export.py: a pickle of the whole model cannot be read without Duet.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from duetgan.models import registry, restore
from duetgan.utils.errors import UserError

dependencies = ["torch", "torchvision", "numpy", "safetensors", "pydantic", "yaml"]


def resnet_classifier(checkpoint: str, *, which: str = "last", device: str = "cpu") -> nn.Module:
    """Load a classifier: images float [N, channels, height, width] in [-1, 1] -> logits [N,
    classes].

    Args:
        checkpoint: a run folder of train.py, a checkpoint file, a .safetensors file of export.py,
            or a ready-made classifier (`torchvision:NAME`, `timm:NAME`, a state dict). Its average
            (EMA) weights are loaded; nothing in the file is executed.
        which: "last" or "best" checkpoint of a run folder.
        device: the device of the network: "cpu", "cuda", ...

    Returns the network in evaluation mode. Its `class_names` are a list of str in the order of the
    logits; `image_shape` is the (channels, height, width) of its images, `image_range` is
    (-1.0, 1.0).
    Raises ValueError (one line with the remedy) if the checkpoint is missing, damaged or of another
    task.
    """
    content = restore.open_checkpoint(checkpoint, which)[1]
    return _described(restore.classifier_from(content, device), content["classes"])


_GENERATOR = """Load a {} generator: z [N, z_dim] (normal), labels int64 [N] or None -> images
    [N, channels, height, width] in about [-1, 1].

    Call it as `model(z, labels)`. StyleGAN2 also takes `model(z, labels, truncation_psi=1.0, noise="const")`, where
    `noise` is "const", "none" or a list of maps with the shapes of `model.noise_shapes()`; `model.mapping` and
    `model.synthesis` are its two halves. The checkpoint of a progressively growing run that has not reached its full
    resolution gives a model with `forward` only, whose images are enlarged to the full resolution.

    Arguments, result and errors are those of `resnet_classifier`.
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
    """Set the attributes that entry points document on `model`, and return it."""
    model.class_names = list(class_names)
    model.image_shape = model.spec.shape
    model.image_range = (-1.0, 1.0)
    return model


dcgan = _generator("dcgan")
r3gan = _generator("r3gan")
stylegan2 = _generator("stylegan2")
