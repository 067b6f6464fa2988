"""An exported file against the original: do the outputs agree, is it as accurate, how fast is it."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inference.export.formats import Format, Runner
from inference.export.subject import Inputs, Subject
from utils.errors import TrainingHalted, UserError

ACCURACY_LOSS = 0.01  # of int8, at most: one point
SINGLE_CALLS = 10  # of batch 1 in a repeat
Progress = Callable[[str], None]


class CheckFailed(TrainingHalted):
    """The file does not do what the original does; it was not left behind. Exit code 4, as a training that stops
    itself.
    """


@dataclass(kw_only=True)
class Row:
    """One way to run the network, beside the original."""

    name: str
    bytes: int  # of its weights, or of its file
    largest_difference: float  # of an output from the original's
    agreement: float | None  # share of images that get the original's class
    accuracy: float | None  # None where true classes are not known
    accuracy_change: float | None
    batch1_ms: float = math.nan  # median
    images_per_second: float = math.nan  # at the large batch, median
    batch1_speedup: float = math.nan  # against the original
    batch_speedup: float = math.nan


def outputs(run: Runner, batches: Sequence[Inputs]) -> Tensor:
    """All batches' outputs, float32 [n, ...]."""
    with torch.inference_mode():
        return torch.cat([run(batch) for batch in batches])


def runner(network: nn.Module) -> Runner:
    """A network as a function of its tuple of inputs."""
    return lambda inputs: network(*inputs)


def compare(name: str, size: int, found: Tensor, original: Tensor, labels: Tensor | None, *, classes: bool) -> Row:
    """A row from outputs [n, ...] and the original's; `classes`: they are logits."""
    difference = float((found - original).abs().max()) if found.shape == original.shape else math.inf
    row = Row(name=name, bytes=size, largest_difference=difference, agreement=None, accuracy=None, accuracy_change=None)
    if classes:
        named, before = found.argmax(1), original.argmax(1)
        row.agreement = _share(named == before)
        if labels is not None:
            row.accuracy = _share(named == labels)
            row.accuracy_change = row.accuracy - _share(before == labels)
    return row


def _share(right: Tensor) -> float:
    return int(right.sum()) / len(right)


def judge(row: Row, form: Format, original: Tensor) -> str | None:
    """What is wrong with an exported file's outputs; None if nothing is."""
    if form.limit is not None:
        limit = form.limit * max(1.0, float(original.abs().max()))
        if not row.largest_difference <= limit:  # and so for NaN
            return (
                f"its outputs differ from the original's by up to {row.largest_difference:.3g}, more than {limit:.3g}"
            )
        return None
    if not math.isfinite(row.largest_difference):
        return "its outputs are not finite"
    loss = -row.accuracy_change if row.accuracy_change is not None else 1 - (row.agreement or 0.0)
    what = "accuracy falls" if row.accuracy_change is not None else "it names other classes than the original"
    if loss > ACCURACY_LOSS + 1e-9:
        return f"{what} by {100 * loss:.2f} points, more than {100 * ACCURACY_LOSS:g}"
    return None


def measure_speed(
    runs: Mapping[str, Runner], subject: Subject, rows: Mapping[str, Row], *, batch: int, repeats: int
) -> None:
    """Fill in the rows' times: medians of `repeats` turns, in which the contenders alternate."""
    one, many = subject.rows(1), subject.rows(batch)
    single: dict[str, list[float]] = {name: [] for name in runs}
    whole: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for name in runs:
            runs[name](one), runs[name](many)  # what the first call prepares
        for _ in range(repeats):
            for name, run in runs.items():
                single[name] += [_seconds(run, one) for _ in range(SINGLE_CALLS)]
                whole[name].append(_seconds(run, many))
    first = next(iter(runs))
    for name, row in rows.items():
        row.batch1_ms = 1000 * statistics.median(single[name])
        row.images_per_second = batch / statistics.median(whole[name])
        row.batch1_speedup = statistics.median(single[first]) / statistics.median(single[name])
        row.batch_speedup = statistics.median(whole[first]) / statistics.median(whole[name])


def _seconds(run: Runner, inputs: Inputs) -> float:
    started = time.perf_counter()
    run(inputs)
    return time.perf_counter() - started


def weight_bytes(network: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())


def examine(
    subject: Subject, exported: tuple[str, int, Runner], form: Format, *, batch: int, repeats: int, say: Progress
) -> tuple[list[Row], str | None]:
    """The table's rows, the original's first and the exported file's last, and what is wrong with the file or None.

    `exported` is its name, its bytes and how it runs. Raises UserError if the original's own outputs are not finite.
    """
    fast = subject.fast()
    networks = {"fp32 eager": subject.network, "folded": fast, "bf16": subject.in_bfloat16()}
    if not subject.is_classifier:
        del networks["folded"]  # there is nothing to fold
    name, size, run_exported = exported
    runs = {what: runner(network) for what, network in networks.items()} | {name: run_exported}
    sizes = {what: weight_bytes(network) for what, network in networks.items()} | {name: size}
    original = outputs(runs["fp32 eager"], subject.batches)
    if not bool(torch.isfinite(original).all()):
        raise UserError("the checkpoint's own outputs are not finite; export another one (--which, or an earlier file)")
    rows: dict[str, Row] = {}
    for what, run in runs.items():
        say(f"comparing {what}")
        found = original if what == "fp32 eager" else outputs(run, subject.batches)
        rows[what] = compare(what, sizes[what], found, original, subject.labels, classes=subject.is_classifier)
    wrong = judge(rows[name], form, original)
    if wrong is None:
        say("measuring speed")
        measure_speed(runs, subject, rows, batch=batch, repeats=repeats)
    return list(rows.values()), wrong


def document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for JSON: what was not measured is null."""
    return [{key: None if _missing(value) else value for key, value in asdict(row).items()} for row in rows]


def _missing(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def table(rows: Sequence[Row], *, batch: int) -> str:
    """The rows as text."""
    lines = [
        f"{'':14}{'MiB':>9}{'largest difference':>20}{'accuracy':>10}{'change':>9}{'batch 1':>12}{'':8}"
        f"{f'batch {batch}':>14}"
    ]
    for row in rows:
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.4f}"
        change = "" if row.accuracy_change is None else f"{row.accuracy_change:+.4f}"
        line = f"{row.name:14}{row.bytes / 2**20:9.2f}{row.largest_difference:20.3g}{accuracy:>10}{change:>9}"
        if math.isfinite(row.batch1_ms):
            line += f"{row.batch1_ms:9.2f} ms{row.batch1_speedup:7.2f}x"
            line += f"{row.images_per_second:10,.0f}/s{row.batch_speedup:7.2f}x"
        lines.append(line)
    return "\n".join(lines)
