"""Which files of a folder belong to a split: by their names, as data sets in shards have them.

Shards are taken in order of name. Names with a split's (`train-00000-of-00002.parquet`) are its shards; `-of-N` says
that there are N of them.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from data.sources.listing import SPLIT_NAMES, first_of
from utils.errors import UserError

NAMES = "|".join(sorted(SPLIT_NAMES, key=len, reverse=True))
SPLIT_PREFIX = re.compile(rf"({NAMES})(?=[-_.]|$)")
SPLIT_INSIDE = re.compile(rf"(?:^|[-_.])({NAMES})(?=[-_.]|$)")
SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})")


def choose_shards(
    where: Path,
    paths: Sequence[Path],
    split: str | None,  # None: train, if there are splits
    *,
    anywhere: bool = False,  # a split's name may stand anywhere in a file's name: `imagenet1k-train-0000.tar`
) -> tuple[list[Path], tuple[str, ...]]:
    """The files of a split, and the splits that there are. Raises UserError if it has none, if a shard is missing, or
    if only some name a split.
    """
    groups: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        groups[split_of(path, anywhere=anywhere)].append(path)
    if "" in groups and len(groups) > 1:
        named = next(iter(groups[name] for name in groups if name))[0]
        raise UserError(f"{where}: {named.name} names a split, {groups[''][0].name} does not: rename or remove one")
    if "" in groups:
        if split in ("test", "val"):
            raise UserError(
                f"{where} has no splits in its files' names: leave --split out to take all of it, or add"
                " --val-share 0.1"
            )
        chosen = groups[""]
    elif where.is_file() and split in (None, "train"):
        chosen = list(paths)  # a file that is named is meant, whatever its split
    else:
        name = first_of(split or "train", groups)
        if name is None:
            raise UserError(
                f"{where} has no {split or 'train'} split, only {', '.join(sorted(groups))}: pass another --split"
            )
        chosen = groups[name]
    if where.is_dir():
        check_complete(where, chosen)
    return chosen, tuple(sorted(filter(None, groups))) if where.is_dir() else ()


def split_of(path: Path, *, anywhere: bool = True) -> str:
    """The split that a shard's name tells, or ""; at its beginning, or anywhere."""
    match = (SPLIT_INSIDE.search if anywhere else SPLIT_PREFIX.match)(path.stem.lower())
    return match[1] if match else ""


def check_complete(where: Path, paths: Sequence[Path]) -> None:
    """Raise UserError if the files' names say that there are more."""
    names, suffix = {path.stem for path in paths}, paths[0].suffix
    for match in filter(None, map(SHARD.fullmatch, sorted(names))):
        for number in range(int(match[3])):
            wanted = f"{match[1]}-{number:05d}-of-{match[3]}"
            if wanted not in names:
                raise UserError(f"{where}: {wanted}{suffix} is missing beside {match[0]}{suffix}: add it")
