"""The first minutes with Duet: pack images, train both models on this machine, evaluate them, write a report.

Without a FOLDER the embedded sample; a FOLDER is one of class folders or a flat one, a zip, a CSV, or whatever else
`data.pack` reads. What fits the images, the machine and --minutes is measured and chosen at the first start. Each step
is one of Duet's own commands, printed before it runs. After an interruption the same command resumes, by the same plan.
"""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from planning.choice import replanned
from planning.plan import Plan, Training, from_tree
from utils.config.cli import Parser, number
from utils.distributed.launch import handling, obeyed_signals
from utils.errors import EXIT_SIGNAL, UserError
from utils.files import check_writable, write_atomic
from utils.processes import die_with_parent
from utils.script import run_cli
from utils.text import duration

ROOT = Path(__file__).resolve().parent
CHECKOUT = (ROOT / "pyproject.toml").is_file()  # else installed by pip
WEEK = 7 * 24 * 60  # minutes
SAMPLE = "sample"
BEFORE_GAN = ("pack", "train classifier")  # parts of the plan
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
    plan: Plan
    timings: dict[str, dict[str, Any]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    def run(self) -> int:
        """Run every step; the first that fails ends it with its exit code."""
        timings = self.folder / "timings.json"
        if timings.is_file():
            self.timings = json.loads(timings.read_text())
        begun: set[str] = set()  # parts of the plan
        for step in self.steps():
            self.commands.append(typed(step.command))
            part, expected = part_of(step.name), self.plan.seconds
            seconds = 0.0 if part in begun else expected[part]
            begun.add(part)
            rest = sum(expected[name] for name in expected if name not in begun)
            timed = seconds and not self.plan.quick and not step.done
            told = f": about {duration(seconds)}, then {duration(rest)}" if timed else ""
            print(f"\n{time.strftime('%H:%M:%S')} {step.name}{told}\n$ {self.commands[-1]}", flush=True)
            if step.done:
                print(f"{step.name}: already done", flush=True)
                continue
            code = self.timed(step)
            if code != 0:
                how = "was stopped" if code == EXIT_SIGNAL else f"ended with exit code {code}"
                start = "" if code == EXIT_SIGNAL else "error: "
                print(f"{start}{step.name} {how}; the same command resumes from here", file=sys.stderr)
                return code
        self.finish()
        return 0

    def steps(self) -> Iterator[Step]:
        """The steps in order, one by one: whether a step is done already is looked up when its turn comes."""
        train, test = (self.folder / "data" / f"{split}.lmdb" for split in ("train", "test"))
        yield from self.packing(train, test)
        for task in trained(self.plan):
            if task == "gan":
                self.plan_again()
            command = self.training(task, trained(self.plan)[task], train, test)
            yield Step(f"train {task}", command, finished(self.folder / task))
        for task in trained(self.plan):
            yield Step(f"evaluate {task}", self.evaluation(task, test), done=False)

    def plan_again(self) -> None:
        """Before the GAN begins: another length for it where the machine turned out slower or faster than planned."""
        plan = self.plan
        if plan.quick or plan.replanned or (self.folder / "gan" / "config.yaml").exists():
            return
        spent: dict[str, float] = {}
        for name, step in self.timings.items():
            spent[part_of(name)] = spent.get(part_of(name), 0.0) + step["seconds"]
        spent = {part: spent.get(part, plan.seconds[part]) for part in BEFORE_GAN if part in plan.seconds}
        self.plan = replanned(plan, spent)
        if self.plan is not plan:
            print(f"\n{self.plan.notes[-1]}", flush=True)
            write_atomic(self.folder / "plan.json", f"{json.dumps(self.plan.tree(), indent=1)}\n".encode())

    def packing(self, train: Path, test: Path) -> Iterator[Step]:
        """The commands that pack: both parts of a source that has them, or one that splits a part off."""
        plan = self.plan
        images = ["--size", str(plan.size), "--channels", str(plan.survey.channels)]
        images += ["--pyramid", str(plan.smallest)] if plan.smallest < plan.size else []
        images += ["--on-error", "skip"] if plan.survey.source != SAMPLE else []
        if plan.val_share is None:
            parts = [("pack train", train, ["--split", "train"]), ("pack test", test, ["--split", "test"])]
        else:
            parts = [("pack", train, ["--val-share", f"{plan.val_share:g}", "--val-dest", shown(test)])]
        for name, file, options in parts:
            made = [train, test] if plan.val_share is not None else [file]
            done = all(each.exists() and complete(each) for each in made)
            overwrite = ["--overwrite"] if not done and any(each.exists() for each in made) else []
            pack = ["-m", "data.pack", plan.survey.source, shown(file), *images, *options, *overwrite]
            yield Step(name, pack, done)

    def training(self, task: str, training: Training, train: Path, test: Path) -> list[str]:
        """The command that trains a task or resumes it."""
        command = ["train.py", "--config", training.config, "--run-dir", shown(self.folder / task)]
        command += ["--data.path", shown(train), "--data.val-path", shown(test), *training.overrides]
        quick = ["--max-steps", str(QUICK_STEPS), "--log.every", str(QUICK_STEPS // 2)]
        return command + (quick if self.plan.quick else [])

    def evaluation(self, task: str, test: Path) -> list[str]:
        """The command that evaluates a task, the GAN with the classifier as judge."""
        command = ["evaluate.py", "--checkpoint", shown(self.folder / task), "--data", shown(test)]
        command += ["--n", str(QUICK_IMAGES)] if self.plan.quick else []
        if task == "gan":
            quick = ["--searched", str(QUICK_IMAGES), "--per-class", str(QUICK_IMAGES // 10)]
            quick += [] if self.plan.classifier else ["--extractor", "pixels"]  # there may be no weights
            options = quick if self.plan.quick else self.plan.evaluation
            command += self.judged(options, test) if self.plan.classifier else options
        return command

    def judged(self, options: list[str], test: Path) -> list[str]:
        """The GAN's options with the classifier as judge, or with its features alone where it may not judge."""
        run = shown(self.folder / "classifier")
        told = unfit(test.with_name("train.lmdb"), test)
        if not told:
            return ["--classifier", run, *options]
        print(f"the classifier does not judge the GAN: {told}", flush=True)
        features = f"classifier:{run}"
        if "--extractor" not in options:
            return ["--extractor", features, *options]
        return [features if option == "classifier" else option for option in options]

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
        from reporting.report import write_quickstart_report
        from utils.provenance import environment

        seconds = round(sum(step["seconds"] for step in self.timings.values()), 1)
        summary = summarise(self.folder, self.plan, seconds)
        summary |= {"timings": {name: step["seconds"] for name, step in self.timings.items()}}
        summary |= {"versions": environment()}
        write_atomic(self.folder / "summary.json", f"{json.dumps(summary, indent=1)}\n".encode())
        report = write_quickstart_report(
            self.folder,
            commands=self.commands,
            seconds=seconds,
            notes=[self.plan.survey.text(), *self.plan.notes],
            classifier=self.plan.classifier is not None,
        )
        print(f"\n{in_words(summary)}")
        print(f"{duration(seconds)} in all" + (f", {duration(self.plan.total)} expected" * (not self.plan.quick)))
        print(f"summary: {shown(self.folder / 'summary.json')}\nreport:  {shown(report)}  (open it in a browser)")


def in_words(summary: dict[str, Any]) -> str:
    """Both models' figures, a line each."""
    found, gan, lines = summary["classifier"], summary["gan"], []
    if found:
        known = " ({:.3f} to {:.3f})".format(*found["interval"]) if found["interval"] else ""
        lines = [f"classifier: accuracy {found['accuracy']:.3f}{known}, n {found['n']}"]
    figures = {"recognised": gan["recognised"], "diversity": gan["diversity_ratio"], "distance": gan["distance"]}
    words = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if value is not None)
    floor = "" if gan["floor"] is None else f" (real images: {gan['floor']:.3f})"
    return "\n".join([*lines, f"GAN: {words}{floor} by {gan['extractor'].partition(':')[0]}, n {gan['n']}"])


def summarise(folder: Path, plan: Plan, seconds: float) -> dict[str, Any]:
    """The figures of summary.json from both evaluations, the distance the first extractor's, and what was planned."""
    figures = {task: json.loads((folder / task / "eval/metrics.json").read_text()) for task in trained(plan)}
    classifier, gan = figures.get("classifier"), figures["gan"]
    first = gan["distances"][0]
    return {
        "seconds": seconds,
        "classifier": classifier and accuracy_of(classifier),
        "gan": {
            "recognised": gan["recognised"],
            "diversity_ratio": gan["diversity_ratio"],
            "distance": first["frechet"],
            "floor": first["floor"],
            "extractor": first["extractor"],
            "n": first["n"],
            **sure_of(gan, first),
        },
        "plan": {
            "source": plan.survey.source,
            "minutes": plan.minutes,
            "expected_seconds": round(plan.total, 1),
            "replanned": plan.replanned,
            "notes": plan.notes,
            **{task: about(folder / task, training, plan.quick) for task, training in trained(plan).items()},
        },
    }


def part_of(step: str) -> str:
    """The part of the plan that a step belongs to: packing is one command or two."""
    return "pack" if step.startswith("pack") else step


def trained(plan: Plan) -> dict[str, Training]:
    """The plan's trainings by their task."""
    return ({"classifier": plan.classifier} if plan.classifier else {}) | {"gan": plan.gan}


def accuracy_of(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The accuracy, the interval in which the true one lies at 95 %, and of how many images."""
    found = {"accuracy": evaluation["accuracy"], "interval": evaluation.get("accuracy_interval")}
    return found | {"n": evaluation.get("n")}


def sure_of(gan: dict[str, Any], distance: dict[str, Any]) -> dict[str, Any]:
    """The 95 % intervals of a generator's figures, and fidelity and coverage with theirs; those that there are."""
    shares = ("clipped_density", "clipped_coverage")
    names = ("recognised_interval", "diversity_ratio_interval", *shares, *(f"{name}_interval" for name in shares))
    found = {name: gan[name] for name in names if name in gan}
    interval = {"distance_interval": distance["frechet_interval"]} if "frechet_interval" in distance else {}
    return interval | found


def about(run: Path, training: Training, quick: bool) -> dict[str, Any]:
    """Which recipe, how long, how fast, and the precision that the run's own config.yaml names."""
    config = run / "config.yaml"
    used = re.search(r"^precision: (\w+)", config.read_text(), re.MULTILINE) if config.is_file() else None
    guessed = {"steps": QUICK_STEPS, "images_per_second": None, "seconds": None} if quick else {}
    return asdict(training) | guessed | ({"precision": used[1]} if used else {})


def shown(path: Path) -> str:
    """A path as the commands get it: relative to the checkout, where they run, if it lies inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def typed(command: list[str]) -> str:
    """A command as it is typed: `python train.py ...`, or `duet train ...` where Duet is installed."""
    script, *arguments = command[1:] if command[0] == "-m" else command
    name = script.removesuffix(".py").rpartition(".")[2]
    return shlex.join(["python", *command] if CHECKOUT else ["duet", name, *arguments])


def complete(file: Path) -> bool:
    """Whether a packed file is whole, as its completion record says."""
    from data.reading.dataset import Dataset

    try:
        Dataset(file).close()
    except UserError as error:
        print(f"packing again: {error}", flush=True)
        return False
    return True


def unfit(train: Path, test: Path) -> str:
    """Why a classifier of these training images cannot judge samples, as `metrics.lineage` says; empty if it can."""
    from data.reading.dataset import Dataset
    from metrics.lineage import TOLERATED, overlap

    with Dataset(train) as trained, Dataset(test) as tested:
        if trained.meta.passport:
            return "its training images are samples"
        share = overlap(tested, trained) / len(tested)
    return f"it was trained on {share:.1%} of the test images" if share > TOLERATED else ""


def finished(run: Path) -> bool:
    """Whether a run's training came to its end."""
    status = run / "status.json"
    return status.is_file() and json.loads(status.read_text()).get("state") == "finished"


def call(command: list[str]) -> int:
    """Run a command in the checkout and return its exit code, 128 + n if signal n ended it.

    It has a session of its own: a terminal's Ctrl-C, and whatever else asks this process to stop, reaches it once,
    through us. It saves its state and we wait for that; where we are killed it is too.
    """
    processes: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals before there is a process

    def forward(number: int, _frame: FrameType | None) -> None:
        if processes:
            processes[0].send_signal(number)
        else:
            early.append(number)

    dies = functools.partial(die_with_parent, os.getpid())
    own: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": dies}
    with handling(forward, obeyed_signals()), subprocess.Popen(command, cwd=ROOT, **own) as process:
        processes.append(process)
        for number in early:
            process.send_signal(number)
        while (code := process.poll()) is None:
            with suppress(subprocess.TimeoutExpired):  # a signal just before a wait without end would not be seen
                process.wait(timeout=5)
    return 128 - code if code < 0 else code


def plan_for(folder: Path, options: Namespace) -> Plan | int:
    """The plan of the folder's first start, else a new one; or the exit code of what makes it. Raises UserError."""
    file = folder / "plan.json"
    source = options.source if options.source == SAMPLE or "://" in options.source else place(options.source)
    if file.is_file():
        return check_plan(file, source, options)
    check_writable(folder)
    print(f"looking at {source}" + (", then measuring this machine" * (not options.quick)), flush=True)
    command = [sys.executable, "-m", "planning.here", source, "--out", str(file), "--minutes", f"{options.minutes:g}"]
    command += ["--weights", str(Path(options.weights).resolve())] if options.weights else []
    code = call(command + (["--quick"] if options.quick else []))
    return from_tree(json.loads(file.read_text())) if code == 0 else code


def check_plan(file: Path, source: str, options: Namespace) -> Plan:
    """The plan that an earlier start made. Raises UserError if it is for something else."""
    another = "give another folder with --dir, or remove this one"
    try:
        plan = from_tree(json.loads(file.read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file}: is no plan of this version ({error}); {another}") from error
    if (plan.survey.source, plan.quick) != (source, options.quick):
        quick = " with --quick" if plan.quick else ""
        raise UserError(f"{file.parent}: its plan is for {plan.survey.source}{quick}; {another}")
    kept = f", of {plan.minutes:g} minutes" if plan.minutes != options.minutes else ""
    print(f"going on with the plan of the first start{kept}: {shown(file)}", flush=True)
    if all(finished(file.parent / task) for task in trained(plan)):
        print(f"it is trained already and will only be evaluated; to start anew {another}", flush=True)
    return plan


def place(source: str) -> str:
    """Where the user's images are, seen from any folder: the commands run in the checkout. Named sources stay."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def default_folder(source: str, quick: bool) -> Path:
    """runs/quickstart for the sample, runs/quickstart_NAME for one's own images."""
    name = "" if source == SAMPLE else "_" + re.sub(r"[^\w.-]+", "_", Path(source).resolve().stem)
    base = ROOT if CHECKOUT else Path.cwd()
    return base / "runs" / f"quickstart{name}{'_quick' * quick}"


def main(argv: list[str]) -> int:
    """Parse the options and run the steps."""
    parser = Parser(prog="quickstart.py", description=__doc__)
    add = parser.add_argument
    add("source", nargs="?", default=SAMPLE, metavar="FOLDER", help="images: folder, zip, CSV (default: the sample)")
    add("--minutes", type=number(float, 1, WEEK), default=15.0, help="how long it may take in all")
    add("--weights", metavar="FILE", help="ImageNet weights to fine-tune the classifier from (default: see docs)")
    add("--dir", help="folder of the results (default: runs/quickstart, or runs/quickstart_NAME)")
    add("--quick", action="store_true", help=f"train {QUICK_STEPS} steps only, as a quick check")
    options = parser.parse_args(argv)
    folder = Path(options.dir).resolve() if options.dir else default_folder(options.source, options.quick)
    plan = plan_for(folder, options)
    return plan if isinstance(plan, int) else Quickstart(folder, plan).run()


if __name__ == "__main__":
    sys.exit(run_cli(main))
