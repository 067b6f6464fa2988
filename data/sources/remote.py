"""Images below a URL (s3://, gs://, hf://, http://, file://, ...), through the library fsspec.

What lies there is arranged by the rules of folders (data/sources/listing.py) and read file by file; nothing is kept on
disk. fsspec's drivers for object storage are packages of their own, which find their credentials themselves.
"""

import functools
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from data.errors import ImageError
from data.sources.base import SourceOptions
from data.sources.files import ListedSource
from data.sources.listing import Listing, arrange, kind_of
from utils import bounded
from utils.errors import UserError

T = TypeVar("T")

PAUSES = (0.5, 2.0)  # seconds before the second and the third attempt
# Another attempt would end the same way. All else is tried again: drivers raise their libraries' own exceptions.
FINAL = (
    bounded.Refused,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    NotImplementedError,
    MemoryError,
)


class RemoteSource(ListedSource):
    """A "folder" below a URL: class folders, flat, or with StyleGAN's `dataset.json`."""

    def __init__(self, url: str, options: SourceOptions) -> None:
        if "::" in url:
            raise UserError(f"{without_secrets(url)}: chained URLs are not read; copy the archive here and unpack it")
        self.url = without_secrets(url).rstrip("/")
        self._sizes: dict[str, int] = {}
        self._place = _connect(url)
        super().__init__(self.url, self._list(options))

    def _list(self, options: SourceOptions) -> Listing:
        filesystem, root = self._place
        try:
            found = attempt(lambda: filesystem.find(root, withdirs=True, detail=True))
        except Exception as error:  # whatever the driver raises, see FINAL
            raise UserError(f"{self.url} cannot be listed ({_reason(error)}); check it and its credentials") from None
        if not found:
            raise UserError(f"{self.url}: nothing is there; check the URL")
        if list(found) == [root] and found[root].get("type") != "directory":
            raise UserError(f"{self.url} is a single file: give the URL of a folder of images, or copy it here")
        prefix = root.rstrip("/") + "/" if root else ""
        files: list[str] = []
        folders: list[str] = []
        for place, details in found.items():
            name = place.removeprefix(prefix)
            if not place.startswith(prefix) or not name:
                continue
            if details.get("type") == "directory" or name.endswith("/"):  # some stores mark folders by empty objects
                folders.append(name.rstrip("/"))
                continue
            files.append(name)
            if isinstance(details.get("size"), int):
                self._sizes[name] = details["size"]
        return arrange(self.url, files, folders, options.split, self.read, options.classes_from)

    def item_name(self, index: int) -> str:
        return f"{self.url}/{self.names[index]}"

    def read(self, name: str) -> bytes:
        size = self._sizes.get(name)
        if size is not None and (reason := bounded.too_large(size, kind_of(name))):
            raise ImageError(reason)
        try:
            return attempt(functools.partial(self._fetch, name, size))
        except UserError:
            raise
        except bounded.Refused as error:
            raise ImageError(str(error)) from None
        except Exception as error:  # whatever the driver raises, see FINAL
            raise ImageError(f"cannot be read ({_reason(error)})") from None

    def _fetch(self, name: str, size: int | None) -> bytes:
        filesystem, root = self._place
        place = f"{root.rstrip('/')}/{name}" if root else name
        if "file" in filesystem.protocol:
            return bounded.read_file(place, kind_of(name))
        if size is None:  # a web server: what it sends is read as it comes, up to the limit
            # Of a web server without a cache, which would ask for the size and for parts.
            options = {"block_size": 0} if "http" in filesystem.protocol else {}
            with filesystem.open(place, "rb", **options) as file:
                return bounded.read_stream(file, kind_of(name))
        content: bytes = filesystem.cat_file(place)
        if size is not None and len(content) != size:
            raise OSError(f"{len(content):,} of {size:,} bytes arrived")
        return content


def attempt(read: Callable[[], T]) -> T:
    """Call `read` up to three times, with growing pauses. Raises what the last call raises, what is FINAL at once."""
    failures = 0
    while True:
        try:
            return read()
        except FINAL:
            raise
        except Exception as error:  # see FINAL
            if failures == len(PAUSES):
                error.add_note(f"after {failures + 1} attempts")
                raise
        time.sleep(PAUSES[failures])
        failures += 1


def without_secrets(text: str) -> str:
    """A URL, or a text with URLs, without their user names, passwords and queries, which may hold keys."""
    return re.sub(r"(://[^\s?]*)\?[^\s'\")]*", r"\1", re.sub(r"(?<=://)[^/@\s]*@", "", text))


def _connect(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it. Raises UserError if its driver is not installed."""
    from fsspec.core import url_to_fs  # slow to import, for URLs only

    shown = without_secrets(url)
    try:
        filesystem, root = url_to_fs(url)
    except ImportError as error:  # its text names the package
        raise UserError(f"{shown}: the driver of {shown.partition(':')[0]} is missing: {error}") from None
    except Exception as error:  # a driver may connect here, see FINAL
        raise UserError(f"{shown} cannot be opened ({_reason(error)}); check it and its credentials") from None
    return filesystem, root


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return ", ".join([without_secrets(text[0]), *getattr(error, "__notes__", [])])
