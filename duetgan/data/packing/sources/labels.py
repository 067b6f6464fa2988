"""Find the columns of labels and splits, and interpret their values: the rules for CSV, TSV, JSON
lines, Parquet, Arrow and tar files (docs/lmdb.md). For ambiguous tables UserError names the option
that decides.
"""

import ast
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from duetgan.data.packing.sources import base
from duetgan.data.packing.sources.base import NO_LABELS
from duetgan.utils.errors import UserError
from duetgan.utils.text import did_you_mean

LABEL = "label"
LABEL_COLUMNS = (
    *("labels", "label_name", "fine_label", "class", "class_name", "category", "target"),
    *("tags", "choice", "choices", "finding labels"),
)
# values of a column such as is_valid
POSITIVE = frozenset(("1", "1.0", "true", "yes"))
NEGATIVE = frozenset(("0", "0.0", "false", "no"))
SPLIT_COLUMNS = frozenset(
    ("split", "set", "subset", "partition", "usage", "fold", "kfold", "phase")
)
SEPARATORS = ("|", ";")  # separate labels unless --label-separator says otherwise
ONE = "one per image"

# column -> number of rows by value, see `count`
Counts = Mapping[str, Counter[str]]


@dataclass(frozen=True)
class Columns:
    """The names of the columns of labels, of the groups and of the split; None: there is none."""

    label: str | None
    assumed: bool  # True: `label` is neither set by an option nor called "label"
    group: str | None
    split: str | None
    # value of the split column -> train, val or test
    sides: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        return list(filter(None, [self.label, self.group, self.split]))


