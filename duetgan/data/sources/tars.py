"""Tar files: webdataset's samples, in one `.tar` or a folder of shards, or images arranged as in a
folder.

The files of a sample are contiguous, and its name ends at the first dot. The image is the file
whose remaining name is an image's suffix. If that gives no image, the names end at the last dot
(`a.left.png`). A tar whose images have no files with labels (NOTES) is arranged like a folder.
Nothing is extracted: the positions of the images are listed once. Only regular files are read.
"""

import itertools
import json
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from duetgan.data.errors import ImageError
from duetgan.data.images import SUFFIXES
from duetgan.data.sources import labels
from duetgan.data.sources.base import (
    MOST_VALUES,
    NO_LABELS,
    Problem,
    SourceOptions,
    choose_shards,
    looks_like_labels,
    with_slashes,
)
from duetgan.data.sources.files import ListedSource, arrange, kind_of
from duetgan.data.tar_files import Member, TarFiles, read_members
from duetgan.utils.errors import UserError

SUFFIX = ".tar"
NOTES = ("cls", "json", "txt")  # suffixes of files with labels
# webdataset's rule: the name up to the first dot, and the suffix
SAMPLE = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
LAST_DOT = re.compile(r"((?:.*/)?[^./][^/]*)\.([^./]+)", re.DOTALL)
FIELDS = ("cls", labels.LABEL, *labels.LABEL_COLUMNS)  # fields of `json` files that are labels
INSPECTED = 10_000  # first samples, of which all fields of `json` files are read
META = re.compile(r"__[^/]*__(/|$)")  # webdataset's metadata
NOTE_BYTES = 1 << 20


@dataclass
class Sample:
    """Contiguous files with one name."""

    key: str
    images: list[Member] = field(default_factory=list)
    # texts that may be labels, by suffix of their file or field of a `json` file
    notes: dict[str, str] = field(default_factory=dict)
    dotted: str = ""  # a file with several suffixes, of which the last is an image's


