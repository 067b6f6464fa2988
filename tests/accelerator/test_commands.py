"""The commands on the pretend accelerator: what they do on the CPU, on the device that was named and on no other."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.commands import COMMANDS
from tests.accelerator.test_accelerator import python

pytestmark = pytest.mark.timeout(900)  # all commands run when the first one's row is asked for
FAST = ("gradcam",)  # without the others a few seconds
REST = [name for name in (*COMMANDS, "explorer") if name not in FAST]
ON_THE_CPU = ("export-weights", "export-program")


@pytest.fixture(scope="module")
def see(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What is found of commands, each once."""
    kept: dict[tuple[str, ...], Any] = {}

    def run(names: tuple[str, ...]) -> Any:
        if names not in kept:
            folder = tmp_path_factory.mktemp("commands")
            for file in packed.iterdir():
                (folder / file.name).symlink_to(file)
            kept[names] = json.loads(python("-m", "tests.accelerator.commands", str(folder), *names).splitlines()[-1])
        return kept[names]

    return run


def check(found: dict[str, Any], name: str) -> None:
    assert found["files"] > 0
    assert found["differing"] == []
    first, named = found["bytes"]
    assert first == 0
    assert (named > 0) is (name not in ON_THE_CPU)
    assert bool(found["waits"]) is (name not in ON_THE_CPU)


@pytest.mark.parametrize("name", FAST)
def test_a_command_does_on_the_device_what_it_does_on_the_cpu(see, name):
    check(see(FAST)[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_the_other_commands_do_so_too(see, name):
    check(see(tuple(REST))[name], name)
