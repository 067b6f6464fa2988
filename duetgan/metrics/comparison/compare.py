"""Comparison of evaluated runs: by image, by intervals, or by training seed.

A group is one run, or several runs of the same config with different seeds. Each group is compared
with the first one.

An evaluation stores the results of each image in FILE: those of COLUMNS that its task has, each an
array [n], with `PredictionsMetadata` in the header.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import chain
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
from duetgan.metrics.protocol import Document
from duetgan.utils import files
from duetgan.utils.config.model import PositiveInt, Stored, Whole
from duetgan.utils.errors import UserError
from duetgan.utils.files import write_atomic
from duetgan.utils.text import columns, decimal

FILE = "predictions.safetensors"
SCHEMA = 1
COLUMNS = {
    "label": np.int64,  # the true class of an image; the requested class of a sample
    "prediction": np.int64,  # the most likely class
    "confidence": np.float64,  # probability of the most likely class
    "loss": np.float64,  # -log of the true class's probability
    **{row.key: np.float64 for row in CLASSIFIER + LABELS},  # the image's influence on the metric
}


class PredictionsMetadata(Stored):
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
    dataset: Dataset,  # the test images
    *,
    seed: int,  # of the evaluation
    judge: str | None = None,  # fingerprint of the classifier that judges a GAN's samples
) -> Document:
    """Write columns to FILE; return `data_hash` and `predictions` for metrics.json."""
    metadata = {
        "task": checkpoint["task"],
        "data": dataset.meta.content_hash,
        "n": len(next(iter(columns.values()))),
        "seed": seed,
        "training_seed": checkpoint["config"].get("seed"),
        "classes": checkpoint["classes"],
        "judge": judge,
    }
    return {
        "data_hash": dataset.meta.content_hash,
        "predictions": save_predictions(folder, metadata, columns),
    }


def save_predictions(
    folder: Path, metadata: Mapping[str, object], columns: Mapping[str, np.ndarray]
) -> dict[str, str]:
    """Write columns to FILE in a folder; return the name of the `file` and its `sha256`.

    The metadata is `PredictionsMetadata` without `schema`.
    """
    arrays = {
        name: np.ascontiguousarray(column, dtype=COLUMNS[name]) for name, column in columns.items()
    }
    content = save(arrays, {"about": json.dumps({"schema": SCHEMA, **metadata})})
    write_atomic(folder / FILE, content)
    return {"file": FILE, "sha256": hashlib.sha256(content).hexdigest()}


class Predictions:
    """Stored results of each image of an evaluation, in columns of n rows, with their metadata."""

    def __init__(self, folder: Path, sha256: str) -> None:
        """Read FILE from a folder.

        Args:
            sha256: Hash of FILE, from metrics.json.

        Raises:
            UserError: If the file is missing, damaged, or of another evaluation or format.
        """
        path = folder / FILE
        remedy = "evaluate that run once more with evaluate.py --checkpoint"
        faults = SafetensorError, KeyError, TypeError, ValueError, RecursionError
        with files.reading(path, remedy, *faults):
            content = files.read_file(path, files.TABLE)
            if hashlib.sha256(content).hexdigest() != sha256:
                raise UserError(
                    f"{path} is not of the evaluation that metrics.json beside it is of; {remedy}"
                )
            columns = load(content)
            head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            stored = json.loads(head["__metadata__"]["about"])
            metadata = PredictionsMetadata.read(stored, "about").model_dump(by_alias=True)
            n = metadata["n"]
            classes = len(metadata["classes"])
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
        self.metadata: dict[str, Any] = metadata
        self.columns: dict[str, np.ndarray] = columns

    @property
    def hits(self) -> np.ndarray | None:
        """True for correct predictions, bool [n]; None if there are no predictions."""
        if "prediction" not in self.columns:
            return None
        return self.columns["prediction"] == self.columns["label"]


ROWS = {row.key: row for row in FIGURES if row.better}
HIT_RATES = ("accuracy", "recognised")  # fractions of correctly predicted images
# options of a classifier's evaluation, with the values to assume for older results
SPEED_OPTIONS = {"precision": None, "fold": False, "tta": "off"}


Interval = Annotated[list[float], Len(2, 2)]


class _Sha(Stored):
    sha256: str


def _document_model(name: str, rows: Iterable[Figure], **fields: Any) -> type[Stored]:
    """Create a pydantic model with these fields, and optional fields of metrics and intervals."""
    for row in rows:
        fields |= {row.key: (float | None, None), f"{row.key}_interval": (Interval | None, None)}
    return create_model(name, __base__=Stored, **fields)


_BY_EXTRACTOR = [row for row in ROWS.values() if row in GAN and not row.by_judge]
_Distance = _document_model("_Distance", _BY_EXTRACTOR, extractor=(str, ...), weights=(str, ...))
_HEAD: dict[str, Any] = {
    "task": (str, ...),
    "n": (PositiveInt, ...),
    "seed": (Whole, ...),
    "predictions": (_Sha, ...),
}
_TOP_LEVEL = [row for row in ROWS.values() if row not in _BY_EXTRACTOR]
_HEAD["distances"] = (list[_Distance], [])  # type: ignore[valid-type]
_HEAD["notes"] = (dict[str, Any], {})
_Document = _document_model("_Document", _TOP_LEVEL, **_HEAD)


class Evaluated:
    """An evaluation that evaluate.py wrote into the folder RUN/eval, or into RUN itself."""

    def __init__(self, run: str) -> None:
        """Read the evaluation of a run; raise UserError if it is missing or damaged."""
        folder = Path(run) / "eval" if (Path(run) / "eval").is_dir() else Path(run)
        path = folder / "metrics.json"
        with files.reading(
            path, f"evaluate it with evaluate.py --checkpoint {run}", ValueError, RecursionError
        ):
            document = json.loads(files.read_file(path, files.TABLE))
            _Document.read(document)
        self.name, self.document = run, document
        self.predictions = Predictions(folder, document["predictions"]["sha256"])
        self.metadata = self.predictions.metadata

    @cached_property
    def figures(self) -> dict[str, tuple[float, list[float] | None]]:
        """Value and interval of each metric that can be compared.

        The name of a distance ends in its extractor and the extractor's weights.
        """
        figures = {}

        def add(rows: Iterable[Figure], values: Mapping[str, Any], suffix: str = "") -> None:
            for row in rows:
                if values.get(row.key) is not None:
                    figures[row.key + suffix] = values[row.key], values.get(f"{row.key}_interval")

        add(_TOP_LEVEL, self.document)
        for distance in self.document.get("distances", []):
            extractor = distance["extractor"].partition(":")[0]
            add(_BY_EXTRACTOR, distance, f" {extractor} {distance['weights']}".rstrip())
        return figures


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
        loaded.append([Evaluated(run) for run in runs])
    first = loaded[0][0]
    for run in chain(*loaded):
        _check_same_evaluation(first, run)
    ordered = [_by_training_seed(group) for group in loaded]
    tables = [_differences(ordered[0], group) for group in ordered[1:]]
    for name in dict.fromkeys(name for table in tables for name in table):
        rows = [table[name] for table in tables if name in table]
        paired.holm(rows)
        for row in rows:
            row["verdict"] = "cannot tell"
            if row["p"] is not None and row["p"] < paired.LEVEL:
                better = (row["difference"] > 0) == (_row(name).better == "larger")
                row["verdict"] = "better" if better else "worse"
    return {
        "task": first.metadata["task"],
        "n": first.metadata["n"],
        "seed": first.metadata["seed"],
        "data_hash": first.metadata["data"],
        "runs": list(groups),
        "comparisons": [
            {"run": group, "figures": list(table.values())}
            for group, table in zip(groups[1:], tables, strict=True)
        ],
        "notes": _notes(ordered),
    }


def _check_same_evaluation(first: Evaluated, second: Evaluated) -> None:
    words = {
        "task": "task",
        "data": "test file (hash)",
        "n": "number of images",
        "seed": "seed",
        "classes": "classes",
    }
    for key, name in words.items():
        values = [str(run.metadata[key])[:12] for run in (first, second)]
        if first.metadata[key] != second.metadata[key]:
            text = "" if key == "classes" else f" ({' and '.join(values)})"
            raise UserError(
                f"{first.name} and {second.name} were evaluated with another {name}{text}; evaluate "
                "both with the same --data, --n and --seed"
            )
    if first.metadata["task"] != "classifier":
        return
    for key, default in SPEED_OPTIONS.items():
        pair = [run.document.get(key, default) for run in (first, second)]
        if pair[0] != pair[1] and None not in pair:
            text = " and ".join(str(value).lower()[:12] for value in pair)
            raise UserError(
                f"{first.name} and {second.name} were evaluated with --{key} {text}; evaluate both "
                f"with the same --{key}"
            )


def _by_training_seed(group: list[Evaluated]) -> list[Evaluated]:
    """Sort the runs of a group by training seed; raise UserError unless the seeds differ."""
    seeds = [run.metadata["training_seed"] for run in group]
    if len(group) > 1 and (None in seeds or len(set(seeds)) < len(seeds)):
        names = ", ".join(f"{run.name} ({seed})" for run, seed in zip(group, seeds, strict=True))
        raise UserError(
            f"runs of a group must be trained with different seeds, not {names}; change --seed"
        )
    return sorted(group, key=lambda run: run.metadata["training_seed"] or 0)


def _differences(first: list[Evaluated], second: list[Evaluated]) -> dict[str, Document]:
    """Compare the metrics that all runs of both groups have; return a row for each, by name."""
    seeds, second_seeds = (
        [run.metadata["training_seed"] for run in group] for group in (first, second)
    )
    if len(first) != len(second) or (len(first) > 1 and seeds != second_seeds):
        raise UserError(
            f"the groups have the training seeds {seeds} and {second_seeds}; give runs of equal seeds"
        )
    runs = [*first, *second]
    judges = {run.metadata["judge"] for run in runs}
    rows = {}
    for name in runs[0].figures:
        values = [run.figures.get(name) for run in runs]
        if None in values or (_row(name).by_judge and len(judges) > 1):
            continue
        first_values, second_values = (
            [run.figures[name][0] for run in group] for group in (first, second)
        )
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


def _row(name: str) -> Figure:
    """Return the `Figure` of a metric from its name, which may end in an extractor."""
    return ROWS[name.partition(" ")[0]]


def _difference(name: str, first: Evaluated, second: Evaluated) -> paired.Difference:
    """Compare a metric of two runs: by image if both stored its column, else by intervals."""
    first_hits, second_hits = first.predictions.hits, second.predictions.hits
    if name in HIT_RATES and first_hits is not None and second_hits is not None:
        return paired.paired_fractions(first_hits, second_hits)
    first_value, first_interval = first.figures[name]
    second_value, second_interval = second.figures[name]
    first_influence, second_influence = (
        run.predictions.columns.get(name) for run in (first, second)
    )
    if first_influence is not None and second_influence is not None:
        return paired.paired_figures(second_value - first_value, first_influence, second_influence)
    if first_interval is not None and second_interval is not None:
        return paired.independent_figures(
            first_value, first_interval, second_value, second_interval
        )
    return paired.Difference(second_value - first_value, None, None, "no interval")


def _notes(groups: list[list[Evaluated]]) -> dict[str, str]:
    runs = list(chain(*groups))
    notes = {}
    if len(groups[0]) == 1:
        notes["seeds"] = (
            "one training of each: the intervals cover the choice of test images, not the chance of training; for that "
            "give groups of runs with other seeds, RUN,RUN RUN,RUN"
        )
    if len({run.metadata["judge"] for run in runs}) > 1:
        notes["recognised"] = (
            "the runs were evaluated with different judges; evaluate them with the same --classifier"
        )
    if len(groups[0]) == 1:
        bare = [name for name, (_, interval) in runs[0].figures.items() if interval is None]
        if unknown := [name for name in bare if name not in runs[0].predictions.columns]:
            notes["intervals"] = (
                f"no verdict on {', '.join(unknown)}: the evaluations have neither an interval nor each "
                "image's influence"
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
