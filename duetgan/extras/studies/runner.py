"""The runner of studies, which makes the missing runs and writes study.json after each one.

study.json does not depend on how often the study was interrupted.
"""

import hashlib
import json
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from itertools import chain
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
from duetgan.extras.studies.subject import Job, Subject, of_seed, record
from duetgan.metrics.protocol import Document
from duetgan.reporting.figures import percent, plain
from duetgan.utils.distributed.process import handling, obeyed_signals
from duetgan.utils.errors import StoppedBySignal, UserError
from duetgan.utils.files import as_json, check_writable, write_atomic
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import duration

SCHEMA = 1
VOID = "void: a control came out wrong, so the metrics below prove nothing"


def means(results: Results) -> Document:
    """Return a table with a row for each arm and means over the seeds.

    The columns are the mean recall of each group of classes on the test images, and the metrics.
    """
    runs = [run for runs in results.by_arm.values() for run in runs]
    figures = list(dict.fromkeys(chain(*(run.figures for run in runs))))
    rows = []
    for arm in results.by_arm:
        row = [arm, *(percent(results.mean(arm, group)) for group in results.groups)]
        rows.append(row + [plain(results.mean_figure(arm, name)) for name in figures])
    return {
        "title": "Mean recall of the classes of a group, and means of metrics, over the seeds",
        "header": ["", *results.groups, *figures],
        "rows": rows,
    }


def document(
    name: str,
    subject: Subject,
    results: Mapping[str, Mapping[int, Result]],  # by arm and seed
    seeds: Sequence[int],
) -> Document:
    """Return the content of study.json.

    Comparisons use only the `seeds` for which all arms have results; `void` is None while there is
    no such seed.
    """
    done, planned = sum(map(len, results.values())), len(results) * len(seeds)
    complete_seeds = [seed for seed in seeds if all(seed in runs for runs in results.values())]
    choices = {}
    comparisons: list[Document] = []
    controls: list[Document] = []
    tables = []
    if complete_seeds:
        by_arm = {arm: [runs[seed] for seed in complete_seeds] for arm, runs in results.items()}
        table = Results(complete_seeds, by_arm, subject.labels(), subject.groups())
        choices = {
            choice: table.choose(choice, subject.of_family(family))
            for choice, family in subject.choices.items()
        }
        tables.append(means(table))
        declared = subject.compared()
        comparisons = compared(table, [row for row in declared if not row.expected])
        controls = checked(table, [row for row in declared if row.expected])
    main_rows = [row for row in comparisons if row["asked"]]
    failed = [row for row in controls if row["ok"] is False]
    words = ["unfinished: the answers are of the seeds that are done"] if done < planned else []
    if failed:
        words.append(VOID)
    words += [
        f"{row['arm']} against {row['against']}: {row['found']}, not: {row['expected']}"
        for row in failed
    ]
    words += [in_words(row) for row in main_rows]
    if not complete_seeds:
        words = ["no seed is complete: there is nothing to compare"]
    arms = []
    for arm in subject.arms:
        runs = {str(seed): result.figures for seed, result in results[arm.name].items()}
        arms.append(
            {"name": arm.name, "what": arm.description, "family": arm.family, "figures": runs}
        )
    pictures = []
    for picture, caption in subject.captions.items():
        file = subject.picture(picture)
        if complete_seeds and file.is_file():
            pictures.append({"file": f"pictures/{file.name}", "caption": caption})
    # The subject's notes read the divided images, which may not exist before.
    notes = list(subject.notes) if complete_seeds else []
    return {
        "schema": SCHEMA,
        "subject": name,
        "title": subject.title,
        "complete": done == planned,
        "runs": {"done": done, "planned": planned},
        "seeds": complete_seeds,
        "arms": arms,
        "choices": choices,
        "comparisons": comparisons,
        "controls": controls,
        "void": bool(failed) if complete_seeds else None,
        "verdicts": [
            {key: row[key] for key in ("first", "second", "group", "verdict")} for row in main_rows
        ],
        "words": words,
        "tables": tables,
        "pictures": pictures,
        "notes": notes,
    }


DISCARDED = "checkpoints"  # folders of a run that are removed after its evaluation


class Study:
    """A runner of a subject's jobs and arms in the subject's folder.

    It runs all arms of a seed before the next seed, so that an unfinished study has a complete
    table for fewer seeds.
    """

    def __init__(self, name: str, subject: Subject) -> None:
        self.name = name
        self.subject = subject
        self.folder = subject.folder
        self.seeds = list(range(subject.config.seeds))

    def run(self) -> Document:
        """Make all missing runs, write study.json after each, and return its content.

        Raises StoppedBySignal after a signal, when a training has saved a checkpoint.
        """

        def leave(signum: int, _frame: FrameType | None) -> NoReturn:
            raise StoppedBySignal(f"{signal.Signals(signum).name}; the same command goes on")

        check_writable(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        runs = [(arm, seed) for seed in self.seeds for arm in self.subject.arms]
        with handling(leave, obeyed_signals()):
            for number, (arm, seed) in enumerate(runs, 1):
                if self._perform(arm, seed, f"[{number} of {len(runs)}] {arm.name}, seed {seed}"):
                    self.write()
        return self.write()

    # --- jobs and runs

    def _perform(self, job: Job, seed: int, title: str = "") -> bool:
        """Do a job or an arm's run, after the jobs that it needs, and write its outcome to a file.

        Then deletes the checkpoints of an arm's run, unless `keep_runs` is set or another job needs
        them. Returns False if the outcome exists already. Raises UserError if the job's folder has
        files, other than logs, that were made with other settings.
        """
        place, key = of_seed(job.place, seed), self._key(job, seed)
        file, note = record(place), place.with_name(f"{place.name}.key")
        files = [*place.rglob("*"), *place.parent.glob(f"{place.name}.*")]
        has_files = any(path.is_file() and path.suffix not in (".key", ".log") for path in files)
        if has_files and note.is_file() and note.read_text() != key:
            raise UserError(
                f"{place}: was made or begun with other settings, or by an earlier version; remove it and"
                f" {place.name}.* beside it, or choose another --out"
            )
        if file.is_file():
            return False
        for needed in job.needs:
            self._perform(self.subject.jobs[needed], seed)
        place.mkdir(parents=True, exist_ok=True)
        write_atomic(note, key.encode())
        start = time.monotonic()
        if not title:
            say(job.description)
        outcome = job.make(place, seed)
        seconds = time.monotonic() - start
        if isinstance(outcome, Result):
            figures = [f"{k} {v:.4g}" for k, v in outcome.figures.items() if v is not None]
            say(f"{title}: {', '.join(figures)} ({duration(seconds)})")
            outcome = packed(outcome)
        content = {"told": outcome, "seconds": round(seconds, 1)}
        write_atomic(file, as_json(content))
        is_needed = any(job.place in dependent.needs for dependent in self.subject.jobs.values())
        if place != job.place and not (is_needed or self.subject.config.keep_runs):
            for run in list(place.rglob(DISCARDED)):
                shutil.rmtree(run)
        return True

    def _key(self, job: Job, seed: int) -> str:
        """Return a hash of the settings of a job and of the jobs that it needs."""
        needs = [self._key(self.subject.jobs[place], seed) for place in job.needs]
        content = [job.key, of_seed(job.place, seed).name, needs]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

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
