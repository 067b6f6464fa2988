"""Checkpoints: one file a step, written atomically with a checksum beside it, loaded with restricted unpickling.

Folder: `step-00001234.pt`, `step-00001234.pt.sha256`, `last.json`, `best.json`. The format is described in
docs/checkpoints.md. Everything in a checkpoint is a tensor, number, string, list or dict.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch

from utils.config import near_file
from utils.errors import UserError
from utils.files import replace_file

SCHEMA = 1
NAME = re.compile(r"step-(\d{8,})\.pt$")
KEYS = ("schema", "task", "step", "config", "classes", "shape", "state")

Checkpoint = dict[str, Any]


class CorruptCheckpoint(UserError):
    """The file is damaged, incomplete or not a checkpoint."""


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` as `folder/step-XXXXXXXX.pt`: temporary file, flush, fsync, checksum, rename, fsync of the
    folder.

    A file under its final name is complete, with or without its checksum yet. Raises OSError when the disk refuses
    (full, read-only); what was there before stays.
    """
    _check_plain(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{checkpoint['step']:08d}.pt"
    temporary = folder / f".{path.name}.tmp"
    try:
        with open(temporary, "wb") as file:
            _torch_save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        sha256 = file_sha256(temporary)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_checksum_file(path))  # of an earlier save of this step: it must not judge the new file
        os.replace(temporary, path)
        replace_file(_checksum_file(path), f"{sha256}  {path.name}\n".encode())
    finally:
        temporary.unlink(missing_ok=True)
    _fsync_folder(folder)
    return path


def _torch_save(checkpoint: Checkpoint, file: BinaryIO) -> None:
    """`torch.save`, whose zip writer hides the disk's OSError behind a RuntimeError: here it gets out."""
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise cause from error


def _check_plain(value: Any, where: str = "checkpoint") -> None:
    """Raise TypeError for anything that restricted loading would refuse: better now than when it is needed."""
    if type(value) in (list, tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _check_plain(key, f"key of {where}")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) not in (int, float, str, bool, type(None), torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{where} is a {type(value).__name__}; checkpoints hold tensors, numbers, strings, lists and dicts only"
        )


def _checksum_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(folder: Path, which: str, path: Path, **more: float | str) -> None:
    """Make `which` ("last" or "best") point at `path`: `{"file", "step", "sha256"}` and whatever else is given."""
    sha256 = _checksum_file(path).read_text().split()[0]
    entry = {"file": path.name, "step": step_of(path), "sha256": sha256, **more}
    replace_file(folder / f"{which}.json", f"{json.dumps(entry, indent=1)}\n".encode())
    _fsync_folder(folder)


def pointer(folder: Path, which: str) -> dict[str, Any] | None:
    """What `point` wrote, or None when there is none or it cannot be read."""
    try:
        entry = json.loads((folder / f"{which}.json").read_text())
        return entry if isinstance(entry, dict) and NAME.fullmatch(str(entry.get("file"))) else None
    except (OSError, ValueError):
        return None


def step_of(path: Path) -> int:
    """The step in a checkpoint's file name."""
    match = NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is not a checkpoint's name")
    return int(match[1])


def newest_first(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, newest first."""
    return sorted((p for p in folder.glob("step-*.pt") if NAME.fullmatch(p.name)), key=step_of, reverse=True)


def rotate(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and what `best.json` names; sweep leftovers of a killed write."""
    best = pointer(folder, "best")
    kept = {path.name for path in newest_first(folder)[:keep]} | ({best["file"]} if best else set())
    for path in newest_first(folder):
        if path.name not in kept:
            path.unlink()
            _checksum_file(path).unlink(missing_ok=True)
    for leftover in [*folder.glob(".*.tmp"), *folder.glob("step-*.pt.sha256")]:
        if leftover.suffix == ".tmp" or not leftover.with_suffix("").exists():
            leftover.unlink(missing_ok=True)


def load(path: Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint onto the CPU with `weights_only=True`, after its checksum.

    Raises UserError when it is missing and CorruptCheckpoint when it is damaged, holds more than plain data, lacks
    keys or comes from a newer version; nothing in the file is executed.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    if verify and _checksum_file(path).is_file():
        expected = (_checksum_file(path).read_text().split() or [""])[0]
        if file_sha256(path) != expected:
            raise CorruptCheckpoint(
                f"{path}: damaged (its SHA-256 is not the one in {_checksum_file(path).name}); use an earlier one"
            )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CorruptCheckpoint(
            f"{path}: refused, it is not plain data or not a checkpoint; nothing in it was executed"
        ) from error
    except Exception as error:  # a damaged file makes torch's reader and unpickler raise a dozen kinds
        reason = str(error).split("\n")[0][:200]
        raise CorruptCheckpoint(f"{path}: cannot be read as a checkpoint ({reason}); use an earlier one") from error
    if not isinstance(checkpoint, dict) or any(key not in checkpoint for key in KEYS):
        raise CorruptCheckpoint(f"{path}: not a checkpoint of Duet (expected a dict with {', '.join(KEYS)})")
    if checkpoint["schema"] > SCHEMA:
        raise CorruptCheckpoint(
            f"{path}: schema {checkpoint['schema']} is newer than this program's {SCHEMA}; update Duet"
        )
    return checkpoint


def load_latest(folder: Path, warn: Any = print) -> tuple[Path, Checkpoint] | None:
    """The newest checkpoint that loads; `warn` is told of every one that does not. None when the folder has none.

    Raises CorruptCheckpoint when there are checkpoints but none of them loads.
    """
    paths = newest_first(folder)
    for path in paths:
        try:
            return path, load(path)
        except CorruptCheckpoint as error:
            warn(f"warning: {error}; falling back to the one before")
    if paths:
        raise CorruptCheckpoint(
            f"{folder}: none of its {len(paths)} checkpoints can be read; start in another --run-dir"
        )
    return None


def resolve(run_or_file: str | Path, which: str = "last") -> Path:
    """The checkpoint file that a run folder or a file name means.

    For a run folder: what `checkpoints/<which>.json` names, else the newest. Raises UserError when there is none.
    """
    path = Path(run_or_file)
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(f"{path}: no such run folder or checkpoint{near_file(path)}")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    entry = pointer(folder, which)
    if entry and (folder / entry["file"]).is_file():
        return folder / entry["file"]
    if which == "best":
        raise UserError(f"{folder}: has no best.json (no evaluation has run yet); use --which last")
    paths = newest_first(folder)
    if not paths:
        raise UserError(f"{path}: holds no checkpoints/step-*.pt; name a run folder of train.py or a checkpoint file")
    return paths[0]
