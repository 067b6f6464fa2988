"""Run a quickstart's plan, whose steps are commands of Duet.

Each command is printed before it runs. A later start skips finished steps, except evaluations.
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

from duetgan.commands.planning.measure import WEEK, request_words
from duetgan.commands.planning.plan import SAMPLE, SCRATCH_FROM, Plan
from duetgan.utils.distributed.process import (
    child_environment,
    die_with_parent,
    handling,
    obeyed_signals,
    python_arguments,
)
from duetgan.utils.errors import EXIT_SIGNAL, UserError, explained
from duetgan.utils.files import as_json, check_writable, write_atomic
from duetgan.utils.runlog.run_folder import is_finished, runs_folder
from duetgan.utils.text import duration

QUICK_IMAGES = 120  # evaluated images with --quick
ANOTHER = "give another folder with --dir, or remove this one"
# Keys of summary.json -> keys of the evaluations, which may lack some.
CLASSIFIER_METRICS = {
    "accuracy": "accuracy",
    "interval": "accuracy_interval",
    "n": "n",
    "floor": "probe",
    "majority_class_rate": "majority_class_rate",
}
GAN_METRICS = ("recognised", "diversity_ratio", "clipped_density", "clipped_coverage")
DISTANCE_METRICS = {
    "distance": "frechet",
    "distance_interval": "frechet_interval",
    "floor": "floor",
    "extractor": "extractor",
    "n": "n",
}


class Step(NamedTuple):
    name: str
    command: list[str]  # a command of Duet with its arguments
    done: bool  # True if an earlier start of the quickstart has finished this step


class Quickstart:
    """A runner of a quickstart's plan.

    Args:
        folder: folder of the packed files, the runs, the summary and the report.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.plan = plan
        self.train = folder / "data" / "train.lmdb"
        self.test = folder / "data" / "test.lmdb"
        self.started = time.monotonic()
        self.commands: list[str] = []

    def run(self) -> int:
        """Run all steps and write the results; return 0.

        If a step fails, stop there and return its exit code.
        """
        for step in self.steps():
            self.commands.append(typed(step.command))
            print(f"\n{time.strftime('%H:%M:%S')} {step.name}\n$ {self.commands[-1]}", flush=True)
            if step.done:
                print(f"{step.name}: already done", flush=True)
            elif code := call(step.command):
                message = f"error: {step.name} ended with exit code {code}"
                if code == EXIT_SIGNAL or code - 128 in obeyed_signals():
                    message = f"{step.name} was stopped"
                print(f"{message}; the same command resumes from here", file=sys.stderr)
                return code
        self.finish()
        return 0

    def steps(self) -> Iterator[Step]:
        """Yield the steps in order.

        Run each step before requesting the next one, because `Step.done` depends on the results of
        the previous steps.
        """
        yield from self.packing()
        for task in self.plan.trainings:
            yield Step(f"train {task}", self.training(task), is_finished(self.folder / task, None))
        for task in self.plan.trainings:
            yield Step(f"evaluate {task}", self.evaluation(task), done=False)

    def packing(self) -> Iterator[Step]:
        """Yield the steps that pack the training images and the held-out images.

        A source with its own held-out part needs two steps, one for each part. Otherwise one step
        packs all images and holds some of them out.
        """
        plan = self.plan
        images = ["--size", str(plan.size), "--channels", str(plan.survey.channels)]
        if plan.smallest < plan.size:
            images += ["--pyramid", str(plan.smallest)]
        if plan.survey.source != SAMPLE:
            images += ["--on-error", "skip"]
        parts = [
            (f"pack {file.stem}", [file], ["--split", file.stem])
            for file in (self.train, self.test)
        ]
        if plan.val_share is not None:
            split = ["--val-share", f"{plan.val_share:g}", "--val-dest", display_path(self.test)]
            split += ["--seed", str(plan.seed)]
            parts = [("pack", [self.train, self.test], split)]
        for name, files, options in parts:
            existing = [file for file in files if file.exists()]
            overwrite = ["--overwrite"] if existing else []
            command = ["pack", plan.survey.source, display_path(files[0]), *plan.survey.options]
            yield Step(name, [*command, *images, *options, *overwrite], existing == files)

    def training(self, task: str) -> list[str]:
        training = self.plan.trainings[task]
        return [
            "train",
            "--config",
            training.config,
            "--run-dir",
            display_path(self.folder / task),
            "--data.path",
            display_path(self.train),
            "--data.val-path",
            display_path(self.test),
            *training.overrides,
            "--seed",
            str(self.plan.seed),
        ]

    def evaluation(self, task: str) -> list[str]:
        """Return the command that evaluates the run of a task, "gan" or "classifier".

        The plan's classifier, if there is one, takes part in the evaluation of the GAN: it
        classifies the samples. If `unfit` gives a reason against it, for example that the
        classifier was trained on test images, only its features are used.
        """
        from duetgan.metrics.features.extractors import find_weights

        command = [
            "evaluate",
            "--checkpoint",
            display_path(self.folder / task),
            "--data",
            display_path(self.test),
        ]
        if self.plan.quick:
            command += ["--n", str(QUICK_IMAGES)]
        if task != "gan":
            return command
        if self.plan.classifier is not None:
            classifier = self.folder / "classifier"
            if reason := unfit(classifier, self.test):
                print(f"the classifier does not judge the GAN: it {reason}", flush=True)
                command += ["--extractor", f"classifier:{display_path(classifier)}"]
            else:
                command += ["--classifier", display_path(classifier)]
        elif self.plan.quick or find_weights(None) is None:
            command += ["--extractor", "pixels"]
        if self.plan.quick:
            searched, per_class = str(QUICK_IMAGES), str(QUICK_IMAGES // 10)
            return [*command, "--searched", searched, "--per-class", per_class]
        return command + self.plan.evaluation

    def finish(self) -> None:
        """Write summary.json and the report, and print the results."""
        from duetgan.metrics.tables import credible
        from duetgan.reporting.answers import answers
        from duetgan.reporting.report import write_quickstart_report

        evaluations = {}
        for task in self.plan.trainings:
            file = self.folder / task / "eval" / "metrics.json"
            evaluations[task] = credible(json.loads(file.read_text()))
        seconds = round(self.plan.spent + time.monotonic() - self.started, 1)
        summary = summarise(self.plan, evaluations, seconds)
        write_atomic(self.folder / "summary.json", as_json(summary))
        sentences = answers(evaluations.get("classifier", {}), evaluations["gan"])
        sentences.append(f"Next: {self.next_step()}")
        report = write_quickstart_report(
            self.folder,
            commands=self.commands,
            seconds=seconds,
            notes=[self.plan.survey.text(), *self.plan.notes],
            classifier=self.plan.classifier is not None,
            answers=sentences,
        )
        print("\n" + "\n".join(sentences))
        print(f"total time: {duration(seconds)}")
        print(f"summary: {display_path(self.folder / 'summary.json')}")
        print(f"report:  {display_path(report)}  (open it in a browser)")

    def next_step(self) -> str:
        """Return advice on how to get better results in a next quickstart, with the command.

        The advice is to get ImageNet weights if the classifier was trained without them on few
        images, otherwise to allow more time.
        """
        plan = self.plan
        request = [word for word in plan.request if word != "--quick"]
        step = "train longer, for better samples, perhaps of a higher resolution"
        options = ["--minutes", f"{min(4 * plan.minutes, WEEK):g}"]
        has_few = plan.training_images < SCRATCH_FROM
        if plan.classifier is not None and not plan.classifier.weights and has_few:
            step = "start the classifier from ImageNet weights (docs/your-data.md)"
            options = ["--weights", "resnet50-0676ba61.pth"]
        command = ["quickstart", *request, *options, "--dir", f"{display_path(self.folder)}-next"]
        return f"{step}: {typed(command)}"


def summarise(plan: Plan, evaluations: dict[str, dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the content of summary.json: the plan, and the main metrics of both evaluations.

    Metrics have 95 % intervals. Of several distances only that of the first extractor is included.

    Args:
        evaluations: dict from task, "gan" or "classifier", to the content of its metrics.json.
        seconds: duration of the quickstart.
    """
    classifier = None
    if plan.classifier is not None:
        document = evaluations["classifier"]
        classifier = {name: document.get(key) for name, key in CLASSIFIER_METRICS.items()}
    document = evaluations["gan"]
    gan = {}
    for name in GAN_METRICS:
        for key in (name, f"{name}_interval"):
            if key in document:
                gan[key] = document[key]
    for distance in document["distances"][:1]:
        for name, key in DISTANCE_METRICS.items():
            if key in distance:
                gan[name] = distance[key]
    planned: dict[str, Any] = {
        "source": plan.survey.source,
        "minutes": plan.minutes,
        "notes": plan.notes,
    }
    if not plan.quick:  # nothing was measured
        planned["expected_seconds"] = plan.seconds
        for task, training in plan.trainings.items():
            planned[task] = training.model_dump()
    return {"seconds": seconds, "classifier": classifier, "gan": gan, "plan": planned}


def display_path(path: Path) -> str:
    """Return a path as text for a command line. A path in the current folder becomes relative."""
    folder = Path.cwd()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def typed(command: list[str]) -> str:
    return shlex.join(["duet", *command])


def unfit(run: Path, test: Path) -> str:
    """Return the reason why a run's classifier cannot evaluate a GAN on the `test` images.

    The reason is "" if it can.
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
    """Run Python in a child process and return its exit code, 128 + n if signal n ended it.

    The child has its own session, so Ctrl-C in the terminal reaches this process only. This process
    passes each signal on to the child, and waits until the child has ended. If this process is
    killed, the child is killed too.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    with handling(lambda number, _: process.send_signal(number), obeyed_signals()):
        code = process.wait()
    return 128 - code if code < 0 else code


def plan_for(folder: Path, options: Namespace) -> Plan | int:
    """Return the plan in `folder`. If the folder has none, make one in another process.

    If that process fails, return its exit code. Raises UserError if the plan in the folder was made
    for other options or by another version of Duet.
    """
    file = folder / "plan.json"
    request = request_words(options)
    if file.is_file():
        with explained(
            ValueError, lambda error: f"{file}: is no plan of this version ({error}); {ANOTHER}"
        ):
            plan = Plan.read(json.loads(file.read_text()), "plan")
        if plan.request != request:
            raise UserError(f"{folder}: its plan is for {shlex.join(plan.request)}; {ANOTHER}")
        minutes = f", of {plan.minutes:g} minutes" if plan.minutes != options.minutes else ""
        print(f"continuing with the plan of the first start{minutes}: {display_path(file)}")
        return plan
    check_writable(folder)
    measuring = "" if options.quick else ", then measuring the speed of this machine"
    print(f"reading some images of the source '{options.source}'{measuring}", flush=True)
    command = ["quickstart-plan", *request, "--minutes", f"{options.minutes:g}", "--out", str(file)]
    code = call(command)
    return Plan.read(json.loads(file.read_text())) if code == 0 else code


def default_folder(source: str, quick: bool) -> Path:
    """Return the default folder of results.

    This is runs/quickstart for the sample images, else runs/quickstart_NAME, where NAME is the file
    name of `source` without its suffix. With `quick`, `_quick` is appended.
    """
    name = ""
    if source != SAMPLE:
        name = "_" + re.sub(r"[^\w.-]+", "_", Path(source).resolve().stem)
    return runs_folder() / f"quickstart{name}{'_quick' * quick}"
