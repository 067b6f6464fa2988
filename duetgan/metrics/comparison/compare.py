"""Which of two evaluated runs is better: image by image where both kept them, else by intervals, or
by training seeds.

A group is one run, or several that were trained alike with other seeds. Every group is compared
with the first.

What an evaluation keeps of every image is FILE: those of COLUMNS that there are, [n], and `About`
in its metadata.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Len
from pydantic import Field, create_model
from safetensors import SafetensorError
from safetensors.numpy import load, save

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.comparison import paired
from duetgan.metrics.figures import CLASSIFIER, FIGURES, GAN, LABELS, Figure
from duetgan.utils import bounded
from duetgan.utils.config.model import PositiveInt, Stored, Whole
from duetgan.utils.errors import UserError
from duetgan.utils.files import write_atomic
from duetgan.utils.text import columns, decimal

FILE = "predictions.safetensors"
SCHEMA = 1
COLUMNS = {
    "label": np.int64,  # the true class; of a sample the one that was asked for
    "prediction": np.int64,  # the most likely class
    "confidence": np.float64,  # its probability
    "loss": np.float64,  # -log of the true class's probability
    **{row.key: np.float64 for row in CLASSIFIER + LABELS},  # the image's influence on that figure
}


class About(Stored):
    schema_: Annotated[Literal[1], Field(alias="schema")]
    task: str
    data: str  # content hash of the test file
    n: PositiveInt
    seed: Whole  # of the evaluation
    training_seed: Whole | None = None
    classes: list[str]
    judge: str | None = None  # fingerprint of the classifier that predicts a GAN's samples


def keep_predictions(
    folder: Path,
    columns: Mapping[str, np.ndarray],
    checkpoint: Mapping[str, Any],
    reader: Dataset,  # the test images
    *,
    seed: int,  # of the evaluation
    judge: str | None = None,  # fingerprint of the classifier, where it is not the checkpoint's own
) -> dict[str, Any]:
    """Write FILE of an evaluation into a folder; returns what its document says of it: `data_hash`,
    `predictions`.
    """
    n = len(next(iter(columns.values())))
    about = {"task": checkpoint["task"], "data": reader.meta.content_hash, "n": n, "seed": seed}
    about |= {
        "training_seed": checkpoint["config"].get("seed"),
        "classes": checkpoint["classes"],
        "judge": judge,
    }
    return {
        "data_hash": reader.meta.content_hash,
        "predictions": save_predictions(folder, about, columns),
    }


def save_predictions(
    folder: Path, about: Mapping[str, Any], columns: Mapping[str, np.ndarray]
) -> dict[str, str]:
    """Write FILE into a folder; `about` is `About` without `schema`. Returns `file` and `sha256`."""
    arrays = {
        name: np.ascontiguousarray(column, dtype=COLUMNS[name]) for name, column in columns.items()
    }
    content = save(arrays, {"about": json.dumps({"schema": SCHEMA, **about})})
    write_atomic(folder / FILE, content)
    return {"file": FILE, "sha256": hashlib.sha256(content).hexdigest()}


class Predictions:
    """Columns of n rows, by the images' place in the evaluation, and what they are of."""

    def __init__(self, folder: Path, sha256: str) -> None:
        """Read FILE, which has the hash that metrics.json says.

        Raises UserError for one that is missing, damaged, or of another evaluation or format.
        """
        path = folder / FILE
        remedy = "evaluate that run once more with evaluate.py --checkpoint"
        faults = SafetensorError, KeyError, TypeError, ValueError, RecursionError
        with bounded.reading(path, remedy, *faults):
            content = bounded.read_file(path, bounded.TABLE)
            if hashlib.sha256(content).hexdigest() != sha256:
                raise UserError(
                    f"{path} is not of the evaluation that metrics.json beside it is of; {remedy}"
                )
            columns = load(content)
            head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            about = About.read(json.loads(head["__metadata__"]["about"]), "about").model_dump(
                by_alias=True
            )
            n, classes = about["n"], len(about["classes"])
            for name, column in columns.items():
                if name not in COLUMNS or column.dtype != COLUMNS[name] or column.shape != (n,):
                    raise ValueError(
                        f"column {name} is {column.dtype} {list(column.shape)}, n is {n}"
                    )
                if column.dtype == np.float64 and not np.isfinite(column).all():
                    raise ValueError(f"column {name} is not finite")
                if name in ("label", "prediction") and not 0 <= column.min() <= column.max() < max(
                    1, classes
                ):
                    raise ValueError(f"column {name} lies beyond the {classes} classes")
            if "prediction" in columns and "label" not in columns:
                raise ValueError("column label is missing")
        self.about: dict[str, Any] = about
        self.columns: dict[str, np.ndarray] = columns

    @property
    def hits(self) -> np.ndarray | None:
        """Whether each image is predicted as its label says, bool [n]; None where nothing was
        predicted.
        """
        if "prediction" not in self.columns:
            return None
        return self.columns["prediction"] == self.columns["label"]


