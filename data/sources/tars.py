"""Tar files: webdataset's samples, in one `.tar` or a folder of shards, or images arranged as in a folder.

The files of a sample lie one after the other; the image is the one with an image's suffix alone. A tar without any
file that says something (NOTES) is arranged as a folder is. Nothing is extracted: the places of the images are noted
once, and only regular files are read.
"""

import itertools
import json
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from duetgan.data.errors import ImageError
from duetgan.data.images import SUFFIXES
from duetgan.data.sources.base import (
    LABEL,
    LABEL_COLUMNS,
    Problem,
    SourceOptions,
    choose_shards,
    listed_labels,
    looks_like_labels,
    refuse_split,
)
from duetgan.data.sources.files import ListedSource, arrange, kind_of
from duetgan.data.tar_files import Member, TarFiles, read_members
from duetgan.utils.errors import UserError

SUFFIX = ".tar"
NOTES = ("cls", "json", "txt")  # suffixes of what is said of an image
SAMPLE = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)  # webdataset's: up to the first dot, and the rest
FIELDS = ("cls", LABEL, *LABEL_COLUMNS)  # of `json`
LOOKED_AT = 10_000  # samples whose other fields may be labels
META = re.compile(r"__[^/]*__(/|$)")  # webdataset's own notes
NOTE_BYTES = 1 << 20


@dataclass
class Sample:
    """What lies side by side under one name."""

    key: str
    images: list[Member] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)  # by the suffix, or by the field of `json`


