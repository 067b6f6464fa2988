"""Open tar files in webdataset's layout: one `.tar`, or a folder of shards.

The files of a sample are contiguous, and their names are equal up to the first dot. The rest of a
name is its suffix. One file of a sample is an image, by its suffix. A file with the suffix `cls`,
or a field of a file with the suffix `json`, has the label. Nothing is extracted: the positions of
the images are listed once. Only regular files are read.
"""

import itertools
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from duetgan.data.errors import ImageError
from duetgan.data.images import SUFFIXES
from duetgan.data.packing.sources import labels
from duetgan.data.packing.sources.base import (
    NO_LABELS,
    Problem,
    Source,
    SourceOptions,
    choose_shards,
    with_slashes,
)
from duetgan.data.tar_files import Member, read_member, read_members
from duetgan.utils import files
from duetgan.utils.errors import UserError
from duetgan.utils.text import printable

SUFFIX = ".tar"
CLASS = "cls"  # suffix of files with a label, and the name of their column
# webdataset's rule: the name up to the first dot, and the suffix
SAMPLE = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
META = re.compile(r"__[^/]*__(/|$)")  # webdataset's metadata
NOTE_BYTES = 1 << 20


class TarSource(Source):
    """A source of the images in tar files.

    Raises UserError for a file that cannot be used.
    """

    takes = frozenset(("label_column", "label_separator", "group_column"))

    def __init__(
        self,
        path: Path,
        options: SourceOptions,
        # the tar files; None: those of the split, or the file itself
        shards: Sequence[Path] | None = None,
    ) -> None:
        super().__init__(printable(path.name), [])
        self.where = str(path)  # for messages
        self.shards = [path] if shards is None else list(shards)
        if path.is_dir() and shards is None:
            self.shards, self.splits, self.ignored = choose_shards(path, SUFFIX, options.split)
        images = []
        notes = []
        for shard in range(len(self.shards)):
            for sample_images, sample_notes in self._samples(shard):
                if len(sample_images) == 1:
                    images.append(sample_images[0])
                    notes.append(sample_notes)
        if not images and self.problems:
            raise UserError(str(self.problems[0]))
        if not images:
            raise UserError(
                f"{self.where} holds no images; supported are {' '.join(sorted(SUFFIXES))}"
            )
        names = list(dict.fromkeys(itertools.chain(*notes)))
        if options.label_column is None and CLASS in names:
            options = options._replace(label_column=CLASS)
        columns = labels.choose_columns(self.where, names, options._replace(split_column=NO_LABELS))
        rows = [[note.get(name, "") for name in columns.names] for note in notes]
        places = list(map(self._place_name, images))
        indices = labels.take_columns(self, self.where, columns, rows, places, options)
        self._images = [images[index] for index in indices]

    def _samples(self, shard: int) -> Iterator[tuple[list[Member], dict[str, labels.Value]]]:
        """Yield the images of each sample of a shard, and a dict of the values that may be labels.

        A sample without exactly one image becomes a problem, but is yielded too.
        """
        groups = itertools.groupby(self._members(shard), lambda part: part[0][1])
        for key, group in groups:
            images = []
            notes: dict[str, labels.Value] = {}
            for match, member in group:
                suffix = match[2].lower()
                if f".{suffix}" in SUFFIXES:
                    images.append(member)
                elif suffix in (CLASS, "json"):
                    for name, value in self._read_notes(suffix, member).items():
                        notes.setdefault(name, value)
            if len(images) != 1:
                reason = f"has {len(images)} images; a sample has one"
                self.problems.append(Problem(f"{self.where}: sample {key}", reason))
            yield images, notes

    def _members(self, number: int) -> Iterator[tuple[re.Match[str], Member]]:
        """Yield the regular files of the shard `shards[number]`.

        Each item is a pair: the match of SAMPLE with the file's name, and the file as a Member.
        webdataset's metadata is left out. Links, other special members and damage become problems.
        """
        shard = self.shards[number]
        try:
            for member in read_members(shard):
                name = with_slashes(member.name).removeprefix("./")
                if member.isdir() or META.match(name):
                    continue
                if not member.isreg() or member.issparse():
                    reason = "is not a regular file; put the file itself into the tar"
                    self.problems.append(Problem(f"{shard}:{name}", reason))
                elif match := SAMPLE.fullmatch(name):
                    yield match, Member(name, number, member.offset_data, member.size)
                else:
                    self.ignored.append(name)
        except (OSError, tarfile.TarError, ValueError, OverflowError) as error:
            self.problems.append(
                Problem(str(shard), f"is damaged or was cut off ({error}); copy or get it again")
            )

    def _read_notes(self, suffix: str, member: Member) -> dict[str, labels.Value]:
        """Return a dict from name to value, with the values of a file that may be labels.

        A `cls` file has one value, its text, with the name "cls". The values of a `json` file are
        its fields. A file that cannot be read gives an empty dict, and becomes a problem.
        """
        try:
            if member.size > NOTE_BYTES:
                raise ImageError(f"has {member.size:,} bytes, more than a label has")
            text = self._read(member).decode()
            document = dict(json.loads(text)) if suffix == "json" else {CLASS: text}
            return {name: labels.as_value(value) for name, value in document.items()}
        except (ImageError, ValueError, TypeError, RecursionError) as error:
            self.problems.append(Problem(self._place_name(member), f"cannot be read ({error})"))
            return {}

    def _read(self, member: Member) -> bytes:
        return read_member(self.shards[member.shard], member, files.IMAGE)

    def content(self, index: int) -> bytes:
        return self._read(self._images[index])

    def item_name(self, index: int) -> str:
        return self._place_name(self._images[index])

    def stored_name(self, index: int) -> str:
        member = self._images[index]
        if len(self.shards) == 1:
            return member.name
        return f"{self.shards[member.shard].name}:{member.name}"

    def _place_name(self, member: Member) -> str:
        return f"{self.shards[member.shard]}:{member.name}"
