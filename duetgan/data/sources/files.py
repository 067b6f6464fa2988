"""Images in a folder or a zip file, of which nothing is ever extracted to disk; and from the names
of files to images and labels: the rules that folders and zip files share (docs/lmdb.md), and more:

- Images at the top and in sub-folders are refused.
- Split folders may have any case and "set" behind their names (`Test`, `training_set`). Others
  beside a train and a test folder are left out if they hold no class folders; where it is unclear
  what the folders are, UserError asks for the split or for `classes_from`. Without such folders
  everything is taken, unless the split asked for is test.
- Class folders below every one of several folders: UserError asks for `classes_from`, "top" (a
  class per folder at the top) or "parent" (a class per name of the folder in which images lie).
"""

import os
import re
import stat
import zipfile
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np

from duetgan.data.errors import ImageError, unread
from duetgan.data.images import SUFFIXES
from duetgan.data.sources import stylegan
from duetgan.data.sources.base import (
    SHARDED,
    TRAIN,
    Problem,
    Source,
    SourceOptions,
    choose_split,
    class_of_name,
    first_of,
    names_look_like_labels,
    refuse_split,
    split_name,
    with_slashes,
)
from duetgan.utils import bounded
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import listed, printable

# A member may hold far more than it declares. zipfile keeps to the bytes asked for with these
# methods only; bzip2 and LZMA would fill the memory.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
UNPACKING_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)
CLASSES_FROM = ("top", "parent", "name", "none")
UNLABELLED = {"unlabelled", "unlabeled"}  # a folder beside class folders that is none
ARRAY = ".npy"
# folders that are no class
CONTAINER = re.compile("images?|imgs?|data|photos?|pictures?|files|jpe?g|png")
OTHER_IMAGES = frozenset(
    (
        *(
            ".npy",
            ".jxl",
            ".jp2",
            ".j2k",
            ".psd",
            ".svg",
            ".ico",
            ".tga",
            ".dds",
            ".exr",
            ".hdr",
            ".dcm",
            ".nii",
        ),
        *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".raw", ".pcx", ".eps"),
    )
)  # that are not read, or not beside others
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
LISTED = 4  # folders in a message


def kind_of(name: str) -> bounded.FileLimit:
    """What a file of a source is read as."""
    return bounded.TABLE if PurePosixPath(name).name == stylegan.MANIFEST else bounded.IMAGE


def arrange(
    source: "ListedSource", files: Collection[str], folders: Iterable[str], options: SourceOptions
) -> None:
    """Sort files, by relative names with "/", into images and classes, which the source takes.

    Raises UserError if there is no image, if images lie both at the top and in sub-folders, if the
    split's folder is missing, or if it is unclear what is a class; and for a `dataset.json` that
    cannot be read or does not fit.
    """
    where = source.where
    images, ignored = _images(where, files)
    source.take_names(images)
    source.ignored += ignored
    source.remarks += _other_images(where, len(images), ignored)
    if options.classes_from == "none":  # all images, wherever they lie
        if options.split:
            raise UserError(
                f"{where}: --classes-from none takes the images of all splits; leave --split out"
            )
        return
    if stylegan.take_labels(source, ignored, options):
        return
    folders = [name.rstrip("/") for name in folders if not _hidden(name) and not _leads_out(name)]
    named = [name for name in images if UNLABELLED.isdisjoint(name.lower().split("/")[:-1])]
    if (
        len(named) < len(images)
        and options.classes_from != "top"
        and any("/" in name for name in named)
    ):
        source.unlabelled, images = len(images) - len(named), named
        folders = [name for name in folders if UNLABELLED.isdisjoint(name.lower().split("/"))]
        source.take_names(images)
        source.remarks.append(
            f"{where}: {source.unlabelled:,} images without labels are left out: --classes-from none packs all "
            "without, top makes them a class"
        )
    prefix = _enter(source, folders, options)
    images = [name for name in images if name.startswith(prefix)]
    source.take_names(images)
    paths = [name.removeprefix(prefix).split("/") for name in images]
    loose = [name for name, path in zip(images, paths, strict=True) if len(path) == 1]
    if options.classes_from == "name":
        names = list(map(class_of_name, images))
        if "" in names:
            raise UserError(
                f"{where}: {images[names.index('')]} has no class in its name, as cat.12.jpg has; rename it"
            )
    elif len(loose) == len(images):
        source.remarks += [
            f"warning: {where}: packed without labels, although {name} lies there; if it holds labels, give it as the"
            " source"
            for name in _tables(prefix, ignored)[:1]
        ] or names_look_like_labels(where, images)
        return
    elif loose:
        raise UserError(
            f"{where} holds images both at the top ({loose[0]}) and in sub-folders;"
            " move the loose ones into class folders or away"
        )
    else:
        _check_depth(where, prefix, paths, options.classes_from)
        names = _folder_classes(source, prefix, paths, folders, options.classes_from)
    source.take_labels(where, names, whole=False)