class TarSource(ListedSource):
    """The images of tar files. Raises UserError for a file that cannot be used."""

    takes = ListedSource.takes | {"label_column", "label_separator", "split_column"}

    def __init__(
        self,
        path: Path,
        options: SourceOptions,
        # the tar files; None: those of the split, or the file itself
        shards: Sequence[Path] | None = None,
    ) -> None:
        super().__init__(path.name, str(path))
        self.shards = [path] if shards is None else list(shards)
        if path.is_dir() and shards is None:
            self.shards, self.splits, self.ignored = choose_shards(path, SUFFIX, options.split)
        self._files = TarFiles(self.shards)
        members: list[Member] = []
        for number in range(len(self.shards)):
            members += self._members(number)
        if not members and self.problems:
            raise UserError(str(self.problems[0]))
        parts = _parts(members, SAMPLE)
        if not any(_is_image(match[2]) for match, _ in parts):
            parts = _parts(members, LAST_DOT)
        with_notes = {match[1] for match, _ in parts if _kind(match[2]) in NOTES}
        image_keys = {match[1] for match, _ in parts if _is_image(match[2])}
        if options.label_column is not None or image_keys & with_notes:
            if options.classes_from is not None:
                raise UserError(
                    f"--classes-from does not apply to {path}: its labels lie beside the images"
                )
            part_names = {member.name for _, member in parts}
            self.ignored += [member.name for member in members if member.name not in part_names]
            self._take_samples(list(self._samples(parts, options.label_column)), options)
        else:
            self._by_name = {member.name: member for member in members}
            if len(self._by_name) < len(members):
                name = Counter(member.name for member in members).most_common(1)[0][0]
                raise UserError(
                    f"{self.where} holds {name} more than once: make the tar again, or give one tar"
                    " alone"
                )
            if self.splits:
                options = options._replace(split=None)
            arrange(self, self._by_name, [], options)
            self._images = [self._by_name[name] for name in self.names]

    def _members(self, number: int) -> Iterator[Member]:
        """Yield the regular files of a shard. Other members become problems."""
        shard = self.shards[number]
        try:
            for member in read_members(shard):
                name = with_slashes(member.name).removeprefix("./")
                if member.isdir() or META.match(name):
                    continue
                if not member.isreg() or member.issparse():
                    kind = "a link" if member.islnk() or member.issym() else "not a regular file"
                    self.problems.append(
                        Problem(f"{shard}:{name}", f"is {kind}; put the file itself into the tar")
                    )
                    continue
                yield Member(name, number, member.offset_data, member.size)
        except (OSError, tarfile.TarError, ValueError, OverflowError) as error:
            self.problems.append(
                Problem(str(shard), f"is damaged or was cut off ({error}); copy or get it again")
            )

    # --- webdataset

    def _take_samples(self, samples: list[Sample], options: SourceOptions) -> None:
        for sample in samples:
            if len(sample.images) != 1:
                images = f"{len(sample.images)} images" if sample.images else "no image"
                reason = f"has {images}; a sample has one"
                if sample.dotted:
                    reason += f"; its name ends at the first dot of {sample.dotted}"
                self.problems.append(Problem(f"{self.where}: sample {sample.key}", reason))
        samples = [sample for sample in samples if len(sample.images) == 1]
        if not samples:
            raise UserError(
                f"{self.where} holds no images; supported are {' '.join(sorted(SUFFIXES))}"
            )
        columns = self._choose_columns(samples, options)
        rows = [[sample.notes.get(name, "") for name in columns.names] for sample in samples]
        places = [self._place_name(sample.images[0]) for sample in samples]
        indices = labels.take_columns(self, self.where, columns, rows, places, options)
        self._images = [samples[index].images[0] for index in indices]
        self.take_names([member.name for member in self._images], self.labels().tolist())

    def _choose_columns(self, samples: Sequence[Sample], options: SourceOptions) -> labels.Columns:
        """Choose the notes that are the labels and the split, and add remarks. Raises UserError if
        the choice is unclear.
        """
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for sample in samples:
            for name, text in sample.notes.items():
                counts[name][text] += 1
        if options.label_column is None and "cls" in counts:
            options = options._replace(label_column="cls")
        texts = counts.get("txt", Counter[str]())
        declared = ["txt"] if looks_like_labels(self.where, {"txt": texts}) else []
        if self.splits:  # All shards belong to one split.
            options = options._replace(split_column=options.split_column or NO_LABELS)
        return labels.choose_columns(self, self.where, counts, options, declared=declared)

    def _samples(
        self, parts: list[tuple[re.Match[str], Member]], label_column: str | None
    ) -> Iterator[Sample]:
        groups = itertools.groupby(parts, lambda part: (part[0][1], part[1].shard))
        field_values: dict[str, set[str]] = defaultdict(set)  # in the first samples
        fields: set[str] | None = None
        for number, ((key, _), files) in enumerate(groups):
            sample = Sample(key)
            if number == INSPECTED:  # Fields with few values may be labels or splits.
                fields = {*FIELDS, *(label_column or "").split(",")}
                for name, values in field_values.items():
                    if len(values) <= MOST_VALUES:
                        fields.add(name)
            for match, member in files:
                suffix = match[2].lower()
                if _is_image(suffix):
                    sample.images.append(member)
                elif _kind(suffix) in NOTES:
                    self._take_note(sample, suffix, member, fields)
                elif _is_image(_kind(suffix)):
                    sample.dotted = member.name
            if number < INSPECTED:
                for name, text in sample.notes.items():
                    field_values[name].add(text)
            yield sample

    def _take_note(
        self, sample: Sample, suffix: str, member: Member, fields: Collection[str] | None
    ) -> None:
        """Add the content of a file to its sample's notes, of a `json` file only `fields` (None:
        all).
        """
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
                if isinstance(value, (str, int, float, list)) and (
                    fields is None or name in fields
                ):
                    sample.notes.setdefault(name, labels.as_text(value))

    def read(self, name: str) -> bytes:
        return self._files.read(self._by_name[name], kind_of(name))

    # --- images

    def content(self, index: int) -> bytes:
        return self._files.read(self._images[index])

    def item_name(self, index: int) -> str:
        return self._place_name(self._images[index])

    def stored_name(self, index: int) -> str:
        member = self._images[index]
        if len(self.shards) == 1:
            return member.name
        return f"{self.shards[member.shard].name}:{member.name}"

    def place(self, index: int) -> tuple[int, int]:
        member = self._images[index]
        return member.shard, member.start

    def _place_name(self, member: Member) -> str:
        return f"{self.shards[member.shard]}:{member.name}"

    def __exit__(self, *error: object) -> None:
        self._files.close()


def _parts(members: Sequence[Member], form: re.Pattern[str]) -> list[tuple[re.Match[str], Member]]:
    """Return the members with names of the form NAME.SUFFIX, and the matches."""
    return [(match, member) for member in members if (match := form.fullmatch(member.name))]


def _is_image(suffix: str) -> bool:
    return f".{suffix.lower()}" in SUFFIXES


def _kind(suffix: str) -> str:
    """Return the last suffix: `png` for `seg.png`."""
    return suffix.lower().rpartition(".")[2]
