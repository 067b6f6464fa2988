import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from duetgan.utils.distributed import launch as launcher
from duetgan.utils.distributed.launch import launch, parse_gpus, under_launcher
from duetgan.utils.distributed.process import SAME, STOP_SIGNALS, leaving_on_signals, obeyed_signals, run_cli
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises

# Python 3.12 warns of a fork where torch has threads; train.py launches before it imports torch
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

ROOT = Path(__file__).resolve().parents[3]
HEAD = "import os, pathlib, signal, sys, time\nrank, folder = int(os.environ['RANK']), pathlib.Path(sys.argv[1])\n"
ALIVE = "(folder / f'pid{rank}').write_text(str(os.getpid()))\ntime.sleep(60)\n"


@pytest.fixture
def script(tmp_path):
    """`script(text)` is a command that `launch` runs: a file with HEAD and the text, given tmp_path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(HEAD + text)
        return [str(path), str(tmp_path)]

    return write


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def pids(folder, count):
    """The processes that ALIVE has noted, once all of them have."""
    files = [folder / f"pid{rank}" for rank in range(count)]
    wait_for(lambda: all(file.is_file() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def ended(pid):
    """Whether a process is gone, or only waits to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("allotted", "gpus", "seen", "order"),
    [
        (None, "1,3", "1,3", "PCI_BUS_ID"),
        ("4,5", "0,1", "4,5", "FASTEST_FIRST"),
        ("GPU-8f,GPU-a2,6", "2,0", "6,GPU-8f", "FASTEST_FIRST"),
    ],
)
def test_gpus_are_counted_among_those_that_a_scheduler_has_allotted(monkeypatch, allotted, gpus, seen, order):
    monkeypatch.setattr(launcher, "launch", lambda argv, processes, *, resumes: 100 * processes)
    for name in (*launcher.VISIBLE, "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    if allotted:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allotted)
    assert launcher.start_processes("train.py", [], gpus, None, resumes=True) == 200
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == (seen, order)
    if allotted:
        with pytest.raises(UserError, match=r"--gpus 0,9: CUDA_VISIBLE_DEVICES has [23], .*; count them from 0"):
            launcher.start_processes("train.py", [], "0,9", None, resumes=True)


@pytest.mark.parametrize(("device", "procs", "expected"), [("cuda:1", 2, "cuda:1"), (None, 2, "cpu"), (None, 1, None)])
def test_one_process_takes_the_accelerator_and_several_the_cpu(device, procs, expected):
    assert launcher.requested_device(device, None, procs) == expected


@pytest.mark.parametrize(
    ("usable", "told"),
    [(0, "no usable GPU of this name here"), (1, "only 1 of these 2 can be used"), (2, None), (3, None)],
)
def test_gpus_that_cannot_be_used_are_not_replaced_by_the_cpu(monkeypatch, usable, told):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: usable)
    if told:
        assert_raises(UserError, f"--gpus 4,7: {told}", launcher.requested_device, None, "4,7", 2)
    else:
        assert launcher.requested_device(None, "4,7", 2) is None
    assert launcher.requested_device("cpu", "4,7", 2) == "cpu"


def test_parse_gpus():
    for text, expected in (("0", ["0"]), ("0,1", ["0", "1"]), (" 3 , 10", ["3", "10"])):
        assert parse_gpus(text) == expected
    for text in ("", "a", "0,", "0,0", "-1", "0;1", "cuda:0", "1.5"):
        assert_raises(UserError, r"--gpus .*0,1", parse_gpus, text)


def test_under_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not under_launcher()
    monkeypatch.setenv("RANK", "0")
    assert under_launcher()


