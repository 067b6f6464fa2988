"""The first minutes with Duet: pack the sample, train both models on this machine, evaluate them, write a report.

Each step is one of Duet's own commands, printed before it runs. After an interruption the same command resumes.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from data.dataset import Dataset
from reporting.report import write_quickstart_report
from utils.cli import Parser
from utils.errors import UserError, run_cli
from utils.files import write_atomic
from utils.provenance import environment

ROOT = Path(__file__).resolve().parent
SIZE = 32  # pixels of a side
QUICK_STEPS, QUICK_IMAGES = 12, 120  # of --quick: enough to run every line, too few to learn anything


class Step(NamedTuple):
    """One of Duet's commands."""

    name: str
    command: list[str]  # Python's arguments
    done: bool  # by an earlier start


@dataclass
class Quickstart:
    """The steps, where they write, and how long each took (kept in timings.json over interruptions)."""

    folder: Path
    quick: bool = False
    timings: dict[str, dict[str, Any]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    def run(self) -> int:
        """Run every step; the first that fails ends it with its exit code."""
        timings = self.folder / "timings.json"
        if timings.is_file():
            self.timings = json.loads(timings.read_text())
        for step in self.steps():
            self.commands.append(shlex.join(["python", *step.command]))
            print(f"\n$ {self.commands[-1]}", flush=True)
            if step.done:
                print(f"{step.name}: already done", flush=True)
                continue
            code = self.timed(step)
            if code != 0:
                told = f"error: {step.name} ended with exit code {code}; the same command resumes from here"
                print(told, file=sys.stderr)
                return code
        self.finish()
        return 0

    def steps(self) -> Iterator[Step]:
        """The steps in order, one by one: whether a step is done already is looked up when its turn comes."""
        train, test = (self.folder / "data" / f"{split}.lmdb" for split in ("train", "test"))
        for split, file in (("train", train), ("test", test)):
            pack = ["-m", "data.pack", "sample", shown(file), "--size", str(SIZE), "--split", split]
            done = file.exists() and complete(file)
            yield Step(f"pack {split}", pack + (["--overwrite"] if file.exists() and not done else []), done)
        for task in ("classifier", "gan"):
            yield Step(f"train {task}", self.training(task, train, test), finished(self.folder / task))
        images = ["--data", shown(test), *(["--n", str(QUICK_IMAGES)] if self.quick else [])]
        for task in ("classifier", "gan"):
            command = ["evaluate.py", "--checkpoint", shown(self.folder / task), *images]
            judge = ["--classifier", shown(self.folder / "classifier")] if task == "gan" else []
            yield Step(f"evaluate {task}", command + judge, done=False)

    def training(self, task: str, train: Path, test: Path) -> list[str]:
        """The command that trains a task or resumes it."""
        command = ["train.py", "--config", f"configs/quickstart_{task}.yaml", "--run-dir", shown(self.folder / task)]
        command += ["--data.path", shown(train), "--data.val-path", shown(test)]
        return command + (["--max-steps", str(QUICK_STEPS), "--log.every", str(QUICK_STEPS // 2)] if self.quick else [])

    def timed(self, step: Step) -> int:
        """Run a step and note its time; the time of an interrupted step accumulates."""
        before = self.timings.get(step.name, {"seconds": 0.0, "done": False})
        spent = 0.0 if before["done"] else before["seconds"]
        start = time.monotonic()
        code = call([sys.executable, *step.command])
        self.timings[step.name] = {"seconds": round(spent + time.monotonic() - start, 1), "done": code == 0}
        write_atomic(self.folder / "timings.json", json.dumps(self.timings, indent=1).encode())
        return code

    def finish(self) -> None:
        """Write summary.json and report.html and say where they are."""
        seconds = round(sum(step["seconds"] for step in self.timings.values()), 1)
        summary = summarise(self.folder, seconds)
        summary |= {"timings": {name: step["seconds"] for name, step in self.timings.items()}}
        summary |= {"versions": environment()}
        write_atomic(self.folder / "summary.json", f"{json.dumps(summary, indent=1)}\n".encode())
        report = write_quickstart_report(self.folder, commands=self.commands, seconds=seconds)
        print(f"\nclassifier: {summary['classifier']}\ngan: {summary['gan']}\n{seconds:.0f} seconds in all")
        print(f"summary: {shown(self.folder / 'summary.json')}\nreport:  {shown(report)}  (open it in a browser)")


def summarise(folder: Path, seconds: float) -> dict[str, Any]:
    """The figures of summary.json from both evaluations; the distance is the first extractor's, named beside it."""
    classifier, gan = (json.loads((folder / task / "eval/metrics.json").read_text()) for task in ("classifier", "gan"))
    first = gan["distances"][0]
    return {
        "seconds": seconds,
        "classifier": {"accuracy": classifier["accuracy"]},
        "gan": {
            "recognised": gan["recognised"],
            "diversity_ratio": gan["diversity_ratio"],
            "distance": first["frechet"],
            "floor": first["floor"],
            "extractor": first["extractor"],
            "n": first["n"],
        },
    }


def shown(path: Path) -> str:
    """A path as the commands get it: relative to the checkout, where they run, if it lies inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def complete(file: Path) -> bool:
    """Whether a packed file is whole, as its completion record says."""
    try:
        Dataset(file).close()
    except UserError as error:
        print(f"packing again: {error}", flush=True)
        return False
    return True


def finished(run: Path) -> bool:
    """Whether a run's training came to its end."""
    status = run / "status.json"
    return status.is_file() and json.loads(status.read_text()).get("state") == "finished"


def call(command: list[str]) -> int:
    """Run a command in the checkout and return its exit code, 128 + n if signal n ended it.

    Ctrl-C reaches the command from the terminal itself, SIGTERM is passed on: it saves its state and we wait for that.
    """
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL) as process, signals_left_to(process):
        code = process.wait()
    return 128 - code if code < 0 else code


@contextmanager
def signals_left_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """While the block runs, SIGINT and SIGTERM do not end this process; SIGTERM is passed on to `process`."""

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: list[str]) -> int:
    """Parse the options and run the steps."""
    parser = Parser(prog="quickstart.py", description=__doc__)
    parser.add_argument("--dir", help="folder of the results (default: runs/quickstart, or runs/quickstart_quick)")
    parser.add_argument("--quick", action="store_true", help=f"train {QUICK_STEPS} steps only, as a quick check")
    options = parser.parse_args(argv)
    default = ROOT / "runs" / ("quickstart_quick" if options.quick else "quickstart")
    folder = Path(options.dir).resolve() if options.dir else default
    return Quickstart(folder, options.quick).run()


if __name__ == "__main__":
    sys.exit(run_cli(main))
