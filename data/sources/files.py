"""Images in a folder or a zip file. Nothing is ever extracted to disk."""

import os
import stat
import zipfile
import zlib
from abc import abstractmethod
from collections import Counter
from pathlib import Path

import numpy as np

from duetgan.data.errors import ImageError
from duetgan.data.sources.base import Source, SourceOptions
from duetgan.data.sources.listing import Listing, arrange, kind_of
from duetgan.utils import bounded
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import printable

# A member may hold far more than it declares. zipfile keeps to the bytes asked for with these methods only; bzip2 and
# LZMA would fill the memory.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
UNPACKING_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)


class ListedSource(Source):
    """Images that have names; a subclass reads them."""

    def __init__(self, name: str, listing: Listing) -> None:
        more = {key: getattr(listing, key) for key in ("problems", "ignored", "splits", "remarks")}
        super().__init__(printable(name), [printable(name) for name in listing.classes], **more)
        self.names, self._labels = listing.names, np.array(listing.labels, np.int64)

    def content(self, index: int) -> bytes:
        return self.read(self.names[index])

    def item_name(self, index: int) -> str:
        return self.names[index]

    def stored_name(self, index: int) -> str:
        return self.names[index]

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises ImageError if they cannot be had."""


class LocalSource(ListedSource):
    """Files on this machine, named relative to a folder."""

    def __init__(self, folder: Path, name: str, listing: Listing) -> None:
        self.folder = folder
        super().__init__(name, listing)

    def item_name(self, index: int) -> str:
        return str(self.folder / self.names[index])

    def read(self, name: str) -> bytes:
        return read_file(self.folder / name)


def read_file(path: Path) -> bytes:
    """A file's bytes. Raises ImageError."""
    try:
        return bounded.read_file(path, kind_of(path.name))
    except bounded.Refused as error:
        raise ImageError(str(error)) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise ImageError(f"cannot be read ({getattr(error, 'strerror', error)})") from None


def open_folder(folder: Path, options: SourceOptions) -> LocalSource:
    """A folder of class folders or a flat folder; symbolic links to files are followed, to folders only at the top."""
    listing = arrange(str(folder), *_walk(folder), options, lambda name: read_file(folder / name))
    return LocalSource(folder, folder.name or str(folder), listing)


def _walk(folder: Path) -> tuple[list[str], list[str]]:
    """Names of all files and folders below `folder`, relative to it, with "/"; however deep they lie."""
    files: list[str] = []
    folders = [""]
    try:
        for above in folders:  # which grows meanwhile
            with os.scandir(folder / above) as entries:
                for entry in entries:
                    name = f"{above}/{entry.name}" if above else entry.name
                    if not entry.is_dir():
                        files.append(name)
                    elif not above or not entry.is_symlink():  # class folders may be links
                        folders.append(name)
    except OSError as error:
        reason = f"{str(error.filename)[:200]}: {error.strerror}"
        raise UserError(f"{reason}; check its permissions, or move its files to another place") from None
    return files, folders[1:]


class ZipSource(ListedSource):
    """A zip file: class folders, flat, or with StyleGAN's `dataset.json`."""

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self.path = path
        with bounded.reading(path, "copy or make it again", ValueError, NotImplementedError, zipfile.BadZipFile):
            bounded.check(path, bounded.ARCHIVE)
            self._archive = zipfile.ZipFile(path)
        try:
            super().__init__(path.name, self._list(options))
        except BaseException:
            self.__exit__()
            raise

    def _list(self, options: SourceOptions) -> Listing:
        # Tools for Windows write backslashes, where the format has "/" only.
        members = [(member.filename.replace("\\", "/"), member) for member in self._archive.infolist()]
        self._members = {name: member for name, member in members if not name.endswith("/")}
        folders = [name for name, _ in members if name.endswith("/")]
        if len(self._members) + len(folders) < len(members):
            name, times = Counter(name for name, _ in members if not name.endswith("/")).most_common(1)[0]
            raise UserError(f"{self.path} holds {name} {times} times: make the zip file again")
        return arrange(str(self.path), self._members, folders, options, self.read)

    def item_name(self, index: int) -> str:
        return f"{self.path}:{self.names[index]}"

    def read(self, name: str) -> bytes:
        member = self._members[name]
        if reason := bounded.too_large(member.file_size, kind_of(name)):
            raise ImageError(reason)
        if stat.S_ISLNK(member.external_attr >> 16):
            raise ImageError("is a symbolic link; put the file itself into the zip file")
        if member.compress_type not in METHODS:
            raise ImageError("is not compressed by deflate; make the zip file again with an ordinary program")
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
