"""The numbers of a report: tiles and tables of a run's evaluation, training and data.

A tile is a value with its meaning. There is no tile for a value that is missing from the run's
files; a value of an unexpected type is shown as a dash.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from duetgan.metrics.figures import FIGURES
from duetgan.metrics.figures import Figure as Row
from duetgan.metrics.tables import Table, as_dict, as_dicts, further_tables
from duetgan.reporting.pictures import number
from duetgan.reporting.run_files import Document, Run
from duetgan.utils.text import duration

Tile = tuple[str, str]  # (value, meaning)
MetricTile = tuple[str, str, str]  # (value, meaning, its interval and other context in brackets)
Formatter = Callable[[object], str]


def percent(value: object) -> str:
    """Format a fraction as `12.3 %`, and anything but a number as a dash."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else "-"


def plain(value: object) -> str:
    """Format a number briefly, and anything else as a dash."""
    return number(value) if isinstance(value, int | float) else "-"


def change(value: float) -> str:
    """Format a difference with its sign."""
    return ("-" if value < 0 else "+") + number(abs(value))


VIEWS = {"flip": "mean of 2 views", "shift": "mean of 6 views"}  # keys: values of --tta
TILES = [row for row in FIGURES if row.place in ("headline", "tile")]
COLUMNS = [row for row in FIGURES if row.place == "column"]  # columns of the table of distances
REMARKS = {row.key: row.title for row in FIGURES} | {
    "n": "number of images",
    "floor": "floor of the distances",
    "memorisation": "search for copies",
}


def formatter(row: Row) -> Formatter:
    """Return the function that formats a metric in its unit."""
    return percent if row.unit == "share" else plain


def headline(run: Run) -> list[MetricTile]:
    """Return the tiles at the top of the page: the main metrics and the first Frechet distance."""
    tiles = results(run, [row for row in TILES if row.place == "headline"])
    for row in as_dicts(run.evaluation.get("distances"))[:1]:
        context = [f"real images: {plain(row.get('floor'))}, n {plain(row.get('n'))}"]
        context += _interval(row.get("frechet_interval"), plain)
        meaning = f"Frechet distance on {_extractor(row)}"
        tiles.append((plain(row.get("frechet")), meaning, f" ({'; '.join(context)})"))
    return tiles


def results(run: Run, rows: Sequence[Row] = ()) -> list[MetricTile]:
    """Return tiles of the metrics in `rows` (default: TILES) that the evaluation has."""
    document = run.evaluation
    tiles = []
    for row in rows or TILES:
        value = document.get(row.key)
        # In the evaluation of a classifier, "precision" is the name of a number format.
        if value is None or (row.key == "precision" and isinstance(value, str)):
            continue
        tiles.append((formatter(row)(value), row.meaning, _context(document, row)))
    return tiles


def _context(document: Document, row: Row) -> str:
    """Return the context of a metric, in brackets: its 95 % interval, the number of views of an
    image, and the quality of the classifier that judged the samples.
    """
    context = _interval(document.get(f"{row.key}_interval"), formatter(row))
    judge = as_dict(document.get("judge"))
    if row.key == "accuracy" and str(document.get("tta")) in VIEWS:
        context.append(VIEWS[str(document["tta"])])
    if row.key == "accuracy" and "majority_class_rate" in document:
        context.append(f"the most frequent class: {percent(document['majority_class_rate'])}")
    if row.key == "recognised" and judge:
        accuracy = percent(judge.get("accuracy"))
        text = f"the judge predicts {accuracy} of the real images at the samples' size correctly"
        if "majority_class_rate" in judge:
            text += f", the most frequent class is {percent(judge['majority_class_rate'])} of them"
        context.append(text)
    if row.key == "class_score" and judge.get("class_score") is not None:
        context.append(f"real images: {plain(judge['class_score'])}")
    return f" ({'; '.join(context)})" if context else ""


def _interval(interval: object, show: Formatter) -> list[str]:
    """Return [`95 % interval 12.3 to 14.5 %`], or an empty list without an interval."""
    if not isinstance(interval, list) or len(interval) != 2:
        return []
    low, high = (show(bound) for bound in interval)
    return [f"95 % interval {low.removesuffix(' %')} to {high}"]


def memorisation(run: Run) -> list[Tile]:
    """Return a list of one tile about copied training images; empty if none were searched for."""
    copies = as_dict(run.evaluation.get("memorisation"))
    if not copies:
        return []
    verdict = "copies training images" if copies.get("copies") else "no sign of copies"
    near = f"{percent(copies.get('share'))} of the samples unusually near to training images"
    text = f"{near}, {percent(copies.get('expected'))} expected; p {plain(copies.get('p_value'))}"
    search = f"{copies.get('extractor')}, {plain(copies.get('searched'))} searched"
    return [(verdict, f"{text} ({search})")]


