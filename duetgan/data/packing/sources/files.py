"""Read images from a folder or a zip file, and derive their labels from the file names.

Nothing is extracted from a zip file to disk. The rules of folders and zip files are in
docs/lmdb.md. In addition:

- A source with images both inside and outside class folders is refused.
- The name of a split's folder may have any case, and "set" at the end (`Test`, `training_set`).
- Other folders next to a train and a test folder are left out.
- Without split folders all images are used. A request for the test or validation split is refused.
"""

import json
import os
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np

from duetgan.data.errors import ImageError, read_error
from duetgan.data.images import SUFFIXES
from duetgan.data.packing.sources import labels
from duetgan.data.packing.sources.base import (
    Problem,
    Source,
    SourceOptions,
    choose_split,
    first_of,
    refuse_split,
    side_of,
    with_slashes,
)
from duetgan.utils import files
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import listed, printable

# A member may decompress to far more than it declares. Only with these methods does zipfile stop at
# the requested number of bytes; bzip2 and LZMA would fill the memory.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
UNPACKING_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)
CLASSES_FROM = ("top", "parent", "none")
ARRAY = ".npy"
MANIFEST = "dataset.json"  # StyleGAN's labels: {"labels": [["name", class], ...]}


def kind_of(name: str) -> files.FileLimit:
    """Return the size limit for a file, which depends on its name."""
    return files.TABLE if PurePosixPath(name).name == MANIFEST else files.IMAGE


def arrange(
    source: "ListedSource", files: Collection[str], folders: Iterable[str], options: SourceOptions
) -> None:
    """Set the source's images and classes by the paths of its files and folders.

    The paths are relative to the folder or zip file of the source, with "/". Raises UserError if
    there is no image, if the split's folder is missing, if the classes are unclear, and for an
    unreadable or wrong `dataset.json`.
    """
    where = source.where
    images, ignored = _images(where, files)
    source.take_names(images)
    source.ignored += ignored
    if options.classes_from == "none":  # all images at any depth
        if options.split:
            raise UserError(
                f"{where}: --classes-from none takes the images of all splits; leave --split out"
            )
        return
    if _take_manifest(source, ignored, options):
        return
    folders = [name.rstrip("/") for name in folders if not _hidden(name) and not _leads_out(name)]
    prefix = _enter(source, folders, options)
    images = [name for name in source.names if name.startswith(prefix)]
    source.take_names(images)
    paths = [name.removeprefix(prefix).split("/") for name in images]
    loose = [name for name, path in zip(images, paths, strict=True) if len(path) == 1]
    names = []
    if loose and len(loose) < len(images):
        raise UserError(
            f"{where} holds images both at the top ({loose[0]}) and in sub-folders;"
            " move the loose ones into class folders or away"
        )
    if not loose:
        names = _folder_classes(source, prefix, paths, folders, options.classes_from)
    if names:
        source.take_labels(where, names, whole=False)


def _take_manifest(source: "ListedSource", ignored: list[str], options: SourceOptions) -> bool:
    """Set the source's labels from its `dataset.json`, and return True if this file is used.

    The file is not used if it is missing from `ignored`, the names of the files that are no images,
    or if the option `classes_from` is set. A label in the file is the number or name of a class, or
    a list of them. Raises UserError if the file has another form, or if its images are not exactly
    those of the source.
    """
    manifests = [name for name in ignored if f"/{name}".endswith(f"/{MANIFEST}")]
    manifest = min(manifests, key=lambda name: name.count("/"), default="")
    prefix, where = manifest.removesuffix(MANIFEST), f"{source.where}: {manifest}"
    if not manifest or options.classes_from:
        return False
    refuse_split(source.where, options.split)
    source.ignored.remove(manifest)
    with explained(ImageError, lambda error: f"{where} {error}; fix it"):
        content = source.read(manifest)
    faults = (ValueError, TypeError, KeyError, RecursionError)
    form = '{"labels": [["name", class], ...]}'
    by_name: dict[str, object] = {}
    with explained(faults, lambda error: f"{where} is not {form} ({error})"):
        for name, label in json.loads(content)["labels"] or []:
            by_name[prefix + with_slashes(str(name))] = label
    if not by_name:
        return True
    if odd := sorted(set(by_name) ^ set(source.names)):
        problem = f"has no label for {odd[0]}"
        if odd[0] in by_name:
            problem = f"names {odd[0]}, which is not there"
        raise UserError(f"{where} {problem}: they must name the same images")
    values = [labels.as_value(by_name[name]) for name in source.names]
    source.take_labels(where, values, [f"{where}: {name}" for name in source.names])
    return True


