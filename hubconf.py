"""Entry points for torch.hub: `torch.hub.load("path/to/duet", "resnet_classifier", source="local", checkpoint=...)`.

torch.hub runs this file in the user's process, whose own `utils.py`, `models.py` or `data/` would be found in the place
of ours, or ours in the place of theirs (pytorch issue 65881). So our packages are imported under a name that nobody
else has: inside them, `import models.hooks` means `_duet_<hash of this folder>.models.hooks`. The user's modules and
sys.path are neither looked at nor changed. To keep a model, save its state dict or use export.py: a pickle of the whole
model would need this file to be read.
"""

import builtins as _builtins
import hashlib as _hashlib
import importlib as _importlib
import importlib.abc as _abc
import importlib.machinery as _machinery
import pathlib as _pathlib
import sys as _sys
import types as _types
import typing as _typing

dependencies = ["torch", "torchvision", "numpy", "safetensors", "jsonargparse", "yaml"]

_FOLDER = str(_pathlib.Path(__file__).resolve().parent)
_NAME = f"_duet_{_hashlib.blake2b(_FOLDER.encode(), digest_size=6).hexdigest()}"
_OURS = ("data", "inference", "metrics", "models", "training", "utils")


def _import(
    name: str,
    globals: _typing.Any = None,
    locals: _typing.Any = None,
    fromlist: _typing.Any = (),
    level: int = 0,
) -> _types.ModuleType:
    """`__import__` as our modules see it: their own packages are those below `_NAME`, the rest is everyone's."""
    first = name.partition(".")[0]
    if level or first not in _OURS:
        return _builtins.__import__(name, globals, locals, fromlist, level)
    module = _builtins.__import__(f"{_NAME}.{name}", globals, locals, fromlist, 0)
    return module if fromlist else _sys.modules[f"{_NAME}.{first}"]  # `import a.b` binds a


class _Loader(_machinery.SourceFileLoader):
    """Runs a module of ours with `_import` in the place of `__import__`."""

    def exec_module(self, module: _types.ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(_builtins), "__import__": _import}
        super().exec_module(module)


class _Finder(_abc.MetaPathFinder):
    """Finds the modules below `_NAME` in this folder, and no others."""

    name = _NAME

    def find_spec(self, fullname: str, path: _typing.Any, target: _typing.Any = None) -> _machinery.ModuleSpec | None:
        if not fullname.startswith(f"{_NAME}."):
            return None
        spec = _machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, _machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _ours(name: str) -> _types.ModuleType:
    """A module of this folder, e.g. `models.classifier`, whatever else has that name."""
    if _NAME not in _sys.modules:
        package = _types.ModuleType(_NAME, "Duet's packages, out of everyone's way.")
        package.__path__ = [_FOLDER]
        _sys.modules[_NAME] = package
    if not any(getattr(finder, "name", None) == _NAME for finder in _sys.meta_path):
        _sys.meta_path.insert(0, _Finder())
    return _importlib.import_module(f"{_NAME}.{name}")


def _checkpoint(path: str, which: str) -> dict:
    """The checkpoint that a run folder, a checkpoint file or a .safetensors file holds."""
    weights = _ours("inference.export.weights_file")
    if str(path).endswith(weights.SUFFIX):
        return weights.read_weights(_pathlib.Path(path))
    checkpoints = _ours("utils.checkpoint")
    return checkpoints.load(checkpoints.resolve(path, which))


