"""Checkpoints: one file per step, written atomically with a checksum, loaded as plain data only.

For each saved step the folder holds a file (see `file_name`) and its checksum, `.sha256`. last.json
and best.json name the last and the best of the files. docs/checkpoints.md describes the format. A
checkpoint consists of tensors, numbers, strings, lists and dicts.
"""

import hashlib
import json
import pickle
import zipfile
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval
from pydantic import Field

from duetgan.utils import files
from duetgan.utils.checkpoint.provenance import Lineage, TrainedOn
from duetgan.utils.config.model import Count, Stored
from duetgan.utils.config.yaml_files import near_file
from duetgan.utils.errors import StoppedBySignal, UserError, explained, refuse
from duetgan.utils.files import replace_file, replacing, sync_folder
from duetgan.utils.image_spec import MOST_CHANNELS, PixelFormat, Rectangle

if TYPE_CHECKING:
    from duetgan.utils.checkpoint.writer import Snapshot

SCHEMA = 1
PREFIX, SUFFIX = "step-", ".pt"  # around the step in a checkpoint's file name
READY_MADE = ("torchvision:", "timm:")  # prefixes of the names of published classifiers
HUB_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # files in a folder that timm writes
KEYS = ("schema", "task", "step", "config", "classes", "shape", "state")

Checkpoint = dict[str, Any]
Side = Annotated[int, Interval(ge=1, le=2**16)]  # px


class Shape(Stored):
    """The image format and the number of classes that a checkpoint's networks were built for."""

    channels: Annotated[int, Interval(ge=1, le=MOST_CHANNELS)]
    classes: Annotated[int, Interval(ge=0, le=10**8)]
    resolution: Side | Rectangle
    pixel_format: PixelFormat | None = None  # None: 8-bit values without transparency


class Data(Stored):
    """The hash, number, resize filter and history of the training images."""

    content_hash: str = ""
    count: Count = 0
    resize_filter: str = ""
    history: list[TrainedOn] = []  # in order; these images are last


class Origin(Stored):
    """The checkpoint from which a converted or exported one was made."""

    file: str
    step: Count
    sha256: str


class ConfigData(Stored):
    path: str | None = None
    val_path: str | None = None
    resolution: Side | Rectangle | None = None


class ConfigLoss(Stored):
    classifier: str | None = None


class ConfigHead(Stored):
    """The keys of a checkpoint's config that are read without building the whole configuration."""

    architecture: str = ""
    data: ConfigData | None = None
    loss: ConfigLoss | None = None
    generator: dict[Any, Any] = {}
    model: dict[Any, Any] = {}


class Head(Stored):
    """The content of a checkpoint, except the tensors in `state`, which `state_schema` checks."""

    task: str
    step: Count
    config: ConfigHead
    classes: list[str] | tuple[str, ...]
    # label sets of a GAN's images that may have several labels; None: one label each
    sets: list[list[Count]] | None = None
    shape: Shape
    state: dict[str, dict[Any, Any]]
    data: Data | None = None
    lineage: Lineage | None = None
    origin: Origin | None = None
    teachers: list[str] | tuple[str, ...] = ()
    # the evaluation at this step: metric, value, interval
    figure: dict[str, str | float | list[float]] = {}
    stage: list[Annotated[float, Interval(ge=0, le=2**16)]] = Field(
        [0, 0], min_length=2, max_length=2
    )


def file_name(step: int) -> str:
    """Return the file name of a step's checkpoint.

    Only this function and `find_step` know the form of the name.
    """
    return f"{PREFIX}{step:08d}{SUFFIX}"


def find_step(name: str) -> int | None:
    """Return the step in a checkpoint's file name; None for any other name."""
    digits = name.removeprefix(PREFIX).removesuffix(SUFFIX)
    return int(digits) if digits.isdecimal() and file_name(int(digits)) == name else None


def step_of(path: Path) -> int:
    if (step := find_step(path.name)) is None:
        raise ValueError(f"{path.name} is not a checkpoint's name")
    return step


class CorruptCheckpoint(UserError):
    """The error for a file that is damaged, incomplete or not a checkpoint."""


