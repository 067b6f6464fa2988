"""Import plug-ins, which add entries to the registries (docs/extending.md).

A plug-in is a file or module that the command line or a recipe names (`--import my_losses.py`), or
an installed package's entry point in the group `duetgan.plugins`. A checkpoint lists the plug-ins
that it was made with. Errors mention these, but nothing imports them.
"""

import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from duetgan.utils import files
from duetgan.utils.errors import Expected, UserError, explained

GROUP = "duetgan.plugins"
_imported: dict[str, str] = {}  # name of the file or module -> SHA-256 of the file


def load(names: Iterable[str] = ()) -> dict[str, str]:
    """Import all installed plug-ins, and the files (*.py) or modules in `names`.

    Returns a dict from each of `names` to the SHA-256 of its file. Raises UserError for a plug-in
    that is missing or fails.
    """
    for point in importlib.metadata.entry_points(group=GROUP):
        with explained(Exception, partial(_refused, f"plug-in {point.name} ({point.value})")):
            point.load()
    result = {}
    for name in names:
        if name not in _imported:
            with explained(Exception, partial(_refused, f"--import {name}")):
                is_file = name.endswith(".py")
                _imported[name] = _file(Path(name).expanduser()) if is_file else _module(name)
        result[name] = _imported[name]
    return result


def _file(path: Path) -> str:
    with files.reading(path, "give a .py file, or the name of an installed module"):
        content = files.read_file(path, files.CONFIG)
    digest = hashlib.sha256(content).hexdigest()
    spec = importlib.util.spec_from_file_location(f"imported_{path.stem}_{digest[:8]}", path)
    if spec is not None and spec.loader is not None and spec.name not in sys.modules:
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[spec.name]
            raise
    return digest


def _module(name: str) -> str:
    file = importlib.import_module(name).__file__
    return hashlib.sha256(files.read_file(Path(file), files.CONFIG)).hexdigest() if file else ""


def _refused(subject: str, error: Exception) -> UserError:
    name = "" if isinstance(error, Expected) else f"{type(error).__name__}: "
    return UserError(f"{subject}: {name}{error}; --debug prints the traceback")
