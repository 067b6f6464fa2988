"""From a checkpoint to a file that was checked: written beside its place, loaded again, compared
with the original (do the outputs agree, is it as accurate, how fast is it), and only then renamed.
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

from duetgan.data.reading.dataset import Dataset, dataset_for_model
from duetgan.inference.export.formats import FORMATS, PROGRAMS, Format, import_extra
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
from duetgan.utils.errors import TrainingHalted, UserError
from duetgan.utils.files import check_writable, replace_file, writing
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import columns

ACCURACY_LOSS = 0.01  # of int8, at most: one point
SINGLE_CALLS = 10  # of batch 1 in a repeat


class CheckFailed(TrainingHalted):
    """The file does not do what the original does; it was not left behind. Exit code 4, as a
    training that stops itself.
    """


@dataclass(kw_only=True)
class Row:
    """One way to run the network, compared with the original."""

    name: str
    bytes: int  # of its weights, or of its file
    largest_difference: float  # of an output from the original's
    agreement: float | None = None  # share of images that get the original's class
    accuracy: float | None = None  # None where true classes are not known
    accuracy_change: float | None = None
    batch1_ms: float = math.nan  # median
    images_per_second: float = math.nan  # at the large batch, median
    batch1_speedup: float = math.nan  # against the original
    batch_speedup: float = math.nan


def outputs(run: Runner, batches: Sequence[Inputs], what: str = "") -> Tensor:
    """Return the outputs of all batches, behind a bar that is named `what`."""
    with (
        torch.inference_mode(),
        Bar(total=len(batches), desc=what, unit="batch", disable=not what) as bar,
    ):
        parts = []
        for batch in batches:
            parts.append(run(batch))
            bar.update()
        return torch.cat(parts)


def compare(
    name: str, size: int, found: Tensor, original: Tensor, labels: Tensor | None, *, classes: bool
) -> Row:
    """A row from outputs [n, ...] and the original's; `classes`: they are logits."""
    difference = (
        float((found - original).abs().max()) if found.shape == original.shape else math.inf
    )
    row = Row(name=name, bytes=size, largest_difference=difference)
    if classes:
        predicted, before = found.argmax(1), original.argmax(1)
        row.agreement = float((predicted == before).double().mean())
        if labels is not None:
            row.accuracy = float((predicted == labels).double().mean())
            row.accuracy_change = row.accuracy - float((before == labels).double().mean())
    return row


def judge(row: Row, form: Format, original: Tensor) -> str | None:
    """What is wrong with an exported file's outputs; None if nothing is."""
    if form.limit is not None:
        limit = form.limit * max(1.0, float(original.abs().max()))
        if not row.largest_difference <= limit:  # and so for NaN
            difference = f"{row.largest_difference:.3g}, more than {limit:.3g}"
            return f"its outputs differ from the original's by up to {difference}"
        return None
    if not math.isfinite(row.largest_difference):
        return "its outputs are not finite"
    loss, what = 1 - (row.agreement or 0.0), "it names other classes than the original"
    if row.accuracy_change is not None:
        loss, what = -row.accuracy_change, "accuracy falls"
    if loss > ACCURACY_LOSS + 1e-9:
        return f"{what} by {100 * loss:.2f} points, more than {100 * ACCURACY_LOSS:g}"
    return None


def measure_speed(
    rows: Sequence[Row], runs: Sequence[Runner], subject: Subject, *, batch: int, repeats: int
) -> None:
    """Fill in the rows' times: medians of `repeats` turns, in which the contenders alternate, after
    one to prepare.
    """
    calls = [(subject.rows(1), SINGLE_CALLS), (subject.rows(batch), 1)]
    seconds: list[tuple[list[float], list[float]]] = [([], []) for _ in runs]
    with (
        torch.inference_mode(),
        Bar(total=(repeats + 1) * len(runs), desc="measuring speed", unit="turn") as bar,
    ):
        for turn in range(repeats + 1):
            for run, both in zip(runs, seconds, strict=True):
                for taken, (inputs, times) in zip(both, calls, strict=True):
                    for _ in range(times if turn else 1):
                        started = time.perf_counter()
                        run(inputs)
                        taken += [time.perf_counter() - started] if turn else []
                bar.update()
    medians = [[statistics.median(taken) for taken in both] for both in seconds]
    for row, (single, whole) in zip(rows, medians, strict=True):
        row.batch1_ms, row.batch1_speedup = 1000 * single, medians[0][0] / single
        row.images_per_second, row.batch_speedup = batch / whole, medians[0][1] / whole


def examine(
    subject: Subject, exported: tuple[str, int, Runner], job: Namespace
) -> tuple[list[Row], str | None]:
    """The table's rows, the original's first and the exported file's (name, bytes, how it runs)
    last, and what is wrong with it or None. Raises UserError if the original's own outputs are not
    finite.
    """
    networks = {"fp32 eager": subject.network}
    if subject.is_classifier and not job.no_benchmark:  # else there is nothing to fold
        networks["folded"] = subject.fast()
    if not job.no_benchmark:
        # a classifier whole
        networks["bf16"] = InBfloat16(subject.fast(), autocast=not subject.is_classifier)
    contenders = [
        (what, sum(t.nbytes for t in network.state_dict().values()), as_runner(network))
        for what, network in networks.items()
    ]
    contenders.append(exported)
    original = outputs(contenders[0][2], subject.batches, "comparing fp32 eager")
    if not bool(torch.isfinite(original).all()):
        raise UserError(
            "the checkpoint's own outputs are not finite; export another one (--which, or an earlier file)"
        )
    rows: list[Row] = []
    for what, size, run in contenders:
        result = outputs(run, subject.batches, f"comparing {what}") if rows else original
        rows.append(
            compare(what, size, result, original, subject.labels, classes=subject.is_classifier)
        )
    wrong = judge(rows[-1], FORMATS[job.format], original)
    if wrong is None and not job.no_benchmark:
        measure_speed(
            rows,
            [run for *_, run in contenders],
            subject,
            batch=job.batch_size,
            repeats=job.repeats,
        )
    return rows, wrong