def _folder_classes(
    source: "ListedSource",
    prefix: str,
    paths: list[list[str]],
    folders: list[str],
    classes_from: str | None,
) -> list[str]:
    """Return the class of each image, which is the name of one of the folders in its path.

    The class is the first folder in the path. With `classes_from` "parent" it is the last one,
    which holds the image. If first folders are classes, those without images are added to the
    source's problems.

    Args:
        prefix: path of the folder that has the class folders: "", or a path with "/" at the end.
        paths: parts of each image's path relative to `prefix`; the last part is the file name.
        folders: paths of all folders of the source, relative to the source.
    """
    if classes_from == "parent":
        return [path[-2] for path in paths]
    names = [path[0] for path in paths]
    for name in sorted(_tops(prefix, folders) - set(names)):
        place = f"{source.where}/{prefix}{name}"
        source.problems.append(Problem(place, "is a class folder without images"))
    return names


def _images(where: str, files: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return two sorted lists of visible files: the names of images, and the names of all others.

    Images are recognised by their suffix. If there are none, .npy files are the images. Raises
    UserError if there are no images at all.
    """
    names = sorted(name for name in files if not _hidden(name))
    suffixes = {name: PurePosixPath(name).suffix.lower() for name in names if not _leads_out(name)}
    kinds = SUFFIXES if SUFFIXES.intersection(suffixes.values()) else {ARRAY}
    images = [name for name in names if suffixes.get(name) in kinds]
    ignored = [name for name in names if suffixes.get(name) not in kinds]
    if images:
        return images, ignored
    supported = " ".join(sorted(SUFFIXES))
    raise UserError(f"{where} holds no images; supported are {supported}")


def _hidden(name: str) -> bool:
    if name.endswith(".grid.png"):  # a drawing of duet inspect
        return True
    parts = set(name.split("/")) - {".."}
    return "__MACOSX" in parts or any(part.startswith(".") for part in parts)


def _leads_out(name: str) -> bool:
    """Return True if the name of a zip file's member is a path outside the archive."""
    return name.startswith("/") or ".." in name.split("/")


def _tops(prefix: str, names: Iterable[str]) -> set[str]:
    """Return the names of the files and folders directly below the folder `prefix`."""
    return {
        name[len(prefix) :].split("/")[0]
        for name in names
        if name.startswith(prefix) and name != prefix
    }


def _enter(source: "ListedSource", folders: list[str], options: SourceOptions) -> str:
    """Return the path of the folder that has the class folders: "", or a path with "/" at the end.

    The path enters the folder of the chosen split, if there are splits. It also enters a folder
    without siblings, if all images in this folder are in sub-folders. Sets the source's splits,
    unless it has some, and adds a remark about folders beside the splits.

    Args:
        folders: paths of all folders of the source, relative to the source.
    """
    where, prefix = source.where, ""
    splits: tuple[str, ...] = ()
    while True:
        below = [name[len(prefix) :].split("/") for name in source.names if name.startswith(prefix)]
        tops = {path[0] for path in below} | _tops(prefix, folders)
        in_folders = all(len(path) > 1 for path in below)
        if in_folders and not splits and _are_splits({path[0] for path in below}, options):
            splits = tuple(sorted(filter(side_of, {path[0] for path in below})))
            chosen = choose_split(where, options.split, splits)
            if omitted := sorted({path[0] for path in below} - set(splits)):
                source.remarks.append(f"left out: {listed(omitted)}, beside {' and '.join(splits)}")
            prefix += chosen + "/"
        elif len(tops) == 1 and all(len(path) > 2 for path in below):
            prefix += tops.pop() + "/"
        else:
            if not splits:
                refuse_split(where, options.split, "split folders")
            source.splits = source.splits or splits
            return prefix


def _are_splits(tops: Collection[str], options: SourceOptions) -> bool:
    """Return True if sibling folders with images are splits rather than classes.

    They are splits if all of their names, `tops`, stand for splits, or if one stands for train and
    another for test or val. With the option `classes_from` "top", and no `split`, they are classes.
    """
    if options.classes_from == "top" and options.split is None:
        return False
    named = list(filter(side_of, tops))
    return len(named) == len(tops) or all(first_of(side, named) for side in ("train", "test"))


class ListedSource(Source):
    """Base class of sources whose images are files with names. A subclass reads the files."""

    separator: ClassVar[str] = "/"  # between the source and a file's name, in messages
    takes = frozenset(("classes_from",))

    def __init__(self, name: str, where: str) -> None:
        super().__init__(printable(name), [])
        self.where = where  # for messages
        self.take_names([])

    def take_names(self, names: list[str], labels: Sequence[int] = ()) -> None:
        """Set the names of the images in order, and their class indices if they are labelled."""
        self.names = names
        self._labels = np.array(labels or [0] * len(names), np.int64)
        self.as_is = bool(names) and names[0].lower().endswith(ARRAY)

    def content(self, index: int) -> bytes:
        return self.read(self.names[index])

    def item_name(self, index: int) -> str:
        return f"{self.where}{self.separator}{self.names[index]}"

    def stored_name(self, index: int) -> str:
        return self.names[index]

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the bytes of a file. Raises ImageError if they cannot be read."""


class LocalSource(ListedSource):
    """A source of files on this machine, whose names are relative to a folder."""

    def __init__(self, folder: Path, name: str, where: str) -> None:
        super().__init__(name, where)
        self.folder = folder

    def item_name(self, index: int) -> str:
        return str(self.folder / self.names[index])

    def read(self, name: str) -> bytes:
        return read_file(self.folder / name)


def read_file(path: Path) -> bytes:
    """Return the bytes of a file. Raises ImageError if it cannot be read or is too large."""
    with explained((OSError, ValueError), read_error):  # ValueError: a name with a null byte
        return files.read_file(path, kind_of(path.name))


def open_folder(folder: Path, options: SourceOptions) -> LocalSource:
    """Open a folder of images, or a folder of class folders, as a source."""
    source = LocalSource(folder, folder.name or str(folder), str(folder))
    arrange(source, *walk(folder), options)
    return source


def walk(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of all files, and the names of all folders, below `folder`.

    The names are relative to `folder`, with "/". Links are followed, but a link to a folder above
    the link counts as a file.
    """
    files: list[str] = []
    folders = [""]
    remedy = "check its permissions, or move its files to another place"
    with explained(
        OSError, lambda error: f"{str(error.filename)[:200]}: {error.strerror}; {remedy}"
    ):
        for parent in folders:  # The list grows in the loop.
            with os.scandir(folder / parent) as entries:
                for entry in entries:
                    name = f"{parent}/{entry.name}" if parent else entry.name
                    if entry.is_dir(follow_symlinks=False) or _leads_on(folder / name):
                        folders.append(name)
                    else:
                        files.append(name)
    return files, folders[1:]


def _leads_on(path: Path) -> bool:
    """Return True for a link to a folder that does not contain the link."""
    return (
        path.is_symlink() and path.is_dir() and not any(map(path.samefile, path.absolute().parents))
    )


class ZipSource(ListedSource):
    """A source of the images in a zip file.

    The images are in class folders, in no folders, or listed in StyleGAN's `dataset.json`.
    """

    separator = ":"

    def __init__(self, path: Path, options: SourceOptions) -> None:
        super().__init__(path.name, str(path))
        with files.reading(
            path, "copy or make it again", ValueError, NotImplementedError, zipfile.BadZipFile
        ):
            files.check(path, files.ARCHIVE)
            self._archive = zipfile.ZipFile(path)
        self._members: dict[str, zipfile.ZipInfo] = {}
        folders = []
        for member in self._archive.infolist():
            name = with_slashes(member.filename)
            if name.endswith("/"):
                folders.append(name)
            elif name in self._members:
                raise UserError(f"{path} holds {name} more than once: make the zip file again")
            else:
                self._members[name] = member
        arrange(self, self._members, folders, options)

    def read(self, name: str) -> bytes:
        member = self._members[name]
        with explained(OSError, read_error):
            files.refuse_large(member.file_size, kind_of(name))
        if member.compress_type not in METHODS:
            raise ImageError(
                "is not compressed by deflate; make the zip file again with an ordinary program"
            )
        damaged = explained(
            UNPACKING_ERRORS, lambda error: ImageError(f"cannot be unpacked ({error})")
        )
        with damaged, self._archive.open(member) as file:
            # One byte more than declared: zipfile then reaches the end and compares the checksum,
            # and a longer member is noticed.
            content = file.read(member.file_size + 1)
        if len(content) != member.file_size:
            raise ImageError(f"cannot be unpacked ({len(content):,} of {member.file_size:,} bytes)")
        return content

    def __exit__(self, *error: object) -> None:
        self._archive.close()
