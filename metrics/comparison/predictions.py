"""What an evaluation keeps of every image, beside metrics.json, so that two of them can be compared image by image.

`predictions.safetensors`: a column for each of COLUMNS that there is, each of n rows, and in its metadata under `about`
JSON of what was evaluated (`About`). Nothing in it is executed when it is read.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load, save

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.figures import CLASSIFIER
from duetgan.utils import bounded
from duetgan.utils.config.model import PositiveInt, Stored, Whole
from duetgan.utils.errors import UserError
from duetgan.utils.files import write_atomic

FILE = "predictions.safetensors"
SCHEMA = 1
COLUMNS = {
    "label": np.int64,  # the true class; of a sample the one that was asked for
    "prediction": np.int64,  # the most likely class
    "confidence": np.float64,  # its probability
    "loss": np.float64,  # -log of the true class's probability
    **{row.key: np.float64 for row in CLASSIFIER},  # the image's influence on the document's figure of this name
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
    """Write FILE of an evaluation into a folder; returns what its document says of it: `data_hash`, `predictions`."""
    about = {"task": checkpoint["task"], "data": reader.meta.content_hash, "n": len(columns["label"]), "seed": seed}
    about |= {"training_seed": checkpoint["config"].get("seed"), "classes": checkpoint["classes"], "judge": judge}
    return {"data_hash": reader.meta.content_hash, "predictions": save_predictions(folder, about, columns)}


def save_predictions(folder: Path, about: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Write FILE into a folder; `about` is `About` without `schema`. Returns what metrics.json says of it: `file`,
    `sha256`.
    """
    arrays = {name: np.ascontiguousarray(column, dtype=COLUMNS[name]) for name, column in columns.items()}
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
                raise UserError(f"{path} is not of the evaluation that metrics.json beside it is of; {remedy}")
            columns = load(content)
            head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            about = json.loads(head["__metadata__"]["about"])
            About.read(about, "about")
            n, classes = about["n"], len(about["classes"])
            for name, column in columns.items():
                if name not in COLUMNS or column.dtype != COLUMNS[name] or column.shape != (n,):
                    raise ValueError(f"column {name} is {column.dtype} {list(column.shape)}, n is {n}")
                if column.dtype == np.float64 and not np.isfinite(column).all():
                    raise ValueError(f"column {name} is not finite")
                if name in ("label", "prediction") and not 0 <= column.min() <= column.max() < max(1, classes):
                    raise ValueError(f"column {name} lies beyond the {classes} classes")
            if "prediction" in columns and "label" not in columns:
                raise ValueError("column label is missing")
        self.about: dict[str, Any] = about
        self.columns: dict[str, np.ndarray] = columns

    @property
    def hits(self) -> np.ndarray | None:
        """Whether each image is predicted as its label says, bool [n]; None where nothing was predicted."""
        if "prediction" not in self.columns:
            return None
        return self.columns["prediction"] == self.columns["label"]
