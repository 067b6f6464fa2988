import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from duetgan.utils.distributed import rendezvous
from duetgan.utils.distributed.heartbeat import Heartbeat, clear, silent_ranks
from tests.conftest import REPOSITORY


def write(folder: Path, rank: int, **more: Any) -> None:
    """A sign of life of a process on another machine; this one has no process of its number."""
    sign = {"pid": 2**22 + 1, "host": "elsewhere", "step": 7, "left": None, "lost_peer": False} | more
    (folder / "heartbeat").mkdir(exist_ok=True)
    (folder / "heartbeat" / f"rank-{rank}.json").write_text(json.dumps(sign))


def told(folder: Path, world: int, own: int = 0, patience: float = 0.1) -> list[tuple[int, bool, str]]:
    return [(s.rank, s.gone, s.reason) for s in silent_ranks(folder, world, own_rank=own, patience=patience)]


def beating(folder: Path, rank: int, step: int = 0) -> Heartbeat:
    beat = Heartbeat(folder, rank, interval=0.02, parent=None)
    beat.step = step
    beat.start()
    return beat


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


PROGRAM = """
import pathlib, sys, time
from duetgan.utils.distributed.heartbeat import Heartbeat
parent = int(sys.argv[2]) if len(sys.argv) > 2 else None
Heartbeat(pathlib.Path(sys.argv[1]), 2, parent=parent, interval=0.05).start()
time.sleep(60)
"""


def test_it_stops_where_its_file_is_gone(tmp_path):
    beat = Heartbeat(tmp_path, 3, interval=60, parent=None)
    beat.start()
    (tmp_path / "heartbeat" / "rank-3.json").unlink()
    beat.stop()
    assert list(tmp_path.iterdir()) == []


def test_it_beats_and_leaves_nothing_behind(tmp_path):
    beat = beating(tmp_path, 3, step=5)
    sign = json.loads((tmp_path / "heartbeat" / "rank-3.json").read_text())
    assert (sign["rank"], sign["pid"], sign["step"], sign["left"]) == (3, os.getpid(), 5, None)
    beat.step = 6
    wait_for(lambda: json.loads(beat.path.read_text())["step"] == 6, 20)
    beat.stop()
    assert list(tmp_path.iterdir()) == []


def test_why_it_left_is_left(tmp_path):
    beat = beating(tmp_path, 1, step=9)
    beat.stop("MemoryError: no more")
    assert told(tmp_path, 2) == [(1, True, "rank 1 has left in step 9: MemoryError: no more")]
    beat.stop("Connection closed", lost_peer=True)
    assert told(tmp_path, 2) == []  # no cause is looked for there


def test_a_missing_file_means_a_rank_that_has_left(tmp_path):
    write(tmp_path, 0)
    assert told(tmp_path, 2, own=0) == [(1, True, "rank 1 has left")]
    for content in ("{half a", "{}", "[1]", '{"pid": 1}'):
        (tmp_path / "heartbeat" / "rank-1.json").write_text(content)
        assert told(tmp_path, 2, own=0) == [(1, True, "rank 1 has left")]


@pytest.mark.parametrize(("signum", "word"), [(signal.SIGKILL, "gone"), (signal.SIGSTOP, "stopped")])
def test_processes_of_this_machine_are_known_at_once(tmp_path, signum, word):
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=REPOSITORY) as process:
        wait_for((tmp_path / "heartbeat" / "rank-2.json").exists)
        write(tmp_path, 1)
        process.send_signal(signum)
        found = silent_ranks(tmp_path, 3, own_rank=0, patience=30)
        process.kill()
    assert [(s.rank, s.gone) for s in found] == [(2, word == "gone")]
    assert f"rank 2 is {word} (process {process.pid}" in found[0].reason


def test_who_does_not_beat_is_silent(tmp_path):
    write(tmp_path, 1)
    beat = beating(tmp_path, 2)
    found = told(tmp_path, 3, patience=1.0)
    beat.stop()
    assert found == [(1, False, "rank 1 gives no sign of life (host elsewhere, last seen in step 7)")]


def test_a_full_disk_does_not_end_the_process(tmp_path):
    (tmp_path / "heartbeat").write_text("a file in the way")
    beat = beating(tmp_path, 0)
    time.sleep(0.1)
    assert beat._thread.is_alive()
    beat._stopped.set()


def test_a_full_disk_does_not_look_like_a_rank_that_is_gone(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    beat = beating(tmp_path, 1)
    monkeypatch.setattr(Path, "write_text", refuse)
    time.sleep(0.1)
    assert told(tmp_path, 2, patience=0.5) == []
    assert [path.name for path in (tmp_path / "heartbeat").iterdir()] == ["rank-1.json"]
    beat.stop()


def test_what_an_earlier_start_has_left_is_cleared(tmp_path):
    clear(tmp_path)
    for rank in range(3):
        write(tmp_path, rank)
    (tmp_path / "heartbeat" / "rank-2.tmp").touch()
    clear(tmp_path)
    assert list((tmp_path / "heartbeat").iterdir()) == []


def test_an_orphan_ends_itself(tmp_path):
    """A process whose launcher is gone leaves; here the launcher is not the parent of what is started."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(os.getppid())]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (4, "error on rank 2: its launcher is gone, leaving\n")


TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def client(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=TIMEOUT)


def start_of(store: dist.TCPStore, world_size: int, *, late: int | None = None) -> set[str]:
    """The words of all ranks of one start; rank `late` comes when the others wait already."""
    others_wait = threading.Event()

    def rank(number: int) -> str:
        if number == late:
            others_wait.wait(1)
        return rendezvous.meet(client(store), number, world_size, TIMEOUT)

    with ThreadPoolExecutor(world_size) as pool:
        return set(pool.map(rank, range(world_size)))


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_every_start_has_a_word_of_its_own(store, late):
    words = [start_of(store, world_size, late=late) for world_size in (3, 3, 2, 4)]
    assert [len(found) for found in words] == [1, 1, 1, 1]
    assert len(set.union(*words)) == 4


def test_a_rank_that_was_killed_while_it_waited_is_not_in_the_way(store):
    store.set("duet/hello/1", "a word of the dead")
    assert len(start_of(store, 2, late=1)) == 1
    assert store.check(["duet/answer/a word of the dead"])  # nobody reads it


def test_rank_0_does_not_wait_for_ever(store):
    with pytest.raises(dist.DistStoreError, match="rank 1 has not come"):
        rendezvous.meet(store, 0, 2, timedelta(seconds=0.2))


def test_keys_of_an_earlier_start_are_not_seen(store, monkeypatch):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert rendezvous.fresh_store(TIMEOUT) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first, second = rendezvous.fresh_store(TIMEOUT), rendezvous.fresh_store(TIMEOUT)
    assert second is not None
    first.set("address", "of rank 0")
    assert first.check(["address"])
    assert not second.check(["address"])
