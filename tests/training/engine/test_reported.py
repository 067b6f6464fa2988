"""Compare all that a run reports with values from other sources: rows, pointers, status,
TensorBoard, the progress line, the console and the training part of the report. A key of a row
that has no expected value here fails.

What a step reports is the subject of tests/oracle; here it is an input, as are evaluations and
a clock that the test moves. Both runs stop between two rows and resume; the classifier's has
another batch size then, and rolls back.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tensorboard.util import tensor_util

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading import loader
from duetgan.data.reading.dataset import Dataset
from duetgan.reporting.pictures import number
from duetgan.training.base import monitors
from duetgan.training.engine.checkpoints import CheckpointManager
from duetgan.training.engine.loop import Loop
from duetgan.training.engine.tasks import TASKS
from duetgan.utils import checkpoint
from duetgan.utils.machine import peak_bytes
from duetgan.utils.runlog import progress, run_folder, run_log
from duetgan.utils.text import duration
from tests.distributed.test_oracle import CLASSES, untrained_classifier
from tests.end_to_end.helpers import events_of, log_of, status, train_in_process
from tests.oracle.optimizer import Optimizer
from tests.oracle.test_gan import ADAPTIVE, EVERYTHING, GROWTH, STYLEGAN2

Tree = dict[str, Any]
CPU, START = torch.device("cpu"), 1000.0
READ = 0.25  # seconds of a batch
WARM = {"name": "adam", "lr": 0.02, "warmup_steps": 4, "schedule": "cosine", "final_lr": 0.1}
LINEAR = {"name": "adamw", "lr": 0.01, "schedule": "linear", "hold": 0.25, "warmup_steps": 0}
DECAY = {"generator_optimizer": WARM, "discriminator_optimizer": LINEAR}
COMMON: dict[str, Any] = {
    "data": {"path": "data.lmdb", "val_path": "held-out.lmdb"},
    "log": {"every": 3, "samples_every": 4},
}
TREES: dict[str, dict[str, Any]] = {
    "gan": STYLEGAN2
    | {"steps": 10, "loss": EVERYTHING | {"gradients_every": 2}, "ada": ADAPTIVE}
    | {"progressive": GROWTH, "checkpoint": {"every": 3}}
    | {"evaluation": {"every": 4, "extractor": "pixels"}}
    | DECAY,
    "classifier": {"task": "classifier", "steps": 20, "batch_size": 8, "seed": 5}
    | {"model": {"stem": "small-stride2"}, "finetune": {"stage_lr": {"layer4": 3.0}}}
    | {"optimizer": LINEAR | {"lr_batch_size": 16}}
    | {"unlabelled": {"path": "unlabelled.lmdb", "ratio": 2}}
    | {"spikes": {"action": "roll-back", "factor": 1000.0}}
    | {"evaluation": {"every": 7}, "checkpoint": {"every": 5, "keep": 9}},
}
STOP, RESUMED = {"gan": 5, "classifier": 8}, {"gan": [], "classifier": ["--batch_size", "12"]}
BROKEN, MASKED, SPIKE = 2, 6, 13  # numbers of updates, see `Record.step`
BACK = 10  # the checkpoint before the spike
# the first step and the total of each progress bar
BARS = {"gan": [(0, 5), (5, 10)], "classifier": [(0, 8), (8, 20), (BACK, 20)]}
IMAGES = {"gan": [16] + [12] * 9, "classifier": [8] * 8 + [12] * 12}  # of each step
BEST = {"gan": ("frechet/pixels", 8), "classifier": ("accuracy", 14)}  # and where it was reached
QUALITY = [0.25, 0.75, 0.625, 0.5]  # of the evaluations; the classifier rolls the second back
DISTANCES = ("frechet", "floor", "kernel", "kernel_floor", "recognised", "diversity_ratio")
FOLLOWED = {  # key of an evaluation's row -> of its document
    "gan": {"n": "n", "memorised/pixels": "share", "memorised_p/pixels": "p_value"}
    | {f"{key}/pixels": key for key in DISTANCES},
    "classifier": {key: key for key in ("accuracy", "nll", "ece")},
}


def work_seconds(update: int) -> float:
    """Return how long an update takes besides its batch."""
    return 1 + update / 8


class Record:
    """What the steps and evaluations of a run gave, and its clock."""

    def __init__(self, task: str) -> None:
        self.task, self.now = task, START
        self.count = 0  # steps taken
        self.steps: dict[int, dict[str, Any]] = {}  # by updates done; the last time counts
        self.documents: list[dict[str, Any]] = []
        self.bars: list[tuple[str, int]] = []  # last words, steps taken
        self.curves: list[Any] = []

    def slow(self, seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which takes so long."""

        def run(*arguments: Any, **options: Any) -> Any:
            self.now += seconds
            return function(*arguments, **options)

        return run

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Observe a step: a value is no number, updates are masked, and a loss jumps."""

        def step(task: Any, batches: Any, update: int) -> Any:
            values = function(task, batches, update)
            self.now += work_seconds(update)
            network = "generator" if self.task == "gan" else "classifier"
            if update == BROKEN:
                values[f"gradient_norm/{network}"] *= math.nan
                values[f"nonfinite_updates/{network}"] += 1
            if update in (BROKEN, MASKED):
                values[f"skipped_updates/{network}"] += 1
            if update == self.count == SPIKE:
                values["loss/classifier"] *= 1e6
            self.count += 1
            self.steps[update + 1] = {name: float(value) for name, value in values.items()}
            return values

        return step

    def evaluate(self, *_: Any, **options: Any) -> dict[str, Any]:
        """An evaluation's document, in which no two values are equal."""
        self.now += 50
        place = len(self.documents)
        value = QUALITY[place] if self.task == "classifier" else 1 - QUALITY[place]
        names = ("n", "nll", "ece", *DISTANCES, "precision")
        document: dict[str, Any] = {name: place + at / 16 for at, name in enumerate(names, 1)}
        for key in ("frechet", "accuracy"):
            document |= {key: value, f"{key}_interval": [value - 0.125, value + 0.0625]}
        copies = {"extractor": "pixels", "share": place + 0.03, "p_value": place + 0.02}
        self.documents.append(document | copies)
        return document | {"distances": [document, {}], "memorisation": copies}

    def at(self, step: int) -> dict[str, Any]:
        """The last document of an evaluation after a step."""
        return self.documents[{4: 0, 7: 0, 8: 1, 14: 2}.get(step, -1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of 16 px, three classes of different sizes; no count is a multiple of a batch."""
    path, rng = tmp_path_factory.mktemp("reported"), np.random.default_rng(0)
    for name, count in (("data", 61), ("held-out", 29), ("unlabelled", 37)):
        images = rng.integers(0, 256, (count, 1, 16, 16), dtype=np.uint8)
        labels = np.minimum(np.arange(count) % 5, 2)
        pack_arrays(path / f"{name}.lmdb", images, labels=labels, classes=CLASSES, smallest=8)
    return path


@pytest.fixture(params=TREES)
def record(request, monkeypatch, slim):
    """An observer of the runs in this process, whose every pause takes seconds of its own."""
    record, task = Record(request.param), TASKS[request.param].task
    now: Any = dict.fromkeys(("perf_counter", "monotonic", "time"), lambda: record.now)
    clock = SimpleNamespace(**now, strftime=time.strftime)
    monkeypatch.setattr("tqdm.std.time", clock.time)
    for module in (monitors, loader, progress, run_folder):
        monkeypatch.setattr(module, "time", clock)
    for owner, name, seconds in (
        (loader, "read_batch", READ),
        (CheckpointManager, "save", 7),
        (CheckpointManager, "restore", 11),
        (task, "source", 3),
        (task, "sample_grid", 20),
        (task, "begin", 30),
    ):
        monkeypatch.setattr(owner, name, record.slow(seconds, getattr(owner, name)))
    monkeypatch.setattr(task, "step", record.step(task.step))
    function = {"gan": "evaluation.evaluate_generator", "classifier": "task.evaluate_classifier"}[record.task]
    monkeypatch.setattr(f"duetgan.training.{record.task}.{function}", record.evaluate)
    monkeypatch.setattr(monitors, "LEAST", 5)
    monkeypatch.setattr("duetgan.extras.graph.graph.draw", lambda *_: None)  # which takes a while

    def draw(curves: list[Any], *, log: bool) -> str:
        record.curves += curves
        return ""

    monkeypatch.setattr("duetgan.reporting.pictures._svg", draw)

    class Bar(progress.Bar):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.begun = record.count

        def close(self) -> None:
            if not self.disable:
                record.bars.append((str(self), record.count - self.begun))
            super().close()

    monkeypatch.setattr(run_log, "Bar", Bar)
    return record


def expected_row(record: Record, tree: Tree, last: int, begun: int, step: int) -> dict[str, Any]:
    """Return the row of a step.

    Args:
        last: The step of the row before.
        begun: The step at which this process began, or to which it went back.
    """
    row: dict[str, Any] = {}
    window = [record.steps[at] for at in range(last + 1, step + 1)]
    for key in dict.fromkeys(key for values in window for key in values):
        if "_updates/" not in key:
            found = [values[key] for values in window if key in values]
            row[key] = sum(found) / len(found)
    for kind in ("skipped_updates", "nonfinite_updates"):
        row[kind] = 0
        for at in range(1, step + 1):
            row[kind] += sum(v for key, v in record.steps[at].items() if key.startswith(kind))
    here = range(max(last, begun) + 1, step + 1)
    seconds = sum(READ + work_seconds(at - 1) for at in here)
    images = IMAGES[record.task]
    row["images"] = sum(images[:step])
    row["images_per_second"] = sum(images[at - 1] for at in here) / seconds
    row["data_wait"] = READ * len(here) / seconds
    factor = 1.0 if record.task == "gan" else 3.0  # the fastest stage's
    for name in [name for name in tree if name.endswith("optimizer")]:
        schedule = Optimizer({}, tree[name], tree["steps"], images[step - 1])
        row[f"lr/{name}"] = factor * schedule.rate(step - 1)
    if record.task == "classifier":
        row |= {"roll_backs": int(step > BACK)}
    return row


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Return what metrics.jsonl may hold of values: null for NaN, else six digits."""
    near = {key: pytest.approx(value, rel=1e-5, abs=1e-30) for key, value in row.items()}
    return near | {key: None for key, value in row.items() if value != value}


def check_rows(record: Record, tree: Tree, rows: list[dict[str, Any]], begun: int) -> None:
    last, least = 0, 0
    for row in rows:
        step = row["step"]
        if "images" not in row:
            document = record.at(step)
            followed = FOLLOWED[record.task].items()
            expected = {f"val/{key}": document[source] for key, source in followed}
            if record.task == "gan" and step > 4:  # of whole images; tests/oracle has their values
                logits = [f"val/logits/{name}" for name in ("held_out", "real", "fake")]
                expected |= {key: row[key] for key in logits}
            assert row == rounded(expected | {"step": step})
            continue
        memory = row.pop("memory_mib")
        assert max(1, least) <= memory <= peak_bytes(CPU) / 2**20
        least = memory
        start = begun if step > begun else 0
        if record.task == "classifier" and step > BACK:
            start = BACK
        expected = expected_row(record, tree, last, start, step) | {"step": step}
        expected |= {"partial": True} if step == begun else {}
        assert row == rounded(expected)
        last = step


def check_pointers(record: Record, run: Path, steps: int) -> None:
    metric, best = BEST[record.task]
    key = metric.partition("/")[0]
    for name, step in (("best", best), ("last", steps)):
        pointer, file = checkpoint.pointer(run / "checkpoints", name) or {}, f"step-{step:08d}.pt"
        document = record.at(step)
        figure = {"metric": metric, "value": document[key], "interval": document[f"{key}_interval"]}
        digest = hashlib.sha256((run / "checkpoints" / file).read_bytes()).hexdigest()
        assert pointer == figure | {"file": file, "step": step, "sha256": digest}
        content = checkpoint.load(run / "checkpoints" / file)
        assert (content["step"], content["figure"]) == (step, figure)
        state = content["state"]["loop"]
        assert (state["step"], state["images"]) == (step, sum(IMAGES[record.task][:step]))
        assert state["best"] == {metric: record.at(best)[key], "step": best}


def check_progress(record: Record, rows: list[dict[str, Any]]) -> None:
    """Compare each bar's last words: the steps done here, and the last row."""
    for (words, count), (first, total) in zip(record.bars, BARS[record.task], strict=True):
        assert words.startswith(f"{first + count} of {total}, "), words
    row = [row for row in rows if "images" in row][-1]
    ends = [f"{key[5:]} loss={row[key]:.3g}" for key in row if key.startswith("loss/")]
    assert words.endswith(f" left, {', '.join(ends)}, images/s={row['images_per_second']:.4g}")


def check_report(record: Record, run: Path, rows: list[dict[str, Any]]) -> None:
    page = (run / "report.html").read_text()
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for key in row.keys() - {"step", "images", "val/n"}:
            value = math.nan if row[key] is None else float(row[key])
            series.setdefault(key, []).append((float(row["step"]), value))
    assert sorted(map(repr, record.curves)) == sorted(map(repr, series.values()))
    legend = dict(re.findall(r'<span class="key s\d">([^ ]+) <b>([^<]*)</b>', page))
    last = {key: [y for _, y in points if y == y][-1] for key, points in series.items()}
    assert legend == {key: number(value) for key, value in last.items()}
    speed, wait = (median(y for _, y in series[key]) for key in ("images_per_second", "data_wait"))
    (metric, best), steps = BEST[record.task], rows[-1]["step"]
    value = record.at(best)[metric.partition("/")[0]]
    tiles = re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span>', page)
    assert tiles[-6:] == [
        ("finished", "state of the training"),
        (f"{steps}", "steps"),
        (duration(record.now - START), "duration, including evaluations"),
        (f"{speed:.3g}", "images per second (median)"),
        (f"{100 * wait:.1f} %", "of the time spent waiting for data (median)"),
        (f"step {best}", f"best checkpoint by evaluations during training: {metric} {value:.3g}"),
    ]
    for cells in ((61,), (29,), ("a", 13, 6), ("b", 12, 6), ("c", 36, 17)):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page


def test_every_reported_value(record, folder, tmp_path, capsys):
    tree, run, config = COMMON | TREES[record.task], tmp_path / "run", tmp_path / "recipe.yaml"
    if record.task == "gan":
        untrained_classifier(tmp_path / "classifier")
        tree = tree | {"loss": tree["loss"] | {"classifier": str(tmp_path / "classifier")}}
    config.write_text(re.sub(r"[\w-]+\.lmdb", rf"{folder}/\g<0>", yaml.safe_dump(tree)))
    steps, stop = tree["steps"], STOP[record.task]
    assert train_in_process(config, run, "--max-steps", str(stop)) == 0
    assert status(run, "state", "step", "reason", "exit_code") == ("stopped", stop, "max_steps", 0)
    check_rows(record, tree, log_of(run), stop)
    record.curves.clear()
    assert train_in_process(config, run, *RESUMED[record.task]) == 0
    assert status(run, "state", "step", "reason", "exit_code") == ("finished", steps, "", 0)
    assert status(run)["seconds"] == pytest.approx(record.now - START, abs=0.11)
    rows = log_of(run)
    check_report(record, run, rows)
    check_progress(record, rows)
    check_pointers(record, run, steps)
    events = events_of(run)
    for key in events.Tags()["scalars"]:
        values = [(event.step, rounded({key: event.value})[key]) for event in events.Scalars(key)]
        assert values == [(row["step"], row[key]) for row in rows if key in row]
    grids = [*range(0, steps, 4), steps] if record.task == "gan" else [0]
    assert [event.step for event in events.Images("samples")] == grids
    assert sorted(path.name for path in (run / "samples").iterdir()) == [f"step-{step:08d}.png" for step in grids]
    shown = tensor_util.make_ndarray(events.Tensors("config/text_summary")[-1].tensor_proto).item()
    written = (run / "config.yaml").read_text()
    assert dedent(shown.decode()).splitlines() == written.splitlines()
    assert set(events.Tags()["scalars"]) == {key for row in rows for key in row} - {"step"}
    output = capsys.readouterr().err.splitlines()
    assert output[-2:] == [f"report: {run}/report.html", f"done: step {steps} of {steps}, {run}"]
    for row in [row for row in rows if "images" not in row]:
        words = ", ".join(f"{key[4:]} {value:.4g}" for key, value in row.items() if key != "step")
        assert f"step {row['step']}: {words}" in output
    facts = json.loads((run / "data.json").read_text())
    for role, name in (("training", "data"), ("held-out", "held-out")):
        meta = Dataset(folder / f"{name}.lmdb").meta
        assert facts[role]["count"] == meta.count
        assert facts[role]["content_hash"] == meta.content_hash
    check_rows(record, tree, rows, stop)


def test_the_wait_for_data_is_at_most_all_of_the_time():
    """It may begin before the clock's last pause."""
    loop: Any = SimpleNamespace(
        task=SimpleNamespace(images_at=lambda step: 8 * step),
        step=3,
        images=24,
        stopwatch=SimpleNamespace(step=1, seconds=lambda: 4.0),
        loader=SimpleNamespace(wait_seconds=5.0),
        callbacks=[],
    )
    window: Any = SimpleNamespace(means=lambda: {"loss": 2.0})
    assert Loop._row(loop, window) == {"images": 24, "images_per_second": 4.0, "data_wait": 1.0, "loss": 2.0}