def test_all_ranks_run_with_their_environment(script, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    names += ["OMP_NUM_THREADS", "PYTHONPATH"]
    command = script(f"(folder / f'env{{rank}}').write_text('|'.join(os.environ[n] for n in {names}))\n")
    assert launch(command, 3, resumes=True) == 0
    found = [(tmp_path / f"env{rank}").read_text().split("|") for rank in range(3)]
    assert [f[:5] for f in found] == [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    assert len({f[5] for f in found}) == 1
    assert {int(f[6]) for f in found} == {max(1, (os.cpu_count() or 1) // 3)}
    assert {f[7] for f in found} == {f"{ROOT}{os.pathsep}/mine"}  # a user's own modules are there
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launch(command, 1, resumes=True)
    assert (tmp_path / "env0").read_text().split("|")[6] == "7"


@pytest.mark.parametrize("code", [1, 2, 3, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_failing_ranks_exit_code_is_ours(script, code, rank, capfd):
    assert launch(script(f"sys.exit({code} if rank == {rank} else 0)"), 2, resumes=True) == code
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("processes", "rank", "resumes"), [(2, 0, True), (2, 1, True), (1, 0, True), (2, 1, False)])
def test_a_killed_rank_is_told_and_gives_4(script, capfd, processes, rank, resumes):
    """Also the last one; what does not resume is to be started again."""
    text = f"rank == {rank} and os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(0.7)\n"
    assert launch(script(text), processes, resumes=resumes) == 4
    remedy = launcher.REMEDY if resumes else launcher.AGAIN
    assert capfd.readouterr().err == f"error: rank {rank} was ended by SIGKILL; {remedy}\n"


@pytest.mark.parametrize(("rank", "grace", "left"), [(0, 0.5, False), (1, 0.5, False), (0, None, True)])
def test_the_first_failure_counts_and_the_others_get_a_grace(script, tmp_path, monkeypatch, rank, grace, left):
    """Who leaves within it is not killed."""
    monkeypatch.setattr(launcher, "GRACE_SECONDS", grace or launcher.GRACE_SECONDS)
    text = f"if rank == {rank}: sys.exit(2)\ntime.sleep({0.3 if left else 3})\n(folder / 'left').write_text('x')\n"
    assert launch(script(text), 2, resumes=True) == 2
    assert (tmp_path / "left").exists() == left


CALLER = """import sys
from duetgan.utils.distributed.launch import launch
sys.exit(launch(sys.argv[1:], 2, resumes=True))
"""


@pytest.fixture
def started(script):
    """`started(text)` runs `launch` of two ranks in a process of its own."""
    processes = []

    def start(text):
        command = [sys.executable, "-c", CALLER, *script(text)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_kill_9_of_the_launcher_ends_the_children(started, tmp_path):
    process = started(ALIVE)
    children = pids(tmp_path, 2)
    assert not any(ended(pid) for pid in children)
    process.kill()
    wait_for(lambda: all(ended(pid) for pid in children))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_who_dies_of_a_forwarded_signal_had_not_begun(started, tmp_path, signum, capfd):
    process = started(ALIVE)
    pids(tmp_path, 2)
    time.sleep(0.1)
    os.killpg(process.pid, signum)
    assert process.wait(20) == 3
    name = signal.Signals(signum).name
    assert capfd.readouterr().err == f"stopped: {name} before the first step; {SAME}\n"


def test_before_training_a_signal_is_one_line(capsys):
    before = signal.getsignal(signal.SIGTERM)

    def main(_):
        with leaving_on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    assert run_cli(main, []) == 3
    assert capsys.readouterr().err == f"stopped: SIGTERM; {SAME}\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert obeyed_signals() == [signum for signum in STOP_SIGNALS if signum != signal.SIGHUP]
        with leaving_on_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signals_are_forwarded_once_to_every_rank(started, tmp_path, signum):
    text = (
        "seen = []\n"
        f"signal.signal({int(signum)}, lambda *_: seen.append(1))\n"
        "(folder / f'pid{rank}').write_text(str(os.getpid()))\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(0.2)\n"
        "(folder / f'seen{rank}').write_text(str(len(seen)))\n"
        "sys.exit(3)\n"
    )
    process = started(text)
    pids(tmp_path, 2)
    time.sleep(0.1)  # the launcher takes over the signals right after starting the ranks
    os.killpg(process.pid, signum)  # as a terminal's Ctrl-C does: to every process of the launcher's group
    assert process.wait(20) == 3
    assert [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_handlers_are_put_back(script):
    before = [signal.getsignal(signum) for signum in STOP_SIGNALS]
    launch(script(""), 1, resumes=True)
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == before


def test_a_killed_process_is_named_though_another_ended_at_the_same_look(capfd):
    """Rank 0 left because rank 1 was gone; the look that saw both told of neither."""
    children = [subprocess.Popen(["sh", "-c", end]) for end in ("exit 4", "kill -9 $$")]
    for child in children:
        child.wait()
    assert launcher._wait(children, [], resumes=False) == 4
    assert capfd.readouterr().err == f"error: rank 1 was ended by SIGKILL; {launcher.AGAIN}\n"
