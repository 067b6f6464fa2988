"""Which of two evaluated runs is better: image by image where both kept them, else by intervals, or by training seeds.

A group is one run, or several that were trained alike with other seeds. Every group is compared with the first.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metrics.comparison.paired import (
    Difference,
    by_seeds,
    holm,
    independent_figures,
    paired_figures,
    paired_shares,
)
from metrics.comparison.predictions import Predictions, load_predictions
from utils import bounded
from utils.errors import UserError
from utils.schema import anything, items, mapping, maybe, number, record, text, whole
from utils.text import columns, decimal

LEVEL = 0.05  # of a verdict
BETTER = {  # figure of a document, or of one of a GAN's `distances`: whether a larger one is better
    "accuracy": True,
    "balanced_accuracy": True,
    "top5_accuracy": True,
    "auroc": True,
    "average_precision": True,
    "nll": False,
    "ece": False,
    "recognised": True,
    "class_score": True,
}
BETTER_SPACE = {  # the same for each extractor's figures
    "frechet": False,
    "kernel": False,
    "intra_class_frechet": False,
    "precision": True,
    "recall": True,
    "coverage": True,
    "clipped_density": True,
    "clipped_coverage": True,
}
SHARES = ("accuracy", "recognised")  # of images that are predicted as their label says
JUDGED = ("recognised", "class_score")  # by a classifier
SPEED = {"precision": None, "fold": False, "tta": "off"}  # a classifier's options, as in older documents
INTERVAL = maybe(items(number(), 2, 2))
FIGURES, SPACE = (
    {name: maybe(number()) for name in names} | {f"{name}_interval": INTERVAL for name in names}
    for names in (BETTER, BETTER_SPACE)
)
DISTANCE = record({"extractor": text, "weights": text}, SPACE)
DOCUMENT = record(
    {"task": text, "n": whole(1), "seed": whole(-(2**63)), "predictions": record({"sha256": text})},
    {**FIGURES, "distances": items(DISTANCE), "notes": mapping(anything)},
)


@dataclass(frozen=True)
class Evaluated:
    """An evaluated run."""

    name: str  # as it was given
    document: dict[str, Any]
    predictions: Predictions

    def figures(self) -> dict[str, tuple[float, list[float] | None]]:
        """(value, interval) of every figure that can be compared; distances by their extractor and its weights."""
        found = _figures(self.document, BETTER, "")
        for row in self.document.get("distances", []):
            found |= _figures(row, BETTER_SPACE, f" {row['extractor'].partition(':')[0]} {row['weights']}".rstrip())
        return found

    def influences(self) -> dict[str, np.ndarray]:
        """Each image's influence, [n], on those figures that it was kept for or that labels and predictions give."""
        kept, hits = self.predictions.columns, self.predictions.hits
        found: dict[str, np.ndarray] = {
            name: kept[name] for name in ("auroc", "average_precision", "ece") if name in kept
        }
        if "loss" in kept:
            found["nll"] = kept["loss"] - kept["loss"].mean()
            assert hits is not None
            counts = np.bincount(kept["label"])
            recalls = np.bincount(kept["label"], hits) / np.maximum(counts, 1)
            weights = len(hits) / (counts[kept["label"]] * (counts > 0).sum())
            found["balanced_accuracy"] = weights * (hits - recalls[kept["label"]])
        return found


def _figures(values: dict[str, Any], names: Iterable[str], suffix: str) -> dict[str, tuple[float, list[float] | None]]:
    return {
        name + suffix: (values[name], values.get(f"{name}_interval")) for name in names if values.get(name) is not None
    }


def load_evaluated(run: str) -> Evaluated:
    """What evaluate.py wrote into RUN/eval, or into the folder itself. UserError for what is missing or unfit."""
    folder = Path(run) / "eval" if (Path(run) / "eval").is_dir() else Path(run)
    path = folder / "metrics.json"
    remedy = f"evaluate it with evaluate.py --checkpoint {run}"
    try:
        document = json.loads(bounded.read_file(path, bounded.TABLE))
        DOCUMENT("", document)
    except FileNotFoundError:
        raise UserError(f"{run}: {path} is not there; {remedy}") from None
    except OSError as error:
        raise UserError(f"{path} {error}; {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())[:120]}; {remedy} once more") from error
    return Evaluated(run, document, load_predictions(folder, document["predictions"]["sha256"]))


def compare(groups: Sequence[str]) -> dict[str, Any]:
    """The comparison of two or more groups, ready for JSON: each a run, or runs with commas between them.

    Returns `task`, `n`, `seed`, `data_hash`, `runs` (the groups), `comparisons`: for every group after the first `run`
    and `figures`, a list of `figure`, `first`, `second`, `difference`, `interval`, `p`, `verdict`, `method`; `notes`.
    Raises UserError unless all runs were evaluated on the same images with the same seed.
    """
    if len(groups) < 2:
        raise UserError("--compare needs two runs or more: --compare RUN RUN; the others are compared with the first")
    loaded = [[load_evaluated(run) for run in group.split(",")] for group in groups]
    first = loaded[0][0]
    for run in (run for group in loaded for run in group):
        _check_alike(first, run)
    sets = [_by_training_seed(group) for group in loaded]
    tables = [_differences(sets[0], other) for other in sets[1:]]
    for name in dict.fromkeys(name for table in tables for name in table):
        rows = [table[name] for table in tables if name in table]
        tested = [row for row in rows if row["p"] is not None]
        for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
            row["p"] = p
        for row in rows:
            row["verdict"] = _verdict(name, row)
    about = first.predictions.about
    return {
        **{key: about[key] for key in ("task", "n", "seed")},
        "data_hash": about["data"],
        "runs": list(groups),
        "comparisons": [
            {"run": group, "figures": list(table.values())} for group, table in zip(groups[1:], tables, strict=True)
        ],
        "notes": _notes(sets),
    }


