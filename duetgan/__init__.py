"""Duet as a library: `duetgan.load("runs/classifier").predict("cat.jpg")`; docs/library.md shows what there is.

`duetgan.data`, `duetgan.models`, `duetgan.utils`, ... are the folders of these names: beside this one in a checkout,
below it where it is installed. So Duet has one name in a process, and modules called `data` or `utils` are the user's.
Importing `duetgan` imports no torch; using it does.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duetgan.library import (
        Classifier,
        Generator,
        Predictions,
        Samples,
        Transform,
        load,
        load_classifier,
        load_generator,
    )
    from duetgan.utils.errors import UserError

__version__ = "0.1.0"
__all__ = [
    "Classifier",
    "Generator",
    "Predictions",
    "Samples",
    "Transform",
    "UserError",
    "__version__",
    "load",
    "load_classifier",
    "load_generator",
]

_HERE = Path(__file__).resolve().parent
HOME = _HERE / "scripts" if (_HERE / "scripts").is_dir() else _HERE.parent  # where train.py and configs/ are
if _HERE.parent == HOME:
    __path__.insert(0, str(HOME))  # the checkout
    # a script, or `python -m` (whose module is being looked for), started by a Python that is not the environment's
    _script = "".join(sys.argv[:1])  # empty where Python is embedded
    _starting = _script == "-m" or Path(_script).resolve().parent == HOME
    if _starting and not all(map(importlib.util.find_spec, ("lmdb", "pydantic", "torchvision"))):
        _remedy = "needs the packages of this project: `make setup`, then .venv/bin/python ..."
        print(f"error: Duet {_remedy}", file=sys.stderr)
        sys.exit(2)


def lazily(package: str, places: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A package's `__getattr__`: a module is imported when one of its names is asked for. `places`: module -> names; of
    a name in several the last counts. The package's `dir` has these names, too, for completion.
    """
    module_of = {name: f"{package}.{module}" for module, names in places.items() for name in names}

    def attribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    module = sys.modules.get(package)
    if module is not None:  # `python -m data.pack` imports it as `data`
        setattr(module, "__dir__", lambda: sorted({*vars(module), *module_of}))  # noqa: B010
    return attribute


__getattr__ = lazily("duetgan", {"library": __all__, "utils.errors": ["UserError"]})
