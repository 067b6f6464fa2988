import subprocess
import sys

import pytest

from duetgan.utils.errors import StoppedBySignal, TrainingHalted, UserError
from duetgan.utils.script import run_cli


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
    code = "import sys; from duetgan.utils.script import run_cli; sys.exit(run_cli(lambda _: print('x' * 1_000_000)))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `| head` does
        assert process.stderr.read() == b""
        assert process.wait() == 141
