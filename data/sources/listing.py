"""From the names of files to images and labels: the rules that folders and zip files share.

- Names with a part that begins with "." and macOS's `__MACOSX` are left out; files without an image's suffix, and
  members of archives whose names lead out of them (absolute or with ".."), are ignored and listed.
- A `dataset.json` at the top (StyleGAN's) names the labels: `{"labels": [["name", class], ...]}` or null.
- Images at the top only: unlabelled, in order of name. Images in sub-folders only: a class per sub-folder, in order
  of name (text order, as torchvision's ImageFolder), images at any depth. Both: refused.
- Sub-folders called train, test, val, valid or validation and no others: the split's folder is entered; test stands for
  val, valid and validation too. A single sub-folder that holds only sub-folders is entered. Without such folders
  everything is taken, unless the split asked for is test.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from data.images import SUFFIXES, ImageError
from data.sources.base import Problem
from utils.errors import UserError

MANIFEST = "dataset.json"
SPLITS = {"train": ("train",), "test": ("test", "val", "valid", "validation")}
SPLIT_NAMES = frozenset(name for names in SPLITS.values() for name in names)


@dataclass
class Listing:
    """Images in order, their labels (zeros if unlabelled), class names."""

    names: list[str]
    labels: list[int]
    classes: list[str]
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def arrange(
    where: str,  # the source, for errors
    files: Collection[str],  # relative names with "/"
    folders: Iterable[str],
    split: str,
    read: Callable[[str], bytes],  # a file's bytes; raises ImageError
) -> Listing:
    """Sort files into images and classes.

    Raises UserError if there is no image, if images lie both at the top and in sub-folders, or if the split's folder is
    missing; and for a `dataset.json` that cannot be read or does not fit.
    """
    if MANIFEST in files:
        try:
            return _by_manifest(where, files, read(MANIFEST))
        except ImageError as error:
            raise UserError(f"{where}: {MANIFEST} {error}; fix it") from None
    images, ignored = _images(where, files)
    folders = [name.rstrip("/") for name in folders if not _hidden(name) and not _leads_out(name)]
    prefix = _enter(where, images, folders, split)
    images = [name for name in images if name.startswith(prefix)]
    parts = {name: name[len(prefix) :].split("/") for name in images}
    loose = [name for name in images if len(parts[name]) == 1]
    if len(loose) == len(images):
        return Listing(images, [0] * len(images), [], [], ignored)
    if loose:
        raise UserError(
            f"{where} holds images both at the top ({loose[0]}) and in sub-folders;"
            " move the loose ones into class folders or away"
        )
    filled = {path[0] for path in parts.values()}
    problems = []
    for name in sorted(_tops(prefix, folders) - filled):
        instead = _what_instead([file for file in ignored if file.startswith(f"{prefix}{name}/")])
        problems.append(Problem(f"{where}/{prefix}{name}", f"is a class folder without images{instead}"))
    classes = sorted(filled)
    labels = {name: label for label, name in enumerate(classes)}
    return Listing(images, [labels[parts[name][0]] for name in images], classes, problems, ignored)


def _by_manifest(where: str, files: Iterable[str], manifest: bytes) -> Listing:
    """Images and labels by StyleGAN's `dataset.json`; classes are called by their numbers.

    Raises UserError if it is no such document, names an image that is not there, leaves one out, or if its labels are
    not whole numbers from 0.
    """
    images, ignored = _images(where, files)
    ignored = [name for name in ignored if name != MANIFEST]
    where = f"{where}: {MANIFEST}"
    try:
        pairs = json.loads(manifest)["labels"]
        known = {str(name): label for name, label in pairs or []}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f'{where} is not {{"labels": [["name", class], ...]}} ({error})') from None
    if not known:
        return Listing(images, [0] * len(images), [], [], ignored)
    odd = sorted(set(known) ^ set(images))
    if odd:
        raise UserError(f"{where} and the images do not match: {odd[0]} is in one of them only")
    for name, label in known.items():
        if not isinstance(label, int) or isinstance(label, bool) or label < 0:
            raise UserError(f"{where}: the label of {name} is {label!r}; labels are whole numbers from 0")
    if max(known.values()) >= len(known):
        raise UserError(f"{where}: labels go up to {max(known.values())}, but there are only {len(known)} images")
    classes = [str(label) for label in range(max(known.values()) + 1)]
    return Listing(images, [known[name] for name in images], classes, [], ignored)


def _images(where: str, files: Iterable[str]) -> tuple[list[str], list[str]]:
    """The visible files in order of name: images by their suffix, and the others."""
    visible = sorted(name for name in files if not _hidden(name))
    images = [name for name in visible if _is_image(name)]
    ignored = [name for name in visible if not _is_image(name)]
    if not images:
        supported = " ".join(sorted(SUFFIXES))
        raise UserError(f"{where} holds no images{_what_instead(ignored)}; supported are {supported}")
    return images, ignored


def _hidden(name: str) -> bool:
    return any((part.startswith(".") and part != "..") or part == "__MACOSX" for part in name.split("/"))


def _leads_out(name: str) -> bool:
    """Whether a zip member's name is no place inside the archive; it belongs to no class."""
    return name.startswith("/") or ".." in name.split("/")


def _is_image(name: str) -> bool:
    """By its suffix."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES and not _leads_out(name)


def _what_instead(ignored: list[str]) -> str:
    if not ignored:
        return " (it is empty)"
    kinds = Counter(PurePosixPath(name).suffix or PurePosixPath(name).name for name in ignored)
    return f" (only {', '.join(f'{count} {kind}' for kind, count in kinds.most_common(3))})"


def _tops(prefix: str, names: Iterable[str]) -> set[str]:
    """First parts of the names below `prefix`."""
    return {name[len(prefix) :].split("/")[0] for name in names if name.startswith(prefix) and name != prefix}


def _enter(where: str, images: list[str], folders: list[str], split: str) -> str:
    """The prefix under which the classes lie: "" or a split's or a single wrapper folder, with a "/" at its end."""
    prefix, entered = "", False
    while True:
        below = [name[len(prefix) :].split("/") for name in images if name.startswith(prefix)]
        tops = {path[0] for path in below} | _tops(prefix, folders)
        if tops <= SPLIT_NAMES and not entered and all(len(path) > 1 for path in below):
            chosen = [name for name in SPLITS[split] if name in tops]
            if not chosen:
                found = ", ".join(sorted(tops))
                raise UserError(f"{where} has no {split} split, its folders are {found}: pass another --split")
            entered = True
            prefix += chosen[0] + "/"
            if not any(name.startswith(prefix) for name in images):
                raise UserError(f"{where}: the folder {prefix} holds no images")
        elif len(tops) == 1 and all(len(path) > 2 for path in below):
            prefix += tops.pop() + "/"
        elif split == "test" and not entered:
            raise UserError(f"{where} has no split folders: leave --split out to take all of it")
        else:
            return prefix