def _check_alike(first: Evaluated, other: Evaluated) -> None:
    """Raise UserError unless both were evaluated on the same images in the same way."""
    told = {"task": "task", "data": "test file (hash)", "n": "number of images", "seed": "seed", "classes": "classes"}
    for key, name in told.items():
        own, its = first.predictions.about[key], other.predictions.about[key]
        if own != its:
            shown = "" if key == "classes" else f" ({str(own)[:12]} and {str(its)[:12]})"
            raise UserError(
                f"{first.name} and {other.name} were evaluated with another {name}{shown}; evaluate both with the same "
                "--data, --n and --seed"
            )
    for key, older in SPEED.items() if first.predictions.about["task"] == "classifier" else ():
        pair = [run.document.get(key, older) for run in (first, other)]
        if pair[0] != pair[1] and None not in pair:
            shown = " and ".join(str(value).lower()[:12] for value in pair)
            raise UserError(f"{first.name} and {other.name} were evaluated with --{key} {shown}; evaluate both alike")


def _by_training_seed(group: list[Evaluated]) -> list[Evaluated]:
    """The runs of a group in the order of their seeds, which must differ."""
    seeds = [run.predictions.about["training_seed"] for run in group]
    if len(group) > 1 and (None in seeds or len(set(seeds)) < len(seeds)):
        names = ", ".join(f"{run.name} ({seed})" for run, seed in zip(group, seeds, strict=True))
        raise UserError(f"runs of a group must be trained with different seeds, not {names}; train with other --seed")
    return sorted(group, key=lambda run: run.predictions.about["training_seed"] or 0)


def _differences(first: list[Evaluated], second: list[Evaluated]) -> dict[str, dict[str, Any]]:
    """The figures that both groups have, by name."""
    seeds = [[run.predictions.about["training_seed"] for run in group] for group in (first, second)]
    if len(first) != len(second) or (len(first) > 1 and seeds[0] != seeds[1]):
        raise UserError(f"the groups have the training seeds {seeds[0]} and {seeds[1]}; give runs of equal seeds")
    runs = [*first, *second]
    judges = {run.predictions.about["judge"] for run in runs}
    found = {}
    for name in runs[0].figures():
        values = [run.figures().get(name) for run in runs]
        if None in values or (name in JUDGED and len(judges) > 1):
            continue
        one, other = ([run.figures()[name][0] for run in group] for group in (first, second))
        difference = by_seeds(one, other) if len(first) > 1 else _difference(name, first[0], second[0])
        found[name] = {
            "figure": name,
            "first": float(np.mean(one)),
            "second": float(np.mean(other)),
            "difference": difference.value,
            "interval": difference.interval,
            "p": difference.p,
            "verdict": "",
            "method": difference.method,
        }
    return found


def _difference(name: str, first: Evaluated, second: Evaluated) -> Difference:
    """Of one figure of two runs, by the sharpest way that what they kept allows."""
    hits, others = first.predictions.hits, second.predictions.hits
    if name in SHARES and hits is not None and others is not None:
        return paired_shares(hits, others)
    (value, interval), (its_value, its_interval) = first.figures()[name], second.figures()[name]
    own, its = first.influences(), second.influences()
    if name in own and name in its:
        return paired_figures(its_value - value, own[name], its[name])
    if interval is not None and its_interval is not None:
        return independent_figures(value, interval, its_value, its_interval)
    return Difference(its_value - value, None, None, "no interval")


def _verdict(name: str, row: dict[str, Any]) -> str:
    if row["p"] is None or row["p"] >= LEVEL:
        return "cannot tell"
    larger_is_better = (BETTER | BETTER_SPACE)[name.partition(" ")[0]]
    return "better" if (row["difference"] > 0) == larger_is_better else "worse"


def _notes(sets: list[list[Evaluated]]) -> dict[str, str]:
    """What the verdicts do not say."""
    runs = [run for group in sets for run in group]
    notes = {}
    if len(sets[0]) == 1:
        notes["seeds"] = (
            "one training of each: the intervals cover the choice of test images, not the chance of training; for that "
            "give groups of runs with other seeds, RUN,RUN RUN,RUN"
        )
    if len({run.predictions.about["judge"] for run in runs}) > 1:
        notes["recognised"] = "the runs had other judges; evaluate them with the same --classifier"
    if len(sets) > 2:
        notes["p"] = f"corrected for {len(sets) - 1} comparisons with the first (Holm); the intervals are not"
    return notes


def comparison_table(document: dict[str, Any]) -> str:
    """The comparison for people: a table for every group after the first."""
    parts = [f"{document['task']}, {document['n']} images, seed {document['seed']}"]
    for found in document["comparisons"]:
        rows = [
            [
                row["figure"],
                decimal(row["first"]),
                decimal(row["second"]),
                f"{row['difference']:+.4f}",
                "-" if row["interval"] is None else f"{row['interval'][0]:+.4f} to {row['interval'][1]:+.4f}",
                "<0.0001" if row["p"] is not None and row["p"] < 1e-4 else decimal(row["p"]),
                row["verdict"],
            ]
            for row in found["figures"]
        ]
        head = ["", "first", "second", "difference", "95 % interval", "p", "the second is"]
        parts += ["", f"{document['runs'][0]} and {found['run']}", columns([head, *rows], "<>>>>><")]
    return "\n".join([*parts, "", *(f"{key}: {note}" for key, note in document["notes"].items())])
