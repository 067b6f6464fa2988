"""Find a table's columns of labels, groups and splits, and interpret their values.

The rules apply to CSV, Parquet, Arrow and tar files (docs/lmdb.md).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from duetgan.data.packing.sources import base
from duetgan.data.packing.sources.base import NO_LABELS
from duetgan.utils.errors import UserError
from duetgan.utils.text import did_you_mean

# names of the columns, in descending order of preference
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "category", "target", "tags")
SPLIT_COLUMNS = ("split", "set", "subset", "usage")

Value = str | list[str]  # of a table's cell; lists are several labels


@dataclass(frozen=True)
class Columns:
    """The names of a table's columns of labels, groups and splits; None for a missing column."""

    label: str | None
    group: str | None
    split: str | None
    # values of the split column that mark held-out images; empty: its values name the splits
    held_out: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return list(filter(None, [self.label, self.group, self.split]))


def as_value(value: object) -> Value:
    """Return the value of a table's cell as text: "" for None, a list of texts for a list."""
    if isinstance(value, list):
        return [str(item).strip() for item in value]
    return "" if value is None else str(value).strip()


def find_name(where: str, option: str, name: str, columns: Sequence[str]) -> str:
    """Return the column that the user calls `name`, as `columns` spell it.

    Upper and lower case do not matter. Raises UserError if there is no such column. The message
    names the table `where` and the command-line option `option`.
    """
    for column in columns:
        if column.lower() == name.lower():
            return column
    raise UserError(
        f"{where}: {option} {name}: no such column{did_you_mean(name, columns)}; there are "
        f"{', '.join(columns) or 'none'}"
    )


def first_name(names: Iterable[str], columns: Sequence[str]) -> str | None:
    """Return the first of `names` that is a column, as `columns` spell it; None if none is.

    `names` are in lower case. The case of `columns` does not matter.
    """
    lower = {column.lower(): column for column in columns}
    return next((lower[name] for name in names if name in lower), None)


def choose_columns(where: str, names: Sequence[str], options: base.SourceOptions) -> Columns:
    """Choose the columns of labels, groups and splits from `names`, the names of all columns.

    A column that an option names is chosen. Without the option, the columns of labels and splits
    are found by their usual names, and there are no groups. Raises UserError if a column that an
    option names is missing.
    """
    label = first_name(LABEL_COLUMNS, names)
    if options.label_column is not None:
        label = None
        if options.label_column != NO_LABELS:
            label = find_name(where, "--label-column", options.label_column, names)
    group = None
    if options.group_column is not None:
        group = find_name(where, "--group-column", options.group_column, names)
    split = first_name(SPLIT_COLUMNS, names)
    held_out: tuple[str, ...] = ()
    if options.split_column is not None:
        split = None
        if options.split_column != NO_LABELS:
            name, _, values = options.split_column.partition("=")
            split = find_name(where, "--split-column", name, names)
            held_out = tuple(value.strip() for value in values.split(",") if value.strip())
    return Columns(label, group, split, held_out)


def _side(where: str, columns: Columns, value: Value) -> str:
    """Return the split that a value of the split column stands for: train, val or test.

    Raises UserError for a value that stands for no split.
    """
    if columns.held_out:
        return "val" if value in columns.held_out else "train"
    if side := base.side_of(str(value)):
        return side
    raise UserError(
        f"{where}: column {columns.split}: {value!r} is no name of a split: pass --split-column"
        f" {columns.split}={value} if those rows are held out, or --split-column {NO_LABELS}"
    )


def take_columns(
    source: base.Source,
    where: str,
    columns: Columns,
    rows: Sequence[Sequence[Value]],  # values of `columns.names`
    places: Sequence[str],  # names of the rows, for messages
    options: base.SourceOptions,
) -> list[int]:
    """Set the source's labels and groups, and return the indices of the rows that it uses.

    The source uses the rows of the chosen split. Rows without a label or split become problems of
    the source. Raises UserError for invalid labels, for a row without a group, and if the split
    does not exist.
    """
    usable = []
    labels = []
    sides = []
    for index, row in enumerate(rows):
        values = dict(zip(columns.names, row, strict=True))
        label = values.get(columns.label or "", "")
        if options.label_separator is not None and isinstance(label, str):
            label = [part.strip() for part in label.split(options.label_separator)]
        if columns.label is not None and label == "":
            source.problems.append(base.Problem(places[index], "has no label"))
        elif columns.split is not None and not values[columns.split]:
            source.problems.append(base.Problem(places[index], "has no split"))
        else:
            usable.append(index)
            labels.append(label)
            if columns.split is not None:
                sides.append(_side(where, columns, values[columns.split]))
    source._labels = np.zeros(len(usable), np.int64)
    if columns.label is not None:
        source.take_labels(where, labels, [places[index] for index in usable])
        if columns.label.lower() != LABEL_COLUMNS[0] and options.label_column is None:
            source.remarks.append(f'{where}: labels from column "{columns.label}"')
    if columns.split is not None:
        source.splits = tuple(sorted(set(sides)))
        chosen = base.choose_split(where, options.split, source.splits) if usable else ""
        source.remarks.append(f'{where}: split from column "{columns.split}"')
        of_split = [side == chosen for side in sides]
        source._labels = source._labels[of_split]
        usable = [index for index, is_chosen in zip(usable, of_split, strict=True) if is_chosen]
    elif not source.splits:
        base.refuse_split(where, options.split)
    if columns.group is not None:
        position = columns.names.index(columns.group)
        source.grouping = base.group_images(
            f"--group-column {columns.group}",
            [str(rows[index][position]) for index in usable],
            lambda index: places[usable[index]],
        )
    return usable
