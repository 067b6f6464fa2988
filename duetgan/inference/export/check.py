"""The export of a checkpoint, with a check of the exported file.

The file is written under a temporary name and loaded again. Its outputs and accuracy are compared
with those of the original network. Only then it is renamed.
"""

import math
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duetgan.data.opening import dataset_for_model
from duetgan.data.reading.dataset import Dataset
from duetgan.inference.export.formats import FORMATS, Format
from duetgan.inference.export.subject import (
    Inputs,
    Runner,
    Subject,
    as_runner,
    classifier_subject,
    generator_subject,
)
from duetgan.metrics.evaluate_classifier import calibrate
from duetgan.metrics.lineage import data_of
from duetgan.models.restore import NETWORKS
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.errors import TrainingHalted, UserError, refuse
from duetgan.utils.files import check_writable, replace_file, writing
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import columns

ACCURACY_LOSS = 0.01  # the largest loss of accuracy by int8: one percentage point
BATCH = 64  # size of the batches of the check


class CheckFailed(TrainingHalted):
    """Error: an exported file does not agree with the original network and was removed.

    The exit code is 4, as for training that cannot continue.
    """


@dataclass(kw_only=True)
class Row:
    """A row of the check's results: the original network, or the file compared with it."""

    name: str
    bytes: int  # size of the weights, or of the file
    largest_difference: float  # largest absolute difference from the original's outputs
    agreement: float | None = None  # fraction of images with the original's predicted class
    accuracy: float | None = None  # None if the true classes are unknown
    accuracy_change: float | None = None


def outputs(run: Runner, batches: Sequence[Inputs]) -> Tensor:
    """Run a network on all batches and return its outputs, concatenated."""
    with torch.inference_mode():
        return torch.cat([run(batch) for batch in batches])


def compare(
    name: str, size: int, result: Tensor, original: Tensor, labels: Tensor | None, *, classes: bool
) -> Row:
    """Compare the outputs `result` [n, ...] of a network with those of the original network.

    Args:
        name: Name of the network, for the row.
        size: Size of its weights or its file in bytes.
        labels: True classes, int64 [n], if known.
        classes: True if the outputs are logits of classes, so that predictions can be compared.
    """
    row = Row(name=name, bytes=size, largest_difference=math.inf)
    if result.shape == original.shape:
        row.largest_difference = float((result - original).abs().max())
    if classes:
        predicted, expected = result.argmax(1), original.argmax(1)
        row.agreement = float((predicted == expected).double().mean())
        if labels is not None:
            row.accuracy = float((predicted == labels).double().mean())
            row.accuracy_change = row.accuracy - float((expected == labels).double().mean())
    return row


def judge(row: Row, form: Format, original: Tensor) -> str | None:
    """Return the reason why an exported file fails the check, or None if it passes.

    `row` compares the file with the original network. `form` has the limits, and `original` are the
    outputs of the original network.
    """
    if not form.quantized:
        limit = form.limit * max(1.0, float(original.abs().max()))
        if row.largest_difference <= limit:
            return None
        difference = f"{row.largest_difference:.3g}, more than {limit:.3g}"
        return f"its outputs differ from the original's by up to {difference}"
    if not math.isfinite(row.largest_difference):
        return "its outputs are not finite"
    loss, fault = 1 - (row.agreement or 0.0), "agreement with the original's classes falls"
    if row.accuracy_change is not None:
        loss, fault = -row.accuracy_change, "accuracy falls"
    if loss > ACCURACY_LOSS + 1e-9:
        return f"{fault} by {100 * loss:.2f} points, more than {100 * ACCURACY_LOSS:g}"
    return None


def document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as dicts, ready for JSON, with None for differences that are not finite."""
    entries = [asdict(row) for row in rows]
    for entry in entries:
        if not math.isfinite(entry["largest_difference"]):
            entry["largest_difference"] = None
    return entries


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table of text."""
    lines = [["", "MiB", "largest difference", "accuracy", "change"]]
    for row in rows:
        lines.append(
            [
                row.name,
                f"{row.bytes / 2**20:.2f}",
                f"{row.largest_difference:.3g}",
                _cell("{:.4f}", row.accuracy),
                _cell("{:+.4f}", row.accuracy_change),
            ]
        )
    return columns(lines)


