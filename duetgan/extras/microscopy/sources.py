"""TIFF files whose pages are images, and stacks of files with one channel each."""

import contextlib
import os
import re
from pathlib import Path

import numpy as np

from duetgan.data.errors import ImageError, read_error
from duetgan.data.images.values import Values, native
from duetgan.data.packing.sources import READERS, STACKS
from duetgan.data.packing.sources.base import Source, SourceOptions, refuse_split
from duetgan.data.packing.sources.files import ListedSource
from duetgan.extras.microscopy.tiff import open_tiff, page_values, stacked
from duetgan.utils import files
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import listed


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

    Files with the same `name` are one image, whose channels are sorted by the pattern's `channel`.
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


READERS[".tif"] = READERS[".tiff"] = TiffSource
STACKS.append(StackSource)
