"""Sources of arrays: .npy and .npz files."""

import os
import zipfile
from pathlib import Path

import numpy as np

from duetgan.data.errors import ImageError
from duetgan.data.images.values import channels_last, npy_array, npy_header
from duetgan.data.packing.sources.base import (
    ArraySource,
    SourceOptions,
    choose_split,
    refuse_split,
    side_of,
)
from duetgan.data.packing.sources.files import METHODS, UNPACKING_ERRORS
from duetgan.utils import files
from duetgan.utils.errors import UserError
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
            split = next(filter(None, map(side_of, name.split("_"))), "")
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
