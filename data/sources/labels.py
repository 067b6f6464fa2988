"""Which column of a table holds the labels, and what looks like labels but is not used: columns, names of files."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from duetgan.utils.config.cli import did_you_mean
from duetgan.utils.errors import UserError
from duetgan.utils.text import listed

LABEL = "label"
LABEL_COLUMNS = ("labels", "label_name", "fine_label", "class", "class_name", "category", "target")
NO_LABELS = "none"  # asked for: pack without labels
MOST_VALUES = 1000  # different ones, of a column that is taken for labels
# Words before numbers in files' names that are no classes.
NUMBERED = {"dsc", "dscf", "dscn", "frame", "image", "img", "mvi", "photo", "picture", "pxl", "screenshot"}
NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
SHOWN = 4  # classes in a message


def choose_label(
    where: str,
    columns: Sequence[str],
    asked: str | None,
    declared: Iterable[str] = (),  # columns that the file itself calls labels
) -> tuple[str | None, list[str]]:
    """The column of labels (None: unlabelled) and remarks: the one that is asked for, else `label`, else the only one
    of LABEL_COLUMNS, else of the declared ones. Raises UserError if it is not there, or if there are several.
    """
    if asked == NO_LABELS:
        return None, []
    text = ", ".join(columns)
    if asked is not None and asked not in columns:
        hint = did_you_mean(asked, columns)
        raise UserError(f"{where}: --label-column {asked}: no such column{hint}; there are {text or 'none'}")
    if asked is not None:
        return asked, []
    if LABEL in columns:
        return LABEL, []
    fitting = [name for name in LABEL_COLUMNS if name in columns] or list(declared)
    if len(fitting) > 1:
        raise UserError(
            f"{where}: {' and '.join(fitting)} could be labels: pass --label-column {fitting[0]}, call one label, or"
            f" pass --label-column {NO_LABELS}; its columns are {text}"
        )
    remark = "{}: the labels are those of the column {}; without: --label-column none"
    return next(iter(fitting), None), [remark.format(where, name) for name in fitting]


def looks_like_labels(where: str, columns: Mapping[str, Counter[str]]) -> list[str]:
    """A warning if a column of an unlabelled set has the values of labels: few different ones, most several times."""
    return [
        f"warning: {where}: packed without labels, although the column {name} has {len(counts):,} values for"
        f" {counts.total():,} images; if they are labels, pass --label-column {name}"
        for name, counts in columns.items()
        if 2 <= len(counts) <= min(MOST_VALUES, counts.total() // 2)
    ][:1]


def class_of_name(name: str) -> str:
    """The class in a file's name, what stands before its number: `cat` of `cat.12.jpg`, "" of `12.jpg`."""
    return re.sub(r"[\W\d_]+$", "", unicodedata.normalize("NFC", PurePosixPath(name).stem))


def names_look_like_labels(where: str, names: Sequence[str]) -> list[str]:
    """A warning if the names of unlabelled images begin with one of a few words, as in `cat.0.jpg`, `dog.0.jpg`."""
    counts = Counter(map(class_of_name, names))
    few = 2 <= len(counts) <= min(MOST_VALUES, len(names) // 2)
    if not few or "" in counts or all(word.lower() in NUMBERED for word in counts):
        return []
    return [
        f"warning: {where}: packed without labels, although all names begin with one of {len(counts):,} words; for the"
        f" classes {listed(sorted(counts), SHOWN)} pass --classes-from name"
    ]


def text_classes(where: str, labels: Sequence[str]) -> tuple[list[str], list[int], list[str]]:
    """Classes in text order, the number of each label, and remarks. Labels are compared in Unicode's form NFC: "é" may
    be one character or two, as macOS writes it, and looks the same.
    """
    spelled = {label: unicodedata.normalize("NFC", label) for label in labels}
    counts = Counter(spelled.values())
    numbers = {name: number for number, name in enumerate(sorted(counts))}
    twice = sorted(name for name, count in counts.items() if count > 1)
    remark = f"{where}: written in two ways that look the same, and taken as one class each: {listed(twice, SHOWN)}"
    return list(numbers), [numbers[spelled[label]] for label in labels], [remark] if twice else []


def classes_of(where: str, labels: Sequence[str], lines: Sequence[int] = ()) -> tuple[list[str], list[int], list[str]]:
    """As `text_classes`, but whole numbers are the classes "0" to the largest. Raises UserError for a number that is
    negative or larger than the number of labels, with its line if `lines` has one for each label.
    """
    if not all(map(NUMBER.fullmatch, set(labels))):
        return text_classes(where, labels)
    numbers = [int(label) for label in labels]
    if numbers and (min(numbers) < 0 or max(numbers) >= len(numbers)):
        odd = min(numbers) if min(numbers) < 0 else max(numbers)
        place = f"{where} line {lines[numbers.index(odd)]}" if lines else where
        raise UserError(
            f"{place}: label {odd}; labels are names, or whole numbers from 0 below the {len(labels)} images"
        )
    return [str(number) for number in range(max(numbers, default=-1) + 1)], numbers, []
