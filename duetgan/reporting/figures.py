"""Collect the numbers of a report: tiles and tables of a run's evaluation, training and data.

A tile shows a value and its meaning. A value that is missing from the run's files has no tile. A
value of an unexpected type is shown as a dash.
"""

import math
import statistics

from duetgan.metrics.figures import FIGURES
from duetgan.metrics.tables import (
    Table,
    as_dict,
    as_dicts,
    copies_found,
    extractor_name,
    interval_words,
    joined,
    metric_values,
    percent,
    plain,
)
from duetgan.reporting.run_files import Run
from duetgan.utils.text import duration, number

Tile = tuple[str, str]  # (value, meaning)
MetricTile = tuple[str, str, str]  # (value, meaning, its interval and other context in brackets)


def change(value: float) -> str:
    """Format a difference with its sign."""
    return ("-" if value < 0 else "+") + number(abs(value))


def headline(run: Run) -> list[MetricTile]:
    """Return the tiles at the top of the page: the main metrics, and a Frechet distance.

    The distance is that of the first extractor in the evaluation.
    """
    tiles = _tiles(run, ("headline",))
    for row in as_dicts(run.evaluation.get("distances"))[:1]:
        floor, n = plain(row.get("floor")), plain(row.get("n"))
        context = [f"between training and test images: {floor}; {n} images each"]
        context += interval_words(row.get("frechet_interval"), plain)
        meaning = f"Frechet distance between samples and real images, on features of {extractor_name(row)}"
        tiles.append((plain(row.get("frechet")), meaning, f" ({'; '.join(context)})"))
    return tiles


def results(run: Run) -> list[MetricTile]:
    """Return tiles of the evaluation's metrics, and of the search for copies."""
    return [*_tiles(run, ("headline", "tile")), *copies_found(run.evaluation)]


def _tiles(run: Run, places: tuple[str, ...]) -> list[MetricTile]:
    rows = [row for row in FIGURES if row.place in places]
    values = metric_values(run.evaluation, rows)
    return [(value, row.meaning, context) for row, value, context in values]


# --- training and data


def progress(run: Run) -> list[Tile]:
    """Return tiles of a training: its state, steps, time, speed and best checkpoint."""
    tiles: list[Tile] = []
    if run.status:
        reason = str(run.status.get("reason") or "state of the training")
        tiles.append((str(run.status.get("state", "-")), reason))
        tiles.append((plain(run.status.get("step")), "steps"))
    seconds = run.status.get("seconds")
    if isinstance(seconds, int | float) and math.isfinite(seconds):
        tiles.append((duration(seconds), "duration, including evaluations"))
    for key, form, meaning in (
        ("images_per_second", plain, "images per second (median)"),
        ("data_wait", percent, "of the time spent waiting for data (median)"),
    ):
        values = [y for _, y in run.series.get(key, []) if math.isfinite(y)]
        if values:
            tiles.append((form(statistics.median(values)), meaning))
    if "step" in run.best:
        metric = str(run.best.get("metric", "")).replace("_", " ")
        meaning = f"best checkpoint by evaluations during training: {metric} {plain(run.best.get('value'))}"
        tiles.append((f"step {plain(run.best['step'])}", meaning))
    return tiles


def data_tables(run: Run) -> list[Table]:
    """Return the report's tables about the data of a run; none if the run has no data entries.

    The first table has a row for each data set: training images, synthetic images, held-out images.
    If the run was continued with other training images, the second table lists all training images,
    each with the step from which they were used. If there are classes, the last table has the
    number of images of each class.
    """
    rows = []
    counts = {}
    for role in ("training", "synthetic", "held-out"):
        if data := as_dict(run.data.get(role)):
            row = [role, str(data.get("path", "-")), plain(data.get("count"))]
            row.append(
                f"{data.get('resolution') or '-'} px, {data.get('channels', '-')} channel(s)"
            )
            rows.append([*row, str(data.get("groups", "-"))])
            by_class = as_dict(data.get("by_class"))
            counts[role] = {name: plain(count) for name, count in by_class.items()}
    if not rows:
        return []
    header = ["data", "file", "images", "size", "groups of images kept together"]
    if all(row[-1] == "-" for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    tables: list[Table] = [(header, rows)]
    if history := as_dict(run.data.get("history")):
        tables.append((["from", "training images"], [[*map(str, row)] for row in history.items()]))
    by_class_table = joined(counts)
    return [*tables, by_class_table] if by_class_table[1] else tables
