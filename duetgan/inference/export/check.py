"""The export of a checkpoint with its checks: the file is written under a temporary name, loaded
again, compared with the original network in outputs, accuracy and speed, and only then renamed.
"""

import math
import statistics
import tempfile
import time
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
    InBfloat16,
    Inputs,
    Runner,
    Subject,
    as_runner,
    classifier_subject,
    generator_subject,
)
from duetgan.metrics.lineage import data_of
from duetgan.models.restore import NETWORKS
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.errors import TrainingHalted, UserError, refuse
from duetgan.utils.files import check_writable, replace_file, writing
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import columns

ACCURACY_LOSS = 0.01  # the largest loss of accuracy by int8: one percentage point
SINGLE_CALLS = 10  # calls with batch size 1 in a round of the speed measurement


class CheckFailed(TrainingHalted):
    """The exported file does not agree with the original and was removed. Exit code 4, as for a
    training that stops itself.
    """


@dataclass(kw_only=True)
class Row:
    """One variant of the network, compared with the original."""

    name: str
    bytes: int  # size of the weights, or of the file
    largest_difference: float  # largest absolute difference from the original's outputs
    agreement: float | None = None  # fraction of images with the original's predicted class
    accuracy: float | None = None  # None if the true classes are unknown
    accuracy_change: float | None = None
    batch1_ms: float = math.nan  # median time of one image
    images_per_second: float = math.nan  # median, at the batch size of the export
    batch1_speedup: float = math.nan  # relative to the original
    batch_speedup: float = math.nan


def outputs(run: Runner, batches: Sequence[Inputs], progress: str = "") -> Tensor:
    """Return the outputs of all batches, with a progress bar if `progress` is not empty."""
    with (
        torch.inference_mode(),
        Bar(total=len(batches), desc=progress, unit="batch", disable=not progress) as bar,
    ):
        parts = []
        for batch in batches:
            parts.append(run(batch))
            bar.update()
        return torch.cat(parts)


def compare(
    name: str, size: int, result: Tensor, original: Tensor, labels: Tensor | None, *, classes: bool
) -> Row:
    """Compare the outputs [n, ...] of a variant of `size` bytes with the original's. `classes` is
    True if the outputs are logits.
    """
    difference = math.inf
    if result.shape == original.shape:
        difference = float((result - original).abs().max())
    row = Row(name=name, bytes=size, largest_difference=difference)
    if classes:
        predicted, expected = result.argmax(1), original.argmax(1)
        row.agreement = float((predicted == expected).double().mean())
        if labels is not None:
            row.accuracy = float((predicted == labels).double().mean())
            row.accuracy_change = row.accuracy - float((expected == labels).double().mean())
    return row


def judge(row: Row, form: Format, original: Tensor) -> str | None:
    """Return the reason why an exported file fails the check, or None if it passes."""
    if not form.quantized:
        limit = form.limit * max(1.0, float(original.abs().max()))
        if not row.largest_difference <= limit:  # also for NaN
            difference = f"{row.largest_difference:.3g}, more than {limit:.3g}"
            return f"its outputs differ from the original's by up to {difference}"
        return None
    if not math.isfinite(row.largest_difference):
        return "its outputs are not finite"
    loss, fault = 1 - (row.agreement or 0.0), "agreement with the original's classes falls"
    if row.accuracy_change is not None:
        loss, fault = -row.accuracy_change, "accuracy falls"
    if loss > ACCURACY_LOSS + 1e-9:
        return f"{fault} by {100 * loss:.2f} points, more than {100 * ACCURACY_LOSS:g}"
    return None


