"""H20, H21: streams that are closed or full, and Ctrl-C while a script imports what it needs."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.end_to_end.helpers import write_config

LOST = "error: standard output: {}; what was to be printed is lost\n"
CLOSED, FULL = LOST.format("it is closed"), LOST.format("No space left on device")


def script(*command: str | Path, streams: str = "", path: str = "", **options: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python command...`, started by a shell with its `streams` redirected."""
    environment = {**os.environ, "PYTHONPATH": path}
    line = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, *map(str, command)]
    done = subprocess.run(line, cwd=REPOSITORY, env=environment, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("streams", "code", "told"),
    [
        (">&-", 2, CLOSED),
        (">/dev/full", 2, FULL),
        ("<&- >&- 2>&-", 2, ""),
        (">/dev/full 2>/dev/full", 2, ""),
        ("2>&-", 0, ""),
        ("2>/dev/full", 0, ""),
    ],
)
def test_results_that_cannot_be_printed_are_one_line_and_an_exit_code(
    packed: Path, streams: str, code: int, told: str
) -> None:
    found = script("-m", "data.inspect", packed / "test.lmdb", "--json", streams=streams)
    assert (found[0], found[2]) == (code, told)
    assert bool(found[1]) == (code == 0)


@pytest.mark.parametrize(("streams", "told"), [(">&-", CLOSED), (">/dev/full", FULL)])
def test_help_too(streams: str, told: str) -> None:
    assert script("train.py", "--help", streams=streams) == (2, "", told)


@pytest.mark.parametrize("streams", [">&-", ">/dev/full 2>/dev/full"])
def test_a_refusal_keeps_its_exit_code(streams: str) -> None:
    code, out, told = script("train.py", "--config", "nowhere.yaml", streams=streams)
    assert (code, out, told.count("\n")) == (2, "", int("2>" not in streams))


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_training_and_packing_need_no_stream(tmp_path: Path, packed: Path, streams: str) -> None:
    """Files do not get the numbers of closed streams: what is printed would end in them."""
    recipe, run = write_config(tmp_path / "recipe.yaml", "classifier", packed), tmp_path / "run"
    training = ["--config", str(recipe), "--run-dir", str(run), "--device", "cpu", "--steps", "2"]
    code, *told = script("train.py", *training, streams=streams)
    assert (code, told) == (0, ["", ""])
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert script("-m", "data.pack", packed / "test.lmdb", tmp_path / "x.lmdb", streams=streams)[0] == 2
    assert script("-m", "data.inspect", tmp_path / "x.lmdb", "--verify")[0] == 0


def test_training_goes_on_where_the_terminal_is_gone(tmp_path: Path, packed: Path) -> None:
    recipe, run = write_config(tmp_path / "recipe.yaml", "classifier", packed), tmp_path / "run"
    ours, theirs = pty.openpty()
    command = [sys.executable, "train.py", "--config", str(recipe), "--run-dir", str(run), "--device", "cpu"]
    command += ["--steps", "2"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=theirs, stderr=theirs, stdin=theirs) as process:
        os.close(theirs)
        os.read(ours, 1)
        os.close(ours)  # writing to the terminal is refused from here on
        assert process.wait(timeout=120) == 0
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize(
    "command", ["-m data.pack", "-m data.inspect", "-m data.duplicates", "quickstart.py"], ids=lambda c: c.split()[-1]
)
def test_an_interruption_while_a_script_imports_is_one_line(tmp_path: Path, command: str) -> None:
    slow = tmp_path / "numpy" / "__init__.py"
    slow.parent.mkdir()
    slow.write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n")
    code, out, told = script(*command.split(), path=str(tmp_path))
    assert told == "stopped: interrupted from the keyboard\n"
    assert out == ("looking at sample, then measuring this machine\n" if command == "quickstart.py" else "")
    assert code in (-2, 130)  # of SIGINT, as shells expect it


@pytest.mark.parametrize(
    ("signum", "expected", "line"),
    [
        ("SIGINT", 130, "stopped: interrupted from the keyboard\n"),
        ("SIGTERM", 3, "stopped: SIGTERM; nothing was lost, the same command resumes\n"),
    ],
)
def test_a_signal_while_cpp_is_imported_aborts_nothing(tmp_path: Path, signum: str, expected: int, line: str) -> None:
    """An exception that a signal handler raises below C++ is std::terminate: torch's import ended in SIGABRT so."""
    stub = tmp_path / "torch" / "__init__.py"
    stub.parent.mkdir()
    wait = f"    os.kill(os.getpid(), signal.{signum})\n    time.sleep(20)\n"
    stub.write_text(f"import os, signal, time\ntry:\n{wait}except BaseException:\n    os.abort()\n")
    recipe = REPOSITORY / "configs" / "quickstart_gan.yaml"
    found = script("train.py", "--config", recipe, "--run-dir", tmp_path / "run", path=str(tmp_path))
    assert found == (expected, "", line)


def test_others_processes_keep_their_own_ways(tmp_path: Path) -> None:
    """torch.hub.load and notebooks import a part of this project."""
    code = "import sys, utils.errors; assert sys.excepthook is sys.__excepthook__; assert sys.stdout is sys.__stdout__"
    assert script("-c", code) == (0, "", "")
