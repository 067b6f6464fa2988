"""Comparison of evaluated runs: by image, by intervals, or by training seed.

A group is one run, or several runs of the same config with different seeds. Each group is compared
with the first one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from duetgan.metrics.comparison import paired
from duetgan.metrics.comparison.predictions import load_predictions
from duetgan.metrics.figures import Figure, rows_of
from duetgan.metrics.protocol import Document
from duetgan.utils.errors import UserError
from duetgan.utils.files import TABLE, read_file, reading
from duetgan.utils.text import columns, decimal

HIT_RATES = ("accuracy", "recognised")  # fractions of correctly predicted images
# options of a classifier's evaluation, with their defaults
SPEED_OPTIONS = {"precision": "fp32", "fold": False, "tta": "off"}


class Value(NamedTuple):
    """A metric of an evaluated run."""

    figure: Figure
    value: float
    interval: list[float] | None


class Evaluated:
    """An evaluation that evaluate.py wrote into the folder RUN/eval, or into RUN itself."""

    def __init__(self, run: str) -> None:
        """Read the evaluation of a run; raise UserError if it is missing or damaged."""
        folder = Path(run) / "eval" if (Path(run) / "eval").is_dir() else Path(run)
        path = folder / "metrics.json"
        faults = ValueError, KeyError, TypeError, AttributeError, RecursionError
        with reading(path, f"evaluate it with evaluate.py --checkpoint {run}", *faults):
            self.document: Document = json.loads(read_file(path, TABLE))
            self.values = comparable(self.document)
            sha256 = self.document["predictions"]["sha256"]
        self.name = run
        self.metadata, self.columns = load_predictions(folder, sha256)


def comparable(document: Document) -> dict[str, Value]:
    """Return the metrics of an evaluation's results that can be compared, by name.

    The name of a distance ends in its extractor and the extractor's weights.
    """
    values = {}
    for row, results in rows_of(document):
        if row.better:
            kind = results.get("extractor", "").partition(":")[0]
            name = f"{row.key} {kind} {results.get('weights', '')}".rstrip()
            interval = results.get(f"{row.key}_interval")
            if interval is not None:
                low, high = interval
                interval = [float(low), float(high)]
            values[name] = Value(row, float(results[row.key]), interval)
    return values


def compare(groups: Sequence[str]) -> Document:
    """Compare groups of evaluated runs with the first group.

    Args:
        groups: Two or more groups, each a run folder, or several separated by commas.

    Returns:
        `task`, `n`, `seed`, `data_hash`, `runs` (the groups), `notes`, and `comparisons`: for each
        group after the first, `run` and `figures`, a list of `figure`, `first`, `second`,
        `difference`, `interval`, `p`, `method` and `verdict`.

    Raises:
        UserError: If a run has no evaluation, or the runs were evaluated on different images, with
            different seeds or in different ways.
    """
    if len(groups) < 2:
        raise UserError(
            "--compare needs two runs or more: --compare RUN RUN; each is compared with the first"
        )
    loaded = []
    for group in groups:
        runs = [group] if Path(group).is_dir() else group.split(",")
        loaded.append(_by_training_seed([Evaluated(run) for run in runs]))
    first = loaded[0][0]
    for run in chain(*loaded):
        _check_same_evaluation(first, run)
    tables = [_differences(loaded[0], group) for group in loaded[1:]]
    for name in dict.fromkeys(chain(*tables)):
        rows = [table[name] for table in tables if name in table]
        paired.holm(rows)
        for row in rows:
            row["verdict"] = "cannot tell"
            if row["p"] is not None and row["p"] < paired.LEVEL:
                larger_is_better = first.values[name].figure.better == "larger"
                is_better = (row["difference"] > 0) == larger_is_better
                row["verdict"] = "better" if is_better else "worse"
    return {
        "task": first.metadata.task,
        "n": first.metadata.n,
        "seed": first.metadata.seed,
        "data_hash": first.metadata.data,
        "runs": list(groups),
        "comparisons": [
            {"run": group, "figures": list(table.values())}
            for group, table in zip(groups[1:], tables, strict=True)
        ],
        "notes": _notes(loaded),
    }


def _check_same_evaluation(first: Evaluated, second: Evaluated) -> None:
    """Raise UserError unless two evaluations differ in nothing but the run."""
    for name, value in _conditions(second).items():
        expected = _conditions(first)[name]
        if value != expected:
            raise UserError(
                f"{first.name} and {second.name} were evaluated with different {name} "
                f"({str(expected)[:12]} and {str(value)[:12]}); evaluate both in the same way"
            )


def _conditions(run: Evaluated) -> dict[str, object]:
    """Return what runs must have in common to be compared, by name."""
    metadata = run.metadata
    conditions: dict[str, object] = {
        "tasks": metadata.task,
        "test files": metadata.data,
        "--n": metadata.n,
        "--seed": metadata.seed,
        "classes": metadata.classes,
    }
    if metadata.task == "classifier":
        for option, default in SPEED_OPTIONS.items():
            conditions[f"--{option}"] = run.document.get(option, default)
    return conditions


def _by_training_seed(group: list[Evaluated]) -> list[Evaluated]:
    """Sort the runs of a group by training seed; raise UserError unless the seeds differ."""
    seeds = [run.metadata.training_seed for run in group]
    if len(group) > 1 and (None in seeds or len(set(seeds)) < len(seeds)):
        names = ", ".join(f"{run.name} ({run.metadata.training_seed})" for run in group)
        raise UserError(
            f"runs of a group must be trained with different seeds, not {names}; change --seed"
        )
    return sorted(group, key=lambda run: run.metadata.training_seed or 0)


def _differences(first: list[Evaluated], second: list[Evaluated]) -> dict[str, Document]:
    """Compare the metrics that all runs of both groups have; return a row for each, by name."""
    seeds, second_seeds = (
        [run.metadata.training_seed for run in group] for group in (first, second)
    )
    if len(first) != len(second) or (len(first) > 1 and seeds != second_seeds):
        raise UserError(
            f"the groups have the training seeds {seeds} and {second_seeds}; give runs of equal seeds"
        )
    runs = [*first, *second]
    has_one_judge = len({run.metadata.judge for run in runs}) == 1
    rows = {}
    for name, value in first[0].values.items():
        is_measured = all(name in run.values for run in runs)
        if not is_measured or (value.figure.by_judge and not has_one_judge):
            continue
        first_values = [run.values[name].value for run in first]
        second_values = [run.values[name].value for run in second]
        if len(first) > 1:
            difference = paired.by_seeds(first_values, second_values)
        else:
            difference = _difference(name, first[0], second[0])
        rows[name] = {
            "figure": name,
            "first": float(np.mean(first_values)),
            "second": float(np.mean(second_values)),
            **asdict(difference),
            "verdict": "",
        }
    return rows


def _difference(name: str, first: Evaluated, second: Evaluated) -> paired.Difference:
    """Compare a metric of two runs: by image if both stored its column, else by intervals."""
    results = first.columns, second.columns
    if name in HIT_RATES and all("prediction" in columns for columns in results):
        hits = [columns["prediction"] == columns["label"] for columns in results]
        return paired.paired_fractions(*hits)
    _, value, interval = first.values[name]
    _, second_value, second_interval = second.values[name]
    if all(name in columns for columns in results):
        return paired.paired_figures(second_value - value, *(columns[name] for columns in results))
    if interval is not None and second_interval is not None:
        return paired.independent_figures(value, interval, second_value, second_interval)
    return paired.Difference(second_value - value, None, None, "no interval")


def _notes(groups: list[list[Evaluated]]) -> dict[str, str]:
    notes = {}
    if len(groups[0]) == 1:
        notes["seeds"] = (
            "one training of each: the intervals cover the choice of test images, not the chance of training; for that "
            "give groups of runs with other seeds, RUN,RUN RUN,RUN"
        )
    if len({run.metadata.judge for run in chain(*groups)}) > 1:
        notes["recognised"] = (
            "the runs were evaluated with different judges; evaluate them with the same --classifier"
        )
    if len(groups) > 2:
        notes["p"] = (
            f"corrected for {len(groups) - 1} comparisons with the first (Holm); the intervals are not"
        )
    return notes


def cells(row: Mapping[str, Any]) -> list[str]:
    """Format first value, second value, difference, interval and p of a comparison."""
    interval, p = row["interval"], row["p"]
    return [
        decimal(row["first"]),
        decimal(row["second"]),
        f"{row['difference']:+.4f}",
        "-" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}",
        "<0.0001" if p is not None and p < 1e-4 else decimal(p),
    ]


def comparison_table(document: Document) -> str:
    """Format a comparison as text, with a table for each group after the first."""
    parts = [f"{document['task']}, {document['n']} images, seed {document['seed']}"]
    for pair in document["comparisons"]:
        rows = [[row["figure"], *cells(row), row["verdict"]] for row in pair["figures"]]
        head = ["", "first", "second", "difference", "95 % interval", "p", "the second is"]
        parts += ["", f"{document['runs'][0]} and {pair['run']}", columns([head, *rows], "<>>>>><")]
    return "\n".join([*parts, "", *(f"{key}: {note}" for key, note in document["notes"].items())])
