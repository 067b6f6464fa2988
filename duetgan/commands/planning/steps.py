"""The quickstart's steps by its plan: each one of Duet's own commands, printed before it runs; what
is done is kept.
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
from pathlib import Path
from typing import Any, NamedTuple

from duetgan.commands.planning.plan import SCRATCH_FROM, Plan, Training
from duetgan.commands.planning.replan import spent_before_gan
from duetgan.utils.config.cli import table_words
from duetgan.utils.distributed.launch import handling, obeyed_signals
from duetgan.utils.errors import EXIT_SIGNAL, UserError, explained
from duetgan.utils.files import as_json, check_writable, write_atomic
from duetgan.utils.runlog.run_folder import ended, runs_folder
from duetgan.utils.script import child_environment, die_with_parent, python_arguments
from duetgan.utils.text import duration, listed

ROOT = Path(__file__).resolve().parents[3]
CHECKOUT = (ROOT / "quickstart.py").is_file()  # else installed by pip
SAMPLE = "sample"
# of --quick: enough to run every line, too few to learn anything
QUICK_STEPS, QUICK_IMAGES = 12, 120
WEEK = 7 * 24 * 60  # minutes that it may take at most
ANOTHER = "give another folder with --dir, or remove this one"
STEADY = 0.02  # of the minutes: by less the parts before the GAN may differ from the plan
SHARES = ("clipped_density", "clipped_coverage")
# where they are there
SURE = (*SHARES, *(f"{name}_interval" for name in ("recognised", "diversity_ratio", *SHARES)))


class Step(NamedTuple):
    name: str
    command: list[str]  # of Duet, with its arguments
    done: bool  # by an earlier start


class Quickstart:
    """The steps, where they write, and how long each took (kept in timings.json over
    interruptions).
    """

    def __init__(self, folder: Path, plan: Plan, new: Path | None = None) -> None:
        """`new`: images that the classifier names in the end. Raises UserError where there is no
        classifier.
        """
        if new is not None and plan.classifier is None:
            raise UserError(
                "--predict: these images train no classifier; put them into a folder for each class"
            )
        self.folder, self.plan, self.new = folder, plan, new
        self.train, self.test, self.all = (
            folder / "data" / f"{name}.lmdb" for name in ("train", "test", "all")
        )
        file = folder / "timings.json"
        planned = {"plan": {"seconds": plan.seconds.get("plan", 0.0), "done": True}}
        self.timings: dict[str, dict[str, Any]] = (
            json.loads(file.read_text()) if file.is_file() else planned
        )
        self.commands: list[str] = []

    def run(self) -> int:
        """Run every step; the first that fails ends it with its exit code."""
        begun = {"plan"}  # parts of the plan
        for step in self.steps():
            self.commands.append(typed(step.command))
            part = next(
                (part for part in self.plan.seconds if step.name.startswith(part)), ""
            )  # packing may be two steps
            left = {
                name: seconds for name, seconds in self.plan.seconds.items() if name not in begun
            }
            begun.add(part)
            seconds = 0.0 if self.plan.quick or step.done else left.pop(part, 0.0)
            when = (
                f": about {duration(seconds)}, then {duration(sum(left.values()))}"
                if seconds
                else ""
            )
            print(
                f"\n{time.strftime('%H:%M:%S')} {step.name}{when}\n$ {self.commands[-1]}",
                flush=True,
            )
            if step.done:
                print(f"{step.name}: already done", flush=True)
            elif code := self.timed(step):
                stopped = code == EXIT_SIGNAL or code - 128 in obeyed_signals()
                how = (
                    f"{step.name} was stopped"
                    if stopped
                    else f"error: {step.name} ended with exit code {code}"
                )
                print(f"{how}; the same command resumes from here", file=sys.stderr)
                return code
        self.finish()
        return 0 if self.new is None else self.name(self.new)

    def name(self, new: Path) -> int:
        """Name new images; the exit code: 2 where some cannot be read, which leaves the others
        their names.
        """
        command = ["predict", str(new), "--checkpoint", shown(self.folder / "classifier")]
        files = {"--csv": "predictions.csv", "--errors": "unreadable.csv"}
        command += [
            word for option, name in files.items() for word in (option, shown(self.folder / name))
        ]
        print(f"\n$ {typed(command)}", flush=True)
        return call(command)

    def steps(self) -> Iterator[Step]:
        """The steps in order, one by one: whether a step is done already is looked up when its turn
        comes.
        """
        yield from self.packing()
        if "compare networks" in self.plan.seconds:
            file = self.folder / "plan.json"
            compare = ["quickstart-networks", shown(file), shown(self.train)]
            yield Step("compare networks", compare, done=not self.plan.choices)
            self.plan = Plan.read(json.loads(file.read_text()))
        for task in self.plan.trainings:
            if task == "gan" and self.drifted():
                yield Step("measure again", ["quickstart-replan", shown(self.folder)], done=False)
                self.plan = Plan.read(json.loads((self.folder / "plan.json").read_text()))
            yield Step(f"train {task}", self.training(task), ended(self.folder / task))
        for task in self.plan.trainings:
            yield Step(f"evaluate {task}", self.evaluation(task), done=False)

    def drifted(self) -> bool:
        """Whether the GAN is still to begin, and the parts before it took another time than
        planned.
        """
        plan = self.plan
        if plan.quick or plan.replanned or (self.folder / "gan" / "config.yaml").exists():
            return False
        spent = spent_before_gan(plan, self.timings)
        return (
            abs(sum(spent.values()) - sum(plan.seconds[part] for part in spent))
            > STEADY * 60 * plan.minutes
        )

    def packing(self) -> Iterator[Step]:
        """The commands that pack: both parts of a source that has them, or one that splits a part
        off.
        """
        plan = self.plan
        images = ["--size", str(plan.size), "--channels", str(plan.survey.channels)]
        images += ["--pyramid", str(plan.smallest)] if plan.smallest < plan.size else []
        skipped = [
            "--on-error",
            "skip",
            "--max-skipped",
            str((plan.survey.count + plan.survey.unlabelled) // 2),
        ]
        images += skipped if plan.survey.source != SAMPLE else []
        if plan.val_share is None:
            parts = [
                (f"pack {file.stem}", [file], ["--split", file.stem])
                for file in (self.train, self.test)
            ]
        else:
            share = [
                "--val-share",
                f"{plan.val_share:g}",
                "--val-dest",
                shown(self.test),
                *seeded(plan),
            ]
            parts = [("pack", [self.train, self.test], share)]
        without = ["--classes-from", "none", "--apart", shown(self.test), "--no-duplicates"]
        parts += [("pack all", [self.all], without)] if plan.pooled else []
        for name, files, options in parts:
            done = all(file.exists() and complete(file) for file in files)
            overwrite = ["--overwrite"] if not done and any(file.exists() for file in files) else []
            pack = ["pack", plan.survey.source, shown(files[0]), *plan.survey.options, *images]
            yield Step(name, [*pack, *options, *overwrite], done)

    def training(self, task: str) -> list[str]:
        training = self.plan.trainings[task]
        command = ["train", "--config", training.config, "--run-dir", shown(self.folder / task)]
        images = self.all if task == "gan" and self.plan.pooled else self.train
        command += [
            "--data.path",
            shown(images),
            "--data.val-path",
            shown(self.test),
            *training.overrides,
        ]
        if task == "classifier" and self.plan.from_gan:
            command += [
                "--model.weights",
                shown(self.folder / "gan"),
                "--unlabelled.path",
                shown(self.all),
            ]
        command += [*seeded(self.plan), "--threads", "adapt"]  # the minutes were promised
        quick = ["--max-steps", str(QUICK_STEPS), "--log.every", str(QUICK_STEPS // 2)]
        return command + (quick if self.plan.quick else [])

    def evaluation(self, task: str) -> list[str]:
        """The command that evaluates a task, the GAN with the classifier as judge."""
        command = [
            "evaluate",
            "--checkpoint",
            shown(self.folder / task),
            "--data",
            shown(self.test),
        ]
        command += ["--n", str(QUICK_IMAGES)] if self.plan.quick else []
        if task != "gan":
            return command
        options, judged = self.plan.evaluation, self.plan.classifier and not self.plan.from_gan
        if self.plan.quick:
            options = ["--searched", str(QUICK_IMAGES), "--per-class", str(QUICK_IMAGES // 10)]
            options += [] if judged else ["--extractor", "pixels"]  # there may be no weights
        if not judged:
            return [*command, *options]
        run = self.folder / "classifier"
        if not (why := unfit(run, self.test)):
            return [*command, "--classifier", shown(run), *options]
        print(f"the classifier does not judge the GAN: it {why}", flush=True)
        options = [
            f"classifier:{shown(run)}" if option == "classifier" else option for option in options
        ]
        return (
            command
            + ([] if "--extractor" in options else ["--extractor", f"classifier:{shown(run)}"])
            + options
        )

    def timed(self, step: Step) -> int:
        """Run a step and note its time; the time of an interrupted step accumulates."""
        before = self.timings.get(step.name, {"seconds": 0.0, "done": False})
        # of a training that was killed
        status = self.folder / step.name.removeprefix("train ") / "status.json"
        noted = json.loads(status.read_text()).get("seconds", 0.0) if status.is_file() else 0.0
        spent = 0.0 if before["done"] else max(before["seconds"], noted)
        start = time.monotonic()
        code = call(step.command)
        self.timings[step.name] = {
            "seconds": round(spent + time.monotonic() - start, 1),
            "done": code == 0,
        }
        write_atomic(self.folder / "timings.json", as_json(self.timings))
        return code

    def finish(self) -> None:
        from duetgan.reporting.report import write_quickstart_report
        from duetgan.utils.versions import environment

        told = in_sentences(self.folder, self.plan)
        seconds = round(sum(step["seconds"] for step in self.timings.values()), 1)
        timings = {name: step["seconds"] for name, step in self.timings.items()}
        summary = summarise(self.folder, self.plan, seconds) | {
            "timings": timings,
            "versions": environment(),
        }
        write_atomic(self.folder / "summary.json", as_json(summary))
        report = write_quickstart_report(
            self.folder,
            commands=self.commands,
            seconds=seconds,
            notes=[self.plan.survey.text(), *self.plan.notes],
            classifier=self.plan.classifier is not None,
            answers=told,
        )
        print("\n" + "\n".join(told))
        print(
            f"{duration(seconds)} in all"
            + (f", {duration(self.plan.total)} expected" * (not self.plan.quick))
        )
        print(
            f"summary: {shown(self.folder / 'summary.json')}\nreport:  {shown(report)}  (open it in a browser)"
        )


def in_sentences(folder: Path, plan: Plan) -> list[str]:
    """What the evaluations have found, of which images, and what to do next."""
    from duetgan.metrics.tables import credible
    from duetgan.reporting.answers import advice, answers

    found = {
        task: json.loads((folder / task / "eval" / "metrics.json").read_text())
        for task in plan.trainings
    }
    classifier, gan, smallest = (
        found.get("classifier", {}),
        credible(found["gan"]),
        plan.survey.smallest_class,
    )
    weights = (
        ["--weights", plan.classifier.weights]
        if plan.classifier and plan.classifier.weights
        else []
    )
    scratch = plan.training_images >= SCRATCH_FROM
    ended = plan.minutes == WEEK or (plan.gan.most is not None and plan.gan.steps >= plan.gan.most)
    longer = 0.0 if ended else min(4 * plan.minutes, WEEK)
    what, options, suffix = advice(classifier, longer, smallest, weights=bool(weights) or scratch)
    another = f"{shown(folder)}-{suffix}"
    command = [
        "quickstart",
        plan.survey.source,
        *plan.survey.options,
        *weights,
        *options,
        *seeded(plan),
    ]
    command += ["--dir", another]
    packed = json.loads((folder / "gan" / "data.json").read_text())
    left = (
        plan.survey.count
        + plan.survey.held_out
        - sum(packed[role]["count"] for role in ("training", "held-out"))
    )
    left, why = (
        left + plan.survey.unlabelled * plan.pooled,
        " or look like held-out ones" * plan.pooled,
    )
    out = f"; {left:,} of them cannot be read{why} and are left out" if left else ""
    return [
        f"{plan.survey.text()}{out}.",
        *answers(classifier, gan, smallest),
        f"Next: {what}. $ {typed(command)}",
    ]


def summarise(folder: Path, plan: Plan, seconds: float) -> dict[str, Any]:
    """The figures of summary.json from both evaluations with their 95 % intervals, the distance the
    first extractor's, and what was planned.
    """
    from duetgan.metrics.tables import credible

    figures = {
        task: json.loads((folder / task / "eval/metrics.json").read_text())
        for task in plan.trainings
    }
    classifier, gan = figures.get("classifier"), credible(figures["gan"])
    if classifier:
        names = {
            "accuracy": "accuracy",
            "interval": "accuracy_interval",
            "n": "n",
            "floor": "probe",
        }
        names["majority_class_rate"] = "majority_class_rate"
        classifier = {name: classifier.get(key) for name, key in names.items()}
    distances = gan["distances"][0] if gan["distances"] else {}
    first = {key.replace("frechet", "distance"): value for key, value in distances.items()}
    of_first = ("distance", "distance_interval", "floor", "extractor", "n")
    return {
        "seconds": seconds,
        "classifier": classifier,
        "gan": {key: gan[key] for key in ("recognised", "diversity_ratio", *SURE) if key in gan}
        | {key: first[key] for key in of_first if key in first},
        "plan": {
            "source": plan.survey.source,
            "minutes": plan.minutes,
            "expected_seconds": round(plan.total, 1),
            "replanned": plan.replanned,
            "notes": plan.notes,
            **{
                task: about(folder / task, training, plan.quick)
                for task, training in plan.trainings.items()
            },
        },
    }


def about(run: Path, training: Training, quick: bool) -> dict[str, Any]:
    """Which recipe, how long, how fast, and the precision that the run's own config.yaml names."""
    config = run / "config.yaml"
    used = (
        re.search(r"^precision: (\w+)", config.read_text(), re.MULTILINE)
        if config.is_file()
        else None
    )
    guessed = {"steps": QUICK_STEPS, "images_per_second": None, "seconds": None} if quick else {}
    return training.model_dump() | guessed | ({"precision": used[1]} if used else {})