def _folder_classes(
    source: "ListedSource",
    prefix: str,
    paths: list[list[str]],
    folders: list[str],
    classes_from: str | None,
) -> list[str]:
    """Return each image's class, by its folder; folders without images become problems. Raises
    UserError for the only folder beside a table that may hold the labels.
    """
    where, parent = source.where, classes_from == "parent"
    names = [path[-2 if parent else 0] for path in paths]
    for name in [] if parent else sorted(_tops(prefix, folders) - set(names)):
        instead = _what_instead(
            [file for file in source.ignored if file.startswith(f"{prefix}{name}/")]
        )
        source.problems.append(
            Problem(f"{where}/{prefix}{name}", f"is a class folder without images{instead}")
        )
    tables = _tables(prefix, source.ignored)
    if not CONTAINER.fullmatch(names[0].lower()):
        tables = [name for name in tables if name.startswith(f"{prefix}{names[0]}/")]
    if classes_from is None and len(set(names)) == 1 and tables:
        raise UserError(
            f"{where}: all images lie in {prefix}{names[0]}, beside {tables[0]}: if that holds the labels, give it"
            f" as the source; else pass --classes-from top (one class, {names[0]}) or none"
        )
    return names


def _other_images(where: str, count: int, ignored: list[str]) -> list[str]:
    """Return a warning where images of kinds that are not read lie among others."""
    others = [name for name in ignored if PurePosixPath(name).suffix.lower() in OTHER_IMAGES]
    text = f"warning: {where}: {len(others):,} of {count + len(others):,} images are of kinds that are not read"
    return [f"{text}{_what_instead(others)}: convert them to PNG"] if others else []


def _tables(prefix: str, ignored: list[str]) -> list[str]:
    """Return the tables, which may hold labels, in the folder of the images, below it, or above it."""
    near = [name for name in ignored if name.startswith(prefix) or prefix.startswith(_folder(name))]
    return [name for name in near if PurePosixPath(name).suffix.lower() in TABLES]


def _folder(name: str) -> str:
    return name[: name.rfind("/") + 1]


def _check_depth(where: str, prefix: str, paths: list[list[str]], classes_from: str | None) -> None:
    """Raise UserError where class folders lie below every one of several folders, unless told what
    is a class.
    """
    tops = sorted({path[0] for path in paths})
    parents = sorted({tuple(path[:-1]) for path in paths})
    if (
        classes_from
        or len(tops) < 2
        or len(parents) == len(tops)
        or any(len(path) == 2 for path in paths)
    ):
        return
    inner = sorted({parent[-1] for parent in parents})
    raise UserError(
        f"{where}: there are folders of images below every folder ({prefix}{'/'.join(parents[0])}, ...): pass"
        f" --classes-from top for the classes {listed(tops, LISTED)}, or --classes-from parent for the classes"
        f" {listed(inner, LISTED)}; or give one folder alone, for example {where}/{prefix}{tops[0]}"
    )


def _images(where: str, files: Iterable[str]) -> tuple[list[str], list[str]]:
    """The visible files in order of name: images by their suffix, without any the arrays, and the
    others.
    """
    names = sorted(name for name in files if not _hidden(name))
    suffixes = {name: PurePosixPath(name).suffix.lower() for name in names if not _leads_out(name)}
    kinds = SUFFIXES if SUFFIXES.intersection(suffixes.values()) else {ARRAY}
    images, others = (
        [name for name in names if (suffixes.get(name) in kinds) == wanted]
        for wanted in (True, False)
    )
    if images:
        return images, others
    below = next((name for name in others if name.endswith(tuple(SHARDED)) and "/" in name), None)
    if below is not None:  # a snapshot of the Hugging Face hub
        inner, kind = below.rpartition("/")[0], SHARDED[PurePosixPath(below).suffix]
        raise UserError(
            f"{where} holds no images; its {kind} files lie below: give {where}/{inner}"
        )
    raise UserError(
        f"{where} holds no images{_what_instead(others)}; supported are {' '.join(sorted(SUFFIXES))}"
    )


