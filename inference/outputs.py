"""Where predict.py's answers go, one by one: a table for people, JSON, CSV, and images sorted into a folder a class."""

import csv
import itertools
import json
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from duetgan.inference.inputs import Input
from duetgan.utils.errors import UserError
from duetgan.utils.files import building, check_writable, write_atomic
from duetgan.utils.images import save_png

Sink = Callable[[Input, dict[str, Any]], None]  # takes an image and the answer of `inference.predictions.predict`


@contextmanager
def json_array(stream: TextIO) -> Iterator[Sink]:
    """An array of the answers, written as they come."""
    before = itertools.chain(["[\n"], itertools.repeat(",\n"))

    def write(_given: Input, answer: dict[str, Any]) -> None:
        text = json.dumps(answer, indent=1, allow_nan=False)
        stream.write(next(before) + textwrap.indent(text, " "))

    yield write
    stream.write("[]\n" if next(before) == "[\n" else "\n]\n")


@contextmanager
def csv_file(path: Path, classes: Sequence[str], top: int | None) -> Iterator[Sink]:
    """A row an image: `file`, `label`, `probability`, and a column a class; with `top` K instead `label_2`,
    `probability_2`, ... up to K. Empty behind `file` where an image cannot be read. Raises UserError as `building`.
    """
    places = range(2, (top or 0) + 1)
    more = [f"{name}_{place}" for place in places for name in ("label", "probability")] if top else classes
    with building(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "label", "probability", *more])

        def write(given: Input, answer: dict[str, Any]) -> None:
            shares: dict[str, float] = answer.get("probabilities", {})
            pairs = list(itertools.chain(*shares.items()))
            row = pairs if top else [*pairs[:2], *(shares[name] for name in classes if name in shares)]
            writer.writerow([given.name, *row, *[""] * (2 + len(more) - len(row))])

        yield write


@contextmanager
def error_file(path: Path) -> Iterator[Sink]:
    """`file` and `error` of the images that cannot be read, as CSV. Raises UserError as `building`."""
    with building(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "error"])
        yield lambda given, answer: writer.writerow([given.name, answer["error"]]) if "error" in answer else None


def sorter(folder: Path) -> Sink:
    """Puts each image into `folder`/CLASS: a link to its file, or a file where it lies in an archive. Raises UserError
    where the disk refuses.
    """
    check_writable(folder)

    def write(given: Input, answer: dict[str, Any]) -> None:
        if "error" in answer:
            return
        path = Path(given.name)
        label = answer["label"].replace(os.sep, "_").replace("\0", "")
        label = label if label.strip(".") else f"_{label}"  # a checkpoint's word: it must not lead out of the folder
        place = folder / label / path.name.replace(":", "_")
        if path.is_file():
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                _free(place).symlink_to(path.resolve())
            except OSError as error:
                raise UserError(f"--sort-into: cannot link {place}: {error.strerror}; choose another place") from error
            return
        content = given.content()
        if isinstance(content, np.ndarray):
            save_png(content, _free(place.with_suffix(".png")))
        else:
            write_atomic(_free(place), content)

    return write


def _free(place: Path) -> Path:
    """`place`, numbered where there is something else."""
    numbered = (place.with_stem(f"{place.stem}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([place], numbered) if not os.path.lexists(path))