ROWS = {row.key: row for row in FIGURES if row.better}
SHARES = ("accuracy", "recognised")  # of images that are predicted as their label says
# a classifier's options, as in older documents
SPEED = {"precision": None, "fold": False, "tta": "off"}


Interval = Annotated[list[float], Len(2, 2)]


class _Sha(Stored):
    sha256: str


def _stored(name: str, rows: Iterable[Figure], **more: Any) -> type[Stored]:
    """The model of a document that may hold figures and their intervals."""
    for row in rows:
        more |= {row.key: (float | None, None), f"{row.key}_interval": (Interval | None, None)}
    return create_model(name, __base__=Stored, **more)


_FEATURES = [row for row in ROWS.values() if row in GAN and not row.by_judge]
_Distance = _stored("_Distance", _FEATURES, extractor=(str, ...), weights=(str, ...))
_HEAD: dict[str, Any] = {
    "task": (str, ...),
    "n": (PositiveInt, ...),
    "seed": (Whole, ...),
    "predictions": (_Sha, ...),
}
_OWN = [row for row in ROWS.values() if row not in _FEATURES]
_HEAD["distances"] = (list[_Distance], [])  # type: ignore[valid-type]
_HEAD["notes"] = (dict[str, Any], {})
_Document = _stored("_Document", _OWN, **_HEAD)


class Evaluated:
    """What evaluate.py wrote into RUN/eval, or into the folder itself."""

    def __init__(self, run: str) -> None:
        """Raises UserError for what is missing or unfit."""
        folder = Path(run) / "eval" if (Path(run) / "eval").is_dir() else Path(run)
        path = folder / "metrics.json"
        with bounded.reading(
            path, f"evaluate it with evaluate.py --checkpoint {run}", ValueError, RecursionError
        ):
            document = json.loads(bounded.read_file(path, bounded.TABLE))
            _Document.read(document)
        self.name, self.document = run, document
        self.predictions = Predictions(folder, document["predictions"]["sha256"])
        self.about = self.predictions.about  # what was evaluated

    @cached_property
    def figures(self) -> dict[str, tuple[float, list[float] | None]]:
        """(value, interval) of every figure that can be compared; distances by their extractor and
        its weights.
        """
        parts = [("", self.document, _OWN)]
        for row in self.document.get("distances", []):
            parts.append(
                (f" {row['extractor'].partition(':')[0]} {row['weights']}".rstrip(), row, _FEATURES)
            )
        return {
            row.key + suffix: (values[row.key], values.get(f"{row.key}_interval"))
            for suffix, values, rows in parts
            for row in rows
            if values.get(row.key) is not None
        }


def compare(groups: Sequence[str]) -> dict[str, Any]:
    """The comparison of two or more groups, ready for JSON: each a run, or runs with commas between
    them.

    Returns `task`, `n`, `seed`, `data_hash`, `runs` (the groups), `comparisons`: for every group
    after the first `run` and `figures`, a list of `figure`, `first`, `second`, `difference`,
    `interval`, `p`, `method`, `verdict`; `notes`.
    Raises UserError unless all runs were evaluated on the same images with the same seed.
    """
    if len(groups) < 2:
        raise UserError(
            "--compare needs two runs or more: --compare RUN RUN; the others are compared with the first"
        )
    loaded = [
        [Evaluated(run) for run in ([group] if Path(group).is_dir() else group.split(","))]
        for group in groups
    ]
    first = loaded[0][0]
    for run in (run for group in loaded for run in group):
        _check_alike(first, run)
    sets = [_by_training_seed(group) for group in loaded]
    tables = [_differences(sets[0], other) for other in sets[1:]]
    for name in dict.fromkeys(name for table in tables for name in table):
        rows = [table[name] for table in tables if name in table]
        paired.holm(rows)
        for row in rows:
            better = (row["difference"] > 0) == (_row(name).better == "larger")
            unsure = row["p"] is None or row["p"] >= paired.LEVEL
            row["verdict"] = "cannot tell" if unsure else "better" if better else "worse"
    about = first.about
    return {
        **{key: about[key] for key in ("task", "n", "seed")},
        "data_hash": about["data"],
        "runs": list(groups),
        "comparisons": [
            {"run": group, "figures": list(table.values())}
            for group, table in zip(groups[1:], tables, strict=True)
        ],
        "notes": _notes(sets),
    }


def _check_alike(first: Evaluated, other: Evaluated) -> None:
    """Raise UserError unless both were evaluated on the same images in the same way."""
    words = {
        "task": "task",
        "data": "test file (hash)",
        "n": "number of images",
        "seed": "seed",
        "classes": "classes",
    }
    for key, name in words.items():
        own, its = first.about[key], other.about[key]
        if own != its:
            values = "" if key == "classes" else f" ({str(own)[:12]} and {str(its)[:12]})"
            raise UserError(
                f"{first.name} and {other.name} were evaluated with another {name}{values}; evaluate both with the "
                "same --data, --n and --seed"
            )
    for key, older in SPEED.items() if first.about["task"] == "classifier" else ():
        pair = [run.document.get(key, older) for run in (first, other)]
        if pair[0] != pair[1] and None not in pair:
            values = " and ".join(str(value).lower()[:12] for value in pair)
            raise UserError(
                f"{first.name} and {other.name} were evaluated with --{key} {values}; evaluate both alike"
            )


