"""How a script ends: exit codes, full streams (H20, H21), Ctrl-C, a library's threads."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from duetgan.utils.distributed import collectives
from duetgan.utils.distributed import process as processes
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import StoppedBySignal, TrainingHalted, UserError
from tests.conftest import REPOSITORY
from tests.end_to_end.helpers import write_config

FULL = "error: standard output: No space left on device; the output is incomplete\n"


def script(*command: str | Path, streams: str = "", path: str = "", **options: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python command...`, started by a shell with its `streams` redirected."""
    environment = {**os.environ, "PYTHONPATH": path}
    line = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, *map(str, command)]
    done = subprocess.run(line, cwd=REPOSITORY, env=environment, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("streams", "code", "told"), [(">/dev/full", 2, FULL), (">/dev/full 2>/dev/full", 2, ""), ("2>/dev/full", 0, "")]
)
def test_results_that_cannot_be_printed_are_one_line_and_an_exit_code(packed, streams, code, told):
    found = script("-m", "data.inspect", packed / "test.lmdb", "--json", streams=streams)
    assert (found[0], found[2]) == (code, told)
    assert bool(found[1]) == (code == 0)


def test_help_too_and_a_refusal_keeps_its_exit_code():
    assert script("train.py", "--help", streams=">/dev/full") == (2, "", FULL)
    assert script("train.py", "--config", "nowhere.yaml", streams=">/dev/full 2>/dev/full") == (2, "", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_terminal_gets_each_line_at_once_and_characters_that_it_lacks_as_escapes(unbuffered):
    code = "import os\nfrom duetgan.utils.distributed.process import guard\nguard()\n"
    code += "print('\xe9')\nos._exit(0)"
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": unbuffered}
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, stdout=theirs, check=True)
    os.close(theirs)
    try:
        assert os.read(ours, 100) == b"\\xe9\r\n"
    finally:
        os.close(ours)


def test_training_goes_on_where_the_terminal_is_gone(tmp_path, packed):
    recipe, run = write_config(tmp_path / "recipe.yaml", "gan", packed), tmp_path / "run"
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
def test_an_interruption_while_a_script_imports_is_one_line(tmp_path, command, monkeypatch):
    monkeypatch.setenv("DUET_RUNS", str(tmp_path))
    slow = tmp_path / "numpy" / "__init__.py"
    slow.parent.mkdir()
    slow.write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n")
    code, out, told = script(*command.split(), path=str(tmp_path))
    assert told == "stopped: interrupted from the keyboard\n"
    assert out == ""
    assert code in (-2, 130)  # of SIGINT, as shells expect it


@pytest.mark.parametrize(
    ("signum", "expected", "line"),
    [
        ("SIGINT", 130, "stopped: interrupted from the keyboard\n"),
        ("SIGTERM", 3, "stopped: SIGTERM; nothing was lost, the same command resumes\n"),
    ],
)
def test_a_signal_while_cpp_is_imported_aborts_nothing(tmp_path, signum, expected, line):
    """An exception that a signal handler raises below C++ is std::terminate: torch's import ended in SIGABRT so."""
    stub = tmp_path / "torch" / "__init__.py"
    stub.parent.mkdir()
    wait = f"    os.kill(os.getpid(), signal.{signum})\n    time.sleep(20)\n"
    stub.write_text(f"import os, signal, time\ntry:\n{wait}except BaseException:\n    os.abort()\n")
    recipe = REPOSITORY / "configs" / "quickstart_gan.yaml"
    found = script("train.py", "--config", recipe, "--run-dir", tmp_path / "run", path=str(tmp_path))
    assert found == (expected, "", line)


def test_others_processes_keep_their_own_ways(tmp_path):
    """torch.hub.load and notebooks import a part of this project."""
    code = "import sys, utils.errors; assert sys.excepthook is sys.__excepthook__; assert sys.stdout is sys.__stdout__"
    assert script("-c", code) == (0, "", "")


def raising(error):
    def main(_argv):
        raise error

    return main


@pytest.fixture(autouse=True)
def _rank_zero(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (2, 2)])
def test_what_main_returns_is_the_exit_code(returned, code):
    def main(argv):
        assert argv == ["--x"]
        return returned

    assert run_cli(main, ["--x"]) == code


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("x.yaml: bad\n  key; fix it"), 2, "error: x.yaml: bad key; fix it\n"),
        (StoppedBySignal("SIGTERM at step 3"), 3, "stopped: SIGTERM at step 3\n"),
        (TrainingHalted("too many"), 4, "error: too many\n"),
        (KeyboardInterrupt(), 130, "stopped: interrupted from the keyboard\n"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_its_code(capsys, error, code, line):
    assert run_cli(raising(error), []) == code
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", line)


def test_debug_prints_the_traceback_as_well_and_faults_of_ours_are_not_hidden(capsys):
    assert run_cli(raising(UserError("bad")), ["--debug"]) == 2
    found = capsys.readouterr().err
    assert "Traceback" in found
    assert found.endswith("error: bad\n")
    with pytest.raises(ZeroDivisionError):
        run_cli(raising(ZeroDivisionError()), [])


def test_other_ranks_leave_the_telling_to_rank_zero(capsys, monkeypatch):
    of_one = UserError("x.lmdb: no such file", rank_specific=True)
    of_one.of_rank = 1  # raised on all because of it
    for rank, error, line in (
        (1, UserError("all say so"), ""),
        (1, UserError("only here", rank_specific=True), "error on rank 1: only here\n"),
        (0, of_one, "error on rank 1: x.lmdb: no such file\n"),
        (1, of_one, ""),
    ):
        monkeypatch.setenv("RANK", str(rank))
        assert run_cli(raising(error), []) == 2
        assert capsys.readouterr().err == line


def test_a_reader_that_has_seen_enough_is_no_fault():
    code = "from duetgan.utils.distributed.process import exit_cli; exit_cli(lambda _: print('x' * 1_000_000))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # as `| head` does
        assert process.stderr.read() == b""
        assert process.wait() == 141


# threads that ask for Python's lock in C++, as gloo's do where a process group is not destroyed
SCRIPT = """
import sys, threading
import torch
from duetgan.utils.distributed import process as processes
from duetgan.utils.errors import UserError
from duetgan.utils.distributed.process import exit_cli

def work():
    a = torch.ones(64, 64)
    while True:
        a @ a

def main(argv):
    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    print("result")
    if "leave" in argv:
        processes.leave_threads()
    if "fault" in argv:
        raise KeyError("ours")
    raise UserError("bad input")

exit_cli(main)
"""


@pytest.mark.parametrize(("kind", "code", "told"), [("user", 2, "error: bad input"), ("fault", 1, "KeyError: 'ours'")])
def test_threads_that_are_left_do_not_abort_the_end(kind, code, told):
    """`--lr-find` on two ranks without a rate: SIGABRT instead of 2, once in five times."""
    command = [sys.executable, "-c", SCRIPT, "leave", kind]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.rstrip().endswith(told)
    assert done.stdout == "result\n"  # what was printed is not lost


def test_a_group_that_is_not_destroyed_leaves_threads(monkeypatch):
    monkeypatch.setattr(processes, "_threads_left", False)
    collectives.stop(lost=True)
    assert not processes._threads_left  # there was no group
    monkeypatch.setattr(collectives.dist, "is_initialized", lambda: True)
    collectives.stop(lost=True)
    assert processes._threads_left


def test_without_threads_the_end_is_the_usual_one(monkeypatch):
    monkeypatch.setattr(processes, "_threads_left", False)
    with pytest.raises(SystemExit) as end:
        processes.leave(3)
    assert end.value.code == 3
