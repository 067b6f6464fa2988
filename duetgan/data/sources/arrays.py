"""Sources of arrays: .npy and .npz files, TIFF files whose pages are images, and stacks of files
with one channel each.
"""

import contextlib
import os
import re
import zipfile
from pathlib import Path

import numpy as np

from duetgan.data.errors import ImageError, read_error
from duetgan.data.sources.base import (
    ArraySource,
    Source,
    SourceOptions,
    choose_split,
    refuse_split,
    split_name,
)
from duetgan.data.sources.files import METHODS, UNPACKING_ERRORS, ListedSource
from duetgan.data.values import (
    Values,
    channels_last,
    native,
    npy_array,
    npy_header,
    open_tiff,
    page_values,
    stacked,
)
from duetgan.utils import files
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import listed


def open_npy(path: Path, options: SourceOptions) -> ArraySource:
    """Open all images of a .npy file, unlabelled. The file is memory-mapped."""
    refuse_split(path, options.split)
    with (
        files.reading(path, "save it with numpy.save", ImageError),
        files.open_file(path, files.ARCHIVE) as file,
    ):
        shape, fortran, dtype, start = npy_header(file, os.fstat(file.fileno()).st_size)
        images = channels_last(
            np.memmap(file, dtype, "r", start, shape, "F" if fortran else "C"), many=True
        )
    return ArraySource(path.name, images)


def open_npz(path: Path, options: SourceOptions) -> ArraySource:
    """Open the images, and the labels if there are some, of a .npz file or of one of its splits.

    An array belongs to a split if its name has `train`, `val` or `test` between underscores
    (MedMNIST's train_images, Keras's x_train). Labels are integers [n] or [n, 1], or multi-hot
    vectors [n, classes] of 0 and 1. Raises UserError for other arrays.
    """
    by_split: dict[str, dict[str, np.ndarray]] = {}  # "": arrays without a split
    damaged = files.reading(
        path, "save it with numpy.savez", *UNPACKING_ERRORS, NotImplementedError
    )
    with (
        damaged,
        files.open_file(path, files.ARRAY) as whole,
        zipfile.ZipFile(whole) as archive,
    ):
        files.refuse_large(sum(member.file_size for member in archive.infolist()), files.ARRAY)
        for member in archive.infolist():
            if member.compress_type not in METHODS:
                raise ImageError(f"{member.filename} is not compressed by deflate")
            with archive.open(member) as file:
                array = npy_array(file.read(member.file_size + 1))
            name = member.filename.removesuffix(".npy")
            split = next(filter(None, map(split_name, name.split("_"))), "")
            by_split.setdefault(split, {})[name] = array
    splits = tuple(sorted(filter(None, by_split)))
    if not splits:
        refuse_split(path, options.split, "arrays with its name")
    arrays = by_split.get(choose_split(path, options.split, splits) if splits else "", {})
    images = [name for name, array in arrays.items() if array.ndim > 2]
    label_arrays = [name for name in arrays if name not in images]
    if len(images) != 1 or len(label_arrays) > 1:
        raise UserError(
            f"{path}: holds {listed(sorted(arrays))}; give one array of images and one of labels"
        )
    with files.reading(path, "save it with numpy.savez", ImageError):
        pixels = channels_last(arrays[images[0]], many=True)
    source = ArraySource(path.name, pixels)
    source.splits = splits
    if not label_arrays:
        return source
    labels = arrays[label_arrays[0]]
    is_multi_hot = labels.size > len(pixels)
    if (
        len(labels) != len(pixels)
        or labels.dtype.kind not in "iu"
        or (is_multi_hot and not np.isin(labels, (0, 1)).all())
    ):
        raise UserError(
            f"{path}: {label_arrays[0]} is {labels.dtype} {list(labels.shape)}; give whole numbers,"
            " a row an image, of several 0 and 1"
        )
    if not is_multi_hot:
        source.take_labels(path.name, list(map(str, labels.ravel().tolist())))
    else:
        rows, numbers = np.unique(labels.astype(bool), axis=0, return_inverse=True)
        source.classes = list(map(str, range(labels.shape[1])))
        source.label_sets = [np.flatnonzero(row).tolist() for row in rows]
        source._labels = numbers
    return source


class TiffSource(Source):
    """A TIFF file whose pages are images, unlabelled."""

    in_order = True

    def __init__(self, path: Path, options: SourceOptions) -> None:
        super().__init__(path.name, [])
        refuse_split(path, options.split)
        self.path = path
        self.as_is = True
        with (
            files.reading(path, "copy or make it again", ImageError),
            contextlib.ExitStack() as stack,
        ):
            stream = stack.enter_context(files.open_file(path, files.ARCHIVE))
            self._size = os.fstat(stream.fileno()).st_size
            self._file = stack.enter_context(open_tiff(stream))
            self._labels = np.zeros(len(self._file.pages), np.int64)
            if not len(self):
                raise ImageError("holds no page")
            self._open = stack.pop_all()
        self.remarks.append(f"{path.name}: each of its {len(self):,} pages is an image")

    def content(self, index: int) -> Values:
        with explained(IndexError, read_error):
            return page_values(self._file.pages[index], self._size)

    def item_name(self, index: int) -> str:
        return f"{self.path}: page {index + 1}"

    def __exit__(self, *error: object) -> None:
        self._open.close()


class StackSource(Source):
    """Images with one file per channel, named by a pattern such as `{name}_{channel}.tif`.

    Files with the same `name` are one image. Its channels are in the order of their names.
    """

    def __init__(self, files: ListedSource, pattern: str) -> None:
        vars(self).update(vars(files))
        self.as_is = True
        text = re.escape(pattern)
        for part, group in (("name", "(?P<name>.+?)"), ("channel", "(?P<channel>[^/]+?)")):
            if text.count(rf"\{{{part}\}}") != 1:
                raise UserError(
                    f"--stack {pattern}: give {{name}} and {{channel}} once each, as in"
                    f" {{name}}_{{channel}}.tif"
                )
            text = text.replace(rf"\{{{part}\}}", group)
        stacks: dict[str, dict[str, int]] = {}
        for index, name in enumerate(files.names):
            if (match := re.fullmatch(text, name)) is None:
                raise UserError(
                    f"{files.item_name(index)} does not fit --stack {pattern}: move it away"
                )
            stacks.setdefault(match["name"], {})[match["channel"]] = index
        channels = sorted({channel for stack in stacks.values() for channel in stack})
        for name, stack in stacks.items():
            if missing := sorted(set(channels) - set(stack)):
                raise UserError(
                    f"{files.name}: {name} has no file of channel {listed(missing)}: add it"
                )
        self.files = files
        self.stacks = list(stacks.items())
        self._labels = files.labels()[[stack[channels[0]] for stack in stacks.values()]]
        self.channel_names = channels
        self.remarks = [
            *files.remarks,
            f"{files.name}: {len(self):,} stacks of the channels {', '.join(channels)}",
        ]

    def content(self, index: int) -> np.ndarray:
        parts = [
            native(self.files.content(self.stacks[index][1][channel]))
            for channel in self.channel_names
        ]
        if parts[0].pixels.shape[2] != 1:
            raise ImageError("has channels of more than a grey value")
        return stacked(parts).pixels

    def item_name(self, index: int) -> str:
        return self.stacks[index][0]

    stored_name = item_name

    def __exit__(self, *error: object) -> None:
        self.files.__exit__(*error)
