"""Images below a URL (s3://, gs://, hf://, http://, file://, ...), through the library fsspec.

What lies there is arranged by the rules of folders (data/sources/files.py) and read file by file;
nothing is kept on disk. fsspec's drivers for object storage are packages of their own, which find
their credentials themselves.
"""

import functools
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from duetgan.data.errors import ImageError
from duetgan.data.sources.base import SourceOptions
from duetgan.data.sources.files import ListedSource, arrange, kind_of
from duetgan.utils import bounded
from duetgan.utils.errors import UserError

T = TypeVar("T")

PAUSES = (0.5, 2.0)  # seconds before the second and the third attempt
# Another attempt would end the same way. All else is tried again: drivers raise their libraries'
# own exceptions.
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
            raise UserError(
                f"{without_secrets(url)}: chained URLs are not read; copy the archive here and unpack it"
            )
        self.url = without_secrets(url).rstrip("/")
        super().__init__(self.url, self.url)
        from fsspec.core import url_to_fs  # slow to import, for URLs only

        try:
            self._filesystem, root = url_to_fs(url)  # a driver may connect here
            entries = attempt(lambda: self._filesystem.find(root, withdirs=True, detail=True))
        except ImportError as error:  # its text names the package
            scheme = self.url.partition(":")[0]
            raise UserError(f"{self.url}: the driver of {scheme} is missing: {error}") from None
        except Exception as error:  # whatever the driver raises, see FINAL
            raise UserError(
                f"{self.url} cannot be listed ({_reason(error)}); check it and its credentials"
            ) from None
        if not entries:
            raise UserError(f"{self.url}: nothing is there; check the URL")
        if list(entries) == [root] and entries[root].get("type") != "directory":
            raise UserError(
                f"{self.url} is a single file: give the URL of a folder of images, or copy it here"
            )
        self._prefix = root.rstrip("/") + "/" if root else ""
        self._sizes: dict[str, Any] = {}  # of the files
        folders: list[str] = []
        for place, details in entries.items():
            name = place.removeprefix(self._prefix)
            if not place.startswith(self._prefix) or not name:
                continue
            # some stores mark folders by empty objects
            if details.get("type") == "directory" or name.endswith("/"):
                folders.append(name)
            else:
                self._sizes[name] = details.get("size")
        arrange(self, self._sizes, folders, options)

    def read(self, name: str) -> bytes:
        try:
            return attempt(functools.partial(self._fetch, name, self._sizes.get(name)))
        except bounded.Refused as error:
            raise ImageError(str(error)) from None
        except Exception as error:  # whatever the driver raises, see FINAL
            raise ImageError(f"cannot be read ({_reason(error)})") from None

    def _fetch(self, name: str, size: Any) -> bytes:
        place, protocol = self._prefix + name, self._filesystem.protocol
        if "file" in protocol:
            return bounded.read_file(place, kind_of(name))
        # a web server: what it sends is read as it comes, up to the limit
        if not isinstance(size, int):
            # Of a web server without a cache, which would ask for the size and for parts.
            options = {"block_size": 0} if "http" in protocol else {}
            with self._filesystem.open(place, "rb", **options) as file:
                return bounded.read_stream(file, kind_of(name))
        bounded.refuse_large(size, kind_of(name))
        content: bytes = self._filesystem.cat_file(place)
        if len(content) != size:
            raise OSError(f"{len(content):,} of {size:,} bytes arrived")
        return content


def attempt(read: Callable[[], T]) -> T:
    """Call `read` up to three times, with growing pauses. Raises what the last call raises, what is
    FINAL at once.
    """
    pauses = iter(PAUSES)
    while True:
        try:
            return read()
        except FINAL:
            raise
        except Exception as error:  # see FINAL
            if (pause := next(pauses, None)) is None:
                error.add_note(f"after {len(PAUSES) + 1} attempts")
                raise
            time.sleep(pause)


def without_secrets(text: str) -> str:
    """A URL, or a text with URLs, without their user names, passwords and queries, which may hold
    keys.
    """
    return re.sub(r"(://[^\s?]*)\?[^\s'\")]*", r"\1", re.sub(r"(?<=://)[^/@\s]*@", "", text))


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return ", ".join([without_secrets(text[0]), *getattr(error, "__notes__", [])])
