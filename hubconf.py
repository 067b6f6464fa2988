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
from typing import Any as _Any

dependencies = ["torch", "torchvision", "numpy", "safetensors", "pydantic", "yaml"]

_FOLDER = str(_pathlib.Path(__file__).resolve().parent)
_NAME = f"_duet_{_hashlib.blake2b(_FOLDER.encode(), digest_size=6).hexdigest()}"
_OURS = ("data", "inference", "metrics", "models", "training", "utils")


def _import(
    name: str, globals: _Any = None, locals: _Any = None, fromlist: _Any = (), level: int = 0
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

    def find_spec(self, fullname: str, path: _Any, target: _Any = None) -> _machinery.ModuleSpec | None:
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


def resnet_classifier(
    checkpoint: str | None = None, *, which: str = "last", device: str = "cpu", seed: int = 0, **sizes: _Any
) -> _Any:
    """A classifier of images: float [N, channels, resolution, resolution] in [-1, 1] -> logits [N, classes].

    Args:
        checkpoint: a run folder of train.py, a checkpoint file, or a .safetensors file of export.py; its average
            (EMA) weights are loaded, nothing in the file is executed. None: a new network with random weights.
        which: "last" or "best" checkpoint of a run folder.
        device: where the network goes: "cpu", "cuda", ...
        seed: of the random weights.
        sizes: of a new network: `classes` (default 10), `channels` and `resolution` of its images (default 3, 32 px),
            and the keys of a config's `model` section, e.g. `name="convnext_tiny"`, `stem="small"`.

    Returns the network in evaluation mode. Its `class_names` are a list of str in the order of the logits, empty for a
    new network; `image_shape` is (channels, height, width) of its images, `image_range` their (-1.0, 1.0).
    Raises ValueError (one line with the remedy) where the checkpoint is missing, damaged or another task's, and for an
    unknown size.
    """
    if checkpoint is not None:
        content = _content(checkpoint, which, sizes)
        return _described(_ours("models.restore").classifier_from(content, device), content["classes"])
    networks = _ours("models.classifier")
    return _new(networks.Classifier, networks.ModelConfig, 10, sizes, device, seed)


_GENERATOR = """A {} generator: z [N, z_dim] (normal), labels int64 [N] or None -> images [N, channels, resolution,
    resolution] in about [-1, 1].

    Call it as `model(z, labels)`; with styles and noise (StyleGAN2) as `model(z, labels, truncation_psi=1.0,
    noise="const")`: `noise` may be a list of maps of `model.noise_shapes()`, "const" or "none", and `model.mapping` and
    `model.synthesis` are its two halves. A run that was still growing gives its stage: `forward` only.

    Arguments (`checkpoint`, ...), result and errors as of `resnet_classifier`; `classes` is 0 by default, which is
    unconditional, and the other `sizes` are the keys of a config's `generator` section, e.g. `z_dim=128`.
    """


def _generator(name: str) -> _Any:
    """The entry point of an architecture of models/registry.py; "any": of a checkpoint's, whatever it is."""
    gan = _ours("models.registry")

    def entry(
        checkpoint: str | None = None, *, which: str = "last", device: str = "cpu", seed: int = 0, **sizes: _Any
    ) -> _Any:
        if checkpoint is None:
            architecture = gan.ARCHITECTURES[name]
            return _new(architecture.generator, architecture.generator_config, 0, sizes, device, seed)
        content = _content(checkpoint, which, sizes)
        actual = content["config"].get("architecture", gan.DEFAULT)
        if content["task"] == "gan" and name not in (actual, "any"):
            wrong = f"{checkpoint}: its generator is of architecture {actual}; load {actual!r}"
            raise _ours("utils.errors").UserError(wrong)
        model = _ours("models.restore").generator_from(content, device)
        return _described(model, content["classes"] if model.classes else ())

    entry.__name__, entry.__doc__ = name, _GENERATOR.format(name)
    return entry


_any_generator = _generator("any")  # of duet.load_generator


def _content(checkpoint: str, which: str, sizes: dict) -> dict:
    """What the checkpoint holds; with one, sizes are its own: raise UserError for any that were given."""
    given = [name for name, value in sizes.items() if value is not None]
    if given:
        raise _ours("utils.errors").UserError(f"{given[0]}: the checkpoint sets it; leave it out")
    return _ours("inference.export.weights_file").open_checkpoint(checkpoint, which)[1]


def _new(network: _Any, config: _Any, classes: int, sizes: dict, device: str, seed: int) -> _Any:
    """A network with random weights of that seed; torch's own generator is left as it was."""
    shape = {"classes": classes, "channels": 3, "resolution": 32}
    shape |= {name: sizes[name] for name in shape if sizes.get(name) is not None}
    keys = {name: value for name, value in sizes.items() if name not in shape}
    with _ours("utils.seeding").forked(seed, "init", "hub"):
        model = network(_ours("utils.config.build").build(config, keys, source="sizes"), **shape).to(device).eval()
    return _described(model, ())


def _described(model: _Any, names: _Any) -> _Any:
    """The network with what its user must know."""
    model.class_names, model.image_range = list(names), (-1.0, 1.0)
    model.image_shape = (model.channels, model.resolution, model.resolution)
    return model


for _name in _ours("models.registry").ARCHITECTURES:
    globals()[_name] = _generator(_name)
