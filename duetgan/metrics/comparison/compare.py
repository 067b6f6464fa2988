"""Compare the metrics of evaluated runs.

A group is one run, or several runs of the same config with different training seeds. Each group is
compared with the first group: single runs by the intervals of their metrics, several runs by the
differences between runs of the same seed.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from duetgan.metrics.comparison import paired
from duetgan.metrics.figures import Figure, rows_of
from duetgan.metrics.protocol import Document
from duetgan.utils.errors import UserError
from duetgan.utils.files import TABLE, read_file, reading
from duetgan.utils.text import columns, decimal

# Settings that must be equal, by their key in metrics.json: the name for messages, and the value if
# the document lacks the key.
CONDITIONS = {
    "task": ("tasks", None),
    "data_hash": ("test files", None),
    "n": ("--n", None),
    "seed": ("--seed", None),
    "precision": ("--precision", "fp32"),
    "fold": ("--fold", False),
    "tta": ("--tta", "off"),
}


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
        self.name = run
        self.training_seed = self.document.get("training_seed")
        # evaluations of older versions lack the fingerprint of the judge
        self.judge = str(self.document.get("judge_weights") or self.document.get("judge"))


def comparable(document: Document) -> dict[str, Value]:
    """Return the metrics in an evaluation's results that can be compared, by name.

    These are the metrics of which larger or smaller values are better. The name is the key of the
    metric. For a metric of features, the extractor and its weights follow the key.
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
        A dict with `task`, `n`, `seed`, `data_hash`, `runs` (the groups), `notes`, and
        `comparisons`, a list with a dict for each group after the first. This dict has `run`, the
        group, and `figures`, a list with a dict for each metric: `figure` (its name), `first`,
        `second`, `difference`, `interval`, `p`, `method` and `verdict`.

    Raises:
        UserError: If there are fewer than two groups, a run has no evaluation, the groups have
            different training seeds, or the runs were evaluated on different images, with different
            seeds or in different ways.
    """
    if len(groups) < 2:
        raise UserError(
            "--compare needs two runs or more: --compare RUN RUN; each is compared with the first"
        )
    loaded = []
    for group in groups:
        runs = [group] if Path(group).is_dir() else group.split(",")
        loaded.append([Evaluated(run) for run in runs])
    first = loaded[0][0].document
    for run in chain(*loaded):
        for key, (name, default) in CONDITIONS.items():
            expected, value = first.get(key, default), run.document.get(key, default)
            if value != expected:
                raise UserError(
                    f"{loaded[0][0].name} and {run.name} were evaluated with different {name} "
                    f"({str(expected)[:12]} and {str(value)[:12]}); evaluate both in the same way"
                )
    tables = [_differences(loaded[0], group) for group in loaded[1:]]
    for name in dict.fromkeys(chain(*tables)):
        rows = [table[name] for table in tables if name in table]
        paired.holm(rows)
        for row in rows:
            row["verdict"] = "cannot tell"
            if row["p"] is not None and row["p"] < paired.LEVEL:
                larger_is_better = loaded[0][0].values[name].figure.better == "larger"
                is_better = (row["difference"] > 0) == larger_is_better
                row["verdict"] = "better" if is_better else "worse"
    return {
        **{name: first.get(name) for name in ("task", "n", "seed", "data_hash")},
        "runs": list(groups),
        "comparisons": [
            {"run": group, "figures": list(table.values())}
            for group, table in zip(groups[1:], tables, strict=True)
        ],
        "notes": _notes(loaded),
    }


def _differences(first: list[Evaluated], second: list[Evaluated]) -> dict[str, Document]:
    """Compare the metrics that all runs of both groups have; return the results by metric name.

    Raises UserError if the runs of the two groups have different training seeds.
    """
    by_seed = [{run.training_seed: run for run in group} for group in (first, second)]
    seeds = list(by_seed[0])
    if len(first) != len(second) or (
        len(first) > 1
        and (None in seeds or len(seeds) < len(first) or by_seed[0].keys() != by_seed[1].keys())
    ):
        first_seeds, second_seeds = (
            [run.training_seed for run in group] for group in (first, second)
        )
        raise UserError(
            f"the groups have the training seeds {first_seeds} and {second_seeds}; give runs of "
            "equal seeds, each seed once"
        )
    if len(first) > 1:
        second = [by_seed[1][seed] for seed in seeds]
    runs = [*first, *second]
    has_one_judge = len({run.judge for run in runs}) == 1
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
            difference = paired.independent_figures(*value[1:], *second[0].values[name][1:])
        rows[name] = {
            "figure": name,
            "first": float(np.mean(first_values)),
            "second": float(np.mean(second_values)),
            **asdict(difference),
            "verdict": "",
        }
    return rows


def _notes(groups: list[list[Evaluated]]) -> dict[str, str]:
    notes = {}
    if len(groups[0]) == 1:
        notes["seeds"] = (
            "one training of each: the intervals cover the choice of test images, not the chance of training; for that "
            "give groups of runs with other seeds, RUN,RUN RUN,RUN"
        )
    if len({run.judge for run in chain(*groups)}) > 1:
        notes["recognised"] = (
            "the runs were evaluated with different judges; evaluate them with the same --classifier"
        )
    if len(groups) > 2:
        notes["p"] = (
            f"corrected for {len(groups) - 1} comparisons with the first (Holm); the intervals are not"
        )
    return notes


def comparison_table(document: Document) -> str:
    """Format a comparison as text.

    The text has one table for each group of runs that is compared with the first group.
    """
    parts = [f"{document['task']}, {document['n']} images, seed {document['seed']}"]
    for pair in document["comparisons"]:
        rows = [["", "first", "second", "difference", "95 % interval", "p", "the second is"]]
        for row in pair["figures"]:
            interval, p = row["interval"], row["p"]
            rows.append(
                [
                    row["figure"],
                    decimal(row["first"]),
                    decimal(row["second"]),
                    f"{row['difference']:+.4f}",
                    "-" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}",
                    "<0.0001" if p is not None and p < 1e-4 else decimal(p),
                    row["verdict"],
                ]
            )
        parts += ["", f"{document['runs'][0]} and {pair['run']}", columns(rows, "<>>>>><")]
    return "\n".join([*parts, "", *(f"{key}: {note}" for key, note in document["notes"].items())])
