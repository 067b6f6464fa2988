"""Code of one's own: a file or a module that a command line or a recipe names (`--import
my_losses.py`), and what installed packages have under the entry points `duetgan.plugins`. Being
imported, it adds its entries to the registries (docs/extending.md). What a checkpoint was made with
is told, never imported.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from duetgan.utils import bounded
from duetgan.utils.errors import Expected, UserError, explained

GROUP = "duetgan.plugins"
_imported: dict[str, str] = {}  # as it was named -> SHA-256 of its file


def load(names: Iterable[str] = ()) -> dict[str, str]:
    """Import the installed plug-ins and `names`, files (*.py) or modules; each name with the
    SHA-256 of its file.

    Raises UserError for what is not there or cannot be imported.
    """
    for point in importlib.metadata.entry_points(group=GROUP):
        with explained(Exception, partial(_refused, f"plug-in {point.name} ({point.value})")):
            point.load()
    result = {}
    for name in names:
        if name not in _imported:
            with explained(Exception, partial(_refused, f"--import {name}")):
                _imported[name] = (
                    _file(Path(name).expanduser()) if name.endswith(".py") else _module(name)
                )
        result[name] = _imported[name]
    return result


def _file(path: Path) -> str:
    with bounded.reading(path, "give a .py file, or the name of an installed module"):
        content = bounded.read_file(path, bounded.CONFIG)
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
    return hashlib.sha256(bounded.read_file(Path(file), bounded.CONFIG)).hexdigest() if file else ""


def _refused(what: str, error: Exception) -> UserError:
    if isinstance(error, Expected):
        return UserError(f"{what}: {error}")
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = (
        f"{last.filename}, line {last.lineno}"
        if not last.filename.startswith("<")
        else "its import"
    )
    return UserError(
        f"{what}: {type(error).__name__}: {error} ({where}); --debug prints the traceback"
    )


@contextlib.contextmanager
def hinting(config: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Add to an error of an unknown name what the run of that config was made with, if that is not
    imported here.
    """
    try:
        yield
    except UserError as error:
        named, here = config().get("imports"), [*_imported, *_imported.values()]
        pairs = named.items() if isinstance(named, dict) else ()
        missing = [
            f"--import {name}" for name, digest in pairs if name not in here and digest not in here
        ]
        if missing and "unknown" in str(error):
            error.args = (f"{error}; it was made with {' '.join(missing)}: add that",)
        raise
