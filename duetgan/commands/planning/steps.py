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

from duetgan.commands.planning.plan import SCRATCH_FROM, Plan, Training
from duetgan.commands.planning.replan import replanned, spent_before_gan
from duetgan.utils.config.cli import table_words
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
from duetgan.utils.text import duration, listed

ROOT = Path(__file__).resolve().parents[3]
CHECKOUT = (ROOT / "quickstart.py").is_file()  # False if Duet was installed by pip
SAMPLE = "sample"
# Training steps and evaluated images with --quick, which are too few to learn anything.
QUICK_STEPS, QUICK_IMAGES = 12, 120
WEEK = 7 * 24 * 60  # largest --minutes
ANOTHER = "give another folder with --dir, or remove this one"
CLIPPED_METRICS = ("clipped_density", "clipped_coverage")
INTERVALS = ("recognised", "diversity_ratio", *CLIPPED_METRICS)
# Metrics of the GAN that summary.json may lack.
OPTIONAL_METRICS = (*CLIPPED_METRICS, *(f"{name}_interval" for name in INTERVALS))


class Step(NamedTuple):
    name: str
    command: list[str]  # a command of Duet with its arguments
    done: bool  # True if an earlier start of the quickstart has finished this step


class Quickstart:
    """The runner of a quickstart's plan, which adds up each step's time in timings.json.

    Args:
        folder: folder of the results.
        new_images: images to classify at the end.

    Raises UserError for new images if the plan has no classifier.
    """

    def __init__(self, folder: Path, plan: Plan, new_images: Path | None = None) -> None:
        if new_images is not None and plan.classifier is None:
            raise UserError(
                "--predict: these images train no classifier; put them into a folder for each class"
            )
        self.folder = folder
        self.plan = plan
        self.new_images = new_images
        self.train = folder / "data" / "train.lmdb"
        self.test = folder / "data" / "test.lmdb"
        self.all = folder / "data" / "all.lmdb"
        file = folder / "timings.json"
        self.timings: dict[str, dict[str, Any]] = {
            "plan": {"seconds": plan.seconds.get("plan", 0.0), "done": True}
        }
        if file.is_file():
            self.timings = json.loads(file.read_text())
        self.commands: list[str] = []

    def run(self) -> int:
        """Run all steps, then classify new images, if any. Return the first exit code above 0."""
        started = {"plan"}  # keys of `plan.seconds`
        for step in self.steps():
            self.commands.append(typed(step.command))
            # Packing may be several steps, such as `pack train`.
            part = next((part for part in self.plan.seconds if step.name.startswith(part)), "")
            planned = self.plan.seconds.items()
            remaining = {name: seconds for name, seconds in planned if name not in started}
            started.add(part)
            line = f"{time.strftime('%H:%M:%S')} {step.name}"
            seconds = 0.0 if self.plan.quick or step.done else remaining.pop(part, 0.0)
            if seconds:
                left = duration(sum(remaining.values()))
                line += f": about {duration(seconds)}, then {left} for the other steps"
            print(f"\n{line}\n$ {self.commands[-1]}", flush=True)
            if step.done:
                print(f"{step.name}: already done", flush=True)
            elif code := self.timed(step):
                message = f"error: {step.name} ended with exit code {code}"
                if code == EXIT_SIGNAL or code - 128 in obeyed_signals():
                    message = f"{step.name} was stopped"
                print(f"{message}; the same command resumes from here", file=sys.stderr)
                return code
        self.finish()
        return 0 if self.new_images is None else self.predict(self.new_images)

    def predict(self, images: Path) -> int:
        """Classify images; return the exit code, which is 2 if an image could not be read."""
        command = ["predict", str(images), "--checkpoint", display_path(self.folder / "classifier")]
        command += ["--csv", display_path(self.folder / "predictions.csv")]
        command += ["--errors", display_path(self.folder / "unreadable.csv")]
        print(f"\n$ {typed(command)}", flush=True)
        return call(command)

    def steps(self) -> Iterator[Step]:
        """Yield the steps in order. The `done` of a step is determined after the previous ones have
        run.
        """
        yield from self.packing()
        for task in self.plan.trainings:
            if task == "gan":
                self.replan()
            yield Step(f"train {task}", self.training(task), is_finished(self.folder / task))
        for task in self.plan.trainings:
            yield Step(f"evaluate {task}", self.evaluation(task), done=False)

    def replan(self) -> None:
        """Fit the GAN's length of training in plan.json to the time that is left.

        Does nothing with --quick, after an earlier change, and once the training has begun.
        """
        plan = self.plan
        if plan.quick or plan.replanned or (self.folder / "gan" / "config.yaml").exists():
            return
        self.plan = replanned(plan, spent_before_gan(plan, self.timings))
        if self.plan is not plan:
            print(self.plan.notes[-1], flush=True)
            write_atomic(self.folder / "plan.json", as_json(self.plan.model_dump()))

    def packing(self) -> Iterator[Step]:
        """Yield the steps that pack images: one for each part of a source with its own held-out
        part, otherwise one that holds images out. A pooled plan also packs all images.
        """
        plan = self.plan
        images = ["--size", str(plan.size), "--channels", str(plan.survey.channels)]
        if plan.smallest < plan.size:
            images += ["--pyramid", str(plan.smallest)]
        if plan.survey.source != SAMPLE:
            max_skipped = (plan.survey.count + plan.survey.unlabelled) // 2
            images += ["--on-error", "skip", "--max-skipped", str(max_skipped)]
        if plan.val_share is None:
            parts = [
                (f"pack {file.stem}", [file], ["--split", file.stem])
                for file in (self.train, self.test)
            ]
        else:
            split = ["--val-share", f"{plan.val_share:g}", "--val-dest", display_path(self.test)]
            parts = [("pack", [self.train, self.test], [*split, *seeded(plan)])]
        if plan.pooled:
            options = [
                "--classes-from",
                "none",
                "--apart",
                display_path(self.test),
                "--no-duplicates",
            ]
            parts.append(("pack all", [self.all], options))
        for name, files, options in parts:
            done = all(file.exists() and complete(file) for file in files)
            overwrite = ["--overwrite"] if not done and any(file.exists() for file in files) else []
            pack = [
                "pack",
                plan.survey.source,
                display_path(files[0]),
                *plan.survey.options,
                *images,
            ]
            yield Step(name, [*pack, *options, *overwrite], done)

    def training(self, task: str) -> list[str]:
        training = self.plan.trainings[task]
        command = [
            "train",
            "--config",
            training.config,
            "--run-dir",
            display_path(self.folder / task),
        ]
        images = self.all if task == "gan" and self.plan.pooled else self.train
        command += [
            "--data.path",
            display_path(images),
            "--data.val-path",
            display_path(self.test),
            *training.overrides,
        ]
        if task == "classifier" and self.plan.from_gan:
            command += [
                "--model.weights",
                display_path(self.folder / "gan"),
                "--unlabelled.path",
                display_path(self.all),
            ]
        # Adapting the threads keeps the training close to its planned time on a busy machine.
        command += [*seeded(self.plan), "--threads", "adapt"]
        if self.plan.quick:
            command += ["--max-steps", str(QUICK_STEPS), "--log.every", str(QUICK_STEPS // 2)]
        return command

    def evaluation(self, task: str) -> list[str]:
        """Return the command that evaluates the run of a task, "gan" or "classifier".

        The classifier judges the GAN unless it is `unfit`.
        """
        command = [
            "evaluate",
            "--checkpoint",
            display_path(self.folder / task),
            "--data",
            display_path(self.test),
        ]
        command += ["--n", str(QUICK_IMAGES)] if self.plan.quick else []
        if task != "gan":
            return command
        options = self.plan.evaluation
        has_judge = self.plan.classifier is not None and not self.plan.from_gan
        if self.plan.quick:
            options = ["--searched", str(QUICK_IMAGES), "--per-class", str(QUICK_IMAGES // 10)]
            if not has_judge:
                options += ["--extractor", "pixels"]  # ResNet-50's weights may be missing
        if not has_judge:
            return [*command, *options]
        run = self.folder / "classifier"
        if not (reason := unfit(run, self.test)):
            return [*command, "--classifier", display_path(run), *options]
        print(f"the classifier does not judge the GAN: it {reason}", flush=True)
        extractor = f"classifier:{display_path(run)}"
        options = [extractor if option == "classifier" else option for option in options]
        if "--extractor" not in options:
            options = ["--extractor", extractor, *options]
        return [*command, *options]

    def timed(self, step: Step) -> int:
        """Run a step, add its time to timings.json, and return its exit code."""
        previous = self.timings.get(step.name, {"seconds": 0.0, "done": False})
        spent = 0.0
        if not previous["done"]:
            spent = previous["seconds"]
            # The time of a killed training is recorded only in the run's own status.json.
            status = self.folder / step.name.removeprefix("train ") / "status.json"
            if status.is_file():
                spent = max(spent, json.loads(status.read_text()).get("seconds", 0.0))
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
        from duetgan.utils.runlog.versions import environment

        sentences = in_sentences(self.folder, self.plan)
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
            answers=sentences,
        )
        print("\n" + "\n".join(sentences))
        expected = "" if self.plan.quick else f" ({duration(self.plan.total)} expected)"
        print(f"total time: {duration(seconds)}{expected}")
        print(f"summary: {display_path(self.folder / 'summary.json')}")
        print(f"report:  {display_path(report)}  (open it in a browser)")


def in_sentences(folder: Path, plan: Plan) -> list[str]:
    """Return sentences for the user: about the images, the results of the evaluations, and the
    command to run next.
    """
    from duetgan.metrics.tables import credible
    from duetgan.reporting.answers import advice, answers

    evaluations = read_evaluations(folder, plan)
    classifier = evaluations.get("classifier", {})
    gan = credible(evaluations["gan"])
    smallest = plan.survey.smallest_class
    weights: list[str] = []
    if plan.classifier and plan.classifier.weights:
        weights = ["--weights", plan.classifier.weights]
    can_do_without = plan.training_images >= SCRATCH_FROM
    longer = min(4 * plan.minutes, WEEK)
    is_longest = plan.gan.most is not None and plan.gan.steps >= plan.gan.most
    if plan.minutes == WEEK or is_longest:
        longer = 0.0
    next_step, options, suffix = advice(
        classifier, longer, smallest, weights=bool(weights) or can_do_without
    )
    command = [
        "quickstart",
        plan.survey.source,
        *plan.survey.options,
        *weights,
        *options,
        *seeded(plan),
    ]
    command += ["--dir", f"{display_path(folder)}-{suffix}"]
    packed = json.loads((folder / "gan" / "data.json").read_text())
    omitted = plan.survey.count + plan.survey.held_out
    omitted -= packed["training"]["count"] + packed["held-out"]["count"]
    reason = "cannot be read"
    if plan.pooled:
        omitted += plan.survey.unlabelled
        reason += " or look like held-out ones"
    images = plan.survey.text()
    if omitted:
        images += f"; {omitted:,} of them {reason} and are left out"
    return [
        f"{images}.",
        *answers(classifier, gan, smallest),
        f"Next: {next_step}. $ {typed(command)}",
    ]


def read_evaluations(folder: Path, plan: Plan) -> dict[str, dict[str, Any]]:
    evaluations = {}
    for task in plan.trainings:
        evaluations[task] = json.loads((folder / task / "eval" / "metrics.json").read_text())
    return evaluations


def summarise(folder: Path, plan: Plan, seconds: float) -> dict[str, Any]:
    """Return the content of summary.json: the main metrics of both evaluations with their 95 %
    intervals, and the plan. The distance is that of the first extractor.
    """
    from duetgan.metrics.tables import credible

    evaluations = read_evaluations(folder, plan)
    classifier = evaluations.get("classifier")
    gan = credible(evaluations["gan"])
    if classifier:
        names = {
            "accuracy": "accuracy",
            "interval": "accuracy_interval",
            "n": "n",
            "floor": "probe",
            "majority_class_rate": "majority_class_rate",
        }
        classifier = {name: classifier.get(key) for name, key in names.items()}
    distances = gan["distances"][0] if gan["distances"] else {}
    first = {key.replace("frechet", "distance"): value for key, value in distances.items()}
    gan_metrics = {}
    for key in ("recognised", "diversity_ratio", *OPTIONAL_METRICS):
        if key in gan:
            gan_metrics[key] = gan[key]
    for key in ("distance", "distance_interval", "floor", "extractor", "n"):
        if key in first:
            gan_metrics[key] = first[key]
    return {
        "seconds": seconds,
        "classifier": classifier,
        "gan": gan_metrics,
        "plan": {
            "source": plan.survey.source,
            "minutes": plan.minutes,
            "expected_seconds": round(plan.total, 1),
            "replanned": plan.replanned,
            "notes": plan.notes,
            **{
                task: summarise_training(folder / task, training, plan.quick)
                for task, training in plan.trainings.items()
            },
        },
    }


def summarise_training(run: Path, training: Training, quick: bool) -> dict[str, Any]:
    """Return the plan of a training for summary.json, with the precision that the run used."""
    document = training.model_dump()
    if quick:
        document |= {"steps": QUICK_STEPS, "images_per_second": None, "seconds": None}
    config = run / "config.yaml"
    if config.is_file():
        match = re.search(r"^precision: (\w+)", config.read_text(), re.MULTILINE)
        if match:
            document["precision"] = match[1]
    return document


def seeded(plan: Plan) -> list[str]:
    return ["--seed", str(plan.seed)] if plan.seed else []


def working_folder() -> Path:
    """Return the folder in which the steps run: the checkout of Duet, else the current folder."""
    return ROOT if CHECKOUT else Path.cwd()


def display_path(path: Path) -> str:
    """Return a path as text for a command line, relative to `working_folder` if it is inside."""
    folder = working_folder()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def typed(command: list[str]) -> str:
    """Return a command as a user types it: `python NAME.py ...` if the checkout has that script,
    otherwise `duet NAME ...`.
    """
    name, *arguments = command
    if CHECKOUT and (ROOT / f"{name}.py").is_file():
        return shlex.join(["python", f"{name}.py", *arguments])
    return shlex.join(["duet", *command])


def complete(file: Path) -> bool:
    """Return True if a packed file was written to its end; print the reason otherwise."""
    from duetgan.data.reading.dataset import Dataset

    try:
        Dataset(file).close()
    except UserError as error:
        print(f"packing again: {error}", flush=True)
        return False
    return True


def unfit(run: Path, test: Path) -> str:
    """Return the reason why a run's classifier cannot judge a GAN on the `test` images; empty if it
    can.
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

    The child has its own session, so that it gets each signal, Ctrl-C included, only once, from
    this process, which waits until the child has saved its state and ended. The child ends if this
    process is killed.
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
    """Return the plan in a folder of results, after making a missing one.

    If making it fails, return the exit code. Makes $DUET_WEIGHTS absolute. Raises UserError.
    """
    file = folder / "plan.json"
    source = options.source
    # Paths become absolute, because the commands may run in another folder.
    if weights := os.environ.get("DUET_WEIGHTS"):
        os.environ["DUET_WEIGHTS"] = os.path.abspath(weights)
    if "://" not in source and source != SAMPLE:
        path = Path(source).expanduser()
        source = str(path.resolve()) if path.exists() else source
    if file.is_file():
        return existing_plan(file, source, options)
    check_writable(folder)
    if existing := [name for name in ("data", "classifier", "gan") if (folder / name).exists()]:
        raise UserError(f"{folder}: has no plan.json for its {listed(existing)}; {ANOTHER}")
    measuring = "" if options.quick else ", then measuring the speed of this machine"
    print(f"reading some images of {source}{measuring}", flush=True)
    command = ["quickstart-plan", source, *table_words(options), "--out", str(file)]
    command += ["--minutes", f"{options.minutes:g}", "--seed", str(options.seed)]
    if options.quick:
        command.append("--quick")
    if options.weights:
        command += ["--weights", str(Path(options.weights).resolve())]
    code = call(command)
    return Plan.read(json.loads(file.read_text())) if code == 0 else code


def existing_plan(file: Path, source: str, options: Namespace) -> Plan:
    """Return the plan that an earlier start wrote. Raises UserError if it is for other settings."""
    with explained(
        ValueError, lambda error: f"{file}: is no plan of this version ({error}); {ANOTHER}"
    ):
        plan = Plan.read(json.loads(file.read_text()), "plan")
    images = [plan.survey.source, *plan.survey.options]
    expected_images = [source, *table_words(options)]
    if images != expected_images or plan.quick != options.quick or plan.seed != options.seed:
        settings = []
        if plan.quick:
            settings.append("--quick")
        if plan.seed != options.seed:
            settings.append(f"--seed {plan.seed}")
        text = " ".join(images)
        if settings:
            text += f" with {' '.join(settings)}"
        raise UserError(f"{file.parent}: its plan is for {text}; {ANOTHER}")
    if options.weights and plan.classifier and not plan.quick:
        planned = plan.classifier.weights
        if not planned or Path(planned).resolve() != Path(options.weights).resolve():
            raise UserError(
                f"{file.parent}: its plan is for other weights, {planned or 'none'}; {ANOTHER}"
            )
    minutes = f", of {plan.minutes:g} minutes" if plan.minutes != options.minutes else ""
    print(f"continuing with the plan of the first start{minutes}: {display_path(file)}", flush=True)
    if all(is_finished(file.parent / task) for task in plan.trainings):
        print(
            f"training is finished, so the models are only evaluated; to start anew {ANOTHER}",
            flush=True,
        )
    return plan


def default_folder(source: str, quick: bool) -> Path:
    """Return the default folder of results: runs/quickstart for the sample images, else
    runs/quickstart_NAME, followed by `_quick` for --quick.
    """
    name = ""
    if source != SAMPLE:
        name = "_" + re.sub(r"[^\w.-]+", "_", Path(source).resolve().stem)
    return runs_folder(working_folder()).absolute() / f"quickstart{name}{'_quick' * quick}"