def _hidden(name: str) -> bool:
    drawn = name.endswith(".grid.png")  # by duet inspect
    return drawn or any(
        (part.startswith(".") and part != "..") or part == "__MACOSX" for part in name.split("/")
    )


def _leads_out(name: str) -> bool:
    """Whether a zip member's name is no place inside the archive; it belongs to no class."""
    return name.startswith("/") or ".." in name.split("/")


def _what_instead(ignored: list[str]) -> str:
    if not ignored:
        return " (it is empty)"
    kinds = Counter(PurePosixPath(name).suffix or PurePosixPath(name).name for name in ignored)
    return f" (only {', '.join(f'{count} {kind}' for kind, count in kinds.most_common(3))})"


def _tops(prefix: str, names: Iterable[str]) -> set[str]:
    """First parts of the names below `prefix`."""
    return {
        name[len(prefix) :].split("/")[0]
        for name in names
        if name.startswith(prefix) and name != prefix
    }


def _enter(source: "ListedSource", folders: list[str], options: SourceOptions) -> str:
    """The prefix under which the classes lie: "" or a split's or a single wrapper folder, with a
    "/" at its end. The source takes the splits that there are, unless it has some, and remarks.
    """
    where, prefix = source.where, ""
    splits: tuple[str, ...] = ()
    while True:
        below = [name[len(prefix) :].split("/") for name in source.names if name.startswith(prefix)]
        tops = {path[0] for path in below} | _tops(prefix, folders)
        if (
            all(len(path) > 1 for path in below)
            and not splits
            and _are_splits(where, below, tops, options)
        ):
            splits = tuple(sorted(filter(split_name, tops)))
            chosen = choose_split(where, options.split, splits)
            others = sorted({path[0] for path in below} - set(splits))
            source.remarks += (
                [f"left out: {listed(others)}, beside {' and '.join(splits)}"] if others else []
            )
            prefix += chosen + "/"
            if not any(name.startswith(prefix) for name in source.names):
                raise UserError(f"{where}: the folder {prefix} holds no images")
        elif len(tops) == 1 and all(len(path) > 2 for path in below):
            prefix += tops.pop() + "/"
        else:
            if not splits:
                refuse_split(where, options.split, "split folders")
            source.splits = source.splits or splits
            return prefix


def _are_splits(
    where: str, paths: list[list[str]], tops: Collection[str], options: SourceOptions
) -> bool:
    """Whether the folders at the top are splits, maybe with others beside them. Raises UserError if
    it is unclear.
    """
    named = sorted(filter(split_name, tops))
    if not named or (options.classes_from == "top" and options.split is None):
        return False
    others = {path[0] for path in paths} - set(named)
    both = all(first_of(side, named) for side in ("train", "test"))
    classes = {path[0] for path in paths if len(path) > 2}  # folders with class folders
    if not others:
        return both or len(named) == len(tops) or bool(classes)
    if both and not others & classes and classes:
        return True
    # a class that is called train
    if not both and not (others <= classes and classes & set(named)):
        return False
    if options.split is not None:
        return True
    side = "train" if split_name(named[0]) in TRAIN else "test"  # what --split calls it
    raise UserError(
        f"{where}: {' and '.join(named)} may be splits, but there are other folders with images:"
        f" {listed(sorted(others), LISTED)}; pass --split {side} to take {named[0]} alone, or"
        " --classes-from top if every folder is a class"
    )