def as_text(value: object) -> str:
    """Return a table's value as the text that a CSV file would hold."""
    if value is None or isinstance(value, str):
        return (value or "").strip()
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def count(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> dict[str, Counter[str]]:
    """Count the rows with each value of a column, up to MOST_VALUES + 1 values per column."""
    counts = {name: Counter[str]() for name in columns}
    for row in rows:
        for values, text in zip(counts.values(), row, strict=True):
            if len(values) <= base.MOST_VALUES:
                values[text] += 1
    return counts


def find_name(where: str, option: str, name: str, columns: Iterable[str]) -> str:
    """Return the one of `columns` called `name`, in any case. Raises UserError if none or several
    are; the message names `option`.
    """
    columns = list(columns)
    matching = [column for column in columns if column.lower() == name.lower()]
    if name in columns:
        matching = [name]
    if len(matching) != 1:
        raise UserError(
            f"{where}: {option} {name}: no such column{did_you_mean(name, columns)}; there are "
            f"{', '.join(columns) or 'none'}"
        )
    return matching[0]


def choose_columns(
    source: base.Source,  # remarks are added to it
    where: str,
    counts: Counts,
    options: base.SourceOptions,
    *,
    declared: Iterable[str] = (),  # label columns according to the file's metadata
    paths: str | None = None,  # the column of the images' paths
) -> Columns:
    """Return the columns of labels, of the groups and of the split.

    Options choose the columns. Without options, the labels' column is found by its name, the
    split's column by its name or else by its values, and there is no column of groups. Raises
    UserError for a missing column, and if several columns are possible.
    """
    group = None
    if options.group_column is not None:
        group = find_name(where, "--group-column", options.group_column, counts)
        counts = {name: values for name, values in counts.items() if name != group}
    label = _label_by_name(where, counts, options.label_column, declared)
    remaining = {name: values for name, values in counts.items() if name not in (label, paths)}
    split, sides = _split(where, remaining, options.split_column)
    if label is None and options.label_column is None:
        remaining.pop(split or "", None)
        source.remarks += base.looks_like_labels(where, remaining)
    assumed = label is not None and options.label_column is None and label.lower() != LABEL
    return Columns(label, assumed, group, split, sides)


def _label_by_name(
    where: str, counts: Counts, option: str | None, declared: Iterable[str]
) -> str | None:
    if option == NO_LABELS:
        return None
    if option is not None:
        return find_name(where, "--label-column", option, counts)
    usual = [name for name in counts if name.lower() in LABEL_COLUMNS]
    usual.sort(key=lambda name: LABEL_COLUMNS.index(name.lower()))
    names = [name for name in counts if name.lower() == LABEL] or usual or list(declared)
    if len(names) > 1:
        raise UserError(
            f"{where}: {' and '.join(names)} could be labels: pass --label-column {names[0]}, or"
            f" --label-column {NO_LABELS}; its columns are {', '.join(counts)}"
        )
    return names[0] if names else None


# --- splits


def _split(where: str, counts: Counts, option: str | None) -> tuple[str | None, dict[str, str]]:
    """Return the name of the split's column, and the split that each of its values means. Raises
    UserError if the column, or the meaning of one of its values, is unclear.
    """
    if option == NO_LABELS:
        return None, {}
    name, _, held_out = (option or "").partition("=")
    if option is not None:
        name = find_name(where, "--split-column", name, counts)
        counts = {name: counts[name]}
    if held_out:
        texts = counts[name].keys() - {""}
        chosen = {
            find_name(where, f"--split-column {name}=", value.strip(), texts)
            for value in held_out.split(",")
        }
        return name, {text: "val" if text in chosen else "train" for text in texts}
    splits: dict[str, dict[str, str]] = {}
    for column, values in counts.items():
        sides = _sides(column, values)
        is_chosen = option is not None or column.lower() in SPLIT_COLUMNS
        if is_chosen and not sides:
            value = min((value for value in values if not base.side_of(value)), default="")
            raise UserError(
                f"{where}: the column {column} may be a split, but {value!r} is no name of one:"
                f" pass --split-column {column}={value} if those rows are held out, or"
                f" --split-column {NO_LABELS}"
            )
        if sides and (is_chosen or len(set(sides.values())) > 1):
            splits[column] = sides
    if len(splits) > 1:
        raise UserError(
            f"{where}: {' and '.join(splits)} may be a split: pass --split-column"
            f" {min(splits)}, or {NO_LABELS}"
        )
    return next(iter(splits.items()), (None, {}))


def _sides(name: str, values: Iterable[str]) -> dict[str, str]:
    """Return the split that each value of the column `name` means, as in `Usage: Training` and
    `is_valid: True`. Returns {} if a value means none.
    """
    values = sorted(set(values) - {""})
    flag = base.side_of(name.lower().removeprefix("is"))
    if flag and set(map(str.lower, values)) <= POSITIVE | NEGATIVE:
        opposite = "test" if flag == "train" else "train"
        return {value: flag if value.lower() in POSITIVE else opposite for value in values}
    sides = {value: base.side_of(value) for value in values}
    return sides if all(sides.values()) else {}


# --- values


def listed_labels(text: str) -> str | list[str]:
    """Parse a list of labels as Python or JSON writes it: `["cat", "dog"]`. Returns any other text
    unchanged.
    """
    if (text[:1], text[-1:]) == ("[", "]"):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            content = ast.literal_eval(text)
            if set(map(type, content)) <= {str, int}:
                return [str(label).strip() for label in content]
    return text


def split_labels(
    where: str, texts: Sequence[str], option: str | None
) -> tuple[list[str | list[str]], str]:
    """Return the label of each text, or its list of labels, and a description for the user.

    `option` is the separator, or "none"; None: it is found. Raises UserError if it is unclear
    whether a text is one label.
    """
    values = list(map(listed_labels, texts))
    plain = {value for value in values if isinstance(value, str)}
    separator = option
    if option is None:
        separator = next((sign for sign in SEPARATORS if any(sign in text for text in plain)), "")
        if not separator and (joined := min((text for text in plain if "," in text), default="")):
            raise UserError(
                f'{where}: labels such as "{joined}" may be one or several: pass --label-separator'
                f' "," for several per image, or --label-separator {NO_LABELS} for one'
            )
    if separator and separator != NO_LABELS:
        separator = separator.replace("\\t", "\t")
        for index, value in enumerate(values):
            if value and isinstance(value, str):
                values[index] = [part.strip() for part in value.split(separator)]
        return values, f'several per image separated by "{separator}"'
    if any(isinstance(value, list) for value in values):
        return values, "lists of several per image"
    return values, ONE


def take_columns(
    source: base.Source,
    where: str,
    columns: Columns,
    rows: Sequence[Sequence[str]],  # values of `columns.names`
    places: Sequence[str],  # names of the rows, for messages
    options: base.SourceOptions,
) -> list[int]:
    """Set the source's labels and groups from the rows of the chosen split, and return the indices
    of these rows.

    Rows without a label or split become problems of the source. A remark describes assumptions.
    Raises UserError for invalid labels, for a row without a group, and if the split does not exist.
    """
    values: Sequence[str | list[str]] = [""] * len(rows)
    form = ONE
    if columns.label is not None:
        texts = [row[0] for row in rows]
        values, form = split_labels(where, texts, options.label_separator)
    # With lists an empty value is an image without labels.
    with_lists = any(isinstance(value, list) for value in values)
    label_required = columns.label is not None and not with_lists
    usable = []
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        if label_required and not value:
            source.problems.append(base.Problem(places[index], "has no label"))
        elif columns.split and not row[-1]:
            source.problems.append(base.Problem(places[index], "has no split"))
        else:
            usable.append(index)
    if form != ONE or columns.split or columns.assumed:
        text = f'labels from column "{columns.label}", {form}' if columns.label else "no labels"
        sides = ", ".join(f"{value} -> {side}" for value, side in sorted(columns.sides.items()))
        text += f'; split from column "{columns.split}": {sides}' if columns.split else ""
        source.remarks.append(f"{where}: {text}")
    source._labels = np.zeros(len(usable), np.int64)
    if columns.label is not None:
        source.take_labels(
            where, [values[index] for index in usable], [places[index] for index in usable]
        )
    if columns.split is None:
        if not source.splits:
            base.refuse_split(where, options.split)
    else:
        source.splits = tuple(sorted({columns.sides[rows[index][-1]] for index in usable}))
        chosen = base.choose_split(where, options.split, source.splits) if usable else ""
        of_split = [columns.sides[rows[index][-1]] == chosen for index in usable]
        source._labels = source._labels[of_split]
        usable = list(itertools.compress(usable, of_split))
    if columns.group is not None:
        source.grouping = base.group_images(
            f"--group-column {columns.group}",
            [rows[index][columns.names.index(columns.group)] for index in usable],
            lambda index: places[usable[index]],
        )
    return usable
