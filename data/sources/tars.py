"""Tar files: webdataset's samples, in one `.tar` or a folder of shards, or images arranged as in a folder.

The files of a sample lie one after the other; the image is the one with an image's suffix alone. A tar without any
file that says something (TOLD) is arranged as a folder is. Nothing is extracted: the places of the images are noted
once, and only regular files are read.
"""

import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.errors import ImageError
from data.images import SUFFIXES
from data.sources.base import Item, Problem, Source, SourceOptions
from data.sources.labels import LABEL, LABEL_COLUMNS, choose_label, classes_of, looks_like_labels
from data.sources.listing import arrange, kind_of
from data.sources.splits import choose_shards, refuse_split
from data.tar_files import Member, TarFiles, read_members
from utils.config.cli import did_you_mean
from utils.errors import UserError
from utils.text import printable

SUFFIX = ".tar"
TOLD = ("cls", "json", "txt")  # suffixes of what is said of an image
SAMPLE = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)  # webdataset's: up to the first dot, and the rest
FIELDS = ("cls", LABEL, *LABEL_COLUMNS)  # of `json`
LOOKED_AT = 10_000  # samples whose other fields may be labels
META = re.compile(r"__[^/]*__(/|$)")  # webdataset's own notes
TOLD_BYTES = 1 << 20  # of a file that says something


@dataclass
class Sample:
    """What lies side by side under one name."""

    key: str
    images: list[Member] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)  # labels by the suffix, or by the field of `json`


