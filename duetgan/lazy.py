"""Import a package's modules when one of their names is first used."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a package's `__getattr__` that imports a module when one of its names is first used.

    The package's `dir` lists these names too, for completion.

    Args:
        package: the full name of the package.
        modules: the names that each module of the package defines; if two modules define a name,
            the last one is used.
    """
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def attribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    module = sys.modules.get(package)
    if module is not None:  # None where `python -m data.pack` imports the package as `data`
        setattr(module, "__dir__", lambda: sorted({*vars(module), *module_of}))  # noqa: B010
    return attribute
