"""The results of each image of an evaluation, which are stored for comparisons of runs.

FILE has columns [n], with `PredictionsMetadata` in the header. Columns are

- `label`, int64: the true class of an image, or the requested class of a sample;
- `prediction`, int64: the most likely class;
- `confidence`, float64: the probability of the most likely class;
- `loss`, float64: -log of the true class's probability;
- any metric's key, float64: the influence of the image on the metric.
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
from duetgan.metrics.protocol import Document
from duetgan.utils.config.model import PositiveInt, Stored, Whole
from duetgan.utils.errors import UserError
from duetgan.utils.files import TABLE, read_file, reading, write_atomic

FILE = "predictions.safetensors"
SCHEMA = 1
INTEGERS = ("label", "prediction")  # columns of integers


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
    arrays = {}
    for name, column in columns.items():
        arrays[name] = np.ascontiguousarray(column, dtype=_dtype(name))
    content = save(arrays, {"about": json.dumps({"schema": SCHEMA, **metadata})})
    write_atomic(folder / FILE, content)
    return {"file": FILE, "sha256": hashlib.sha256(content).hexdigest()}


def load_predictions(
    folder: Path, sha256: str
) -> tuple[PredictionsMetadata, dict[str, np.ndarray]]:
    """Read FILE from a folder; return its metadata and columns.

    Args:
        sha256: Hash of FILE, from metrics.json.

    Raises:
        UserError: If the file is missing, damaged, or of another evaluation or format.
    """
    path = folder / FILE
    remedy = "evaluate that run once more with evaluate.py --checkpoint"
    faults = SafetensorError, KeyError, TypeError, ValueError, RecursionError
    with reading(path, remedy, *faults):
        content = read_file(path, TABLE)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise UserError(
                f"{path} is not of the evaluation that metrics.json beside it is of; {remedy}"
            )
        columns = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        stored = json.loads(header["__metadata__"]["about"])
        metadata = PredictionsMetadata.read(stored, "about")
        for name, column in columns.items():
            if column.dtype != _dtype(name) or column.shape != (metadata.n,):
                raise ValueError(
                    f"column {name} is {column.dtype} {list(column.shape)}, n is {metadata.n}"
                )
    return metadata, columns


def _dtype(name: str) -> type[np.generic]:
    return np.int64 if name in INTEGERS else np.float64
