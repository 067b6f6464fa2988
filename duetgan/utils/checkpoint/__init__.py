"""Checkpoints: one file a step, written atomically with a checksum beside it, loaded with
restricted unpickling.

Folder: for each step a file (`file_name`) and its `.sha256`, `last.json`, `best.json`. The format
is described in docs/checkpoints.md. Everything in a checkpoint is a tensor, number, string, list or
dict.
"""

import hashlib
import json
import math
import pickle
import sys
import zipfile
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval
from pydantic import Field

from duetgan.utils import bounded
from duetgan.utils.config.model import Count, Stored
from duetgan.utils.config.yaml_files import near_file
from duetgan.utils.errors import StoppedBySignal, UserError, explained
from duetgan.utils.files import replace_file, replacing, sync_folder
from duetgan.utils.image_spec import MOST_CHANNELS, PixelFormat, Rectangle
from duetgan.utils.provenance import Lineage

if TYPE_CHECKING:
    from duetgan.utils.checkpoint.writer import Snapshot

SCHEMA = 1
BEFORE, AFTER = "step-", ".pt"  # around the step in a checkpoint's file name
READY_MADE = ("torchvision:", "timm:")  # how the names of classifiers begin that others trained
HUB_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of a folder as timm writes it
KEYS = ("schema", "task", "step", "config", "classes", "shape", "state")

Checkpoint = dict[str, Any]
Side = Annotated[int, Interval(ge=1, le=2**16)]  # px


class Shape(Stored):
    """What the networks of a checkpoint were built for."""

    channels: Annotated[int, Interval(ge=1, le=MOST_CHANNELS)]
    classes: Annotated[int, Interval(ge=0, le=10**8)]
    resolution: Side | Rectangle
    pixel_format: PixelFormat | None = None  # None: 8-bit values without transparency


class Data(Stored):
    content_hash: str = ""
    count: Count = 0
    resize_filter: str = ""


class Origin(Stored):
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
    """What is read of a checkpoint's config without the models of its sections."""

    architecture: str = ""
    data: ConfigData | None = None
    loss: ConfigLoss | None = None
    generator: dict[Any, Any] = {}
    model: dict[Any, Any] = {}


class Head(Stored):
    """What a checkpoint says beside its state, which is compared with the networks
    (`state_schema`).
    """

    task: str
    step: Count
    config: ConfigHead
    classes: list[str] | tuple[str, ...]
    # of classes that a GAN's images have together; None: one class each
    sets: list[list[Count]] | None = None
    shape: Shape
    state: dict[str, dict[Any, Any]]
    data: Data | None = None
    lineage: Lineage | None = None
    origin: Origin | None = None
    teachers: list[str] | tuple[str, ...] = ()
    # of the evaluation at this step: metric, value, interval
    figure: dict[str, str | float | list[float]] = {}
    stage: list[Annotated[float, Interval(ge=0, le=2**16)]] = Field(
        [0, 0], min_length=2, max_length=2
    )


def file_name(step: int) -> str:
    """The name of a step's checkpoint; nothing else knows what it looks like, but `find_step`,
    which reads it.
    """
    return f"{BEFORE}{step:08d}{AFTER}"


def find_step(name: str) -> int | None:
    """The step of a checkpoint's file name, None for another name."""
    digits = name.removeprefix(BEFORE).removesuffix(AFTER)
    return int(digits) if digits.isdecimal() and file_name(int(digits)) == name else None


def step_of(path: Path) -> int:
    if (step := find_step(path.name)) is None:
        raise ValueError(f"{path.name} is not a checkpoint's name")
    return step


class CorruptCheckpoint(UserError):
    """The file is damaged, incomplete or not a checkpoint."""


