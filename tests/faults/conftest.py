"""The commands a user gives, what they end with, and broken files to give them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.end_to_end.helpers import write_config
from tests.faults import inject
from tests.faults.forks import Fork

SITE = REPOSITORY / "tests" / "faults" / "site"  # of what DUET_FAIL_AT asks for
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SITE}:{REPOSITORY}"}


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int  # negative: the signal that ended it
    out: str
    err: str

    def refusal(self, *told: str) -> str:
        """The one line of a refused command; it must hold all of `told`."""
        assert self.code == 2, (self.code, self.err)
        return self.error(*told)

    def error(self, *told: str) -> str:
        """The one error line of a command that did not end well."""
        assert self.code > 0, (self.code, self.err)
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert [part for part in told if part not in lines[0]] == [], lines[0]
        return lines[0]

    def success(self) -> "Outcome":
        """Nothing went wrong."""
        assert self.code == 0, (self.code, self.err)
        assert "Traceback" not in self.err
        return self


Command = Callable[..., Outcome]


def run_command(*argv: str | Path, folder: Path = REPOSITORY) -> Outcome:
    """`run_command("train.py", ...)` or `run_command("data.pack", ...)`, without the faults that are asked for."""
    return ended(Fork(list(map(str, argv)), dict(os.environ) | {inject.VARIABLE: ""}, folder))


@pytest.fixture(scope="session")
def command():
    return run_command


def start(*argv: str | Path) -> Fork:
    """The same with the faults that are asked for; it is not waited for."""
    return Fork(list(map(str, argv)), dict(os.environ))


def start_python(*argv: str | Path, prefix: Sequence[str] = (), **options: Any) -> "subprocess.Popen[str]":
    """The same in a process of its own, after `prefix`, such as a shell that changes what it may do.

    -B: on a full disk, Python itself leaves torn bytecode files.
    """
    script = ["-m", str(argv[0])] if str(argv[0]).startswith("data.") else [str(argv[0])]
    asked = {name: os.environ[name] for name in (inject.VARIABLE,) if name in os.environ}  # by this very test
    return subprocess.Popen(
        [*prefix, sys.executable, "-B", *script, *map(str, argv[1:])],
        cwd=REPOSITORY,
        env=ENVIRONMENT | asked,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def ended(process: "Fork | subprocess.Popen[str]") -> Outcome:
    out, err = process.communicate(timeout=300)
    assert process.returncode is not None
    return Outcome(process.returncode, out, err)


def own_process(*argv: str | Path, **options: Any) -> Outcome:
    """`start`, or with any options `start_python`, to its end."""
    return ended(start_python(*argv, **options) if options else start(*argv))


def with_mounts(*mounts: str) -> list[str]:
    """The prefix of a command that sees other file systems than everyone else. Skips where that is not allowed."""
    prefix = ["unshare", "--mount", "sh", "-e", "-c", "; ".join([*mounts, 'exec "$@"']), "sh"]
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, check=False, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare on this machine")
    if allowed.returncode:
        pytest.skip(f"file systems cannot be mounted here: {allowed.stderr.strip()}")
    return prefix


def training(folder: Path, task: str, packed: Path) -> list[str]:
    """`train.py` and its arguments for a tiny run in folder/run."""
    config = write_config(folder / "recipe.yaml", task, packed)
    return ["train.py", "--config", str(config), "--run-dir", str(folder / "run"), "--device", "cpu"]


@pytest.fixture
def recipe(tmp_path, packed):
    """Of a classifier."""
    return training(tmp_path, "classifier", packed)


@pytest.fixture
def gan_recipe(tmp_path, packed):
    """Of a GAN, whose checkpoints are small."""
    return training(tmp_path, "gan", packed)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, packed, command):
    """A classifier's run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    command(*training(folder, "classifier", packed), "--max-steps", "1", "--evaluation.every", "0").success()
    return folder / "run"


@pytest.fixture(scope="session")
def gan_trained(tmp_path_factory, packed, command):
    """A GAN's run of four steps with checkpoints of steps 2 and 4; the last is the best."""
    folder = tmp_path_factory.mktemp("gan_trained")
    command(*training(folder, "gan", packed), "--max-steps", "4").success()
    return folder / "run"


@pytest.fixture
def run(tmp_path, gan_trained):
    """A copy of `gan_trained`, in the run folder of `gan_recipe`."""
    return Path(shutil.copytree(gan_trained, tmp_path / "run"))
