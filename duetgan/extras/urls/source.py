"""Images below a URL (s3://, gs://, hf://, http://, file://, ...), with the library fsspec.

Files are arranged by the rules of folders (data/packing/sources/files.py) and read one by one; nothing is
stored on disk. fsspec's drivers for object storage are separate packages, which find their
credentials themselves.
"""

import re

from duetgan.data.errors import ImageError
from duetgan.data.packing.sources import URLS
from duetgan.data.packing.sources.base import SourceOptions
from duetgan.data.packing.sources.files import ListedSource, arrange, kind_of
from duetgan.utils import files
from duetgan.utils.errors import UserError


class RemoteSource(ListedSource):
    """Images below a URL: in class folders, side by side, or with StyleGAN's `dataset.json`."""

    def __init__(self, url: str, options: SourceOptions) -> None:
        self.url = without_secrets(url).rstrip("/")
        super().__init__(self.url, self.url)
        if "::" in url:
            raise UserError(f"{self.url}: chained URLs are not read; copy the archive here")
        from fsspec.core import url_to_fs  # slow to import, for URLs only

        try:
            self._filesystem, root = url_to_fs(url)  # a driver may connect here
            entries = self._filesystem.find(root, withdirs=True, detail=True)
        except Exception as error:  # whatever the driver raises; an ImportError names its package
            raise UserError(
                f"{self.url} cannot be listed ({_reason(error)}); check it and its credentials"
            ) from None
        self._prefix = root.rstrip("/") + "/" if root else ""
        self._sizes: dict[str, object] = {}  # of files in bytes; no int if the driver has none
        folders: list[str] = []
        for place, details in entries.items():
            name = place.removeprefix(self._prefix)
            if not place.startswith(self._prefix) or not name:
                continue
            # Some stores have empty objects as folders.
            if details.get("type") == "directory" or name.endswith("/"):
                folders.append(name)
            else:
                self._sizes[name] = details.get("size")
        arrange(self, self._sizes, folders, options)

    def read(self, name: str) -> bytes:
        try:
            return self._fetch(name, self._sizes.get(name))
        except files.Refused as error:
            raise ImageError(str(error)) from None
        except Exception as error:  # whatever the driver raises
            raise ImageError(f"cannot be read ({_reason(error)})") from None

    def _fetch(self, name: str, size: object) -> bytes:
        place, protocol = self._prefix + name, self._filesystem.protocol
        if "file" in protocol:
            return files.read_file(place, kind_of(name))
        # A web server may not send the size: read up to the limit.
        if not isinstance(size, int):
            # Block size 0 turns off fsspec's cache, which requests the size and parts of the file.
            options = {"block_size": 0} if "http" in protocol else {}
            with self._filesystem.open(place, "rb", **options) as file:
                return files.read_stream(file, kind_of(name))
        files.refuse_large(size, kind_of(name))
        content: bytes = self._filesystem.cat_file(place)
        if len(content) != size:
            raise OSError(f"{len(content):,} of {size:,} bytes arrived")
        return content


def without_secrets(text: str) -> str:
    """Remove user names, passwords and queries, which may contain keys, from URLs in a text."""
    return re.sub(r"(://[^\s?]*)\?[^\s'\")]*", r"\1", re.sub(r"(?<=://)[^/@\s]*@", "", text))


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return without_secrets(text[0])


URLS.append(RemoteSource)