def evaluation_facts(run: Run) -> tuple[str, str]:
    """Return " at step N" for the evaluated step, empty if unknown, and a text with the checkpoint,
    number of images, data and seed of the evaluation.
    """
    document = run.evaluation
    facts = []
    if "checkpoint" in document:
        facts.append(Path(str(document["checkpoint"])).name)
    if "n" in document:
        facts.append(f"{plain(document['n'])} images")
    facts += [f"{name} {document[name]}" for name in ("data", "seed") if name in document]
    step = document.get("step")
    return f" at step {step:,}" if isinstance(step, int) else "", ", ".join(facts)


def remarks(run: Run) -> list[tuple[str, str]]:
    """Return the evaluation's notes as pairs (title of the metric, text)."""
    notes = as_dict(run.evaluation.get("notes")).items()
    return [(REMARKS.get(key, str(key).replace("_", " ")), str(text)) for key, text in notes]


def tables(run: Run) -> list[Table]:
    """Return the evaluation's non-empty tables of distances and classes, and those of extras."""
    document = run.evaluation
    distances = []
    for distance in as_dicts(document.get("distances")):
        values = [plain(distance.get(row.key)) for row in COLUMNS]
        distances.append([_extractor(distance), *values, plain(distance.get("n"))])
    candidates: list[Table] = [
        (["extractor", *(row.title for row in COLUMNS), "n"], distances),
        _class_table(document),
        *further_tables(document),
    ]
    return [table for table in candidates if table[1]]


def _extractor(row: Document) -> str:
    """Return an extractor's name, with only the last part of a path."""
    kind, _, path = str(row.get("extractor", "-")).partition(":")
    return kind if Path(path).name in ("", kind) else f"{kind} ({Path(path).name})"


def _class_table(document: Document) -> Table:
    """Return a table with a row per class and a column per metric that the evaluation has by
    class.
    """
    columns: dict[str, dict[str, str]] = {}
    formats = {row.key: formatter(row) for row in FIGURES} | {"support": plain}
    for name, metrics in as_dict(document.get("per_class")).items():
        for key, value in as_dict(metrics).items():
            columns.setdefault(key, {})[name] = formats.get(key, percent)(value)
    for row in FIGURES:
        for name, value in as_dict(document.get(row.by_class)).items():
            columns.setdefault(row.title, {})[name] = formatter(row)(value)
    rows: dict[str, list[str]] = {}
    for column in columns.values():
        for name in column:
            rows.setdefault(name, [name])
    for column in columns.values():
        for name, cells in rows.items():
            cells.append(column.get(name, "-"))
    return ["class", *columns], list(rows.values())


# --- training and data


def progress(run: Run) -> list[Tile]:
    """Return tiles of a training: its state, steps, images, time, speed and checkpoints."""
    status, best = run.status, run.best
    tiles: list[Tile] = []

    def add(value: str, meaning: str) -> None:
        tiles.append((value, meaning))

    def median(key: str) -> float | None:
        values = [y for _, y in run.series.get(key, []) if math.isfinite(y)]
        return statistics.median(values) if values else None

    if status:
        add(str(status.get("state", "-")), str(status.get("reason") or "state of the training"))
    step = status.get("step", run.records[-1]["step"] if run.records else None)
    if step is not None:
        add(plain(step), "steps")
    images = [record["images"] for record in run.records if "images" in record]
    if images:
        add(plain(images[-1]), "images seen")
    seconds = status.get("seconds")
    if isinstance(seconds, int | float) and math.isfinite(seconds):
        add(duration(seconds), "time taken, with evaluations")
    if (speed := median("images_per_second")) is not None:
        add(plain(speed), "images a second (median)")
    if (wait := median("data_wait")) is not None:
        add(percent(wait), "of the time spent waiting for data (median)")
    if "step" in best:
        metric = str(best.get("metric", "")).replace("_", " ")
        add(f"step {plain(best['step'])}", f"best checkpoint: {metric} {plain(best.get('value'))}")
    if "step" in run.last:
        add(f"step {plain(run.last['step'])}", "last checkpoint")
    return tiles


def data_tables(run: Run) -> list[Table]:
    """Return a table of the data sets on which the run was trained and evaluated, and a table of
    their numbers of images of each class.
    """
    datasets = {}
    for role in ("training", "synthetic", "held-out"):
        if isinstance(run.data.get(role), dict):
            datasets[role] = run.data[role]
    if not datasets:
        return []
    rows = [["file"], ["images"], ["size"], ["content"]]
    for data in datasets.values():
        size = f"{data.get('resolution') or '-'} px, {data.get('channels', '-')} channel(s)"
        rows[0].append(str(data.get("path", "-")))
        rows[1].append(plain(data.get("count")))
        rows[2].append(size)
        rows[3].append(str(data.get("content_hash", "-"))[:12])
    tables: list[Table] = [(["data", *datasets], rows)]
    counts = [as_dict(data.get("by_class")) for data in datasets.values()]
    classes: dict[str, list[str]] = {}
    for count in counts:
        for name in count:
            classes.setdefault(name, [name])
    for count in counts:
        for name, cells in classes.items():
            cells.append(plain(count.get(name)))
    if classes:
        tables.append((["class", *datasets], list(classes.values())))
    return tables
