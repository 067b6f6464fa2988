import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from utils import inject
from utils.errors import UserError


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "_fired", set())
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(inject.VARIABLE, raising=False)
    inject.check()
    for step in range(3):
        inject.fire(step, rank=0)
        assert not any(inject.due(kind, step, rank=0) for kind in inject.KINDS)


def test_there_and_then_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(inject.VARIABLE, "1:20:nan, *:3:spike")
    assert [step for step in range(30) if inject.due("nan", step, rank=1)] == [20]
    assert not inject.due("nan", 20, rank=1)
    assert not inject.due("nan", 20, rank=0)
    assert inject.due("spike", 3, rank=7)
    assert not inject.due("spike", 3, rank=7)


def test_not_again_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(inject.VARIABLE, "0:1:nan")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not inject.due("nan", 1, rank=0)


@pytest.mark.parametrize("text", ["1:20", "x:1:nan", "1:x:nan", "0:1:meteor", "kill", "-1:0:kill"])
def test_what_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(inject.VARIABLE, text)
    with pytest.raises(UserError, match="is not rank:step:kind"):
        inject.check()


@pytest.mark.parametrize(("kind", "code"), [("kill", -signal.SIGKILL), ("term", -signal.SIGTERM), ("raise", 1)])
def test_what_the_process_does_to_itself(kind: str, code: int) -> None:
    script = "from utils.inject import fire; fire(4, rank=2); print('still here'); fire(5, rank=2); print('too')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        env=os.environ | {inject.VARIABLE: f"2:5:{kind}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert "too" not in done.stdout
    if kind == "raise":
        assert done.stdout == "still here\n"


def test_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(inject.VARIABLE, "0:0:oom")
    with pytest.raises(MemoryError):
        inject.fire(0, rank=0)
