"""A study run by run: what is done is kept, what is missing is made, and the table is a function of the results."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from studies.declare import Arm, Result, Settings, Subject
from studies.document import document
from utils.distributed.launch import handling
from utils.errors import StoppedBySignal, UserError
from utils.files import as_json, check_writable, write_atomic
from utils.runlog.run_log import say
from utils.text import duration

DISCARDED = "checkpoints"  # folders of a run that go once it is judged
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# a choice to go on that depends on what was seen: the chance of an error is larger than the intervals and p say
SEEDS_ADDED = (
    "The study was begun with {} seeds, and raised to {} when results were there: if that was done because of them, "
    "p is too small. A study in earnest fixes its seeds before."
)


@dataclass
class Study:
    """A subject's jobs and runs in a folder. Seeds come one after the other, each with all arms, so that what is there
    is always a whole table over fewer seeds.
    """

    name: str
    subject: Subject
    folder: Path
    seeds: Sequence[int]
    keep_runs: bool = False

    def run(self, minutes: float | None = None) -> dict[str, Any]:
        """Make what is missing; returns study.json's document, which is written after every run. With `minutes` it ends
        by then, whatever is left. Raises StoppedBySignal after a signal, with everything saved.
        """
        check_writable(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._alone(), _stopping(minutes) as timer:
            try:
                self._make()
            except StoppedBySignal:
                self.write()
                if not timer.fired:
                    raise
                say(f"the {minutes:g} minutes are over; the same command goes on")
        return self.write()

    def _make(self) -> None:
        self.jobs = {job.name: job for job in self.subject.jobs()}
        arms = self.subject.arms()
        runs = [(arm, seed) for seed in self.seeds for arm in arms]
        for number, (arm, seed) in enumerate(runs, 1):
            key = self._arm_key(arm, seed)
            if self._kept(self._result_file(arm, seed), key) is None:
                for name in arm.needs:
                    self._job(name)
                self._one(arm, seed, key, f"[{number} of {len(runs)}] {arm.name}, seed {seed}")
                self.write()

    # --- jobs and runs

    def _job(self, name: str) -> None:
        """Make a job, after those it needs, unless it is done."""
        job = self.jobs[name]
        for before in job.needs:
            self._job(before)
        file, key = self.folder / "jobs" / f"{slug(name)}.json", self._job_key(name)
        if self._kept(file, key) is not None:
            return
        say(f"{job.what or name}")
        place = self.folder / "jobs" / slug(name)
        place.mkdir(parents=True, exist_ok=True)
        self._begin(place, key)
        start = time.monotonic()
        made = job.make(place)
        _write(file, {"key": key, "job": name, "told": made, "seconds": round(time.monotonic() - start, 1)})

    def _one(self, arm: Arm, seed: int, key: str, title: str) -> None:
        """One run, and its result into its file."""
        place = self.folder / "runs" / f"{slug(arm.name)}-s{seed}"
        place.parent.mkdir(parents=True, exist_ok=True)
        self._begin(place, key)
        start = time.monotonic()
        result = arm.make(place, seed)
        seconds = time.monotonic() - start
        about = {"key": key, "arm": arm.name, "seed": seed, "seeds": len(self.seeds), "seconds": round(seconds, 1)}
        _write(self._result_file(arm, seed), about | packed(result))
        if not self.keep_runs:
            shutil.rmtree(place / DISCARDED, ignore_errors=True)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in result.figures.items() if value is not None)
        say(f"{title}: {shown} ({duration(seconds)})")

    def _begin(self, place: Path, key: str) -> None:
        """Note what a place is for. Raises UserError if a start with other settings left more than logs there."""
        note = place.with_name(f"{place.name}.key")
        files = [*place.rglob("*"), *place.parent.glob(f"{place.name}.*")]
        left = any(file.is_file() and file.suffix not in (".key", ".log") for file in files)
        if left and note.is_file() and note.read_bytes() != key.encode():
            raise UserError(
                f"{place}: was begun with other settings; remove it and {place.name}.* beside it, or choose another"
                " --out"
            )
        write_atomic(note, key.encode())

    def _result_file(self, arm: Arm, seed: int) -> Path:
        return self.folder / "results" / f"{slug(arm.name)}-s{seed}.json"

    def _kept(self, file: Path, key: str) -> dict[str, Any] | None:
        """What an earlier start left in a file; None: nothing. Raises UserError if it is of other settings."""
        if not file.is_file():
            return None
        try:
            found: dict[str, Any] = json.loads(file.read_text())
            same = found["key"] == key
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file}: cannot be read ({error}); remove it, and it is made again") from error
        if not same:
            raise UserError(
                f"{file}: was made with other settings; choose another --out, or remove this study's folder"
            )
        return found

    def _job_key(self, name: str) -> str:
        job = self.jobs[name]
        return digest({"job": name, **job.key, "needs": [self._job_key(before) for before in job.needs]})

    def _arm_key(self, arm: Arm, seed: int) -> str:
        needs = [self._job_key(name) for name in arm.needs]
        return digest({"arm": arm.name, **arm.key, "seed": seed, "needs": needs})

    # --- results

    def write(self) -> dict[str, Any]:
        """study.json of the results that there are, and its document."""
        arms = self.subject.arms()
        there = {
            arm.name: {
                seed: unpacked(self._result_file(arm, seed))
                for seed in self.seeds
                if self._result_file(arm, seed).is_file()
            }
            for arm in arms
        }
        whole = [seed for seed in self.seeds if all(seed in results for results in there.values())]
        files = [self._result_file(arm, seed) for arm in arms for seed in there[arm.name]]
        at_first = min([json.loads(file.read_text()).get("seeds", 0) for file in files], default=0)
        found = document(self.name, self.subject, arms, there, whole, planned=self.seeds)
        if 0 < at_first < len(self.seeds):
            found["notes"].insert(0, SEEDS_ADDED.format(at_first, len(self.seeds)))
        _write(self.folder / "study.json", found)
        return found

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise UserError while another process makes this study."""
        with (self.folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                told = f"{self.folder}: another process makes this study; wait, or choose another --out"
                raise UserError(told) from error
            yield


class _Timer(threading.Timer):
    """Sends this process SIGTERM after some seconds."""

    fired = False

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, self._fire)
        self.daemon = True

    def _fire(self) -> None:
        self.fired = True
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _stopping(minutes: float | None) -> Iterator[_Timer]:
    """Inside the block signals, and the end of the minutes, raise StoppedBySignal; a training saves before."""

    def leave(signum: int, _frame: FrameType | None) -> NoReturn:
        raise StoppedBySignal(f"{signal.Signals(signum).name}; the same command goes on")

    timer = _Timer(60 * (minutes or 0))
    with handling(leave, STOPS):
        try:
            if minutes is not None:
                timer.start()
            yield timer
        finally:
            timer.cancel()


def told(folder: Path, name: str) -> dict[str, Any]:
    """What a job of the study in `folder` told; empty where it is not done."""
    file = folder / "jobs" / f"{slug(name)}.json"
    found: dict[str, Any] = json.loads(file.read_text())["told"] if file.is_file() else {}
    return found


def slug(name: str) -> str:
    """A name as a file's."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def digest(settings: Settings) -> str:
    """A short hash of settings; the same for equal ones."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def packed(result: Result) -> dict[str, Any]:
    """A result ready for JSON: of hits the number, and the bits as hexadecimal digits."""
    hits = {
        name: {"n": len(values), "bits": np.packbits(values.astype(bool)).tobytes().hex()}
        for name, values in result.hits.items()
    }
    return {"figures": result.figures, "hits": hits}


def unpacked(file: Path) -> Result:
    """The result in a file."""
    found = json.loads(file.read_text())
    hits = {
        name: np.unpackbits(np.frombuffer(bytes.fromhex(kept["bits"]), np.uint8), count=kept["n"]).astype(bool)
        for name, kept in found["hits"].items()
    }
    return Result(found["figures"], hits)


def _write(file: Path, tree: dict[str, Any]) -> None:
    write_atomic(file, as_json(tree))
