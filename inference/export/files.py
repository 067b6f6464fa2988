"""From a checkpoint to a file that was checked: written beside its place, loaded again, compared, and only then
renamed.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.dataset import Dataset, dataset_for_model
from inference.export.check import CheckFailed, Progress, Row, examine
from inference.export.formats import FORMATS, import_extra
from inference.export.subject import Subject, classifier_subject, generator_subject
from utils.errors import UserError
from utils.files import check_writable, replace_file


@dataclass(frozen=True, kw_only=True)
class Job:
    """One export."""

    format: str  # a key of FORMATS
    out: Path
    overwrite: bool = False
    data: str | None = None  # packed images of the check; None: as the config says
    calibration: str | None = None  # likewise, for int8's ranges
    n: int = 1000  # images of the check, at most
    calibrated: int = 256  # images of the calibration, at most
    batch_size: int = 64
    repeats: int = 5


def check_job(job: Job, checkpoint: dict[str, Any]) -> None:
    """Raise UserError for what can be checked before any work."""
    if job.out.exists() and (job.out.is_dir() or not job.overwrite):
        what = "is a folder; name a file" if job.out.is_dir() else "exists; give --overwrite, or another name"
        raise UserError(f"{job.out}: {what}")
    if checkpoint["task"] == "gan" and job.format == "int8":
        raise UserError(
            "--format int8 is for classifiers, whose accuracy can be checked; for a generator choose safetensors, "
            "torch-export or onnx"
        )
    for package in FORMATS[job.format].needs:
        import_extra(package)
    check_writable(job.out.parent)


def open_subject(job: Job, checkpoint: dict[str, Any]) -> Subject:
    """The network and what it is checked with; a classifier's images are read here."""
    if checkpoint["task"] == "gan":
        return generator_subject(checkpoint, batch_size=job.batch_size)
    config = checkpoint["config"].get("data") or {}
    with ExitStack() as stack:
        images = stack.enter_context(_readable(checkpoint, job.data, (config.get("val_path"), config.get("path"))))
        calibration = None
        if job.format == "int8":
            own = (config.get("path"), job.data, config.get("val_path"))
            calibration = stack.enter_context(_readable(checkpoint, job.calibration, own, option="--calibration"))
        sizes = {"count": job.n, "batch_size": job.batch_size, "calibrated": job.calibrated}
        return classifier_subject(checkpoint, images, calibration=calibration, **sizes)


def _readable(
    checkpoint: dict[str, Any], given: str | None, places: tuple[str | None, ...], *, option: str = "--data"
) -> Dataset:
    """The file that was given, else the first of the places that can be read. Raises UserError."""
    trained, resolution = (checkpoint["config"].get("data") or {}).get("resolution"), checkpoint["shape"]["resolution"]
    if given is not None:
        return dataset_for_model(given, trained, resolution)
    reason = "its config names none"
    for place in filter(None, places):
        try:
            return dataset_for_model(place, trained, resolution)
        except UserError as error:
            reason = str(error)
    raise UserError(f"no images to check the export with ({reason}); give packed ones with {option} X.lmdb")


def export(job: Job, checkpoint: dict[str, Any], *, say: Progress) -> tuple[list[Row], Subject, str | None]:
    """Write, load again, check, rename. Returns the table's rows, what was exported and what is wrong, or None.

    Where something is wrong, no file is left behind and one that was there stays. Raises UserError.
    """
    check_job(job, checkpoint)
    form = FORMATS[job.format]
    subject = open_subject(job, checkpoint)
    try:
        job.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{job.out.name}.", dir=job.out.parent) as folder:
            written = Path(folder) / job.out.name
            say(f"writing {job.format}")
            form.write(subject, written)
            exported = (job.format, written.stat().st_size, form.open(subject, written))
            rows, wrong = examine(subject, exported, form, batch=job.batch_size, repeats=job.repeats, say=say)
            if wrong is None:
                replace_file(job.out, written.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot write {job.out}: {error.strerror or error}; choose another place or make room"
        ) from error
    return rows, subject, wrong


def failed(job: Job, wrong: str) -> CheckFailed:
    """The error that a failed check ends with."""
    kept = "; the one that was there is as it was" if job.out.exists() else ""
    remedy = ", or calibrate with more or other images (--calibration)" if job.format == "int8" else ""
    return CheckFailed(f"{job.out}: not written, {wrong}{kept}; choose another --format{remedy}")
