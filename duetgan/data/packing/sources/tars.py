"""Tar files: webdataset's samples, in one `.tar` or a folder of shards, or images arranged as in a
folder.

The files of a sample are contiguous, and its name ends at the first dot. The image is the file
whose remaining name is an image's suffix. A tar whose images have no files with labels (NOTES) is
arranged like a folder. Nothing is extracted: the positions of the images are listed once. Only
regular files are read.
"""

import itertools
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from duetgan.data.errors import ImageError
from duetgan.data.images import SUFFIXES
from duetgan.data.packing.sources import labels
from duetgan.data.packing.sources.base import (
    NO_LABELS,
    Problem,
    SourceOptions,
    choose_shards,
    has_few_values,
    with_slashes,
)
from duetgan.data.packing.sources.files import ListedSource, arrange, kind_of
from duetgan.data.tar_files import Member, read_member, read_members
from duetgan.utils import files
from duetgan.utils.errors import UserError

SUFFIX = ".tar"
NOTES = ("cls", "json", "txt")  # suffixes of files with labels
# webdataset's rule: the name up to the first dot, and the suffix
SAMPLE = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
# fields of `json` files that are read, beside those of the options
FIELDS = {"cls", labels.LABEL, *labels.LABEL_COLUMNS, *labels.SPLIT_COLUMNS, "is_valid"}
META = re.compile(r"__[^/]*__(/|$)")  # webdataset's metadata
NOTE_BYTES = 1 << 20


@dataclass
class Sample:
    """Contiguous files with one name."""

    key: str
    images: list[Member] = field(default_factory=list)
    # texts that may be labels, by suffix of their file or field of a `json` file
    notes: dict[str, str] = field(default_factory=dict)


class TarSource(ListedSource):
    """The images of tar files. Raises UserError for a file that cannot be used."""

    takes = ListedSource.takes | {"label_column", "label_separator", "split_column", "group_column"}

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
        members: list[Member] = []
        for number in range(len(self.shards)):
            members += self._members(number)
        if not members and self.problems:
            raise UserError(str(self.problems[0]))
        parts = [(match, member) for member in members if (match := SAMPLE.fullmatch(member.name))]
        with_notes = {match[1] for match, _ in parts if match[2].lower() in NOTES}
        image_keys = {match[1] for match, _ in parts if _is_image(match[2])}
        if options.label_column is None and not image_keys & with_notes:
            if label := next((member for member in members if member.name.endswith(".cls")), None):
                raise UserError(
                    f"{path}: {label.name} is the label of no image: a sample's name ends at its"
                    " first dot; rename the files"
                )
            self._take_folders(members, options)
        elif options.classes_from is None:
            part_names = {member.name for _, member in parts}
            self.ignored += [member.name for member in members if member.name not in part_names]
            self._take_samples(list(self._samples(parts, options)), options)
        else:
            raise UserError(
                f"--classes-from does not apply to {path}: its labels lie beside the images"
            )

    def _members(self, number: int) -> Iterator[Member]:
        """Yield the regular files of a shard, without webdataset's metadata. Links and other
        special members become problems, and so does damage.
        """
        shard = self.shards[number]
        try:
            for member in read_members(shard):
                name = with_slashes(member.name).removeprefix("./")
                if member.isdir() or META.match(name):
                    continue
                if member.isreg() and not member.issparse():
                    yield Member(name, number, member.offset_data, member.size)
                else:
                    reason = "is not a regular file; put the file itself into the tar"
                    self.problems.append(Problem(f"{shard}:{name}", reason))
        except (OSError, tarfile.TarError, ValueError, OverflowError) as error:
            self.problems.append(
                Problem(str(shard), f"is damaged or was cut off ({error}); copy or get it again")
            )

    def _take_folders(self, members: Sequence[Member], options: SourceOptions) -> None:
        """Set images and classes by the rules of folders."""
        self._by_name = {member.name: member for member in members}
        if len(self._by_name) < len(members):
            raise UserError(
                f"{self.where} holds a name more than once: make the tar again, or give one tar"
                " alone"
            )
        if self.splits:
            options = options._replace(split=None)
        arrange(self, self._by_name, [], options)
        self._images = [self._by_name[name] for name in self.names]

    # --- webdataset

    def _take_samples(self, samples: list[Sample], options: SourceOptions) -> None:
        """Set images and labels. Raises UserError if there are no images, or if it is unclear which
        notes are the labels.
        """
        for sample in samples:
            if len(sample.images) != 1:
                reason = f"has {len(sample.images)} images; a sample has one"
                self.problems.append(Problem(f"{self.where}: sample {sample.key}", reason))
        samples = [sample for sample in samples if len(sample.images) == 1]
        if not samples:
            raise UserError(
                f"{self.where} holds no images; supported are {' '.join(sorted(SUFFIXES))}"
            )
        names = list(dict.fromkeys(itertools.chain(*(sample.notes for sample in samples))))
        notes = [[sample.notes.get(name, "") for name in names] for sample in samples]
        counts = labels.count(names, notes)
        if options.label_column is None and "cls" in counts:
            options = options._replace(label_column="cls")
        if self.splits:  # All shards belong to one split.
            options = options._replace(split_column=options.split_column or NO_LABELS)
        declared = [name for name in names if name == "txt" and has_few_values(counts[name])]
        columns = labels.choose_columns(self, self.where, counts, options, declared=declared)
        rows = [[sample.notes.get(name, "") for name in columns.names] for sample in samples]
        places = [self._place_name(sample.images[0]) for sample in samples]
        indices = labels.take_columns(self, self.where, columns, rows, places, options)
        self._images = [samples[index].images[0] for index in indices]
        self.take_names([member.name for member in self._images], self.labels().tolist())

    def _samples(
        self, parts: list[tuple[re.Match[str], Member]], options: SourceOptions
    ) -> Iterator[Sample]:
        fields = set(FIELDS)
        for option in (options.label_column, options.split_column, options.group_column):
            fields.add((option or "").partition("=")[0].lower())
        groups = itertools.groupby(parts, lambda part: (part[0][1], part[1].shard))
        for (key, _), group in groups:
            sample = Sample(key)
            for match, member in group:
                suffix = match[2].lower()
                if _is_image(suffix):
                    sample.images.append(member)
                elif suffix in NOTES:
                    for name, text in self._read_notes(suffix, member).items():
                        if suffix != "json" or name.lower() in fields:
                            sample.notes.setdefault(name, text)
            yield sample

    def _read_notes(self, suffix: str, member: Member) -> dict[str, str]:
        """Return the text in a file of NOTES by its suffix, or those in a `json` file by field."""
        try:
            if member.size > NOTE_BYTES:
                raise ImageError(f"has {member.size:,} bytes, more than a label has")
            text = self._read(member).decode().strip()
            if suffix != "json":
                return {suffix: text}
            document = dict(json.loads(text))
            return {name: labels.as_text(value) for name, value in document.items()}
        except (ImageError, ValueError, TypeError, RecursionError) as error:
            self.problems.append(Problem(self._place_name(member), f"cannot be read ({error})"))
            return {}

    def read(self, name: str) -> bytes:
        return self._read(self._by_name[name], kind_of(name))

    def _read(self, member: Member, kind: files.FileLimit = files.IMAGE) -> bytes:
        return read_member(self.shards[member.shard], member, kind)

    # --- images

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


def _is_image(suffix: str) -> bool:
    return f".{suffix.lower()}" in SUFFIXES
