"""Entry points of hubconf.py for torch.hub, which return trained or new networks.

torch.hub imports this module in the user's process. Every module of Duet is in the package
`duetgan`, so that none collides with a `utils.py`, `models.py` or `data/` of the user (pytorch
issue 65881). If the user has imported an installed `duetgan`, that one is used. To keep a model,
save its state dict or use export.py: a pickle of the whole model cannot be read without Duet.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from duetgan.models import classifier, registry, restore
from duetgan.models.restore import open_checkpoint
from duetgan.models.weights import load_pretrained
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.config.build import build
from duetgan.utils.config.model import Config
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked

dependencies = ["torch", "torchvision", "numpy", "safetensors", "pydantic", "yaml"]


def resnet_classifier(
    checkpoint: str | None = None,
    *,
    which: str = "last",
    device: str = "cpu",
    seed: int = 0,
    **sizes: object,
) -> nn.Module:
    """Build a classifier: images float [N, channels, height, width] in [-1, 1] -> logits [N,
    classes].

    Args:
        checkpoint: a run folder of train.py, a checkpoint file, a .safetensors file of export.py,
            or a ready-made classifier (`torchvision:NAME`, `timm:NAME`, a state dict). Its average
            (EMA) weights are loaded; nothing in the file is executed. None: a new network with
            random weights.
        which: "last" or "best" checkpoint of a run folder.
        device: the device of the network: "cpu", "cuda", ...
        seed: the seed of the random weights.
        sizes: options of a new network: `classes` (default 10), `channels` (3) and `resolution`
            (32 px; a string for rectangles: "96x64", width x height) of its images, and the keys
            of a config's `model` section, e.g. `name="convnext_tiny"`, `stem="small"`,
            `weights=FILE`. With `weights`, a line on stderr says which tensors were loaded.

    Returns the network in evaluation mode. Its `class_names` are a list of str in the order of the
    logits, empty for a new network; `image_shape` is the (channels, height, width) of its images,
    `image_range` is (-1.0, 1.0).
    Raises ValueError (one line with the remedy) if the checkpoint is missing, damaged or of another
    task, and for an unknown option.
    """
    if checkpoint is not None:
        content = _content(checkpoint, which, sizes)
        return _described(restore.classifier_from(content, device), content["classes"])
    model = _new(classifier.Classifier, classifier.ModelConfig, 10, sizes, device, seed)
    if model.config.weights is not None:
        print(load_pretrained(model), file=sys.stderr)
    return model


_GENERATOR = """Build a {} generator: z [N, z_dim] (normal), labels int64 [N] or None -> images
    [N, channels, height, width] in about [-1, 1].

    Call it as `model(z, labels)`. StyleGAN2 also takes `model(z, labels, truncation_psi=1.0, noise="const")`, where
    `noise` is "const", "none" or a list of maps with the shapes of `model.noise_shapes()`; `model.mapping` and
    `model.synthesis` are its two halves. The checkpoint of a progressively growing run that has not reached its full
    resolution gives a model with `forward` only, whose images are enlarged to the full resolution.

    Arguments (`checkpoint`, ...), result and errors are those of `resnet_classifier`, except that `classes` is 0 by
    default (unconditional), and that `sizes` are the keys of a config's `generator` section, e.g. `z_dim=128`.
    """


def _generator(name: str) -> Callable[..., nn.Module]:
    def entry(
        checkpoint: str | None = None,
        *,
        which: str = "last",
        device: str = "cpu",
        seed: int = 0,
        **sizes: object,
    ) -> nn.Module:
        if checkpoint is None:
            architecture = registry.ARCHITECTURES[name]
            return _new(
                architecture.generator, architecture.generator_config, 0, sizes, device, seed
            )
        content = _content(checkpoint, which, sizes)
        saved = content["config"].get("architecture", registry.DEFAULT)
        if content["task"] == "gan" and saved != name:
            raise UserError(
                f"{checkpoint}: its generator is of architecture {saved}; load {saved!r}"
            )
        model = restore.generator_from(content, device, several=True)
        return _described(model, content["classes"] if model.classes else ())

    entry.__name__, entry.__doc__ = name, _GENERATOR.format(name)
    return entry


def _content(checkpoint: str, which: str, sizes: dict[str, object]) -> Checkpoint:
    """Load a checkpoint. Raises UserError for any of `sizes`, which the checkpoint determines."""
    for name, value in sizes.items():
        if value is not None:
            raise UserError(f"{name}: the checkpoint sets it; leave it out")
    return open_checkpoint(checkpoint, which)[1]


def _new(
    network: Callable[..., nn.Module],
    config_class: type[Config],
    classes: int,
    sizes: dict[str, object],
    device: str,
    seed: int,
) -> Any:
    """Build a network with random weights of `seed`; torch's global generator does not change."""
    shape: dict[str, object] = {"classes": classes, "channels": 3, "resolution": 32}
    shape |= {name: sizes[name] for name in shape if sizes.get(name) is not None}
    keys = {name: value for name, value in sizes.items() if name not in shape}
    with forked(seed, "init", "hub"):
        model = network(build(config_class, keys, source="sizes"), **shape).to(device).eval()
    return _described(model, ())


def _described(model: Any, class_names: Iterable[str]) -> Any:
    """Set the attributes that entry points document on `model`, and return it."""
    model.class_names = list(class_names)
    model.image_shape = model.spec.shape
    model.image_range = (-1.0, 1.0)
    return model


dcgan = _generator("dcgan")
r3gan = _generator("r3gan")
stylegan2 = _generator("stylegan2")