def _by_training_seed(group: list[Evaluated]) -> list[Evaluated]:
    """The runs of a group in the order of their seeds, which must differ."""
    seeds = [run.about["training_seed"] for run in group]
    if len(group) > 1 and (None in seeds or len(set(seeds)) < len(seeds)):
        names = ", ".join(f"{run.name} ({seed})" for run, seed in zip(group, seeds, strict=True))
        raise UserError(
            f"runs of a group must be trained with different seeds, not {names}; train with other --seed"
        )
    return sorted(group, key=lambda run: run.about["training_seed"] or 0)


def _differences(first: list[Evaluated], second: list[Evaluated]) -> dict[str, dict[str, Any]]:
    """The figures that both groups have, by name."""
    seeds = [[run.about["training_seed"] for run in group] for group in (first, second)]
    if len(first) != len(second) or (len(first) > 1 and seeds[0] != seeds[1]):
        raise UserError(
            f"the groups have the training seeds {seeds[0]} and {seeds[1]}; give runs of equal seeds"
        )
    runs = [*first, *second]
    judges = {run.about["judge"] for run in runs}
    rows = {}
    for name in runs[0].figures:
        values = [run.figures.get(name) for run in runs]
        if None in values or (_row(name).by_judge and len(judges) > 1):
            continue
        one, other = ([run.figures[name][0] for run in group] for group in (first, second))
        difference = (
            paired.by_seeds(one, other)
            if len(first) > 1
            else _difference(name, first[0], second[0])
        )
        rows[name] = {
            "figure": name,
            "first": float(np.mean(one)),
            "second": float(np.mean(other)),
            **asdict(difference),
            "verdict": "",
        }
    return rows


def _row(name: str) -> Figure:
    """The row of the table of a figure, which may be followed by its extractor."""
    return ROWS[name.partition(" ")[0]]


def _difference(name: str, first: Evaluated, second: Evaluated) -> paired.Difference:
    """Of one figure of two runs, by the sharpest way that what they kept allows."""
    hits, others = first.predictions.hits, second.predictions.hits
    if name in SHARES and hits is not None and others is not None:
        return paired.paired_shares(hits, others)
    (value, interval), (its_value, its_interval) = first.figures[name], second.figures[name]
    # each image's influence
    own, its = (run.predictions.columns.get(name) for run in (first, second))
    if own is not None and its is not None:
        return paired.paired_figures(its_value - value, own, its)
    if interval is not None and its_interval is not None:
        return paired.independent_figures(value, interval, its_value, its_interval)
    return paired.Difference(its_value - value, None, None, "no interval")


def _notes(sets: list[list[Evaluated]]) -> dict[str, str]:
    """What the verdicts do not say."""
    runs = [run for group in sets for run in group]
    notes = {}
    if len(sets[0]) == 1:
        notes["seeds"] = (
            "one training of each: the intervals cover the choice of test images, not the chance of training; for that "
            "give groups of runs with other seeds, RUN,RUN RUN,RUN"
        )
    if len({run.about["judge"] for run in runs}) > 1:
        notes["recognised"] = "the runs had other judges; evaluate them with the same --classifier"
    without = [name for name, (_, interval) in runs[0].figures.items() if interval is None]
    if len(sets[0]) == 1 and (
        bare := [name for name in without if name not in runs[0].predictions.columns]
    ):
        notes["intervals"] = (
            f"no verdict on {', '.join(bare)}: no interval is known, nor each image's influence"
        )
    if len(sets) > 2:
        notes["p"] = (
            f"corrected for {len(sets) - 1} comparisons with the first (Holm); the intervals are not"
        )
    return notes


def cells(row: Mapping[str, Any]) -> list[str]:
    """First, second, difference, interval and p of a figure in writing."""
    interval, p = row["interval"], row["p"]
    return [
        decimal(row["first"]),
        decimal(row["second"]),
        f"{row['difference']:+.4f}",
        "-" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}",
        "<0.0001" if p is not None and p < 1e-4 else decimal(p),
    ]


def comparison_table(document: dict[str, Any]) -> str:
    """The comparison for people: a table for every group after the first."""
    parts = [f"{document['task']}, {document['n']} images, seed {document['seed']}"]
    for pair in document["comparisons"]:
        rows = [[row["figure"], *cells(row), row["verdict"]] for row in pair["figures"]]
        head = ["", "first", "second", "difference", "95 % interval", "p", "the second is"]
        parts += ["", f"{document['runs'][0]} and {pair['run']}", columns([head, *rows], "<>>>>><")]
    return "\n".join([*parts, "", *(f"{key}: {note}" for key, note in document["notes"].items())])