def file_sha256(path: Path) -> str:
    with bounded.open_file(path, bounded.WEIGHTS) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(folder: Path, checkpoint: "Checkpoint | Snapshot") -> Path:
    """Write `checkpoint` into `folder`: temporary file, flush, fsync, rename, checksum, fsync of
    the folder.

    A file under its final name is complete, with or without its checksum yet. Raises OSError when
    the disk refuses (full, read-only); what was there before stays. Raises TypeError for content
    that could not be loaded again.
    """
    from duetgan.utils.checkpoint.writer import Snapshot, write

    taken = checkpoint if isinstance(checkpoint, Snapshot) else Snapshot(checkpoint, own=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(taken.step)
    with replacing(path) as temporary:
        write(taken, temporary)
        sha256 = file_sha256(temporary)
        # of an earlier save of this step: it must not judge the new file
        _checksum_file(path).unlink(missing_ok=True)
    _write_checksum(path, sha256)
    sync_folder(folder)
    return path


def _write_checksum(path: Path, sha256: str) -> None:
    replace_file(_checksum_file(path), f"{sha256}  {path.name}\n".encode())


def _checksum_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def point(folder: Path, which: str, path: Path, **more: Any) -> None:
    """Make `which` ("last" or "best") point at `path`: `{"file", "step", "sha256"}` and whatever
    else is given.
    """
    checksum = _checksum_file(path)
    if not checksum.is_file():  # the writer was killed before
        _write_checksum(path, file_sha256(path))
    entry = {
        "file": path.name,
        "step": step_of(path),
        "sha256": checksum.read_text().split()[0],
        **more,
    }
    replace_file(folder / f"{which}.json", f"{json.dumps(entry, indent=1)}\n".encode())
    sync_folder(folder)


def pointer(folder: Path, which: str) -> dict[str, Any] | None:
    """What `point` wrote, or None when there is none or it cannot be read."""
    try:
        entry = json.loads(bounded.read_file(folder / f"{which}.json", bounded.CONFIG))
        return entry if find_step(entry["file"]) is not None else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def newest_first(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, newest first."""
    return sorted(
        (p for p in folder.glob("*") if find_step(p.name) is not None), key=step_of, reverse=True
    )


def rotate(
    folder: Path,
    keep: int,
    *,
    every: int | None = None,
    also: Container[int] = (),
    until: int | None = None,
) -> None:
    """Delete all checkpoints but the newest `keep`, those of every `every`-th step, those of the
    steps `also` and what `best.json` names.

    `until`: the step that was saved last. What is newer was passed over as damaged: it does not
    count and stays.
    """
    best = pointer(folder, "best")
    paths = [path for path in newest_first(folder) if until is None or step_of(path) <= until]
    kept = {path.name for path in paths[:keep]} | ({best["file"]} if best else set())
    for path in paths:
        step = step_of(path)
        if not (path.name in kept or step in also or (every and step % every == 0)):
            path.unlink()
    sweep(folder)


def sweep(folder: Path) -> None:
    """Delete what killed writes have left: temporary files, and checksums of files that are not
    there.
    """
    for leftover in [*folder.glob(".*.tmp"), *folder.glob("*.sha256")]:
        checkpoint = leftover.with_suffix("")
        if leftover.suffix == ".tmp" or (
            find_step(checkpoint.name) is not None and not checkpoint.exists()
        ):
            leftover.unlink(missing_ok=True)


def forget_after(folder: Path, step: int) -> bool:
    """Delete checkpoints of later steps and pointers to them; False and nothing deleted where no
    other is left.
    """
    paths = newest_first(folder)
    kept = [path for path in paths if step_of(path) <= step]
    if not kept:
        return False
    for which in ("last", "best"):
        entry = pointer(folder, which)
        if entry is not None and entry["step"] > step:
            (folder / f"{which}.json").unlink()
    for path in paths[: len(paths) - len(kept)]:
        path.unlink()
    sweep(folder)
    if pointer(folder, "last") is None and _checksum_file(kept[0]).is_file():
        point(folder, "last", kept[0])
    return True


def load(path: Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint onto the CPU with `weights_only=True`, after its checksum.

    Raises UserError when it is missing and CorruptCheckpoint when it is damaged, holds more than
    plain data, lacks keys or comes from a newer version; nothing in the file is executed.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        bounded.check(path, bounded.WEIGHTS)
        if verify:
            _verify(path)
        import torch  # not for who only looks for a file

        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (CorruptCheckpoint, StoppedBySignal):
        raise
    except pickle.UnpicklingError as error:
        raise CorruptCheckpoint(
            f"{path}: refused, it is not plain data or not a checkpoint; nothing in it was executed"
        ) from error
    except (
        Exception
    ) as error:  # a damaged file makes torch's reader and unpickler raise a dozen kinds
        known = isinstance(error, (OSError, RuntimeError))
        reason = (
            str(error).split("\n")[0][:200]
            if known
            else "torch.save did not write it, or it is damaged"
        )
        raise CorruptCheckpoint(
            f"{path}: cannot be read as a checkpoint ({reason}); use an earlier one"
        ) from error
    return checked(checkpoint, str(path))


def checked(checkpoint: Any, file: str) -> Checkpoint:
    """What was read from `file`, after a look at all but the state.

    Raises CorruptCheckpoint naming the key.
    """
    if not isinstance(checkpoint, dict) or not all(key in checkpoint for key in KEYS):
        raise CorruptCheckpoint(
            f"{file}: not a checkpoint of Duet (expected a dict with {', '.join(KEYS)})"
        )
    if type(checkpoint["schema"]) is not int or checkpoint["schema"] > SCHEMA:
        schema = (
            checkpoint["schema"]
            if type(checkpoint["schema"]) is int
            else repr(checkpoint["schema"])[:40]
        )
        raise CorruptCheckpoint(
            f"{file}: schema {schema} is newer than this program's {SCHEMA}; update Duet"
        )
    with explained(
        (ValueError, RecursionError),
        lambda why: CorruptCheckpoint(
            f"{file}: not a checkpoint of Duet ({why}); use an earlier one"
        ),
    ):
        Head.read(checkpoint)
        classes, named = checkpoint["shape"]["classes"], len(checkpoint["classes"])
        if classes != named:
            raise ValueError(f"shape.classes is {classes}, but classes has {named} names")
        if any(label >= named for labels in checkpoint.get("sets") or () for label in labels):
            raise ValueError(f"sets has a label beyond the {named} classes")
    return checkpoint | {"file": file}  # file: for messages


def _verify(path: Path) -> None:
    """Raise CorruptCheckpoint unless a file is as it was written: by its checksum, and where a kill
    came before that was written, by those in the zip file, which torch's reader does not look at.
    """
    checksum = _checksum_file(path)
    if checksum.is_file():
        if (bounded.read_file(checksum, bounded.CONFIG).split() or [b""])[0] != file_sha256(
            path
        ).encode():
            raise CorruptCheckpoint(
                f"{path}: damaged (its SHA-256 is not the one in {checksum.name}); use an earlier one"
            )
    elif zipfile.is_zipfile(path):  # what is not, torch.load refuses
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise CorruptCheckpoint(
                f"{path}: damaged (the checksum of its part {damaged}); use an earlier one"
            )


def load_latest(
    folder: Path, warn: Callable[[str], object] = print
) -> tuple[Path, Checkpoint] | None:
    """The newest checkpoint that loads; `warn` is called for every one that does not. None when the
    folder has none.

    Raises CorruptCheckpoint when there are checkpoints but none of them loads.
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


def resolve_for_people(run_or_file: str | Path, which: str = "last") -> Path:
    """`resolve`, and a line on stderr where the run folder has another checkpoint that one may have
    meant: the best beside the last, or the last beside the best; not where the last one's figure
    lies in the interval of the best's.
    """
    path = resolve(run_or_file, which)
    if path == Path(run_or_file):
        return path
    other = "best" if which == "last" else "last"
    last, best = (pointer(path.parent, name) or {} for name in ("last", "best"))
    entry = best if which == "last" else last
    low, high = best.get("interval") or (math.inf, -math.inf)  # a run from before has none
    alike = low <= last.get("value", math.nan) <= high
    if (
        entry
        and entry["file"] != path.name
        and (path.parent / entry["file"]).is_file()
        and not alike
    ):
        figure = (
            f" ({best['metric']} {best['value']:.4g})" if {"metric", "value"} <= best.keys() else ""
        )
        words = {"last": "", "best": figure}
        there = f"{other} is of step {step_of(Path(entry['file']))}{words[other]}: --which {other} takes it"
        print(f"{which}: step {step_of(path)}{words[which]}; {there}", file=sys.stderr)
    return path


def resolve(run_or_file: str | Path, which: str = "last") -> Path:
    """The checkpoint of a run folder (that of `<which>.json`, else the newest), the weights of a
    folder of the hub; a file and a ready-made network's name as they are. Raises UserError for
    none.
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
    if which == "best" and (folder / "best.json").exists():
        raise UserError(
            f"{folder / 'best.json'}: damaged, or the checkpoint that it names is gone; use --which last or name a file"
        )
    if which == "best":
        raise UserError(f"{folder}: has no best.json (no evaluation has run yet); use --which last")
    paths = newest_first(folder)
    if not paths:
        raise UserError(
            f"{path}: holds no checkpoint; name a run folder of train.py or a checkpoint file"
        )
    return paths[0]
