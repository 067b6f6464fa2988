"""The runner of studies, which makes the missing runs and writes study.json after each one.

study.json does not depend on how often the study was interrupted.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import NoReturn

from duetgan.extras.studies.images import TEST
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
from duetgan.utils.errors import StoppedBySignal, UserError, explained
from duetgan.utils.files import as_json, check_writable, hold, write_atomic
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import duration

SCHEMA = 1
LEFT_OUT = (
    "a part of the study: `only` excludes these arms, which were neither run nor compared: {}"
)
VOID = "void: a control came out wrong, so the metrics below prove nothing"


def means(subject: Subject, results: Results) -> Document:
    """Return a table with a row for each arm and means over the seeds.

    The columns are the mean recall of each group of classes on each split, the recall of each class
    on the test images, and the other metrics.
    """
    first_runs = [runs[0] for runs in results.by_arm.values()]
    recalls: list[tuple[str, str]] = []  # (split, group)
    for split in subject.splits:
        if all(split in run.hits for run in first_runs):
            groups = results.groups if split == TEST else subject.class_groups(results)
            recalls += [(split, group) for group in groups]
    figures = list(dict.fromkeys(chain(*(run.figures for run in first_runs))))
    for split in subject.splits:
        if f"{split}_accuracy" in figures:
            figures.remove(f"{split}_accuracy")
    head = ["", *(f"{split}, {group}" for split, group in recalls), *figures]
    rows = []
    for arm in results.by_arm:
        row = [arm, *(percent(results.mean(arm, group, split)) for split, group in recalls)]
        rows.append(row + [plain(results.mean_figure(arm, name)) for name in figures])
    return {
        "title": "Mean recall of the classes and means of metrics, over the seeds",
        "header": head,
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
        tables.append(means(subject, table))
        declared = subject.compared(table)
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
    if subject.left_out:
        notes.append(LEFT_OUT.format("; ".join(subject.left_out)))
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
            {key: row[key] for key in ("first", "second", "group", "figure", "verdict")}
            for row in main_rows
        ],
        "words": words,
        "tables": tables,
        "pictures": pictures,
        "notes": notes,
    }


DISCARDED = "checkpoints"  # folders of a run that are removed after its evaluation

# Adding seeds because of earlier results makes wrong verdicts more likely than p says.
SEEDS_CHANGED = (
    "Results were made when the study was of {} seeds; now it is of {}. If that was changed because of them, p is too "
    "small. A study in earnest fixes its seeds before."
)


class Study:
    """A runner of a subject's jobs and arms in the subject's folder.

    It runs all arms of a seed before the next seed, so that an unfinished study has a complete
    table for fewer seeds.
    """

    def __init__(self, name: str, subject: Subject) -> None:
        self.name = name
        self.subject = subject
        self.folder = subject.folder
        self.end = math.inf  # time.monotonic() at which the study stops
        first = subject.config.first_seed
        self.seeds = list(range(first, first + subject.config.seeds))

    def run(self, minutes: float | None = None) -> Document:
        """Make all missing runs, write study.json after each, and return its content.

        Stops after `minutes`, if given. Raises StoppedBySignal after a signal, when all is saved.
        """
        check_writable(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        with self._locked(), _stopping(minutes):
            try:
                runs = [(arm, seed) for seed in self.seeds for arm in self.subject.arms]
                for number, (arm, seed) in enumerate(runs, 1):
                    if self._perform(
                        arm, seed, f"[{number} of {len(runs)}] {arm.name}, seed {seed}"
                    ):
                        self.write()
            except StoppedBySignal:
                self.write()
                if time.monotonic() < self.end:
                    raise
                say(f"the {minutes:g} minutes are over; the same command goes on")
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
        # A training that is in its last step when the signal comes ends normally.
        if time.monotonic() > self.end:
            raise StoppedBySignal("the minutes are over")
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
        content = {"told": outcome, "seeds": len(self.seeds), "seconds": round(seconds, 1)}
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
        seed_counts = set()
        for arm in self.subject.arms:
            results[arm.name] = {}
            for seed in self.seeds:
                if (file := record(of_seed(arm.place, seed))).is_file():
                    tree = _read(file)
                    results[arm.name][seed] = unpacked(tree["told"])
                    seed_counts.add(tree["seeds"])
        content = document(self.name, self.subject, results, self.seeds)
        if previous := sorted(seed_counts - {len(self.seeds)}):
            note = SEEDS_CHANGED.format(" and ".join(map(str, previous)), len(self.seeds))
            content["notes"].insert(0, note)
        write_atomic(self.folder / "study.json", as_json(content))
        return content

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / ".lock").open("w") as lock:
            if not hold(lock):
                raise UserError(
                    f"{self.folder}: another process makes this study; wait, or choose another --out"
                )
            yield


@contextmanager
def _stopping(minutes: float | None) -> Iterator[None]:
    """Raise StoppedBySignal in the block after a signal or `minutes` (None: no limit).

    A training saves a checkpoint first.
    """

    def leave(signum: int, _frame: FrameType | None) -> NoReturn:
        raise StoppedBySignal(f"{signal.Signals(signum).name}; the same command goes on")

    timer = threading.Timer(60 * (minutes or 0), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    with handling(leave, obeyed_signals()):
        try:
            if minutes is not None:
                timer.start()
            yield
        finally:
            timer.cancel()


def _read(file: Path) -> Document:
    """Read a file that `_perform` has written; raise UserError if it is damaged."""
    remedy = "remove it, and it is made again"
    with explained(
        (ValueError, KeyError, TypeError),
        lambda error: f"{file}: cannot be read ({error}); {remedy}",
    ):
        tree = json.loads(file.read_text())
        return {key: tree[key] for key in ("told", "seeds")}