def seeded(plan: Plan) -> list[str]:
    return ["--seed", str(plan.seed)] if plan.seed else []


def working_folder() -> Path:
    """Return the folder in which the commands run: the checkout, else the current folder."""
    return ROOT if CHECKOUT else Path.cwd()


def shown(path: Path) -> str:
    """Return a path as the commands get it: relative to the folder in which they run, if it lies
    inside.
    """
    folder = working_folder()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def typed(command: list[str]) -> str:
    """Return a command as it is typed: `python train.py ...` for a script of the checkout, else
    `duet pack ...`.
    """
    name, *arguments = command
    if CHECKOUT and (ROOT / f"{name}.py").is_file():
        return shlex.join(["python", f"{name}.py", *arguments])
    return shlex.join(["duet", *command])


def complete(file: Path) -> bool:
    """Whether a packed file is whole, as its completion record says."""
    from duetgan.data.reading.dataset import Dataset

    try:
        Dataset(file).close()
    except UserError as error:
        print(f"packing again: {error}", flush=True)
        return False
    return True


def unfit(run: Path, test: Path) -> str:
    """Why a run's classifier cannot judge samples beside these test images, see `metrics.lineage`;
    empty if it can.
    """
    from duetgan.data.reading.dataset import Dataset
    from duetgan.metrics import lineage
    from duetgan.utils.checkpoint import load, resolve

    with Dataset(test) as reader:
        return lineage.unfit(load(resolve(str(run))), reader)


