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
from dataclasses import dataclass, field

import numpy as np

from duetgan.data.sources import base
from duetgan.data.sources.base import NO_LABELS
from duetgan.utils.errors import UserError
from duetgan.utils.text import did_you_mean, listed

LABEL = "label"
LABEL_COLUMNS = (
    *("labels", "label_name", "fine_label", "class", "class_name", "category", "target"),
    *("tags", "choice", "choices", "finding labels"),
)
# values of a one-hot column
POSITIVE = frozenset(("1", "1.0", "true", "yes"))
NEGATIVE = frozenset(("", "0", "0.0", "false", "no"))
# means "no" in columns with 1 (CelebA), "uncertain" in columns with 0 and 1 (CheXpert)
MINUS = frozenset(("-1", "-1.0"))
NUMBERING = frozenset(("", "id", "index", "unnamed: 0"))  # columns that number the rows
SPLIT_COLUMNS = frozenset(
    ("split", "set", "subset", "partition", "usage", "fold", "kfold", "phase")
)
SEPARATORS = ("|", ";")  # always separate labels
ONE = "one per image"
POSSIBLE_SEPARATORS = (",", "/", "+", "&", " ")

# column -> number of rows by value, see `count`
Counts = Mapping[str, Counter[str]]


@dataclass(frozen=True)
class Columns:
    """The names of the columns of labels and of the split."""

    labels: Sequence[str] = ()  # empty: unlabelled
    one_hot: bool = False  # True: each class is a column of 0 and 1
    assumed: bool = False  # True: neither set by an option nor called "label"
    split: str | None = None
    # value of the split column -> train, val or test
    sides: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [*self.labels, *filter(None, [self.split])]


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
    """Return the columns of labels and of the split.

    They are chosen by the options, else by their names, else by their values. Raises UserError for
    a missing column, and if several columns are possible.
    """
    labels = _labels_by_name(where, counts, options.label_column, declared)
    remaining = {name: values for name, values in counts.items() if name not in (*labels, paths)}
    is_decided = labels != [] or options.label_column is not None
    split, sides = _split(where, remaining, options.split_column, is_decided)
    if is_decided:
        one_hot = len(labels) > 1 and all(_is_one_hot(counts[name]) for name in labels)
        assumed = options.label_column is None and labels[0].lower() != LABEL
        return Columns(labels, one_hot, assumed, split, sides)
    remaining.pop(split or "", None)
    if labels := _one_hot_columns(where, remaining):
        return Columns(labels, True, True, split, sides)
    warnings = base.looks_like_labels(where, remaining)
    if len(remaining) == 1 and paths is not None and warnings:
        return Columns(list(remaining), False, True, split, sides)
    source.remarks += warnings
    near = next((name for name in remaining if did_you_mean(LABEL, [name.lower()])), None)
    if near is not None and paths is not None:
        raise UserError(
            f"{where}: no column label (did you mean {near!r}?): pass --label-column {near}, or"
            f" {NO_LABELS}"
        )
    return Columns(split=split, sides=sides)


def _labels_by_name(
    where: str, counts: Counts, option: str | None, declared: Iterable[str]
) -> list[str]:
    if option == NO_LABELS:
        return []
    if option is not None:
        names = [option] if option in counts else option.split(",")
        return [find_name(where, "--label-column", name.strip(), counts) for name in names]
    usual = [name for name in counts if name.lower() in LABEL_COLUMNS]
    usual.sort(key=lambda name: LABEL_COLUMNS.index(name.lower()))
    names = [name for name in counts if name.lower() == LABEL] or usual or list(declared)
    if len(names) > 1:
        raise UserError(
            f"{where}: {' and '.join(names)} could be labels: pass --label-column {names[0]}, or"
            f" --label-column {NO_LABELS}; its columns are {', '.join(counts)}"
        )
    return names


def _is_one_hot(values: Iterable[str]) -> bool:
    return _lower(values) <= POSITIVE | NEGATIVE or _lower(values) <= POSITIVE | MINUS


def _one_hot_columns(where: str, counts: Counts) -> list[str]:
    """Return the columns of 0 and 1 if there are several. Raises UserError if it is unclear whether
    they are the labels.
    """
    columns = {
        name: values
        for name, values in counts.items()
        if name.lower() not in NUMBERING and {*values} != {""}
    }
    binary = [name for name, values in columns.items() if _is_one_hot(values)]
    varying = [name for name in binary if len(columns[name]) > 1]
    if len(binary) < 2 or not varying or (len(varying) == 1 and len(binary) < len(columns)):
        return []
    rivals = [name for name in columns if name not in binary]
    unsure = [name for name in rivals if _lower(columns[name]) <= POSITIVE | NEGATIVE | MINUS]
    if unsure or base.looks_like_labels(where, {name: columns[name] for name in rivals}):
        reason = (
            f"{unsure[0]} has -1 beside 0 and 1"
            if unsure
            else f"{listed(rivals, 4)} may hold them too"
        )
        raise UserError(
            f"{where}: the columns {listed(binary, 4)} may be labels of 0 and 1, but {reason}: pass"
            " --label-column"
            f" {','.join(binary[:3])}{',...' * (len(binary) > 3)}, another column, or {NO_LABELS}"
        )
    return binary


