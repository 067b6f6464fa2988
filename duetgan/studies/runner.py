"""A study run by run: what is done is kept, what is missing is made, and the table is a function of
the results: of it comes study.json, what a study found so far, which does not depend on how often
the study was stopped.
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
from typing import Any, NoReturn

from duetgan.reporting.figures import percent, plain
from duetgan.studies.images import TEST
from duetgan.studies.results import Result, Results, checked, compared, in_words, packed, unpacked
from duetgan.studies.subject import Job, Subject, of_seed, record
from duetgan.utils.distributed.launch import handling, obeyed_signals
from duetgan.utils.errors import StoppedBySignal, UserError, explained
from duetgan.utils.files import as_json, check_writable, hold, write_atomic
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import duration

SCHEMA = 1
LEFT_OUT = (
    "a part of the study: these arms were not asked for (only), and neither run nor compared: {}"
)
VOID = "void: a control came out wrong, so the figures below prove nothing"


def means(subject: Subject, results: Results) -> dict[str, Any]:
    """The table of all arms: mean recalls of groups of classes on each set of images, of each class
    on the test images, and all other figures.
    """
    firsts = [runs[0] for runs in results.by_arm.values()]
    sets = [name for name in subject.sets if all(name in first.hits for first in firsts)]
    groups = {
        name: results.groups if name == TEST else subject.class_groups(results) for name in sets
    }
    accuracies = [f"{name}_accuracy" for name in subject.sets]
    figures = [
        name
        for name in dict.fromkeys(chain(*(first.figures for first in firsts)))
        if name not in accuracies
    ]
    head = ["", *(f"{name}, {group}" for name in sets for group in groups[name]), *figures]
    rows = [
        [arm, *(percent(results.mean(arm, group, name)) for name in sets for group in groups[name])]
        + [plain(results.mean_figure(arm, name)) for name in figures]
        for arm in results.by_arm
    ]
    return {
        "title": "Mean recall of the classes and means of figures, over the seeds",
        "header": head,
        "rows": rows,
    }


def document(
    name: str,
    subject: Subject,
    results: Mapping[str, Mapping[int, Result]],  # by arm and seed
    planned: Sequence[int],  # seeds
) -> dict[str, Any]:
    """`subject`, `title`, `complete`, `runs`, `seeds`, `arms`, `choices`, `comparisons`,
    `controls`, `void` (None while no seed is complete), `verdicts` (by arm and group), `words`,
    `tables`, `pictures`, `notes`.
    """
    done, wanted = sum(map(len, results.values())), len(results) * len(planned)
    whole = [seed for seed in planned if all(seed in runs for runs in results.values())]
    choices, comparisons, controls, tables = {}, [], [], []
    if whole:
        by_arm = {arm: [runs[seed] for seed in whole] for arm, runs in results.items()}
        table = Results(whole, by_arm, subject.labels(), subject.groups())
        choices = {
            name: table.choose(name, subject.of_family(family))
            for name, family in subject.choices.items()
        }
        tables, declared = [means(subject, table)], subject.compared(table)
        comparisons = compared(table, [row for row in declared if not row.expected])
        controls = checked(table, [row for row in declared if row.expected])
    asked = [row for row in comparisons if row["asked"]]
    failed = [row for row in controls if row["ok"] is False]
    words = ["unfinished: the answers are of the seeds that are done"] * (done < wanted)
    words += [VOID] * bool(failed)
    words += [
        f"{row['arm']} against {row['against']}: {row['found']}, not: {row['expected']}"
        for row in failed
    ]
    words += [in_words(row) for row in asked]
    return {
        "schema": SCHEMA,
        "subject": name,
        "title": subject.title,
        "complete": done == wanted,
        "runs": {"done": done, "planned": wanted},
        "seeds": whole,
        "arms": [
            {"name": arm.name, "what": arm.what, "family": arm.family}
            | {"figures": {str(seed): result.figures for seed, result in results[arm.name].items()}}
            for arm in subject.arms
        ],
        "choices": choices,
        "comparisons": comparisons,
        "controls": controls,
        "void": bool(failed) if whole else None,
        "verdicts": [
            {key: row[key] for key in ("first", "second", "group", "figure", "verdict")}
            for row in asked
        ],
        "words": words if whole else ["no seed is complete: there is nothing to compare"],
        "tables": tables,
        "pictures": [
            {"file": f"pictures/{subject.picture(picture).name}", "caption": caption}
            for picture, caption in subject.captions.items()
            if whole and subject.picture(picture).is_file()
        ],
        "notes": [*(subject.notes if whole else ())]  # they need the images to be divided
        + [LEFT_OUT.format("; ".join(subject.left_out))] * bool(subject.left_out),
    }


DISCARDED = "checkpoints"  # folders of a run that go once it is judged

# a choice to go on that depends on what was seen: the chance of an error is larger than the
# intervals and p say
SEEDS_CHANGED = (
    "Results were made when the study was of {} seeds; now it is of {}. If that was changed because of them, p is too "
    "small. A study in earnest fixes its seeds before."
)


class Study:
    """A subject's jobs and runs in a folder. Seeds come one after the other, each with all arms, so
    that what is there is always a whole table over fewer seeds.
    """

    def __init__(self, name: str, subject: Subject) -> None:
        self.name, self.subject, self.folder = name, subject, subject.folder
        config, self.end = subject.config, math.inf
        self.seeds = list(range(config.first_seed, config.first_seed + config.seeds))

    def run(self, minutes: float | None = None) -> dict[str, Any]:
        """Make what is missing; returns study.json's document, which is written after every run.
        With `minutes` it ends by then, whatever is left. Raises StoppedBySignal after a signal,
        with everything saved.
        """
        check_writable(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        with self._alone(), _stopping(minutes):
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
        """Make a job or an arm's run, after the jobs it needs, and its outcome into a file. False:
        that is there.
        Raises UserError if either is of other settings; of a place where no more than logs are left
        it is not asked.
        """
        place, key = of_seed(job.place, seed), self._key(job, seed)
        file, note = record(place), place.with_name(f"{place.name}.key")
        files = [*place.rglob("*"), *place.parent.glob(f"{place.name}.*")]
        left = any(each.is_file() and each.suffix not in (".key", ".log") for each in files)
        if left and note.is_file() and note.read_text() != key:
            raise UserError(
                f"{place}: was made or begun with other settings, or by an earlier version; remove it and"
                f" {place.name}.* beside it, or choose another --out"
            )
        if file.is_file():
            return False
        for other in job.needs:
            self._perform(self.subject.jobs[other], seed)
        if time.monotonic() > self.end:  # and a training was at its last step when it was told
            raise StoppedBySignal("the minutes are over")
        place.mkdir(parents=True, exist_ok=True)
        write_atomic(note, key.encode())
        start = time.monotonic()
        if not title:
            say(job.what)
        outcome = job.make(place, seed)
        took = time.monotonic() - start
        if isinstance(outcome, Result):
            shown = ", ".join(
                f"{figure} {value:.4g}"
                for figure, value in outcome.figures.items()
                if value is not None
            )
            say(f"{title}: {shown} ({duration(took)})")
            outcome = packed(outcome)
        write_atomic(
            file, as_json({"told": outcome, "seeds": len(self.seeds), "seconds": round(took, 1)})
        )
        needed = any(job.place in other.needs for other in self.subject.jobs.values())
        if place != job.place and not (needed or self.subject.config.keep_runs):
            for run in list(place.rglob(DISCARDED)):
                shutil.rmtree(run)
        return True

    def _key(self, job: Job, seed: int) -> str:
        needs = [self._key(self.subject.jobs[other], seed) for other in job.needs]
        every = [job.key, of_seed(job.place, seed).name, needs]
        return hashlib.sha256(json.dumps(every).encode()).hexdigest()[:16]

    # --- results

    def write(self) -> dict[str, Any]:
        """study.json of the results that there are, and its document."""
        results: dict[str, dict[int, Result]] = {}
        others = set()
        for arm in self.subject.arms:
            results[arm.name] = {}
            for seed in self.seeds:
                if (file := record(of_seed(arm.place, seed))).is_file():
                    tree = _read(file)
                    results[arm.name][seed] = unpacked(tree["told"])
                    others |= {tree["seeds"]} - {len(self.seeds)}
        made = document(self.name, self.subject, results, self.seeds)
        if others:
            made["notes"].insert(
                0, SEEDS_CHANGED.format(" and ".join(map(str, sorted(others))), len(self.seeds))
            )
        write_atomic(self.folder / "study.json", as_json(made))
        return made

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.folder / ".lock").open("w") as lock:
            if not hold(lock):
                raise UserError(
                    f"{self.folder}: another process makes this study; wait, or choose another --out"
                )
            yield


@contextmanager
def _stopping(minutes: float | None) -> Iterator[None]:
    """Inside the block signals, and the end of the minutes, raise StoppedBySignal; a training saves
    before.
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


def _read(file: Path) -> dict[str, Any]:
    """What `_perform` has written. Raises UserError for what is not that."""
    remedy = "remove it, and it is made again"
    with explained(
        (ValueError, KeyError, TypeError), lambda why: f"{file}: cannot be read ({why}); {remedy}"
    ):
        tree = json.loads(file.read_text())
        return {key: tree[key] for key in ("told", "seeds")}