def call(command: list[str]) -> int:
    """Run a command of Duet and return its exit code, 128 + n if signal n ended it."""
    return run_python(python_arguments(*command))


def run_python(arguments: list[str]) -> int:
    """Run Python in a process of its own and return its exit code, 128 + n if signal n ended it.

    The process has its own session: Ctrl-C in a terminal, and any other signal to this process,
    reaches it once, forwarded by this process, which then waits until it has saved its state. It
    ends if this process is killed.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=working_folder(),
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    with handling(lambda number, _: process.send_signal(number), obeyed_signals()):
        code = process.wait()
    return 128 - code if code < 0 else code


def plan_for(folder: Path, options: Namespace) -> Plan | int:
    """The plan of the folder's first start, else a new one; or the exit code of what makes it.
    Raises UserError.
    """
    file, source = folder / "plan.json", options.source
    if given := os.environ.get("DUET_WEIGHTS"):  # the commands may run in another folder
        os.environ["DUET_WEIGHTS"] = os.path.abspath(given)
    if "://" not in source and source != SAMPLE:  # seen from any folder
        path = Path(source).expanduser()
        source = str(path.resolve()) if path.exists() else source
    if file.is_file():
        return kept_plan(file, source, options)
    check_writable(folder)
    if made := [name for name in ("data", "classifier", "gan") if (folder / name).exists()]:
        raise UserError(f"{folder}: has no plan.json for its {listed(made)}; {ANOTHER}")
    print(
        f"looking at {source}" + (", then measuring this machine" * (not options.quick)), flush=True
    )
    command = ["quickstart-plan", source, *table_words(options), "--out", str(file)]
    command += [
        "--minutes",
        f"{options.minutes:g}",
        "--seed",
        str(options.seed),
        *["--quick"] * options.quick,
    ]
    command += [
        word for file in options.weights for word in ("--weights", str(Path(file).resolve()))
    ]
    code = call(command)
    return Plan.read(json.loads(file.read_text())) if code == 0 else code


def kept_plan(file: Path, source: str, options: Namespace) -> Plan:
    """The plan that an earlier start made. Raises UserError if it is for something else."""
    with explained(
        ValueError, lambda why: f"{file}: is no plan of this version ({why}); {ANOTHER}"
    ):
        plan = Plan.read(json.loads(file.read_text()), "plan")
    images = [plan.survey.source, *plan.survey.options]
    if (images, plan.quick, plan.seed) != (
        [source, *table_words(options)],
        options.quick,
        options.seed,
    ):
        how = [
            "with",
            *["--quick"] * plan.quick,
            *[f"--seed {plan.seed}"] * (plan.seed != options.seed),
        ]
        what = " ".join([*images, *how * (len(how) > 1)])
        raise UserError(f"{file.parent}: its plan is for {what}; {ANOTHER}")
    used = [each.weights for each in [*plan.choices, *filter(None, [plan.classifier])]]
    given, planned = (
        {Path(name).resolve() for name in names if name} for names in (options.weights, used)
    )
    if given and used and not plan.quick and not given & planned:
        raise UserError(
            f"{file.parent}: its plan is for other weights, {used[-1] or 'none'}; {ANOTHER}"
        )
    minutes = f", of {plan.minutes:g} minutes" if plan.minutes != options.minutes else ""
    print(f"going on with the plan of the first start{minutes}: {shown(file)}", flush=True)
    if all(ended(file.parent / task) for task in plan.trainings):
        print(
            f"it is trained already and will only be evaluated; to start anew {ANOTHER}", flush=True
        )
    return plan


def default_folder(source: str, quick: bool) -> Path:
    """Return quickstart in the folder of runs for the sample, quickstart_NAME for one's own images."""
    name = "" if source == SAMPLE else "_" + re.sub(r"[^\w.-]+", "_", Path(source).resolve().stem)
    return runs_folder(working_folder()).absolute() / f"quickstart{name}{'_quick' * quick}"
