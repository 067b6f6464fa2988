"""Run a study: do the missing runs, and write study.json after each one.

The final study.json does not depend on how often the study was interrupted.
"""

import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

from duetgan.extras.studies.results import (
    Result,
    Results,
    checked,
    compared,
    in_words,
    packed,
    unpacked,
)
from duetgan.extras.studies.subject import SEED, Job, Subject, of_seed, record
from duetgan.metrics.protocol import Document
from duetgan.utils.distributed.process import handling, obeyed_signals
from duetgan.utils.errors import StoppedBySignal, UserError
from duetgan.utils.files import as_json, check_writable, write_atomic
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import duration


def document(
    name: str,
    subject: Subject,
    results: Mapping[str, Mapping[int, Result]],  # by arm and seed
    seeds: Sequence[int],
) -> Document:
    """Return the content of study.json for the study `name`.

    Comparisons use only the `seeds` for which all arms have results. The entry `void` is True if a
    control has failed, and None if no seed has all results.
    """
    done, planned = sum(map(len, results.values())), len(results) * len(seeds)
    complete_seeds = [seed for seed in seeds if all(seed in runs for runs in results.values())]
    choices = {}
    comparisons: list[Document] = []
    controls: list[Document] = []
    arms: list[Document] = []
    for arm in subject.arms:
        runs = {str(seed): result.figures for seed, result in results[arm.name].items()}
        arms.append(
            {"name": arm.name, "what": arm.description, "family": arm.family, "figures": runs}
        )
    if complete_seeds:
        by_arm = {arm: [runs[seed] for seed in complete_seeds] for arm, runs in results.items()}
        table = Results(complete_seeds, by_arm, subject.labels(), subject.groups())
        choices = {
            choice: table.choose(choice, subject.of_family(family))
            for choice, family in subject.choices.items()
        }
        for row in arms:
            row["recall"] = {group: table.mean(row["name"], group) for group in table.groups}
        declared = subject.compared()
        comparisons = compared(table, [row for row in declared if not row.expected])
        controls = checked(table, [row for row in declared if row.expected])
    failed = [row for row in controls if row["ok"] is False]
    words = ["unfinished: the answers are of the seeds that are done"] if done < planned else []
    if failed:
        words.append("void: a control came out wrong, so the metrics below prove nothing")
    words += [
        f"{row['arm']} against {row['against']}: {row['found']}, not: {row['expected']}"
        for row in failed
    ]
    words += [in_words(row) for row in comparisons]
    if not complete_seeds:
        words = ["no seed is complete: there is nothing to compare"]
    return {
        "subject": name,
        "complete": done == planned,
        "runs": {"done": done, "planned": planned},
        "seeds": complete_seeds,
        "arms": arms,
        "choices": choices,
        "comparisons": comparisons,
        "controls": controls,
        "void": bool(failed) if complete_seeds else None,
        "words": words,
    }


class Study:
    """A runner that does a subject's jobs and arms in the subject's folder.

    It does all arms of a seed before those of the next seed. Thus the results of an unfinished
    study are complete for some seeds.
    """

    def __init__(self, name: str, subject: Subject) -> None:
        self.name = name
        self.subject = subject
        self.folder = subject.folder
        self.seeds = list(range(subject.config.seeds))

    def run(self) -> Document:
        """Make all missing runs, write study.json after each, and return its content.

        Raises StoppedBySignal after a signal. A training saves a checkpoint before that.
        """

        def leave(signum: int, _frame: FrameType | None) -> NoReturn:
            raise StoppedBySignal(f"{signal.Signals(signum).name}; the same command goes on")

        check_writable(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        runs = [(arm, seed) for seed in self.seeds for arm in self.subject.arms]
        with handling(leave, obeyed_signals()):
            for job in self.subject.jobs:
                if not job.family:
                    self._perform(job, SEED, job.description)
            for number, (arm, seed) in enumerate(runs, 1):
                if self._perform(arm, seed, f"[{number} of {len(runs)}] {arm.name}, seed {seed}"):
                    self.write()
        return self.write()

    def _check_settings(self) -> None:
        """Write the settings of the study to settings.json.

        Raises UserError if the file exists already with other settings.
        """
        file = self.folder / "settings.json"
        settings = as_json({"study": self.name} | self.subject.config.key())
        if file.is_file() and file.read_bytes() != settings:
            raise UserError(
                f"{self.folder}: has runs with other settings; remove it, or choose another --out"
            )
        write_atomic(file, settings)

    def _perform(self, job: Job, seed: int, title: str) -> bool:
        """Do a job, or one run of an arm, and write the outcome to a file.

        Also prints `title` with the result, deletes the checkpoints of an arm, and returns True. If
        the outcome exists already, does nothing and returns False.
        """
        place = of_seed(job.place, seed)
        if record(place).is_file():
            return False
        place.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        outcome = job.make(place, seed)
        seconds = time.monotonic() - start
        if isinstance(outcome, Result):
            figures = ", ".join(f"{name} {value:.4g}" for name, value in outcome.figures.items())
            title += f": {figures}"
            outcome = packed(outcome)
        say(f"{title} ({duration(seconds)})")
        content = {"told": outcome, "seconds": round(seconds, 1)}
        write_atomic(record(place), as_json(content))
        if job.family:
            for run in list(place.rglob("checkpoints")):
                shutil.rmtree(run)
        return True

    # --- results

    def write(self) -> Document:
        """Write study.json from the existing results, and return its content."""
        results: dict[str, dict[int, Result]] = {}
        for arm in self.subject.arms:
            results[arm.name] = {}
            for seed in self.seeds:
                if outcome := self.subject.outcome(of_seed(arm.place, seed)):
                    results[arm.name][seed] = unpacked(outcome)
        content = document(self.name, self.subject, results, self.seeds)
        write_atomic(self.folder / "study.json", as_json(content))
        return content
