"""Duet as a library: `duet.load_classifier("runs/classifier")`, `duet.load_generator("runs/gan")`.

Duet's own packages (`data`, `models`, `utils`, ...) are loaded under a name that nobody else has, as hubconf.py says:
modules of these names beside the user's script stay the user's. Importing `duet` imports no torch; loading does.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent
HOME = _HERE / "app" if (_HERE / "app").is_dir() else _HERE.parent  # installed: duet/app; else the checkout
__all__ = ["HOME", "load_classifier", "load_generator"]


def load_classifier(checkpoint: str | Path, *, which: str = "last", device: str = "cpu") -> Any:
    """A classifier of images: float [N, channels, resolution, resolution] in [-1, 1] -> logits [N, classes].

    `checkpoint`: a run folder of `duet train`, a checkpoint file, or a .safetensors file of `duet export`; `which`:
    "last" or "best" of a run folder. Its average (EMA) weights are loaded, nothing in the file is executed. The network
    is in evaluation mode and has `class_names`, `image_shape` and `image_range`. Raises ValueError (one line with the
    remedy) where the checkpoint is missing, damaged or a generator's.
    """
    return _hub().resnet_classifier(str(checkpoint), which=which, device=device)


def load_generator(checkpoint: str | Path, *, which: str = "last", device: str = "cpu") -> Any:
    """A generator of any architecture: z [N, z_dim] (normal), labels int64 [N] or None -> images [N, channels,
    resolution, resolution] in about [-1, 1].

    Arguments, attributes and errors as of `load_classifier`; what else a generator can do: `stylegan2` in hubconf.py.
    """
    return _hub()._any_generator(str(checkpoint), which=which, device=device)


def _hub() -> ModuleType:
    """hubconf.py, which knows how to load our packages."""
    name = "duet._hub"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HOME / "hubconf.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
