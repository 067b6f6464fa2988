"""The cases of a module in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY


def python(*arguments: str) -> str:
    """What a process of its own prints: the device is there for the rest of it."""
    found = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


class Parts(dict[str, Any]):
    """What each part of a module's cases has shown; it runs when it is first asked for."""

    def __init__(self, module: str, folder: Path, packed: Path) -> None:
        self.module, self.folder, self.packed = module, folder, packed

    def __missing__(self, part: str) -> Any:
        folder = self.folder / part
        folder.mkdir()
        for file in self.packed.iterdir():
            (folder / file.name).symlink_to(file)
        self[part] = json.loads(python("-m", self.module, part, str(folder)).splitlines()[-1])
        return self[part]


@pytest.fixture(scope="module")
def seen(request, packed, tmp_path_factory):
    return Parts(request.module.CASES, tmp_path_factory.mktemp("parts"), packed)
