"""Find the packages in `duetgan/extras`, and let them add entries to registries of the core.

The core is the code outside that folder. It names none of the packages.
"""

import importlib
from pathlib import Path
from types import ModuleType

PACKAGE = "duetgan.extras"


def packages() -> list[ModuleType]:
    """Import and return the packages in `duetgan/extras`, sorted by name.

    A package is left out if it needs another one (listed in its NEEDS) that is not installed.
    """
    try:
        folder = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return []
    names = sorted(file.parent.name for file in Path(folder.__path__[0]).glob("*/__init__.py"))
    modules = [importlib.import_module(f"{PACKAGE}.{name}") for name in names]
    return [module for module in modules if set(getattr(module, "NEEDS", ())) <= set(names)]


def names() -> list[str]:
    """Return the folder names of the packages that `packages` returns."""
    return [package.__name__.rpartition(".")[2] for package in packages()]


def commands() -> dict[str, tuple[str, str]]:
    """Return a dict of the commands that extras add to `duet`.

    The key is the command's name, the value is (module with `main`, line in `duet --help`).
    """
    table: dict[str, tuple[str, str]] = {}
    for package in packages():
        table |= getattr(package, "COMMANDS", {})
    return table


def attach(module: str) -> None:
    """Import the extras' modules that add entries to the registries in the core module `module`.

    Each extra has a dict ATTACHES from the name of a core module to the name of its own module to
    import. A core module whose registries extras may extend ends with `attach(__name__)`.
    """
    for package in packages():
        name = getattr(package, "ATTACHES", {}).get(module)
        if name is not None:
            importlib.import_module(name)