def measure_speed(
    rows: Sequence[Row], runs: Sequence[Runner], subject: Subject, *, batch: int, repeats: int
) -> None:
    """Write the speeds of the variants `runs` into `rows`: medians of `repeats` rounds, in which
    the variants take turns, after a warm-up round.
    """
    calls = [(subject.rows(1), SINGLE_CALLS), (subject.rows(batch), 1)]
    seconds: list[tuple[list[float], list[float]]] = [([], []) for _ in runs]
    with (
        torch.inference_mode(),
        Bar(total=(repeats + 1) * len(runs), desc="measuring speed", unit="turn") as bar,
    ):
        for turn in range(repeats + 1):
            for run, durations in zip(runs, seconds, strict=True):
                for call_durations, (inputs, times) in zip(durations, calls, strict=True):
                    for _ in range(times if turn else 1):
                        started = time.perf_counter()
                        run(inputs)
                        if turn:
                            call_durations.append(time.perf_counter() - started)
                bar.update()
    medians = [tuple(map(statistics.median, durations)) for durations in seconds]
    for row, (single, large) in zip(rows, medians, strict=True):
        row.batch1_ms, row.batch1_speedup = 1000 * single, medians[0][0] / single
        row.images_per_second, row.batch_speedup = batch / large, medians[0][1] / large


def examine(
    subject: Subject, exported: tuple[str, int, Runner], job: Namespace
) -> tuple[list[Row], str | None]:
    """Compare the exported file (name, bytes, runner) and other variants with the original. `job`
    has the options of export.py.

    Returns the table's rows, from the original's to the file's, and the fault of the file or None.
    Raises UserError if the outputs of the original are not finite.
    """
    networks = {"fp32 eager": subject.network}
    if subject.is_classifier and not job.no_benchmark:  # generators have no BatchNorm to fold
        networks["folded"] = subject.fast()
    if not job.no_benchmark:
        # A generator needs autocast, because some of its layers must stay in float32.
        networks["bf16"] = InBfloat16(subject.fast(), autocast=not subject.is_classifier)
    variants = []
    for name, network in networks.items():
        size = sum(tensor.nbytes for tensor in network.state_dict().values())
        variants.append((name, size, as_runner(network)))
    variants.append(exported)
    original = outputs(variants[0][2], subject.batches, "comparing fp32 eager")
    if not bool(torch.isfinite(original).all()):
        raise UserError(
            "the checkpoint's own outputs are not finite; export another one (--which, or an earlier file)"
        )
    rows: list[Row] = []
    for name, size, run in variants:
        result = outputs(run, subject.batches, f"comparing {name}") if rows else original
        rows.append(
            compare(name, size, result, original, subject.labels, classes=subject.is_classifier)
        )
    fault = judge(rows[-1], FORMATS[job.format], original)
    if fault is None and not job.no_benchmark:
        runs = [run for *_, run in variants]
        measure_speed(rows, runs, subject, batch=job.batch_size, repeats=job.repeats)
    return rows, fault