def _cell(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


# --- an export


def check_job(job: Namespace, checkpoint: Checkpoint) -> None:
    """Check the options of export.py before any work, and raise UserError for invalid ones.

    Also raises UserError if an optional package is missing or the folder of the output is not
    writable.
    """
    form, task = FORMATS[job.format], checkpoint["task"]
    is_new = not job.out.exists() or (job.out.is_dir() and not any(job.out.iterdir()))
    programs = [name for name, candidate in FORMATS.items() if candidate.truncates]
    several = "thresholds" in checkpoint["state"].get(NETWORKS["classifier"], {})
    spec = ImageSpec.read(checkpoint["shape"])
    title = f"--format {job.format}"
    refuse(
        (form.folder and not is_new, f"{job.out}: exists; {title} makes a folder, give a new one"),
        (not form.folder and job.out.is_dir(), f"{job.out}: is a folder; name a file"),
        (
            not form.folder and not is_new and not job.overwrite,
            f"{job.out}: exists; give --overwrite, or another name",
        ),
        (
            not job.out.name.endswith(form.suffix),
            f"{job.out}: a file of {title} must end in {form.suffix}",
        ),
        (
            form.task not in (None, task),
            f"{title} is for checkpoints of task {form.task}, this one is of {task}; choose "
            f"{', '.join(programs)} or safetensors",
        ),
        (
            job.fit_temperature and (task != "classifier" or several),
            "--fit-temperature is for a classifier of one label an image; leave it out",
        ),
        (
            several and not form.several_labels,
            f"{title} is for one label an image; choose safetensors, torch-export or onnx",
        ),
        (
            form.folder and (spec.alpha or spec.deep),
            f"{title} is for 8-bit images without alpha, the model's are {spec.words}",
        ),
        (
            job.truncation_psi != 1 and not (task == "gan" and form.truncates),
            f"--truncation-psi is for a GAN's {', '.join(programs)}; leave it out",
        ),
    )
    form.check_packages()
    check_writable(job.out.parent)


def open_subject(job: Namespace, checkpoint: Checkpoint) -> Subject:
    """Load the network to export, and the inputs with which the export is checked.

    The inputs of a classifier are images from a file; those of a generator are random latents. The
    option `--fit-temperature` first fits a temperature and stores it in `checkpoint`.
    """
    if checkpoint["task"] == "gan":
        return generator_subject(
            checkpoint, batch_size=BATCH, psi=job.truncation_psi, mean=job.truncation_mean
        )
    trained, held_out = (data_of(checkpoint, key) for key in ("path", "val_path"))
    temperature = None
    if job.fit_temperature:
        with _opened("--data", job.data or held_out, checkpoint) as images:
            temperature = calibrate(checkpoint, images, batch_size=BATCH)
    with ExitStack() as stack:
        images = stack.enter_context(_opened("--data", job.data or held_out or trained, checkpoint))
        calibration = None
        if FORMATS[job.format].quantized:
            path = job.calibration or trained or job.data or held_out
            calibration = stack.enter_context(_opened("--calibration", path, checkpoint))
        subject = classifier_subject(
            checkpoint,
            images,
            count=job.n,
            batch_size=BATCH,
            calibration=calibration,
            calibrated=job.calibrated,
        )
        return replace(subject, temperature=temperature)


def _opened(option: str, path: str | None, checkpoint: Checkpoint) -> Dataset:
    if path is None:
        raise UserError(
            "no images to check the export with (its config names none); give packed ones with "
            f"{option} X.lmdb"
        )
    return dataset_for_model(path, checkpoint)


def export(job: Namespace, checkpoint: Checkpoint) -> tuple[list[Row], Subject, str | None]:
    """Export a checkpoint to `job.out`, after a check of the exported file.

    The export is written to a temporary file, which is renamed if the check finds no fault. With a
    fault, `job.out` is not changed. `job` has the options of export.py. Returns the rows of the
    original and of the export, the subject (the network and its inputs), and the fault or None.
    Raises UserError.
    """
    check_job(job, checkpoint)
    form = FORMATS[job.format]
    subject = replace(open_subject(job, checkpoint), licence=job.licence)
    with (
        writing(job.out),
        tempfile.TemporaryDirectory(prefix=f".{job.out.name}.", dir=job.out.parent) as folder,
    ):
        written = Path(folder) / job.out.name
        say(f"writing {job.format}")
        form.write(subject, written)
        rows, fault = examine(subject, written, job)
        if fault is None and form.folder:
            written.replace(job.out)
        elif fault is None:
            replace_file(job.out, written.read_bytes())
    return rows, subject, fault


def examine(subject: Subject, path: Path, job: Namespace) -> tuple[list[Row], str | None]:
    """Compare the exported file or folder with the original. `job` has the options of export.py.

    Returns the rows of the original and of the export, and the fault of the export or None. Raises
    UserError if the outputs of the original are not finite.
    """
    form = FORMATS[job.format]
    runs = [as_runner(subject.network), form.load(subject, path)]
    results = [outputs(run, subject.batches) for run in runs]
    original = results[0]
    if not bool(torch.isfinite(original).all()):
        raise UserError(
            "the checkpoint's own outputs are not finite; export another one (--which, or an "
            "earlier file)"
        )
    files = [file for file in (path, *path.rglob("*")) if file.is_file()]
    sizes = {
        "fp32 eager": sum(tensor.nbytes for tensor in subject.network.state_dict().values()),
        job.format: sum(file.stat().st_size for file in files),
    }
    rows = []
    for (name, size), result in zip(sizes.items(), results, strict=True):
        rows.append(
            compare(name, size, result, original, subject.labels, classes=subject.is_classifier)
        )
    return rows, judge(rows[1], form, original)
