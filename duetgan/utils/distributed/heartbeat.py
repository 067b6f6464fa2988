"""Heartbeat files. After a failed collective they show which ranks are gone, stopped or silent.

Each process of a run writes RUN/heartbeat/rank-N.json every few seconds. People and schedulers can
read the files too (a liveness probe checks their age). A process removes its file when it ends.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from duetgan.utils.distributed.process import process_state

FILE = "rank-{}.json"
Sign = dict[str, Any]  # content of a heartbeat file
KEYS = {"pid", "host", "step", "left", "lost_peer"}
INTERVAL = 3.0  # seconds between two heartbeats
LOOK = 0.2  # seconds between two reads of the files
ORPHAN_EXIT_CODE = 4


class Silent(NamedTuple):
    """A rank that is gone, stopped or silent."""

    rank: int
    gone: bool  # its process has ended
    reason: str  # text for the user


class Heartbeat:
    """A daemon thread that writes this process's heartbeat file every `interval` seconds.

    The training loop sets `step`.

    Args:
        parent: the process id of the launcher, or None. If the launcher is killed (kill -9 of
            torchrun), this process gets another parent and would train on. Therefore the thread
            ends this process at once, without saving. This can leave only temporary files
            incomplete.
    """

    def __init__(
        self, folder: Path, rank: int, *, parent: int | None, interval: float = INTERVAL
    ) -> None:
        self.path = folder / "heartbeat" / FILE.format(rank)
        self.rank = rank
        self.parent = parent
        self.interval = interval
        self.step = 0
        self._left: str | None = None  # reason why this process leaves the run
        self._lost_peer = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first heartbeat and start the thread."""
        self._beat()
        self._thread.start()

    def stop(self, reason: str | None = None, *, lost_peer: bool = False) -> None:
        """End the thread. Remove the file, or write the `reason` into it for the other ranks.

        Args:
            reason: the reason why this process leaves the run; None if it has ended normally.
            lost_peer: True if this process leaves only because another rank is lost.
        """
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if reason is None:
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the last process removes the folder
                self.path.parent.rmdir()
        else:
            self._left, self._lost_peer = reason, lost_peer
            self._beat()

    def _run(self) -> None:
        while not self._stopped.wait(self.interval):
            if self.parent is not None and os.getppid() != self.parent:
                print(
                    f"error on rank {self.rank}: its launcher is gone, leaving",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(ORPHAN_EXIT_CODE)
            self._beat()

    def _beat(self) -> None:
        sign = {
            "rank": self.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "step": self.step,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "left": self._left,
            "lost_peer": self._lost_peer,
        }
        temporary = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(sign) + "\n")
            os.replace(temporary, self.path)
        # A full disk must not look like a rank that is gone; a new mtime needs no space.
        except OSError:
            with contextlib.suppress(OSError):
                os.utime(self.path)


def clear(folder: Path) -> None:
    """Remove the heartbeat files of earlier starts of a run, which may have had more processes."""
    for path in (folder / "heartbeat").glob("rank-*"):
        path.unlink(missing_ok=True)


def _read(folder: Path, rank: int) -> Sign | None:
    path = folder / "heartbeat" / FILE.format(rank)
    with contextlib.suppress(OSError, ValueError):
        sign = json.loads(path.read_text())
        if isinstance(sign, dict) and sign.keys() >= KEYS:
            return sign | {"touched": path.stat().st_mtime_ns}
    return None


def _failed(rank: int, sign: Sign | None) -> Silent | None:
    """Return a Silent if a rank is gone or stopped, else None.

    `sign` is the content of the rank's heartbeat file; None: there is no valid file. A rank is gone
    or stopped if it has no file, if the file announces its end, or if its process on this machine
    is gone or stopped. A rank that has left only because another one was lost does not count.
    """
    if sign is None:
        return Silent(rank, True, f"rank {rank} has left")
    if sign["left"] is not None and not sign["lost_peer"]:
        return Silent(rank, True, f"rank {rank} has left in step {sign['step']}: {sign['left']}")
    is_local = sign["host"] == socket.gethostname() and Path("/proc/self/stat").exists()
    if not is_local or sign["lost_peer"]:
        return None
    state = process_state(sign["pid"])
    if state not in (None, "Z", "X", "T", "t"):
        return None
    gone = state not in ("T", "t")
    reason = (
        f"rank {rank} is {'gone' if gone else 'stopped'} (process {sign['pid']}, last seen in step "
        f"{sign['step']})"
    )
    return Silent(rank, gone, reason)


def silent_ranks(
    folder: Path, world_size: int, *, own_rank: int, patience: float = 2.5 * INTERVAL
) -> list[Silent]:
    """Return the other ranks that are gone or stopped; if there are none, those that are silent.

    A rank is gone if it has left the run or its process has ended. It is stopped if its process is
    suspended, for example by SIGSTOP. It is silent if its file does not change within `patience`
    seconds. If a rank is gone or stopped, the function returns at once, otherwise after `patience`
    seconds.
    """
    first = {rank: _read(folder, rank) for rank in range(world_size) if rank != own_rank}
    end = time.monotonic() + patience
    while True:
        current = {rank: _read(folder, rank) for rank in first}
        candidates = [_failed(rank, sign) for rank, sign in current.items()]
        silent = [candidate for candidate in candidates if candidate is not None]
        if silent:
            return silent
        if time.monotonic() > end:
            break
        time.sleep(min(LOOK, patience))
    for rank, sign in current.items():
        previous = first[rank]
        if sign is None or sign["lost_peer"] or previous is None:
            continue
        if previous["touched"] == sign["touched"]:
            reason = (
                f"rank {rank} gives no sign of life (host {sign['host']}, "
                f"last seen in step {sign['step']})"
            )
            silent.append(Silent(rank, False, reason))
    return silent