class TarSource(ListedSource):
    """The images of tar files. Raises UserError for what cannot be used, by name."""

    def __init__(
        self,
        path: Path,
        options: SourceOptions,
        shards: Sequence[Path] | None = None,  # these of the folder; None: those of the split, or the file itself
    ) -> None:
        super().__init__(path.name, str(path))
        label_column = options.label_column
        self.shards = [path] if shards is None else list(shards)
        if path.is_dir() and shards is None:
            self.shards, self.splits, self.ignored = choose_shards(path, SUFFIX, options.split)
        self._files = TarFiles(self.shards)
        members = [member for number in range(len(self.shards)) for member in self._members(number)]
        if not members and self.problems:
            raise UserError(str(self.problems[0]))
        matches = [SAMPLE.fullmatch(member.name) for member in members]
        if label_column is not None or any(match and _kind(match[2]) in NOTES for match in matches):
            if options.classes_from is not None:
                raise UserError(f"--classes-from does not apply to {path}: its labels lie beside the images")
            if not self.splits:
                refuse_split(path, options.split)
            self.ignored += [member.name for member, match in zip(members, matches, strict=True) if not match]
            parts = [(match, member) for member, match in zip(members, matches, strict=True) if match]
            self._take_samples(list(self._samples(parts, label_column)), label_column)
        else:
            self._by_name = {member.name: member for member in members}
            if len(self._by_name) < len(members):
                name = Counter(member.name for member in members).most_common(1)[0][0]
                raise UserError(f"{self.where} holds {name} more than once: make the tar again, or give one tar alone")
            arrange(self, self._by_name, [], options._replace(split=None) if self.splits else options)
            self._images = [self._by_name[name] for name in self.names]

    def _members(self, number: int) -> Iterator[Member]:
        """The regular files of a shard; other members become problems."""
        shard = self.shards[number]
        try:
            for member in read_members(shard):
                name = member.name.removeprefix("./")
                if member.isdir() or META.match(name):
                    continue
                if not member.isreg() or member.issparse():
                    what = "a link" if member.islnk() or member.issym() else "not a regular file"
                    self.problems.append(Problem(f"{shard}:{name}", f"is {what}; put the file itself into the tar"))
                    continue
                yield Member(name, number, member.offset_data, member.size)
        except (OSError, tarfile.TarError, ValueError, OverflowError) as error:
            self.problems.append(Problem(str(shard), f"is damaged or was cut off ({error}); copy or get it again"))

    # --- webdataset

    def _take_samples(self, samples: list[Sample], label_column: str | None) -> None:
        for sample in samples:
            if len(sample.images) != 1:
                images = f"{len(sample.images)} images" if sample.images else "no image"
                self.problems.append(Problem(f"{self.where}: sample {sample.key}", f"has {images}; a sample has one"))
        samples = [sample for sample in samples if len(sample.images) == 1]
        if not samples:
            raise UserError(f"{self.where} holds no images; supported are {' '.join(sorted(SUFFIXES))}")
        column = self._label_of(samples, label_column)
        if column is not None:
            for sample in samples:
                if not sample.notes.get(column):
                    self.problems.append(Problem(self._place_name(sample.images[0]), f"has no label {column}"))
            samples = [sample for sample in samples if sample.notes.get(column)]
        self._images = [sample.images[0] for sample in samples]
        self.take_names([member.name for member in self._images])
        if column is not None:
            places = [self._place_name(member) for member in self._images]
            self.take_labels(self.where, [listed_labels(sample.notes[column]) for sample in samples], places)

    def _samples(self, parts: list[tuple[re.Match[str], Member]], asked: str | None) -> Iterator[Sample]:
        """Files of one name that lie one after the other."""
        groups = itertools.groupby(parts, lambda part: (part[0][1], part[1].shard))
        for number, ((key, _), files) in enumerate(groups):
            sample = Sample(key)
            # Of fields that are no labels by their names the first values show whether they look like some.
            fields = None if number < LOOKED_AT else (*FIELDS, asked)
            for match, member in files:
                suffix = match[2].lower()
                if f".{suffix}" in SUFFIXES:
                    sample.images.append(member)
                elif _kind(suffix) in NOTES:
                    self._take_note(sample, suffix, member, fields)
            yield sample

    def _take_note(self, sample: Sample, suffix: str, member: Member, fields: Sequence[str | None] | None) -> None:
        """Take what a file says of its sample; of `json` these fields, None: all."""
        try:
            if member.size > NOTE_BYTES:
                raise ImageError(f"has {member.size:,} bytes, more than a label has")
            text = self._files.read(member).decode().strip()
            document = json.loads(text) if _kind(suffix) == "json" else None
        except (ImageError, ValueError, RecursionError) as error:
            self.problems.append(Problem(self._place_name(member), f"cannot be read ({error})"))
            return
        if _kind(suffix) != "json":
            sample.notes[suffix] = text
        elif isinstance(document, dict):
            for name, value in document.items():
                if isinstance(value, (str, int, float, list)) and (fields is None or name in fields):
                    text = json.dumps(value) if isinstance(value, list) else str(value)
                    sample.notes.setdefault(name, text.strip())

    def _label_of(self, samples: Sequence[Sample], asked: str | None) -> str | None:
        """The note that is a sample's label, or None: unlabelled; adds remarks. Raises UserError if it is unclear."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for sample in samples:
            for name, text in sample.notes.items():
                counts[name][text] += 1
        if asked is None and "cls" in counts:
            return "cls"
        label = self.choose_label(self.where, list(counts), asked)
        if label is None and asked is None:
            if "txt" in counts and looks_like_labels(self.where, {"txt": counts["txt"]}):
                self.remarks.append(f"{self.where}: the labels are those of txt; without: --label-column none")
                return "txt"
            self.remarks += looks_like_labels(self.where, counts)
        return label

    def read(self, name: str) -> bytes:
        return self._files.read(self._by_name[name], kind_of(name))

    # --- images

    def content(self, index: int) -> bytes:
        return self._files.read(self._images[index])

    def item_name(self, index: int) -> str:
        return self._place_name(self._images[index])

    def stored_name(self, index: int) -> str:
        member = self._images[index]
        return member.name if len(self.shards) == 1 else f"{self.shards[member.shard].name}:{member.name}"

    def place(self, index: int) -> tuple[int, int]:
        member = self._images[index]
        return member.shard, member.start

    def _place_name(self, member: Member) -> str:
        return f"{self.shards[member.shard]}:{member.name}"

    def __exit__(self, *error: object) -> None:
        self._files.close()


def _kind(suffix: str) -> str:
    """What a file is: `seg.png` is a png."""
    return suffix.lower().rpartition(".")[2]
