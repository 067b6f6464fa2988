"""The numbers of a report: tiles and tables of a run's evaluation, training and data.

A tile is a value with its meaning. There is no tile for a value that is missing from the run's
files; a value of an unexpected type is shown as a dash.
"""

import math
import statistics
from pathlib import Path

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
    """Return the tiles at the top of the page: the main metrics and the first Frechet distance."""
    tiles = _tiles(run, ("headline",))
    for row in as_dicts(run.evaluation.get("distances"))[:1]:
        context = [f"between real images: {plain(row.get('floor'))}, n {plain(row.get('n'))}"]
        context += interval_words(row.get("frechet_interval"), plain)
        meaning = f"Frechet distance on {extractor_name(row)}"
        tiles.append((plain(row.get("frechet")), meaning, f" ({'; '.join(context)})"))
    return tiles


def results(run: Run) -> list[MetricTile]:
    """Return tiles of the evaluation's metrics, and of the search for copies."""
    return [*_tiles(run, ("headline", "tile")), *copies_found(run.evaluation)]


def _tiles(run: Run, places: tuple[str, ...]) -> list[MetricTile]:
    rows = [row for row in FIGURES if row.place in places]
    values = metric_values(run.evaluation, rows)
    return [(value, row.meaning, context) for row, value, context in values]


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
    titles = {row.key: row.title for row in FIGURES}
    titles |= {"n": "number of images", "floor": "floor of the distances"}
    notes = as_dict(run.evaluation.get("notes")).items()
    return [(titles.get(key, str(key).replace("_", " ")), str(text)) for key, text in notes]


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
    if any("groups" in data for data in datasets.values()):
        rows.append(["groups", *(str(data.get("groups", "-")) for data in datasets.values())])
    for data in datasets.values():
        size = f"{data.get('resolution') or '-'} px, {data.get('channels', '-')} channel(s)"
        rows[0].append(str(data.get("path", "-")))
        rows[1].append(plain(data.get("count")))
        rows[2].append(size)
        rows[3].append(str(data.get("content_hash", "-"))[:12])
    tables: list[Table] = [(["data", *datasets], rows)]
    if history := as_dict(run.data.get("history")):
        tables.append((["from", "training images"], [[*map(str, row)] for row in history.items()]))
    counts = {}
    for role, data in datasets.items():
        by_class = as_dict(data.get("by_class"))
        counts[role] = {name: plain(count) for name, count in by_class.items()}
    by_class_table = joined(counts)
    return [*tables, by_class_table] if by_class_table[1] else tables
