"""Pictures of a study's page."""

from pathlib import Path

import numpy as np
import torch

from data.reading.dataset import Dataset
from utils.images import save_rows

COLUMNS = 12


def class_rows(reader: Dataset, out: Path, *, columns: int = COLUMNS) -> None:
    """The first images of each class in a row with its name."""
    labels = reader.labels()
    rows, names = [], []
    for label, name in enumerate(reader.classes):
        records = np.flatnonzero(labels == label)[:columns]
        if len(records):
            rows.append(list(torch.from_numpy(reader.read(records)[0])))
            names.append(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_rows(rows, out, columns=columns, captions=names)
