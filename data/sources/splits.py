"""Which files or folders belong to a split: by their names.

Shards are taken in order of name. Names with a split's (`train-00000-of-00002.parquet`) are its shards; `-of-N` says
that there are N of them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from duetgan.data.images import SUFFIXES
from duetgan.utils import bounded
from duetgan.utils.errors import UserError

TRAIN, TEST, VAL = ("train", "training"), ("test", "testing"), ("val", "valid", "validation")
SPLITS = {"train": TRAIN, "test": TEST + VAL, "val": VAL + TEST}  # the first name that is there
SPLIT_NAMES = frozenset(TRAIN + TEST + VAL)
SHARDED = {".parquet": "Parquet", ".arrow": "Arrow", ".tar": "tar"}  # what a folder of shards holds
NAMES = "|".join(sorted(SPLIT_NAMES, key=len, reverse=True))
SPLIT_PREFIX = re.compile(rf"({NAMES})(?=[-_.]|$)")
SPLIT_INSIDE = re.compile(rf"(?:^|[-_.])({NAMES})(?=[-_.]|$)")
SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})")


def split_name(text: str) -> str:
    """The name of SPLIT_NAMES that a folder's name, or another text, stands for, or ""."""
    name = re.sub(r"[-_ ]?set$", "", text.strip().lower())
    return name if name in SPLIT_NAMES else ""


def first_of(split: str, names: Iterable[str]) -> str | None:
    """Which of the names stands for the split: the first by SPLITS."""
    ranks = {name: SPLITS[split].index(split_name(name)) for name in names if split_name(name) in SPLITS[split]}
    return min(sorted(ranks), key=lambda name: ranks[name], default=None)


def choose_split(where: str | Path, split: str | None, names: Iterable[str]) -> str:
    """The name that stands for the split; None: for train. Raises UserError if there is none."""
    names = sorted(names)
    name = first_of(split or "train", names)
    if name is None:
        raise UserError(f"{where} has no {split or 'train'} split, only {', '.join(names)}: pass another --split")
    return name


def refuse_split(where: str | Path, split: str | None, what: str = "splits") -> None:
    """Raise UserError for held-out images of what has no splits."""
    if split in ("test", "val"):
        raise UserError(f"{where} has no {what}: leave --split out to take all of it, or add --val-share 0.1")


def sharded(folder: Path) -> str:
    """The suffix of SHARDED of a folder that holds such files and neither images nor visible sub-folders; else ""."""
    with bounded.reading(folder, "check its permissions"):
        visible = _visible(folder)
        suffixes = {entry.suffix.lower() for entry in visible}
        if suffixes & SUFFIXES or any(entry.is_dir() for entry in visible):
            return ""
    return next((suffix for suffix in SHARDED if suffix in suffixes), "")


def _visible(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def shards_by_split(where: Path, suffix: str) -> tuple[dict[str, list[Path]], list[str]]:
    """The shards of each split, under "" those of none, and the names of other files, for a file of the suffix or a
    folder of such files. Raises UserError if only some name a split.
    """
    # A split's name may stand anywhere in a tar's: `imagenet1k-train-0000.tar`.
    split_of = SPLIT_INSIDE.search if suffix == ".tar" else SPLIT_PREFIX.match
    groups: dict[str, list[Path]] = defaultdict(list)
    ignored = []
    for path in _visible(where) if where.is_dir() else [where]:
        if path.suffix.lower() == suffix:
            match = split_of(path.stem.lower())
            groups[match[1] if match else ""].append(path)
        else:
            ignored.append(path.name)
    if "" in groups and len(groups) > 1:
        first = next(iter(groups[name] for name in groups if name))[0]
        raise UserError(f"{where}: {first.name} names a split, {groups[''][0].name} does not: rename or remove one")
    return groups, ignored


def choose_shards(where: Path, suffix: str, split: str | None) -> tuple[list[Path], tuple[str, ...], list[str]]:
    """The files of a split (None: train, if there are splits), the splits that there are, and the names of other files;
    arguments as above. Raises UserError if it has none, or if a shard is missing.
    """
    groups, ignored = shards_by_split(where, suffix)
    if "" in groups:
        refuse_split(where, split, "splits in its files' names")
    # A file that is named is meant, whatever its split.
    single = "" in groups or (where.is_file() and split in (None, "train"))
    chosen = groups[next(iter(groups)) if single else choose_split(where, split, groups)]
    if where.is_file():
        return chosen, (), []
    check_complete(where, chosen)
    return chosen, tuple(sorted(filter(None, groups))), ignored


def check_complete(where: Path, paths: Sequence[Path]) -> None:
    """Raise UserError if the files' names say that there are more."""
    names, suffix = {path.stem for path in paths}, paths[0].suffix
    for match in filter(None, map(SHARD.fullmatch, sorted(names))):
        for number in range(int(match[3])):
            wanted = f"{match[1]}-{number:05d}-of-{match[3]}"
            if wanted not in names:
                raise UserError(f"{where}: {wanted}{suffix} is missing beside {match[0]}{suffix}: add it")
