"""The commands on the pretend accelerator: on the device that was named and on no other."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.commands import COMMANDS
from tests.accelerator.test_accelerator import python

pytestmark = pytest.mark.timeout(900)  # all commands run when the first one's row is asked for
ON_THE_CPU = ("export-weights", "export-program")


@pytest.fixture(scope="module")
def see(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run all commands in one process; return what was seen, by command."""
    folder = tmp_path_factory.mktemp("commands")
    for file in packed.iterdir():
        (folder / file.name).symlink_to(file)
    return json.loads(python("-m", "tests.accelerator.commands", str(folder), *COMMANDS).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_works_on_the_device_that_was_named(see, name):
    found = see[name]
    assert found["files"] > 0
    first, named = found["bytes"]
    assert first == 0
    assert (named > 0) is (name not in ON_THE_CPU)
    assert bool(found["waits"]) is (name not in ON_THE_CPU)