def file_sha256(path: Path) -> str:
    with files.open_file(path, files.WEIGHTS) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(folder: Path, checkpoint: "Checkpoint | Snapshot") -> Path:
    """Write `checkpoint` into `folder` and return the path of its file.

    A temporary file is written, flushed to the disk and renamed; then the checksum is written. Thus
    a file under its final name is complete, even if a kill has prevented its checksum. Raises
    OSError if the disk is full or read-only; existing files stay. Raises TypeError for content that
    could not be loaded again.
    """
    from duetgan.utils.checkpoint.writer import Snapshot, write

    snapshot = checkpoint
    if not isinstance(snapshot, Snapshot):
        snapshot = Snapshot(snapshot, copy_cpu=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(snapshot.step)
    with replacing(path) as temporary:
        write(snapshot, temporary)
        sha256 = file_sha256(temporary)
        # The checksum of an earlier save of this step does not fit the new file.
        _checksum_file(path).unlink(missing_ok=True)
    _write_checksum(path, sha256)
    sync_folder(folder)
    return path


def _write_checksum(path: Path, sha256: str) -> None:
    replace_file(_checksum_file(path), f"{sha256}  {path.name}\n".encode())


def _checksum_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def point(folder: Path, which: str, path: Path, **metadata: object) -> None:
    """Write last.json or best.json into `folder`, as a pointer to the checkpoint `path`.

    `which` is "last" or "best". The JSON object has the keys file, step, sha256 and those of
    `metadata`.
    """
    checksum = _checksum_file(path)
    if not checksum.is_file():  # the process was killed before it wrote the checksum
        _write_checksum(path, file_sha256(path))
    entry = {
        "file": path.name,
        "step": step_of(path),
        "sha256": checksum.read_text().split()[0],
        **metadata,
    }
    replace_file(folder / f"{which}.json", f"{json.dumps(entry, indent=1)}\n".encode())
    sync_folder(folder)


def pointer(folder: Path, which: str) -> dict[str, Any] | None:
    """Return the content of `<which>.json` (see `point`); None if it is missing or invalid."""
    try:
        entry = json.loads(files.read_file(folder / f"{which}.json", files.CONFIG))
        return entry if find_step(entry["file"]) is not None else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def newest_first(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, newest first."""
    return sorted(
        (p for p in folder.glob("*") if find_step(p.name) is not None), key=step_of, reverse=True
    )


def rotate(
    folder: Path,
    keep: int,
    *,
    keep_every: int | None = None,
    also: Container[int] = (),
    until: int | None = None,
) -> None:
    """Delete old checkpoints, and leftovers of killed writes (see `sweep`).

    These checkpoints stay: the newest `keep`, the one that best.json names, those whose step is a
    multiple of `keep_every`, and those of the steps in `also`.

    Args:
        until: the step of the latest save. Checkpoints of later steps, which a resume has skipped
            as damaged, stay and do not count. None: all checkpoints count.
    """
    best = pointer(folder, "best")
    paths = [path for path in newest_first(folder) if until is None or step_of(path) <= until]
    protected = {path.name for path in paths[:keep]}
    if best:
        protected.add(best["file"])
    for path in paths:
        step = step_of(path)
        if keep_every and step % keep_every == 0:
            continue
        if path.name not in protected and step not in also:
            path.unlink()
    sweep(folder)


def sweep(folder: Path) -> None:
    """Delete leftovers of killed writes: temporary files, and checksums without a checkpoint."""
    for leftover in [*folder.glob(".*.tmp"), *folder.glob("*.sha256")]:
        checkpoint = leftover.with_suffix("")
        if leftover.suffix == ".tmp" or (
            find_step(checkpoint.name) is not None and not checkpoint.exists()
        ):
            leftover.unlink(missing_ok=True)


def forget_after(folder: Path, step: int) -> bool:
    """Delete the checkpoints after `step`, and last.json or best.json if it names one of them.

    If last.json is then missing, a new one names the newest remaining checkpoint, provided that its
    checksum file exists. Returns True, or False if no checkpoint would remain; then nothing is
    deleted.
    """
    paths = newest_first(folder)
    remaining = [path for path in paths if step_of(path) <= step]
    if not remaining:
        return False
    for which in ("last", "best"):
        entry = pointer(folder, which)
        if entry is not None and step_of(Path(entry["file"])) > step:
            (folder / f"{which}.json").unlink()
    for path in paths[: len(paths) - len(remaining)]:
        path.unlink()
    sweep(folder)
    if pointer(folder, "last") is None and _checksum_file(remaining[0]).is_file():
        point(folder, "last", remaining[0])
    return True


def load(path: Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint onto the CPU with `weights_only=True`, after a check of its checksum.

    `verify=False` skips the check. Nothing in the file is executed. Raises UserError if it is
    missing, and CorruptCheckpoint if it is damaged, holds more than plain data, lacks keys or comes
    from a newer version.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        files.check(path, files.WEIGHTS)
        if verify:
            _verify(path)
        import torch  # late, because callers that only look for a file do not need it

        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (CorruptCheckpoint, StoppedBySignal):
        raise
    except pickle.UnpicklingError as error:
        raise CorruptCheckpoint(
            f"{path}: refused, it is not plain data or not a checkpoint; nothing in it was executed"
        ) from error
    except Exception as error:  # torch raises a dozen kinds for a damaged file
        reason = "torch.save did not write it, or it is damaged"
        if isinstance(error, (OSError, RuntimeError)):
            reason = str(error).split("\n")[0][:200]
        raise CorruptCheckpoint(
            f"{path}: cannot be read as a checkpoint ({reason}); use an earlier one"
        ) from error
    return checked(checkpoint, str(path))


def checked(checkpoint: object, file: str) -> Checkpoint:
    """Check a checkpoint except its tensors, and return a copy with the additional entry `file`.

    Raises CorruptCheckpoint, which names `file` and the key.
    """
    if not isinstance(checkpoint, dict) or not all(key in checkpoint for key in KEYS):
        raise CorruptCheckpoint(
            f"{file}: not a checkpoint of Duet (expected a dict with {', '.join(KEYS)})"
        )
    schema = checkpoint["schema"]
    if type(schema) is not int or schema > SCHEMA:
        text = schema if type(schema) is int else repr(schema)[:40]
        raise CorruptCheckpoint(
            f"{file}: schema {text} is newer than this program's {SCHEMA}; update Duet"
        )
    with explained(
        (ValueError, RecursionError),
        lambda error: CorruptCheckpoint(
            f"{file}: not a checkpoint of Duet ({error}); use an earlier one"
        ),
    ):
        Head.read(checkpoint)
        classes = checkpoint["shape"]["classes"]
        names = len(checkpoint["classes"])
        if classes != names:
            raise ValueError(f"shape.classes is {classes}, but classes has {names} names")
        for labels in checkpoint.get("sets") or ():
            if any(label >= names for label in labels):
                raise ValueError(f"sets has a label beyond the {names} classes")
    return checkpoint | {"file": file}  # the file's name, for messages


def _verify(path: Path) -> None:
    """Raise CorruptCheckpoint if a checkpoint does not match its checksum.

    If a kill has prevented the checksum file, the CRCs inside the checkpoint, a zip file, are
    checked instead. torch.load does not check them.
    """
    checksum = _checksum_file(path)
    if checksum.is_file():
        expected = (files.read_file(checksum, files.CONFIG).split() or [b""])[0]
        if expected != file_sha256(path).encode():
            raise CorruptCheckpoint(
                f"{path}: damaged (its SHA-256 is not the one in {checksum.name}); use an earlier one"
            )
    elif zipfile.is_zipfile(path):  # torch.load refuses other files
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise CorruptCheckpoint(
                f"{path}: damaged (the checksum of its part {damaged}); use an earlier one"
            )


def load_latest(folder: Path, warn: Callable[[str], object]) -> tuple[Path, Checkpoint] | None:
    """Load the newest undamaged checkpoint; return its path and content.

    Returns None for a folder without checkpoints. Calls `warn` with a message for each damaged one.
    Raises CorruptCheckpoint if all are damaged.
    """
    paths = newest_first(folder)
    for path in paths:
        try:
            return path, load(path)
        except CorruptCheckpoint as error:
            warn(f"warning: {error}; falling back to the previous one")
    if paths:
        raise CorruptCheckpoint(
            f"{folder}: none of its {len(paths)} checkpoints can be read; start in another --run-dir"
        )
    return None


def resolve(run_or_file: str | Path, which: str = "last") -> Path:
    """Return the path of the checkpoint that `run_or_file` means.

    For a run folder, this is the checkpoint that last.json or best.json (`which`) names. If
    last.json names none, it is the newest one. For a folder that timm has written, it is the
    weights file. A file, and the name of a published network such as timm:NAME, are returned
    unchanged. Raises UserError if there is no checkpoint.
    """
    path = Path(run_or_file)
    if which not in ("last", "best"):
        raise UserError(f"which: {which!r} is neither last nor best")
    if path.suffix == ".pkl" and path.is_file():
        raise UserError(
            f"{path}: is no checkpoint of Duet; `duet convert {path} RUN` makes a run of StyleGAN2's and "
            "R3GAN's networks, then give RUN"
        )
    if path.is_file() or str(path).startswith(READY_MADE):
        return path
    for name in HUB_WEIGHTS:
        if (path / "config.json").is_file() and (path / name).is_file():
            return path / name
    if not path.exists():
        raise UserError(f"{path}: no such run folder or checkpoint{near_file(path)}")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    entry = pointer(folder, which)
    if entry and (folder / entry["file"]).is_file():
        return folder / entry["file"]
    refuse(
        (
            which == "best" and (folder / "best.json").exists(),
            f"{folder / 'best.json'}: damaged, or the checkpoint that it names is gone; "
            "use --which last or name a file",
        ),
        (
            which == "best",
            f"{folder}: has no best.json (no evaluation has run yet); use --which last",
        ),
    )
    paths = newest_first(folder)
    if not paths:
        raise UserError(
            f"{path}: holds no checkpoint; name a run folder of train.py or a checkpoint file"
        )
    return paths[0]
