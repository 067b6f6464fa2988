"""Read CSV and TSV files that have the paths of images.

labels.py chooses the columns of labels and splits. A row is a problem, reported with its line, if
its length is wrong, its path or label is empty, its file is missing, or its path appeared before.
"""

import csv
import io
import os
from pathlib import Path

from duetgan.data.packing.sources import base, labels
from duetgan.data.packing.sources.files import LocalSource
from duetgan.utils import files
from duetgan.utils.errors import UserError

DELIMITERS = (",", ";", "\t")
# names of the column of paths, in descending order of preference
PATHS = ("path", "file", "filename", "file_name", "image", "image_path", "image_id", "id", "name")


def read_csv(path: Path) -> dict[int, list[str]]:
    """Return the fields of each row, in a dict whose keys are line numbers.

    The key of a row is its last line in the file. The first row is the header. Empty lines are left
    out. Raises UserError for a file that cannot be read.
    """
    with files.reading(path, "save it as CSV in UTF-8", ValueError, csv.Error):
        text = files.read_file(path, files.TABLE).decode("utf-8-sig")
        delimiter = max(DELIMITERS, key=text.partition("\n")[0].count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = {}
        for row in reader:
            if row:
                rows[reader.line_num] = [field.strip() for field in row]
    return rows


class PathTable(LocalSource):
    """A source of the images whose paths are in a table.

    Raises UserError if the table cannot be used.
    """

    takes = frozenset(
        (
            *("label_column", "label_separator", "split_column", "group_column"),
            *("path_column", "root", "suffix"),
        )
    )

    def __init__(self, path: Path, options: base.SourceOptions) -> None:
        super().__init__(options.root or path.parent, path.name, str(path))
        where = self.where
        rows = iter(read_csv(path).items())
        _, names = next(rows, (0, []))
        if len(set(map(str.lower, names))) < len(names):
            raise UserError(f"{where} line 1: a column appears twice; rename one")
        path_column = labels.first_name(PATHS, names)
        if options.path_column is not None:
            path_column = labels.find_name(where, "--path-column", options.path_column, names)
        if path_column is None:
            raise UserError(
                f"{where}: no column path, its columns are {', '.join(names)}; pass --path-column"
                " NAME"
            )
        columns = labels.choose_columns(where, names, options)
        suffix = options.suffix or ""
        if suffix.isalnum():
            suffix = f".{suffix}"
        first: dict[str, int] = {}  # file -> the line that names it first
        images = []
        values: list[list[labels.Value]] = []
        for line, fields in rows:
            row = dict(zip(names, fields, strict=False))
            file = base.with_slashes(row.get(path_column, "")) + suffix
            place = os.path.normpath(self.folder / file)
            problem = ""
            if len(fields) != len(names):
                problem = f"has {len(fields)} fields where the header has {len(names)}"
            elif not row[path_column]:
                problem = f"has an empty {path_column}"
            elif first.setdefault(place, line) != line:
                problem = f"repeats {file} of line {first[place]}"
            elif not os.path.isfile(place):
                problem = f"names {self.folder / file}, which is no file"
            if problem:
                self.problems.append(base.Problem(f"{where} line {line}", problem))
            else:
                images.append(file)
                values.append([row[name] for name in columns.names])
        if not images:
            reason = self.problems[0] if self.problems else f"{where} has no rows below its header"
            raise UserError(
                f"{reason}; pass --root with the folder of the images, and --suffix .jpg where the"
                " names have none"
            )
        places = [f"{where} line {first[os.path.normpath(self.folder / file)]}" for file in images]
        usable = labels.take_columns(self, where, columns, values, places, options)
        self.take_names([images[index] for index in usable], self.labels().tolist())