def _lower(values: Iterable[str]) -> set[str]:
    return set(map(str.lower, values))


# --- splits


def _split(
    where: str, counts: Counts, option: str | None, labelled: bool
) -> tuple[str | None, dict[str, str]]:
    """Return the name of the split's column, and the split that each of its values means. Raises
    UserError if it is unclear.
    """
    if option == NO_LABELS:
        return None, {}
    if option is not None:
        return _split_by_name(where, counts, *option.partition("=")[::2])
    splits: dict[str, dict[str, str]] = {}
    unclear = []
    for column, all_values in counts.items():
        usual, values = column.lower() in SPLIT_COLUMNS, all_values.keys() - {""}
        if not usual and len(values) > base.MOST_VALUES:
            continue
        sides = _sides(column, values)
        if sides and (usual or len(set(sides.values())) > 1):
            splits[column] = sides
        elif sides is None:
            meanings = set(map(base.side_of, values)) - {""}
            if usual or ("train" in meanings and len(meanings) > 1):
                unclear.append(column)
    called_split = [column for column in splits if column.lower() == "split"]
    if called_split:
        splits = {column: splits[column] for column in called_split}
    name: str | None = next(iter([*splits, *unclear]), None)
    flags = [column for column in counts if column != name and _is_one_hot(counts[column])]
    if len(splits) > 1 or (splits and base.side_of(name or "") and flags and not labelled):
        raise UserError(
            f"{where}: {' and '.join(splits)} may be a split: pass --split-column {name}, or"
            f" {NO_LABELS}"
        )
    if unclear and not splits:
        raise _unclear(where, unclear[0], counts[unclear[0]].keys() - {""})
    return name, splits.get(name or "", {})


def _split_by_name(
    where: str, counts: Counts, name: str, held_out: str
) -> tuple[str, dict[str, str]]:
    name = find_name(where, "--split-column", name, counts)
    values = counts[name].keys() - {""}
    if held_out:
        option = f"--split-column {name}="
        chosen = {find_name(where, option, value.strip(), values) for value in held_out.split(",")}
        return name, {value: "val" if value in chosen else "train" for value in values}
    if (sides := _sides(name, values)) is None:
        raise _unclear(where, name, values)
    return name, sides


def _sides(name: str, values: Iterable[str]) -> dict[str, str] | None:
    """Return the split that each value of the column `name` means, as in `Usage: Training` and
    `is_valid: True`. Returns None if it is unclear.
    """
    values = sorted(values)
    flag = base.side_of(name.lower().removeprefix("is"))
    if flag and _is_one_hot(values):
        opposite = "test" if flag == "train" else "train"
        return {value: flag if value.lower() in POSITIVE else opposite for value in values}
    sides = {value: base.side_of(value) for value in values}
    return sides if all(sides.values()) and len(sides) <= base.MOST_VALUES else None


def _unclear(where: str, name: str, values: Iterable[str]) -> UserError:
    value = min(value for value in values if not base.side_of(value))
    hint = did_you_mean(value.lower(), sorted(base.SPLIT_NAMES))
    return UserError(
        f"{where}: the column {name} may be a split, but {value!r} is no name of one{hint}; its"
        " values are"
        f" {listed(sorted(values), 4)}: pass --split-column {name}={value} if those rows are held"
        " out, or"
        f" --split-column {NO_LABELS}"
    )


# --- values


def listed_labels(text: str) -> str | list[str]:
    """Parse a list of labels in JSON or Python (`["cat", "dog"]`), or Label Studio's
    `{"choices": [...]}`. Returns any other text unchanged.
    """
    if (text[:1], text[-1:]) in (("[", "]"), ("{", "}")):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                content = read(text)
                content = content.get("choices", 0) if isinstance(content, dict) else content
                if isinstance(content, list) and set(map(type, content)) <= {str, int}:
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
    plain = {value for value in values if isinstance(value, str)} - {""}
    separator = option.replace("\\t", "\t") if option is not None else _separator(where, plain)
    if separator and separator != NO_LABELS:
        for index, value in enumerate(values):
            if value:
                parts = value.split(separator) if isinstance(value, str) else value
                values[index] = [part.strip() for part in parts]
        return values, f'several per image separated by "{separator}"'
    if any(isinstance(value, list) for value in values):
        return values, "lists of several per image"
    if option is None:
        for sign in POSSIBLE_SEPARATORS:
            if joined := sorted(value for value in plain if sign in value):
                return values, f'{ONE} ("{joined[0]}" is one; several: --label-separator "{sign}")'
    return values, ONE