def document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for JSON: what was not measured is null."""
    return [
        {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        for row in map(asdict, rows)
    ]


def table(rows: Sequence[Row], *, batch: int) -> str:
    lines = [
        ["", "MiB", "largest difference", "accuracy", "change", "batch 1", "", f"batch {batch}", ""]
    ]
    for row in rows:
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.4f}"
        change = "" if row.accuracy_change is None else f"{row.accuracy_change:+.4f}"
        speeds = [f"{row.batch1_ms:.2f} ms", f"{row.batch1_speedup:.2f}x"]
        speeds += [f"{row.images_per_second:,.0f}/s", f"{row.batch_speedup:.2f}x"]
        speeds = speeds if math.isfinite(row.batch1_ms) else [""] * 4
        lines.append(
            [
                row.name,
                f"{row.bytes / 2**20:.2f}",
                f"{row.largest_difference:.3g}",
                accuracy,
                change,
                *speeds,
            ]
        )
    return columns(lines)


# --- an export


def check_job(job: Namespace, checkpoint: dict[str, Any]) -> None:
    """Raise UserError for what can be checked before any work."""
    form, what = FORMATS[job.format], ""
    if form.folder and job.out.exists() and not (job.out.is_dir() and not any(job.out.iterdir())):
        what = f"exists; --format {job.format} makes a folder, give a new one"
    elif not form.folder and job.out.exists() and (job.out.is_dir() or not job.overwrite):
        what = (
            "is a folder; name a file"
            if job.out.is_dir()
            else "exists; give --overwrite, or another name"
        )
    elif not job.out.name.endswith(form.suffix):
        what = f"--format {job.format} is told by its name's end; give it {form.suffix}"
    if what:
        raise UserError(f"{job.out}: {what}")
    if form.only is not None and checkpoint["task"] != form.only[0]:
        raise UserError(f"--format {job.format} {form.only[1]}")
    several = "thresholds" in checkpoint["state"].get(NETWORKS["classifier"], {})
    if several and (form.folder or job.format == "int8"):
        raise UserError(
            f"--format {job.format} is for one label an image; choose safetensors, torch-export or onnx"
        )
    spec = ImageSpec.read(checkpoint["shape"])
    if form.folder and (spec.alpha or spec.deep):
        raise UserError(
            f"--format {job.format} is for 8-bit images without alpha, the model's are {spec.words}"
        )
    if job.truncation_psi != 1 and (checkpoint["task"] != "gan" or job.format not in PROGRAMS):
        raise UserError(f"--truncation-psi is for a GAN's {', '.join(PROGRAMS)}; leave it out")
    for package in form.needs:
        import_extra(package)
    check_writable(job.out.parent)


def open_subject(job: Namespace, checkpoint: dict[str, Any]) -> Subject:
    """The network and what it is checked with; a classifier's images are read here."""
    if checkpoint["task"] == "gan":
        return generator_subject(
            checkpoint, batch_size=job.batch_size, psi=job.truncation_psi, mean=job.truncation_mean
        )
    trained, held_out = (data_of(checkpoint, key) for key in ("path", "val_path"))
    with ExitStack() as stack:
        images = stack.enter_context(_readable(checkpoint, job.data, (held_out, trained)))
        calibration = None
        if job.format == "int8":
            places = (trained, job.data, held_out)
            calibration = stack.enter_context(
                _readable(checkpoint, job.calibration, places, option="--calibration")
            )
        sizes = {"count": job.n, "batch_size": job.batch_size, "calibrated": job.calibrated}
        return classifier_subject(checkpoint, images, calibration=calibration, **sizes)


def _readable(
    checkpoint: dict[str, Any],
    given: str | None,
    places: tuple[str | None, ...],
    *,
    option: str = "--data",
) -> Dataset:
    """The file that was given, else the first of the places that can be read. Raises UserError."""
    if given is not None:
        return dataset_for_model(given, checkpoint)
    reason = "its config names none"
    for place in filter(None, places):
        try:
            return dataset_for_model(place, checkpoint)
        except UserError as error:
            reason = str(error)
    raise UserError(
        f"no images to check the export with ({reason}); give packed ones with {option} X.lmdb"
    )


def export(job: Namespace, checkpoint: dict[str, Any]) -> tuple[list[Row], Subject, str | None]:
    """Write, load again, check, rename, as `job`, the options of export.py, says. Returns the
    table's rows, what was exported and what is wrong (then a file that was there stays), or None.
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
        files = (
            [path for path in written.rglob("*") if path.is_file()] if form.folder else [written]
        )
        exported = (
            job.format,
            sum(path.stat().st_size for path in files),
            form.open(subject, written),
        )
        rows, wrong = examine(subject, exported, job)
        if wrong is None and form.folder:
            written.replace(job.out)
        elif wrong is None:
            replace_file(job.out, written.read_bytes())
    return rows, subject, wrong
