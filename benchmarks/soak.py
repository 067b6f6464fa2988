"""A soak: both tasks train for hours on two processes, undisturbed and disturbed, and nothing may grow or differ.

`python benchmarks/soak.py [--hours H | --minutes M] [--seed N] [--out DIR] [--json]`, 3 minutes unless told. Each task
trains undisturbed for a share of the time. Then it trains to the same step in another folder while ranks and launcher
are killed at random moments, stopped by signals, and the disk is filled and emptied; the same command resumes each
time. Evaluations, sample grids, TensorBoard and checkpoints go on throughout. DIR/soak.jsonl logs memory, open files
and threads of every process. The exit code is 1 unless all of them are flat and both runs end with the same bits.

The runs' disk is a tmpfs of this script's own. Where mounting is not allowed, the size of the processes' files is
limited instead (`--no-mount`).
"""

import contextlib
import functools
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import duetgan.commands.pack
from benchmarks.harness import parser_of, show
from benchmarks.soaking.verdict import MEASURES, other_rows, trends
from duetgan.utils.checkpoint import file_name, load
from duetgan.utils.config.yaml_files import save_yaml
from duetgan.utils.distributed.process import die_with_parent, process_state, run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_folder import runs_folder
from tests.end_to_end.helpers import differing

ROOT = Path(__file__).resolve().parents[1]
INSIDE = "DUET_SOAK_DISK"  # set in the process that has the disk of its own: its folder
DISK_MIB = 1500
DEFAULT_MINUTES = 3.0
SMALL = 1 << 16  # bytes that a file may have while the size of files is limited
KINDS = ("kill a rank", "kill the launcher", "stop", "fill the disk")
EXPECTED = ("ended by SIGKILL", "was not written")  # in the error of a start that ends with 4
CODES = {0, 3, 4, -signal.SIGKILL}  # how a start may end under these
UNDISTURBED = 0.38  # share of a task's time; the other run repeats steps after every kill
PATIENCE = 300.0  # seconds that an end may take
SIDE = 16  # px

GAN: dict[str, Any] = {
    "task": "gan",
    "generator": {"z_dim": 8, "w_dim": 8, "mapping_layers": 2, "channel_base": 128, "channel_max": 16},
    "discriminator": {"channel_base": 128, "channel_max": 16},
    "ada": {"mode": "adaptive"},
}
CLASSIFIER: dict[str, Any] = {
    "task": "classifier",
    "model": {"stem": "small-stride2"},
    "optimizer": {"name": "sgd", "lr": 0.02, "warmup_steps": 20},
    "augment": {"flip": True, "shift": 1, "mixup": 0.4, "mix_prob": 0.5},
}
EVERY = {"gan": 100, "classifier": 40}  # steps from one checkpoint to the next
TASKS = {"gan": GAN, "classifier": CLASSIFIER}


def recipe(task: str, data: Path) -> dict[str, Any]:
    """A tiny run without an end; `data` holds train.lmdb and test.lmdb."""
    every = EVERY[task]
    return TASKS[task] | {
        "steps": 10**9,
        "batch_size": 16,
        "precision": "fp32",
        "nonfinite_cap": 10**9,
        "log": {"every": 20, "samples_every": 2 * every},
        "checkpoint": {"every": every, "keep": 1},
        "evaluation": {"every": 2 * every, "n": 40},
        "data": {"path": str(data / "train.lmdb"), "val_path": str(data / "test.lmdb"), "workers": 2},
    }