class ListedSource(Source):
    """Images that have names; a subclass reads them."""

    between: ClassVar[str] = "/"  # what stands between the source and a file's name, for people
    takes = frozenset(("classes_from", "stack"))

    def __init__(self, name: str, where: str) -> None:
        super().__init__(printable(name), [])
        self.where = where  # for messages
        self.take_names([])

    def take_names(self, names: list[str], labels: Sequence[int] = ()) -> None:
        """The images in order, with their labels if they have some."""
        self.names, self._labels = names, np.array(labels or [0] * len(names), np.int64)
        self.as_is = bool(names) and names[0].lower().endswith(ARRAY)

    def content(self, index: int) -> bytes:
        return self.read(self.names[index])

    def item_name(self, index: int) -> str:
        return f"{self.where}{self.between}{self.names[index]}"

    def stored_name(self, index: int) -> str:
        return self.names[index]

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises ImageError if they cannot be had."""


class LocalSource(ListedSource):
    """Files on this machine, named relative to a folder."""

    def __init__(self, folder: Path, name: str, where: str) -> None:
        super().__init__(name, where)
        self.folder = folder

    def item_name(self, index: int) -> str:
        return str(self.folder / self.names[index])

    def read(self, name: str) -> bytes:
        return read_file(self.folder / name)


def read_file(path: Path) -> bytes:
    """A file's bytes. Raises ImageError."""
    with explained((OSError, ValueError), unread):  # ValueError: a name with a null byte
        return bounded.read_file(path, kind_of(path.name))


def open_folder(folder: Path, options: SourceOptions) -> LocalSource:
    """A folder of class folders or a flat folder."""
    source = LocalSource(folder, folder.name or str(folder), str(folder))
    arrange(source, *walk(folder), options)
    return source


def walk(folder: Path) -> tuple[list[str], list[str]]:
    """Names of all files and folders below `folder`, relative to it, with "/"; however deep they
    lie. Links are followed, but one that leads to a folder above itself is a file.
    """
    files: list[str] = []
    folders = [""]
    remedy = "check its permissions, or move its files to another place"
    with explained(OSError, lambda why: f"{str(why.filename)[:200]}: {why.strerror}; {remedy}"):
        for above in folders:  # which grows meanwhile
            with os.scandir(folder / above) as entries:
                for entry in entries:
                    name = f"{above}/{entry.name}" if above else entry.name
                    (
                        folders
                        if entry.is_dir(follow_symlinks=False) or _leads_on(folder / name)
                        else files
                    ).append(name)
    return files, folders[1:]


def _leads_on(path: Path) -> bool:
    """Whether it is a link to a folder in which it does not lie."""
    return (
        path.is_symlink() and path.is_dir() and not any(map(path.samefile, path.absolute().parents))
    )


class ZipSource(ListedSource):
    """A zip file: class folders, flat, or with StyleGAN's `dataset.json`."""

    between = ":"

    def __init__(self, path: Path, options: SourceOptions) -> None:
        super().__init__(path.name, str(path))
        with bounded.reading(
            path, "copy or make it again", ValueError, NotImplementedError, zipfile.BadZipFile
        ):
            bounded.check(path, bounded.ARCHIVE)
            self._archive = zipfile.ZipFile(path)
        members = [(with_slashes(member.filename), member) for member in self._archive.infolist()]
        self._members = {name: member for name, member in members if not name.endswith("/")}
        folders = [name for name, _ in members if name.endswith("/")]
        if len(self._members) + len(folders) < len(members):
            name, times = Counter(
                name for name, _ in members if not name.endswith("/")
            ).most_common(1)[0]
            raise UserError(f"{self.where} holds {name} {times} times: make the zip file again")
        arrange(self, self._members, folders, options)

    def read(self, name: str) -> bytes:
        member = self._members[name]
        with explained(OSError, unread):
            bounded.refuse_large(member.file_size, kind_of(name))
        if stat.S_ISLNK(member.external_attr >> 16):
            raise ImageError("is a symbolic link; put the file itself into the zip file")
        if member.compress_type not in METHODS:
            raise ImageError(
                "is not compressed by deflate; make the zip file again with an ordinary program"
            )
        if member.flag_bits & 1:
            raise ImageError("is encrypted; make the zip file without a password")
        damaged = explained(UNPACKING_ERRORS, lambda why: ImageError(f"cannot be unpacked ({why})"))
        with damaged, self._archive.open(member) as file:  # the checksum is compared at the end
            content = file.read(member.file_size + 1)  # a member may hold more than it declares
        if len(content) != member.file_size:
            raise ImageError(f"cannot be unpacked ({len(content):,} of {member.file_size:,} bytes)")
        return content

    def __exit__(self, *error: object) -> None:
        self._archive.close()