def document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON objects, with null for values that were not measured."""
    entries = []
    for row in rows:
        entry = asdict(row)
        for key, value in entry.items():
            if isinstance(value, float) and not math.isfinite(value):
                entry[key] = None
        entries.append(entry)
    return entries


def table(rows: Sequence[Row], *, batch: int) -> str:
    """Return the rows as a table of text."""
    lines = [
        ["", "MiB", "largest difference", "accuracy", "change", "batch 1", "", f"batch {batch}", ""]
    ]
    for row in rows:
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.4f}"
        change = "" if row.accuracy_change is None else f"{row.accuracy_change:+.4f}"
        speeds = [""] * 4
        if math.isfinite(row.batch1_ms):
            speeds = [f"{row.batch1_ms:.2f} ms", f"{row.batch1_speedup:.2f}x"]
            speeds += [f"{row.images_per_second:,.0f}/s", f"{row.batch_speedup:.2f}x"]
        size, difference = f"{row.bytes / 2**20:.2f}", f"{row.largest_difference:.3g}"
        lines.append([row.name, size, difference, accuracy, change, *speeds])
    return columns(lines)


# --- an export


def check_job(job: Namespace, checkpoint: Checkpoint) -> None:
    """Check the options of export.py before any work, as far as possible. Raises UserError."""
    form, fault = FORMATS[job.format], ""
    if form.folder:
        if job.out.exists() and not (job.out.is_dir() and not any(job.out.iterdir())):
            fault = f"exists; --format {job.format} makes a folder, give a new one"
    elif job.out.is_dir():
        fault = "is a folder; name a file"
    elif job.out.exists() and not job.overwrite:
        fault = "exists; give --overwrite, or another name"
    elif not job.out.name.endswith(form.suffix):
        fault = f"a file of --format {job.format} must end in {form.suffix}"
    if fault:
        raise UserError(f"{job.out}: {fault}")
    programs = [name for name, candidate in FORMATS.items() if candidate.truncates]
    several = "thresholds" in checkpoint["state"].get(NETWORKS["classifier"], {})
    spec = ImageSpec.read(checkpoint["shape"])
    refuse(
        (
            form.task not in (None, checkpoint["task"]),
            f"--format {job.format} is for checkpoints of task {form.task}, this one is of "
            f"{checkpoint['task']}; choose {', '.join(programs)} or safetensors",
        ),
        (
            several and not form.several_labels,
            f"--format {job.format} is for one label an image; choose safetensors, torch-export or "
            "onnx",
        ),
        (
            form.folder and (spec.alpha or spec.deep),
            f"--format {job.format} is for 8-bit images without alpha, the model's are "
            f"{spec.words}",
        ),
        (
            job.truncation_psi != 1 and not (checkpoint["task"] == "gan" and form.truncates),
            f"--truncation-psi is for a GAN's {', '.join(programs)}; leave it out",
        ),
    )
    form.check_packages()
    check_writable(job.out.parent)


def open_subject(job: Namespace, checkpoint: Checkpoint) -> Subject:
    """Load the network and the inputs to check it with; read a classifier's images."""
    if checkpoint["task"] == "gan":
        return generator_subject(
            checkpoint, batch_size=job.batch_size, psi=job.truncation_psi, mean=job.truncation_mean
        )
    trained, held_out = (data_of(checkpoint, key) for key in ("path", "val_path"))
    with ExitStack() as stack:
        images = stack.enter_context(_readable(checkpoint, job.data, (held_out, trained)))
        calibration = None
        if FORMATS[job.format].quantized:
            paths = (trained, job.data, held_out)
            calibration = stack.enter_context(
                _readable(checkpoint, job.calibration, paths, option="--calibration")
            )
        return classifier_subject(
            checkpoint,
            images,
            count=job.n,
            batch_size=job.batch_size,
            calibration=calibration,
            calibrated=job.calibrated,
        )


def _readable(
    checkpoint: Checkpoint,
    requested: str | None,
    paths: tuple[str | None, ...],
    *,
    option: str = "--data",
) -> Dataset:
    """Open the requested file of images, by default the first readable one of `paths`. Raises
    UserError.
    """
    if requested is not None:
        return dataset_for_model(requested, checkpoint)
    reason = "its config names none"
    for path in filter(None, paths):
        try:
            return dataset_for_model(path, checkpoint)
        except UserError as error:
            reason = str(error)
    raise UserError(
        f"no images to check the export with ({reason}); give packed ones with {option} X.lmdb"
    )


def export(job: Namespace, checkpoint: Checkpoint) -> tuple[list[Row], Subject, str | None]:
    """Write a file, load it again, check it, and rename it; `job` has the options of export.py.

    Returns the table's rows, the subject, and the fault of the file or None. If there is a fault,
    an existing file stays. Raises UserError.
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
        files = [written]
        if form.folder:
            files = [path for path in written.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        exported = (job.format, size, form.load(subject, written))
        rows, fault = examine(subject, exported, job)
        if fault is None and form.folder:
            written.replace(job.out)
        elif fault is None:
            replace_file(job.out, written.read_bytes())
    return rows, subject, fault
