"""Signs of life: each process of a run writes RUN/heartbeat/rank-N.json every few seconds, and the
others can tell from these files who is gone, stopped or behind when a collective operation fails.

The files are for people and schedulers too (a liveness probe looks at their age); a run that has
left removes its own.
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

from duetgan.utils.script import process_state

FILE = "rank-{}.json"
KEYS = {"pid", "host", "step", "beats", "left", "lost_peer"}
INTERVAL = 3.0  # seconds between two signs of life
LOOK = 0.2  # seconds between two looks at them
ORPHAN_EXIT_CODE = 4


class Silent(NamedTuple):
    """A rank that does not answer."""

    rank: int
    gone: bool  # its process has ended
    reason: str  # for a person


class Heartbeat:
    """A daemon thread that writes this process's file; `step` is set by the training loop.

    With `parent` (a process id) it ends this process, at once and without saving, when that is no
    longer its parent: a launcher that was killed must not leave processes that train on (kill -9 of
    torchrun does). Whatever is being written then is a temporary file.
    """

    def __init__(
        self, folder: Path, rank: int, *, parent: int | None = None, interval: float = INTERVAL
    ) -> None:
        self.path = folder / "heartbeat" / FILE.format(rank)
        self.rank, self.parent, self.interval = rank, parent, interval
        self.step = 0
        self._beats = 0
        self._left: str | None = None  # why this process leaves
        self._lost_peer = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first sign of life and go on by itself."""
        self._beat()
        self._thread.start()

    def stop(self, reason: str | None = None, *, lost_peer: bool = False) -> None:
        """End the thread. The file is removed, or with a `reason` kept for the other ranks to read.
        `lost_peer`: this process leaves because it lost another rank, so it is not the cause.
        """
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if reason is None:
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the last one takes the folder along
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
        self._beats += 1
        sign = {
            "rank": self.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "step": self.step,
        }
        sign |= {"beats": self._beats, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        sign |= {"left": self._left, "lost_peer": self._lost_peer}
        temporary = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(sign) + "\n")
            os.replace(temporary, self.path)
        except (
            OSError
        ):  # a full disk must not look like a rank that is gone: a new time needs no room
            with contextlib.suppress(OSError):
                temporary.unlink()
            with contextlib.suppress(OSError):
                os.utime(self.path)


def clear(folder: Path) -> None:
    """Remove the files that an earlier start of the run has left, perhaps of more processes."""
    for path in (folder / "heartbeat").glob("rank-*"):
        path.unlink(missing_ok=True)


def _read(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        path = folder / "heartbeat" / FILE.format(rank)
        sign = json.loads(path.read_text())
        return (
            sign | {"touched": path.stat().st_mtime_ns}
            if isinstance(sign, dict) and sign.keys() >= KEYS
            else None
        )
    except (OSError, ValueError):
        return None


def _seen(rank: int, sign: dict[str, Any] | None) -> Silent | None:
    """What is known at once: of a process that has announced its end, and of one on this machine."""
    if sign is None:
        return Silent(rank, True, f"rank {rank} has left")
    if sign["left"] is not None and not sign["lost_peer"]:
        return Silent(rank, True, f"rank {rank} has left in step {sign['step']}: {sign['left']}")
    here = sign["host"] == socket.gethostname() and Path("/proc/self/stat").exists()
    state = process_state(sign["pid"]) if here and not sign["lost_peer"] else ""
    if state in (None, "Z", "X", "T", "t"):
        gone = state not in ("T", "t")
        what = "gone" if gone else "stopped"
        return Silent(
            rank,
            gone,
            f"rank {rank} is {what} (process {sign['pid']}, last seen in step {sign['step']})",
        )
    return None


def silent_ranks(
    folder: Path, world_size: int, *, own: int, patience: float = 2.5 * INTERVAL
) -> list[Silent]:
    """The other ranks that are gone or stopped, or give no sign of life for `patience` seconds; if
    all are alive and one is steps behind the others, that one. Empty: no rank in particular.

    Looks at once, and again until something is seen or that time is over.
    """
    before = {rank: _read(folder, rank) for rank in range(world_size) if rank != own}
    end = time.monotonic() + patience
    while True:
        now = {rank: _read(folder, rank) for rank in before}
        silent = [each for rank, sign in now.items() if (each := _seen(rank, sign)) is not None]
        if silent:
            return silent
        if time.monotonic() > end:
            break
        time.sleep(min(LOOK, patience))
    alive = {rank: sign for rank, sign in now.items() if sign is not None and not sign["lost_peer"]}
    for rank, sign in alive.items():
        then = before[rank]
        if then is not None and (sign["beats"], sign["touched"]) == (
            then["beats"],
            then["touched"],
        ):
            reason = f"rank {rank} gives no sign of life (host {sign['host']}, last seen in step {sign['step']})"
            silent.append(Silent(rank, False, reason))
    steps = {rank: sign["step"] for rank, sign in alive.items()}
    if not silent and len(set(steps.values())) > 1:
        slowest = min(steps, key=lambda rank: steps[rank])
        silent = [
            Silent(slowest, False, f"rank {slowest} is alive but still in step {steps[slowest]}")
        ]
    return silent
