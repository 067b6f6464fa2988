"""Pictures in a folder or a zip file. Nothing is ever extracted to disk."""

import os
import zipfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from data.pictures import PictureError
from data.sources.base import Item, Source
from data.sources.listing import MANIFEST, Listing, arrange, arrange_by_manifest
from utils.errors import UserError

MAX_MEMBER = 1 << 30  # bytes of one unpacked zip member


class ListedSource(Source):
    """Pictures that have names; a subclass reads them."""

    def __init__(self, name: str, listing: Listing) -> None:
        super().__init__(name, listing.classes, problems=listing.problems, ignored=listing.ignored)
        self.names, self._labels = listing.names, np.array(listing.labels, np.int64)

    def __len__(self) -> int:
        return len(self.names)

    def item(self, index: int) -> Item:
        return Item(self.item_name(index), int(self._labels[index]), self.read(self.names[index]))

    def item_name(self, index: int) -> str:
        return self.names[index]

    def labels(self) -> np.ndarray:
        return self._labels

    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises PictureError if they cannot be had."""
        raise NotImplementedError


class FolderSource(ListedSource):
    """A folder of class folders or a flat folder; symbolic links to files are followed, to folders only at the top."""

    def __init__(self, folder: Path, *, split: str) -> None:
        self.folder = folder
        files, folders = _walk(folder)
        if MANIFEST in files:
            listing = arrange_by_manifest(str(folder), files, (folder / MANIFEST).read_bytes())
        else:
            listing = arrange(str(folder), files, folders, split)
        super().__init__(folder.name or str(folder), listing)

    def item_name(self, index: int) -> str:
        return str(self.folder / self.names[index])

    def read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise PictureError(f"cannot be read ({error.strerror})") from None


def _walk(folder: Path) -> tuple[list[str], list[str]]:
    """Names of all files and folders below `folder`, relative to it, with "/"."""
    files: list[str] = []
    folders: list[str] = []

    def refuse(error: OSError) -> None:
        raise error

    try:
        for entry in folder.iterdir():
            if not entry.is_dir():
                files.append(entry.name)
                continue
            # os.walk does not follow links to folders, but follows its starting point: class folders may be links.
            for path, _, names in os.walk(entry, onerror=refuse):
                relative = Path(path).relative_to(folder).as_posix()
                folders.append(relative)
                files += [f"{relative}/{name}" for name in names]
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; check its permissions") from None
    return files, folders


class ZipSource(ListedSource):
    """A zip file: class folders, flat, or with StyleGAN's `dataset.json`."""

    def __init__(self, path: Path, *, split: str) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} cannot be read as a zip file ({error}); copy or make it again") from None
        try:
            super().__init__(path.name, self._list(split))
        except BaseException:
            self._archive.close()
            raise

    def _list(self, split: str) -> Listing:
        members = self._archive.infolist()
        files = [member.filename for member in members if not member.is_dir()]
        folders = [member.filename for member in members if member.is_dir()]
        name, times = Counter(files).most_common(1)[0] if files else ("", 0)
        if times > 1:
            raise UserError(f"{self.path} holds {name} {times} times: make the zip file again")
        if MANIFEST in files:
            try:
                return arrange_by_manifest(str(self.path), files, self.read(MANIFEST))
            except PictureError as error:
                raise UserError(f"{self.path}: {MANIFEST} {error}; make the zip file again") from None
        return arrange(str(self.path), files, folders, split)

    def item_name(self, index: int) -> str:
        return f"{self.path}:{self.names[index]}"

    def read(self, name: str) -> bytes:
        member = self._archive.getinfo(name)
        if member.file_size > MAX_MEMBER:
            raise PictureError(f"is {member.file_size:,} bytes when unpacked, more than {MAX_MEMBER:,}")
        try:
            return self._archive.read(member)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as error:
            raise PictureError(f"cannot be unpacked ({error})") from None

    def __exit__(self, *error: object) -> None:
        self._archive.close()

