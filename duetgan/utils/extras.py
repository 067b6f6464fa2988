"""Attach the packages in `duetgan/extras` to registries of the core, which imports none of them."""

import importlib
from pathlib import Path
from types import ModuleType

PACKAGE = "duetgan.extras"


def packages() -> list[ModuleType]:
    """Return the installed extras, sorted by name, without those whose NEEDS are not installed."""
    try:
        folder = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return []
    names = sorted(file.parent.name for file in Path(folder.__path__[0]).glob("*/__init__.py"))
    modules = [importlib.import_module(f"{PACKAGE}.{name}") for name in names]
    return [module for module in modules if set(getattr(module, "NEEDS", ())) <= set(names)]


def names() -> list[str]:
    """Return the names of the extras in `packages`."""
    return [package.__name__.rpartition(".")[2] for package in packages()]


def commands() -> dict[str, tuple[str, str]]:
    """Return the extras' commands: name -> (module with `main`, line in `duet --help`)."""
    table: dict[str, tuple[str, str]] = {}
    for package in packages():
        table |= getattr(package, "COMMANDS", {})
    return table


def attach(module: str) -> None:
    """Import the modules of extras that add entries to the registries in the core's `module`.

    An extra lists them in ATTACHES: name of the core's module -> name of the extra's module. The
    last line of a core module with registries is `attach(__name__)`.
    """
    for package in packages():
        name = getattr(package, "ATTACHES", {}).get(module)
        if name is not None:
            importlib.import_module(name)
