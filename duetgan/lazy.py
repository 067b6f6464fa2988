"""Import a module of a package only when one of the module's names is first used."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a function `__getattr__` for a package, which imports its modules on first use.

    When a name in `modules` is first used, the module that defines the name is imported. The names
    are also added to `dir(package)`, so that an interactive Python can complete them.

    Args:
        package: the full name of the package.
        modules: dict from a module's name within the package to the names that it defines. If two
            modules define a name, the last one is used.
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
