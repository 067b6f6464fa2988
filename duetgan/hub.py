"""What hubconf.py offers to torch.hub: trained or new networks.

torch.hub imports this in the user's process. All of it is below `duetgan`, so that it does not
collide with the user's own `utils.py`, `models.py` or `data/` (pytorch issue 65881). If an
installed `duetgan` was imported before, that one is used. To keep a model, save its state dict or
use export.py: a pickle of the whole model could not be read without Duet.
"""

import sys
from typing import Any

from duetgan.models import classifier, registry, restore
from duetgan.models.restore import open_checkpoint
from duetgan.models.weights import load_pretrained
from duetgan.utils.config.build import build
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked

dependencies = ["torch", "torchvision", "numpy", "safetensors", "pydantic", "yaml"]


def resnet_classifier(
    checkpoint: str | None = None,
    *,
    which: str = "last",
    device: str = "cpu",
    seed: int = 0,
    **sizes: Any,
) -> Any:
    """A classifier of images: float [N, channels, height, width] in [-1, 1] -> logits [N, classes].

    Args:
        checkpoint: a run folder of train.py, a checkpoint file, a .safetensors file of export.py,
            or a ready-made classifier (`torchvision:NAME`, `timm:NAME`, a state dict); its average
            (EMA) weights are loaded, nothing in the file is executed. None: a new network with
            random weights.
        which: "last" or "best" checkpoint of a run folder.
        device: where the network goes: "cpu", "cuda", ...
        seed: of the random weights.
        sizes: of a new network: `classes` (default 10), `channels` and `resolution` of its images
            (default 3, 32 px; text of rectangles: "96x64", width x height), and the keys of a
            config's `model` section, e.g. `name="convnext_tiny"`, `stem="small"`, `weights=FILE`;
            what was taken of these is told on stderr.

    Returns the network in evaluation mode. Its `class_names` are a list of str in the order of the
    logits, empty for a new network; `image_shape` is (channels, height, width) of its images,
    `image_range` their (-1.0, 1.0).
    Raises ValueError (one line with the remedy) where the checkpoint is missing, damaged or another
    task's, and for an unknown size.
    """
    if checkpoint is not None:
        content = _content(checkpoint, which, sizes)
        return _described(restore.classifier_from(content, device), content["classes"])
    model = _new(classifier.Classifier, classifier.ModelConfig, 10, sizes, device, seed)
    if model.config.weights is not None:
        print(load_pretrained(model), file=sys.stderr)
    return model


_GENERATOR = """A {} generator: z [N, z_dim] (normal), labels int64 [N] or None -> images [N, channels, height, width]
    in about [-1, 1].

    Call it as `model(z, labels)`; with styles and noise (StyleGAN2) as `model(z, labels, truncation_psi=1.0,
    noise="const")`: `noise` may be a list of maps of `model.noise_shapes()`, "const" or "none", and `model.mapping` and
    `model.synthesis` are its two halves. A run that was still growing gives its stage: `forward` only.

    Arguments (`checkpoint`, ...), result and errors as of `resnet_classifier`; `classes` is 0 by default, which is
    unconditional, and the other `sizes` are the keys of a config's `generator` section, e.g. `z_dim=128`.
    """


def _generator(name: str) -> Any:
    def entry(
        checkpoint: str | None = None,
        *,
        which: str = "last",
        device: str = "cpu",
        seed: int = 0,
        **sizes: Any,
    ) -> Any:
        if checkpoint is None:
            architecture = registry.ARCHITECTURES[name]
            return _new(
                architecture.generator, architecture.generator_config, 0, sizes, device, seed
            )
        content = _content(checkpoint, which, sizes)
        found = content["config"].get("architecture", registry.DEFAULT)
        if content["task"] == "gan" and found != name:
            raise UserError(
                f"{checkpoint}: its generator is of architecture {found}; load {found!r}"
            )
        model = restore.generator_from(content, device, several=True)
        return _described(model, content["classes"] if model.classes else ())

    entry.__name__, entry.__doc__ = name, _GENERATOR.format(name)
    return entry


def _content(checkpoint: str, which: str, sizes: dict) -> dict:
    """What the checkpoint holds; with one, sizes are its own: raise UserError for any that were
    given.
    """
    if given := [name for name, value in sizes.items() if value is not None]:
        raise UserError(f"{given[0]}: the checkpoint sets it; leave it out")
    return open_checkpoint(checkpoint, which)[1]


def _new(network: Any, config: Any, classes: int, sizes: dict, device: str, seed: int) -> Any:
    """A network with random weights of that seed; torch's own generator is left as it was."""
    shape = {"classes": classes, "channels": 3, "resolution": 32}
    shape |= {name: sizes[name] for name in shape if sizes.get(name) is not None}
    keys = {name: value for name, value in sizes.items() if name not in shape}
    with forked(seed, "init", "hub"):
        model = network(build(config, keys, source="sizes"), **shape).to(device).eval()
    return _described(model, ())


def _described(model: Any, names: Any) -> Any:
    """The network with what its user must know."""
    model.class_names, model.image_range = list(names), (-1.0, 1.0)
    model.image_shape = model.spec.shape
    return model


dcgan = _generator("dcgan")
r3gan = _generator("r3gan")
stylegan2 = _generator("stylegan2")