def _separator(where: str, labels: set[str]) -> str:
    """Return the separator of several labels in one text, "" if there is none. Raises UserError if
    it is unclear.
    """
    for sign in (*SEPARATORS, *POSSIBLE_SEPARATORS):
        parts = {
            label: {part.strip() for part in label.split(sign)}
            for label in labels
            if sign in label.strip(sign)
        }
        if not parts:
            continue
        if sign in SEPARATORS or set.union(*parts.values()) <= labels - parts.keys():
            return sign
        times = Counter(part for label in labels for part in parts.get(label, {label}))
        doubtful = sum(all(times[part] > 1 for part in several) for several in parts.values())
        if sign == "," or 2 * doubtful >= len(parts):
            raise UserError(
                f'{where}: labels such as "{min(parts)}" may be one or several: pass --label-separator "{sign}" for'
                f" several per image, or --label-separator {NO_LABELS} for one"
            )
    return ""


def take_columns(
    source: base.Source,
    where: str,
    columns: Columns,
    rows: Sequence[Sequence[str]],  # values of `columns.names`
    places: Sequence[str],  # names of the rows, for messages
    options: base.SourceOptions,
) -> list[int]:
    """Set the source's labels from the rows of the chosen split, and return the indices of these
    rows.

    Rows without a label or split become problems of the source. A remark describes assumptions.
    Raises UserError for invalid labels, and if the split does not exist.
    """
    width = len(columns.labels)
    values, assumed = _values(
        where, columns, [row[:width] for row in rows], options.label_separator
    )
    # With lists an empty value is an image without labels.
    label_required = width > 0 and not any(isinstance(value, list) for value in values)
    usable = []
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        if label_required and not value:
            source.problems.append(base.Problem(places[index], "has no label"))
        elif columns.split and not row[-1]:
            source.problems.append(base.Problem(places[index], "has no split"))
        else:
            usable.append(index)
    if assumed != ONE or columns.split or columns.assumed:
        names = ", ".join(f'"{name}"' for name in columns.labels)
        text = f"labels from column{'s' * (width > 1)} {names}, {assumed}" if names else "no labels"
        sides = ", ".join(f"{value} -> {side}" for value, side in sorted(columns.sides.items()))
        text += f'; split from column "{columns.split}": {sides}' if columns.split else ""
        source.remarks.append(f"{where}: {text}")
    source._labels = np.zeros(len(usable), np.int64)
    if width:
        source.take_labels(
            where, [values[index] for index in usable], [places[index] for index in usable]
        )
    if columns.split is None:
        if not source.splits:
            base.refuse_split(where, options.split)
        return usable
    source.splits = tuple(sorted({columns.sides[rows[index][-1]] for index in usable}))
    chosen = base.choose_split(where, options.split, source.splits) if usable else ""
    of_split = [columns.sides[rows[index][-1]] == chosen for index in usable]
    source._labels = source._labels[of_split]
    return list(itertools.compress(usable, of_split))


def _values(
    where: str, columns: Columns, rows: Sequence[Sequence[str]], separator: str | None
) -> tuple[list[str | list[str]], str]:
    """Return the label or labels of each row, and a description of assumptions for the user."""
    width = len(columns.labels)
    if columns.one_hot:
        label_sets = [_of_one_hot(columns.labels, row) for row in rows]
        single = all(len(labels) == 1 for labels in label_sets)
        absent = sorted(set(columns.labels) - set(itertools.chain(*label_sets)))
        assumed = f"{ONE if single else 'several per image'} (1: has it)"
        if absent:
            assumed += f"; left out: {listed(absent)}, which no image has"
        return [labels[0] if single else labels for labels in label_sets], assumed
    cells, assumed = split_labels(where, list(itertools.chain(*rows)), separator)
    if width == 1:
        return cells, assumed
    joined = [_joined(cells[row * width : (row + 1) * width]) for row in range(len(rows))]
    return list(joined), assumed + " and column" * (width > 1)


def _of_one_hot(names: Sequence[str], row: Sequence[str]) -> list[str]:
    return [name for name, text in zip(names, row, strict=True) if text.lower() in POSITIVE]


def _joined(cells: Sequence[str | list[str]]) -> list[str]:
    """Return the distinct labels of a row's columns, without empty ones."""
    labels = itertools.chain.from_iterable(
        [cell] if isinstance(cell, str) else cell for cell in cells
    )
    return list(dict.fromkeys(filter(None, labels)))