def _refuse(given: dict) -> None:
    """With a checkpoint, sizes are its own: raise UserError for any that were given."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise _ours("utils.errors").UserError(f"{names[0]}: the checkpoint has sizes of its own; leave it out")


def resnet_classifier(
    checkpoint: str | None = None,
    *,
    which: str = "last",
    device: str = "cpu",
    seed: int = 0,
    classes: int | None = None,
    channels: int | None = None,
    resolution: int | None = None,
    **sizes: _typing.Any,
) -> _typing.Any:
    """A ResNet that names images: float [N, channels, resolution, resolution] in [-1, 1] -> logits [N, classes].

    Args:
        checkpoint: a run folder of train.py, a checkpoint file, or a .safetensors file of export.py; its average
            (EMA) weights are loaded, nothing in the file is executed. None: a new network with random weights.
        which: "last" or "best" checkpoint of a run folder.
        device: where the network goes: "cpu", "cuda", ...
        seed: of the random weights.
        classes: outputs of a new network (default 10).
        channels: of its images, 1 or 3 (default 3).
        resolution: of its images, px (default 32).
        sizes: of a new network, the keys of a config's `model` section, e.g. `name="resnet50"`, `stem="small"`.

    Returns:
        The network in evaluation mode; a trained one has `class_names`, a list of str in the order of the logits.

    Raises:
        ValueError: the checkpoint is missing, damaged or another task's, or a size is unknown; one line with the
            remedy.
    """
    shape = {"classes": classes, "channels": channels, "resolution": resolution}
    if checkpoint is not None:
        _refuse(shape | sizes)
        content = _checkpoint(checkpoint, which)
        model = _ours("models.restore").classifier_from(content, device)
        model.class_names = list(content["classes"])
        return model
    resnet, default = _ours("models.classifier"), {"classes": 10, "channels": 3, "resolution": 32}
    config = _ours("utils.config").build(resnet.ModelConfig, sizes, source="resnet_classifier")
    return _new(resnet.Classifier, config, default, shape, device, seed)


def stylegan2(
    checkpoint: str | None = None,
    *,
    which: str = "last",
    device: str = "cpu",
    seed: int = 0,
    classes: int | None = None,
    channels: int | None = None,
    resolution: int | None = None,
    **sizes: _typing.Any,
) -> _typing.Any:
    """A StyleGAN2 generator: z [N, z_dim] (normal), labels int64 [N] or None -> images [N, channels, resolution,
    resolution] in about [-1, 1].

    Call it as `model(z, labels, truncation_psi=1.0, noise="const")`; `noise` may be a list of maps of
    `model.noise_shapes()`, "const" or "none". `model.mapping` and `model.synthesis` are its two halves.

    Args:
        checkpoint: a run folder of train.py, a checkpoint file, or a .safetensors file of export.py; its average
            (EMA) weights are loaded, nothing in the file is executed. None: a new network with random weights.
        which: "last" or "best" checkpoint of a run folder.
        device: where the network goes: "cpu", "cuda", ...
        seed: of the random weights.
        classes: of a new network; 0, the default, is unconditional.
        channels: of its images, 1 or 3 (default 3).
        resolution: of its images, px, a power of two from 8 (default 32).
        sizes: of a new network, the keys of a config's `generator` section, e.g. `z_dim=128`, `channel_max=64`.

    Returns:
        The generator in evaluation mode; a trained one has `class_names`, a list of str in the order of the labels. A
        run that was still growing gives its stage, with a smaller interface: `forward` only.

    Raises:
        ValueError: the checkpoint is missing, damaged, another task's or architecture's, or a size is unknown; one
            line with the remedy.
    """
    return _generator("stylegan2", checkpoint, which, device, seed, (classes, channels, resolution), sizes)


def r3gan(
    checkpoint: str | None = None,
    *,
    which: str = "last",
    device: str = "cpu",
    seed: int = 0,
    classes: int | None = None,
    channels: int | None = None,
    resolution: int | None = None,
    **sizes: _typing.Any,
) -> _typing.Any:
    """An R3GAN generator: z [N, z_dim] (normal), labels int64 [N] or None -> images [N, channels, resolution,
    resolution] in about [-1, 1].

    Call it as `model(z, labels)`. Arguments, result and errors as of `stylegan2`; `sizes` are R3GAN's, e.g.
    `z_dim=64`, `width=64`.
    """
    return _generator("r3gan", checkpoint, which, device, seed, (classes, channels, resolution), sizes)


def _generator(
    name: str,
    checkpoint: str | None,
    which: str,
    device: str,
    seed: int,
    given: tuple[int | None, int | None, int | None],
    sizes: dict,
) -> _typing.Any:
    shape = dict(zip(("classes", "channels", "resolution"), given, strict=True))
    gan = _ours("models.registry")
    if checkpoint is None:
        architecture, default = gan.ARCHITECTURES[name], {"classes": 0, "channels": 3, "resolution": 32}
        config = _ours("utils.config").build(architecture.generator_config, sizes, source=name)
        return _new(architecture.generator, config, default, shape, device, seed)
    _refuse(shape | sizes)
    content = _checkpoint(checkpoint, which)
    found = content["config"].get("architecture", gan.DEFAULT)
    if content["task"] == "gan" and found != name:
        raise _ours("utils.errors").UserError(f"{checkpoint}: its generator is of architecture {found}; load {found!r}")
    model = _ours("models.restore").generator_from(content, device)
    model.class_names = list(content["classes"]) if model.classes else []
    return model


def _new(network: _typing.Any, config: _typing.Any, default: dict, given: dict, device: str, seed: int) -> _typing.Any:
    """A network with random weights of that seed; torch's own generator is left as it was."""
    shape = default | {name: value for name, value in given.items() if value is not None}
    with _ours("utils.seeding").forked(seed, "init", "hub"):
        return network(config, **shape).to(device).eval()
