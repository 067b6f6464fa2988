"""On the path of the processes that the fault suite starts: their classifiers are slim, their reports have no curves,
and what DUET_FAIL_AT asks for is put into modules when they have been imported.
"""

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tests.faults.inject import CHEAPER, PATCHES

ASKED = CHEAPER | (PATCHES if os.environ.get("DUET_FAIL_AT") else {})


class Finder:
    """Finds the modules to be patched."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, _target: Any = None) -> Any:
        if name not in ASKED:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        plain = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            ASKED[name](module, setattr)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