class TarSource(Source):
    """The images of tar files. Raises UserError for what cannot be used, by name."""

    def __init__(
        self,
        path: Path,
        options: SourceOptions,
        shards: Sequence[Path] | None = None,  # these of the folder; None: those of the split, or the file itself
    ) -> None:
        super().__init__(printable(path.name), [])
        split, label_column, classes_from = options.split, options.label_column, options.classes_from
        self.path, self.shards = path, [path] if shards is None else list(shards)
        if path.is_dir() and shards is None:
            self.shards, self.splits, self.ignored = choose_shards(path, SUFFIX, split, anywhere=True)
        self._files = TarFiles(self.shards)
        members = [member for number in range(len(self.shards)) for member in self._members(number)]
        if not members and self.problems:
            raise UserError(str(self.problems[0]))
        if label_column is not None or any(_suffix(member.name) in TOLD for member in members):
            if classes_from is not None:
                raise UserError(f"--classes-from does not apply to {path}: its labels lie beside the images")
            if not self.splits:
                refuse_split(path, split)
            self._take_samples(list(self._samples(members, label_column)), label_column)
        else:
            self._arrange(members, None if self.splits else split, classes_from)

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
        samples = [sample for sample in samples if self._has_image(sample)]
        if not samples:
            raise UserError(f"{self.path} holds no images; supported are {' '.join(sorted(SUFFIXES))}")
        column = self._label_of(samples, label_column)
        if column is not None:
            texts = [sample.told.get(column, "") for sample in samples]
            self.problems += [
                Problem(self._shown(sample.images[0]), f"has no label {column}")
                for sample, text in zip(samples, texts, strict=True)
                if not text
            ]
            samples = [sample for sample, text in zip(samples, texts, strict=True) if text]
            self.classes, labels, told = classes_of(str(self.path), list(filter(None, texts)))
            self.classes = list(map(printable, self.classes))
            self.remarks += told
        else:
            labels = [0] * len(samples)
        self._images, self._labels = [sample.images[0] for sample in samples], np.array(labels, np.int64)

    def _samples(self, members: Sequence[Member], asked: str | None) -> Iterator[Sample]:
        """Files of one name that lie one after the other."""
        sample, shard, count = Sample(""), -1, 0
        for member in members:
            match = SAMPLE.fullmatch(member.name)
            if match is None:
                self.ignored.append(member.name)
                continue
            key, suffix = match[1], match[2].lower()
            if (key, member.shard) != (sample.key, shard):
                if sample.key:
                    yield sample
                sample, shard, count = Sample(key), member.shard, count + 1
            if f".{suffix}" in SUFFIXES:
                sample.images.append(member)
            elif suffix.rpartition(".")[2] in TOLD:
                # Of fields that are no labels by their names the first values show whether they look like some.
                self._tell(sample, suffix, member, None if count <= LOOKED_AT else (*FIELDS, asked))
        if sample.key:
            yield sample

    def _tell(self, sample: Sample, suffix: str, member: Member, fields: Sequence[str | None] | None) -> None:
        """Note what a file says of its sample; of `json` these fields, None: all."""
        try:
            if member.size > TOLD_BYTES:
                raise ImageError(f"has {member.size:,} bytes, more than a label has")
            text = self._files.read(member).decode().strip()
            if suffix.rpartition(".")[2] != "json":
                sample.told[suffix] = text
                return
            document = json.loads(text)
        except (ImageError, ValueError, RecursionError) as error:
            self.problems.append(Problem(self._shown(member), f"cannot be read ({error})"))
            return
        if isinstance(document, dict):
            for name, value in document.items():
                if isinstance(value, (str, int)) and (fields is None or name in fields):
                    sample.told.setdefault(name, str(value).strip())

    def _has_image(self, sample: Sample) -> bool:
        """Whether a sample has one image; others become problems."""
        if len(sample.images) == 1:
            return True
        found = f"{len(sample.images)} images" if sample.images else "no image"
        self.problems.append(Problem(f"{self.path}: sample {sample.key}", f"has {found}; a sample has one"))
        return False

    def _label_of(self, samples: Sequence[Sample], asked: str | None) -> str | None:
        """What of a sample's words is its label, or None: unlabelled. Raises UserError if it is unclear."""
        counts = {name: Counter[str]() for name in dict.fromkeys(name for sample in samples for name in sample.told)}
        for sample in samples:
            for name, text in sample.told.items():
                counts[name][text] += 1
        where = str(self.path)
        if asked is None and "cls" in counts:
            return "cls"
        if asked is not None and asked not in counts and asked != "none":
            raise UserError(
                f"{where}: --label-column {asked}: no sample has it{did_you_mean(asked, list(counts))}; there are"
                f" {', '.join(counts) or 'none'}"
            )
        label, told = choose_label(where, list(counts), asked)
        self.remarks += told
        if label is None and asked is None:
            if "txt" in counts and looks_like_labels(where, {"txt": counts["txt"]}):
                self.remarks.append(f"{where}: the labels are those of txt; without: --label-column none")
                return "txt"
            self.remarks += looks_like_labels(where, counts)
        return label

    # --- as in a folder

    def _arrange(self, members: Sequence[Member], split: str | None, classes_from: str | None) -> None:
        by_name = {member.name: member for member in members}
        if len(by_name) < len(members):
            name = Counter(member.name for member in members).most_common(1)[0][0]
            raise UserError(f"{self.path} holds {name} more than once: make the tar again, or give one tar alone")

        def read(name: str) -> bytes:
            return self._files.read(by_name[name], kind_of(name))

        listing = arrange(str(self.path), list(by_name), [], split, read, classes_from)
        self.classes = list(map(printable, listing.classes))
        self.problems += listing.problems
        self.ignored += listing.ignored
        self.splits = self.splits or listing.splits
        self.remarks += listing.remarks
        self._images, self._labels = [by_name[name] for name in listing.names], np.array(listing.labels, np.int64)

    # --- images

    def item(self, index: int) -> Item:
        return Item(self.item_name(index), int(self._labels[index]), self._files.read(self._images[index]))

    def item_name(self, index: int) -> str:
        return self._shown(self._images[index])

    def stored_name(self, index: int) -> str:
        member = self._images[index]
        return member.name if len(self.shards) == 1 else f"{self.shards[member.shard].name}:{member.name}"

    def place(self, index: int) -> tuple[int, int]:
        """Where an image's bytes are: the number of its shard, and the first byte in it."""
        member = self._images[index]
        return member.shard, member.start

    def _shown(self, member: Member) -> str:
        return f"{self.shards[member.shard]}:{member.name}"

    def __exit__(self, *error: object) -> None:
        self._files.close()


def _suffix(name: str) -> str:
    match = SAMPLE.fullmatch(name)
    return match[2].lower().rpartition(".")[2] if match else ""