def sample(pid: int) -> dict[str, float]:
    """Memory, open files and threads of a process. Raises OSError when it is gone.

    Memory in MiB: `anon_mib` is what it has taken for itself, and all that a leak can be; `file_mib` are pages of
    mapped files (libraries, packed images) and shared memory, which the kernel keeps and gives back as it likes.
    """
    process = Path(f"/proc/{pid}")
    lines = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    if "RssAnon" not in lines:
        raise ProcessLookupError(f"process {pid} has ended")  # and nobody has asked how
    kib = {name: int(lines[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")}
    return {
        "anon_mib": round(kib["RssAnon"] / 1024, 2),
        "file_mib": round((kib["RssFile"] + kib["RssShmem"]) / 1024, 2),
        "files": len(os.listdir(process / "fd")),
        "threads": int(lines["Threads"]),
    }


def family(launcher: int) -> dict[str, int]:
    """role -> process: the launcher and its ranks, as far as they are there."""
    found = {"launcher": launcher}
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            pairs = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            rank = next((pair[5:].decode() for pair in pairs if pair.startswith(b"RANK=")), None)
            if rank is not None:  # else it has not become one yet
                found[f"rank {rank}"] = int(child)
    return found


def saved_step(run: Path) -> int:
    """The step of a run's last checkpoint, 0 before the first."""
    last = run / "checkpoints" / "last.json"
    return int(json.loads(last.read_text())["step"]) if last.exists() else 0


class Disk:
    """Where the runs are: a file system of our own that can be full, else a limit of the size of files."""

    def __init__(self, folder: Path, *, own: bool) -> None:
        self.folder, self._own, self._ballast = folder, own, folder / "ballast"
        self._limited: list[int] = []

    def fill(self, processes: Sequence[int]) -> None:
        """Leave no room to these processes."""
        if self._own:
            with open(self._ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 20)):
                    pass
            return
        self._limited = list(processes)
        self._limit(SMALL)

    def empty(self) -> None:
        """Give the room back."""
        self._ballast.unlink(missing_ok=True)
        self._limit(resource.RLIM_INFINITY)
        self._limited = []

    def _limit(self, size: int) -> None:
        for pid in self._limited:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class Soak:
    """One soak: starts, disturbances, samples."""

    def __init__(self, out: Path, disk: Disk, *, seconds: float, seed: int) -> None:
        self.out, self.disk, self.draws = out, disk, random.Random(seed)
        self.share = seconds / len(TASKS)  # of each task
        self.every = min(10.0, max(0.5, seconds / 2000))  # seconds between samples
        self.gap = min(600.0, max(15.0, self.share / 16))  # between disturbances, on average
        self.rows: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []
        self._starts = 0
        self._before = 0  # bytes of the output that earlier starts have written

    def log(self, **row: Any) -> None:
        """A row of soak.jsonl."""
        row = {"time": round(time.monotonic(), 2), **row}
        self.rows.append(row)
        with open(self.out / "soak.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def run(self, task: str) -> None:
        """Both runs of a task, compared."""
        straight, disturbed = (self.disk.folder / f"{task}-{kind}" for kind in ("straight", "disturbed"))
        step = self.undisturbed(straight, task)
        self.disturbed(disturbed, task, step)
        states = [load(run / "checkpoints" / file_name(step))["state"] for run in (straight, disturbed)]
        names, rows = differing(*states), other_rows(straight, disturbed)
        self.log(run=task, step=step, differing=names, rows=rows)
        self.counts["steps"] += step
        if names or rows:
            self.findings.append(f"{task}: the ends differ: {names[:5]}, rows of steps {rows[:5]}")
        shutil.rmtree(straight)  # make room for the next task's
        shutil.rmtree(disturbed)

    def start(self, run: Path, task: str, *more: str) -> "subprocess.Popen[bytes]":
        """`train.py` on two processes."""
        self._starts += 1
        self.counts["starts"] += 1
        command = [sys.executable, "train.py", "--config", str(self.out / f"{task}.yaml"), "--run-dir", str(run)]
        with open(self.out / f"{run.name}.log", "ab") as output:
            self._before = output.tell()
            return subprocess.Popen(
                [*command, "--procs", "2", "--device", "cpu", *more],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    def watch(self, process: "subprocess.Popen[bytes]", run: Path, seconds: float) -> int | None:
        """Sample all of its processes for so long; its exit code where it ends before."""
        end = time.monotonic() + seconds
        while (code := process.poll()) is None and time.monotonic() < end:
            saved = saved_step(run)
            for role, pid in family(process.pid).items():
                with contextlib.suppress(OSError):
                    self.log(run=run.name, start=self._starts, role=role, pid=pid, saved=saved, **sample(pid))
            time.sleep(max(0.0, min(self.every, end - time.monotonic())))
        return code

    def undisturbed(self, run: Path, task: str) -> int:
        """Train for a share of the time; the step that it stopped at."""
        process = self.start(run, task)
        with ending(process):
            code = self.watch(process, run, UNDISTURBED * self.share)
            while code is None and not saved_step(run):
                code = self.watch(process, run, self.every)
            process.send_signal(signal.SIGTERM)
            code = code if code is not None else process.wait(PATIENCE)
        if code != 3:
            raise UserError(f"{self.out / run.name}.log: the undisturbed run ended with {code}, see there")
        return saved_step(run)

    def disturbed(self, run: Path, task: str, step: int) -> None:
        """Train to the same step, whatever is done to it."""
        quiet_from = time.monotonic() + (1 - UNDISTURBED) * self.share * 0.8
        code: int | None = None
        while code != 0:
            process = self.start(run, task, "--max-steps", str(step))
            with ending(process):
                code = None
                while code is None:
                    kind = self.draws.choice(KINDS)
                    wait = self.gap * self.draws.uniform(0.2, 1.8)
                    code = self.watch(process, run, wait if time.monotonic() < quiet_from else math.inf)
                    if code is None:
                        code = self.disturb(process, run, kind)
            self.disk.empty()
            self.log(run=run.name, start=self._starts, ended=code)
            self._check_end(run, code)

    def _check_end(self, run: Path, code: int) -> None:
        """Whether a start has ended as it should, by its code and what it said. Raises UserError where none will do."""
        output = self.out / f"{run.name}.log"
        said = output.read_bytes()[self._before :].decode(errors="replace")
        errors = [line for line in said.splitlines() if line.startswith("error")]
        known = code != 4 or any(word in line for word in EXPECTED for line in errors)
        if "Traceback" in said or not known:
            self.findings.append(f"{run.name}, start {self._starts}: ended with {code}: {errors[-1:] or 'a traceback'}")
        if code not in CODES:
            raise UserError(f"{output}: start {self._starts} ended with {code}, see there")

    def disturb(self, process: "subprocess.Popen[bytes]", run: Path, kind: str) -> int | None:
        """Do it; the exit code where that ends the run."""
        there = family(process.pid)
        ranks = [pid for role, pid in there.items() if role != "launcher"]
        self.log(run=run.name, start=self._starts, event=kind)
        self.counts[kind] += 1
        if kind == "fill the disk":
            if not saved_step(run):
                return None  # a start finds a full disk before its first step and refuses, as it should
            self.disk.fill(ranks)
            code = self.watch(process, run, self.draws.uniform(5, 20))
            self.disk.empty()
            return code
        if kind == "kill a rank" and ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.draws.choice(ranks), signal.SIGKILL)
        else:
            process.send_signal(signal.SIGTERM if kind == "stop" else signal.SIGKILL)
        code = process.wait(PATIENCE)
        while any(Path(f"/proc/{pid}/fd").exists() and _alive(pid) for pid in ranks):
            time.sleep(0.05)  # a killed launcher's ranks are ended by the kernel
        return code


def _alive(pid: int) -> bool:
    return process_state(pid) not in (None, "Z", "X")


@contextlib.contextmanager
def ending(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Nothing is left of it, however the block ends: its ranks die with it."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def summary(soak: Soak, seconds: float) -> dict[str, Any]:
    """The flat result; what is not flat is added to the findings."""
    found: dict[str, Any] = {"minutes": seconds / 60, "load_1min": os.getloadavg()[0]}
    found |= {name.replace(" ", "_"): count for name, count in sorted(soak.counts.items())}
    lives = trends(soak.rows)
    found["lifetimes"] = len(lives)
    for (run, start, role), measured in lives.items():
        for name, line in measured.items():
            if run.endswith("-straight"):
                key = f"{run.removesuffix('-straight')}_{role.replace(' ', '')}_{name}"
                found[key], found[f"{key}_per_hour"] = line.level, 3600 * line.slope
                found[f"{key}_per_hour_error"] = 3600 * line.error
                found[f"{key}_per_hour_at_most"] = 3600 * line.most
            if not line.flat(MEASURES[name]):
                told = f"{3600 * line.slope:+.3g} an hour (noise {3600 * line.error:.2g}) at {line.level:.4g}"
                soak.findings.append(f"{run}, start {start}, {role}: {name} grows, {told}")
    return found | {"findings": len(soak.findings)}


def with_own_disk(folder: Path, argv: Sequence[str]) -> int | None:
    """This script again where `folder` is a small file system of its own; None where that is not allowed."""
    mount = f'mount -t tmpfs -o size={DISK_MIB}m tmpfs "$0" && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", mount, str(folder)]
    try:
        if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
            return None
    except FileNotFoundError:
        return None
    command = [*inside, sys.executable, str(Path(__file__).resolve()), *argv]
    dies = functools.partial(die_with_parent, os.getpid())
    return subprocess.run(command, env=os.environ | {INSIDE: str(folder)}, preexec_fn=dies, check=False).returncode


def main(argv: list[str]) -> int:
    parser = parser_of("soak", __doc__)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances")
    results = "logs and result (default: runs/soak)"
    parser.add_argument("--out", default=str(runs_folder() / "soak"), metavar="DIR", help=results)
    parser.add_argument("--no-mount", action="store_true", help="a limit of the size of files instead of a full disk")
    options = parser.parse_args(argv)
    seconds = 60 * ((60 * options.hours + options.minutes) or DEFAULT_MINUTES)
    if not 0 < seconds < math.inf:
        raise UserError("--hours H and --minutes M must be above 0")
    out = Path(options.out).resolve()
    disk = out / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    own = os.environ.get(INSIDE) == str(disk)
    if not own and not options.no_mount and (code := with_own_disk(disk, argv)) is not None:
        return code
    if any(disk.iterdir()):
        raise UserError(f"{disk}: is not empty; give another --out")
    _prepare(out)
    soak, started = Soak(out, Disk(disk, own=own), seconds=seconds, seed=options.seed), time.monotonic()
    for task in TASKS:
        soak.run(task)
    result = summary(soak, time.monotonic() - started) | {"seed": options.seed, "mounted": int(own)}
    for finding in soak.findings:
        print(f"FOUND {finding}")
    show(result, as_json=options.json)
    return 1 if soak.findings else 0


def _prepare(out: Path) -> None:
    """The images and the recipes."""
    for split in ("train", "test"):
        file = str(out / f"{split}.lmdb")
        duetgan.commands.pack.main(["sample", file, "--size", str(SIDE), "--split", split, "--overwrite"])
    for task in TASKS:
        save_yaml(recipe(task, out), out / f"{task}.yaml")
    for left in (out / "soak.jsonl", *out.glob("*.log")):  # of an earlier soak
        left.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(run_cli(main))
