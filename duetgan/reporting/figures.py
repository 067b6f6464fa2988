"""The figures of a report: what a run's evaluation, training and data are in words and numbers.

A tile is a value and what it is. What a run's files do not hold gives no tile; what is odd in them
gives a dash.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from duetgan.metrics.figures import FIGURES
from duetgan.metrics.figures import Figure as Row
from duetgan.metrics.tables import accuracy_under, as_dict, as_dicts
from duetgan.reporting.pictures import number
from duetgan.reporting.run_files import Run
from duetgan.utils.text import duration

Figure = tuple[str, str]  # (value, what it is)
Result = tuple[str, str, str]  # an evaluation's: how sure it is, too
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # (header, rows)
Show = Callable[[object], str]


def percent(value: object) -> str:
    """A share as `12.3 %`; a dash for what is no number."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else "-"


def plain(value: object) -> str:
    """A short figure; a dash for what is no number."""
    return number(value) if isinstance(value, int | float) else "-"


def change(value: float) -> str:
    return ("-" if value < 0 else "+") + number(abs(value))


VIEWS = {"flip": "mean of 2 views", "shift": "mean of 6 views"}  # by evaluate.py's --tta
TILES = [row for row in FIGURES if row.place in ("headline", "tile")]
COLUMNS = [row for row in FIGURES if row.place == "column"]  # of the table of distances
REMARKS = {row.key: row.title for row in FIGURES} | {
    "n": "number of images",
    "floor": "floor of the distances",
    "memorisation": "search for copies",
}


def writer(row: Row) -> Show:
    return percent if row.unit == "share" else plain


def headline(run: Run) -> list[Result]:
    figures = results(run, [row for row in TILES if row.place == "headline"])
    for row in as_dicts(run.evaluation.get("distances"))[:1]:
        words = [f"real images: {plain(row.get('floor'))}, n {plain(row.get('n'))}"]
        words += _interval(row.get("frechet_interval"), plain)
        figures.append(
            (
                plain(row.get("frechet")),
                f"Frechet distance on {_extractor(row)}",
                f" ({'; '.join(words)})",
            )
        )
    return figures


def results(run: Run, rows: Sequence[Row] = ()) -> list[Result]:
    """Those of the rows' figures (none: of all tiles) that the evaluation has, with how sure they
    are.
    """
    document = run.evaluation
    return [
        (writer(row)(document[row.key]), row.meaning, _sureness(document, row))
        for row in rows or TILES
        if document.get(row.key) is not None
        and (row.key, type(document[row.key])) != ("precision", str)
    ]


def _sureness(document: Mapping[str, Any], row: Row) -> str:
    """A figure's 95 % interval, how many views of an image it is of, and how good the classifier is
    that judged it.
    """
    words, judge = (
        _interval(document.get(f"{row.key}_interval"), writer(row)),
        as_dict(document.get("judge")),
    )
    if row.key == "accuracy" and str(document.get("tta")) in VIEWS:
        words.append(VIEWS[str(document["tta"])])
    if row.key == "accuracy" and "majority_class_rate" in document:
        words.append(f"the most frequent class: {percent(document['majority_class_rate'])}")
    if row.key == "recognised" and judge:
        real = f"the judge predicts {percent(judge.get('accuracy'))} of the real images at the samples' size correctly"
        majority = (
            f", the most frequent class is {percent(judge.get('majority_class_rate'))} of them"
        )
        words.append(real + majority * ("majority_class_rate" in judge))
    if row.key == "class_score" and judge.get("class_score") is not None:
        words.append(f"real images: {plain(judge['class_score'])}")
    return f" ({'; '.join(words)})" if words else ""


def _interval(interval: object, show: Show) -> list[str]:
    """`95 % interval 12.3 to 14.5 %`, if there is one."""
    if not isinstance(interval, list) or len(interval) != 2:
        return []
    low, high = (show(bound) for bound in interval)
    return [f"95 % interval {low.removesuffix(' %')} to {high}"]


def memorisation(run: Run) -> list[Figure]:
    copies = as_dict(run.evaluation.get("memorisation"))
    if not copies:
        return []
    verdict = "copies training images" if copies.get("copies") else "no sign of copies"
    near = f"{percent(copies.get('share'))} of the samples unusually near to training images"
    text = f"{near}, {percent(copies.get('expected'))} expected; p {plain(copies.get('p_value'))}"
    return [
        (verdict, f"{text} ({copies.get('extractor')}, {plain(copies.get('searched'))} searched)")
    ]


def evaluation_facts(run: Run) -> tuple[str, str]:
    """At which step the evaluation was and of what: it need not be the last one of the curves."""
    document = run.evaluation
    facts = [Path(str(document["checkpoint"])).name] if "checkpoint" in document else []
    facts += [f"{plain(document['n'])} images"] if "n" in document else []
    facts += [f"{name} {document[name]}" for name in ("data", "seed") if name in document]
    return f" at step {document['step']:,}" if isinstance(
        document.get("step"), int
    ) else "", ", ".join(facts)


def remarks(run: Run) -> list[tuple[str, str]]:
    """The evaluation's notes: what each is about, as the page calls it, and its words."""
    notes = as_dict(run.evaluation.get("notes")).items()
    return [(REMARKS.get(key, str(key).replace("_", " ")), str(words)) for key, words in notes]


def tables(run: Run) -> list[Table]:
    """The evaluation's tables: of distances and of classes, as far as they have rows."""
    document = run.evaluation
    keys, titles = [*(row.key for row in COLUMNS), "n"], [*(row.title for row in COLUMNS), "n"]
    each = as_dicts(document.get("distances"))
    distances = [[_extractor(row), *(plain(row.get(key)) for key in keys)] for row in each]
    of_distances: Table = ["extractor", *titles], distances
    head, *spoiled = accuracy_under(document, percent)
    there = (of_distances, _class_table(document), (head, spoiled), _outlier_table(document))
    return [table for table in there if table[1]]


def _extractor(row: Mapping[str, Any]) -> str:
    """An extractor's name; of a path its last part alone."""
    kind, _, path = str(row.get("extractor", "-")).partition(":")
    return kind if Path(path).name in ("", kind) else f"{kind} ({Path(path).name})"


def _class_table(document: Mapping[str, Any]) -> Table:
    """A row per class: precision and recall, or recognised and diversity, whatever the evaluation
    holds.
    """
    columns: dict[str, dict[str, str]] = {}
    shows = {row.key: writer(row) for row in FIGURES} | {"support": plain}
    for name, figures in as_dict(document.get("per_class")).items():
        for key, value in as_dict(figures).items():
            columns.setdefault(key, {})[name] = shows.get(key, percent)(value)
    for row in FIGURES:
        if by_class := as_dict(document.get(row.by_class)):
            columns[row.title] = {label: writer(row)(value) for label, value in by_class.items()}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return ["class", *columns], [
        [name, *(column.get(name, "-") for column in columns.values())] for name in names
    ]


def _outlier_table(document: Mapping[str, Any]) -> Table:
    """How well images of another file are told from the test images."""
    outliers, rows = as_dict(document.get("ood")), []
    for key, name in (("max_probability", "largest probability"), ("energy", "energy")):
        if row := as_dict(outliers.get(key)):
            ends = row.get("auroc_interval")
            interval = " to ".join(map(plain, ends)) if isinstance(ends, list) else "-"
            rows.append([name, plain(row.get("auroc")), interval, percent(row.get("fpr95"))])
    told_by = f"outliers ({Path(str(outliers.get('data'))).name}) told by"
    return [told_by, "AUROC", "95 % interval", "missed while 95 % pass"], rows


# --- training and data


def progress(run: Run) -> list[Figure]:
    """How far a run has come, how long that took and how fast it went."""

    def middle(key: str) -> float | None:
        values = [y for _, y in run.series.get(key, []) if math.isfinite(y)]
        return statistics.median(values) if values else None

    seen = [record["images"] for record in run.records if "images" in record]
    seconds, speed, wait = (
        run.status.get("seconds"),
        middle("images_per_second"),
        middle("data_wait"),
    )
    taken = duration(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else ""
    step = run.status.get("step", run.records[-1]["step"] if run.records else None)
    best = f"{str(run.best.get('metric', '')).replace('_', ' ')} {plain(run.best.get('value'))}"
    figures = [
        (
            run.status and str(run.status.get("state", "-")),
            str(run.status.get("reason") or "state of the training"),
        ),
        (step is not None and plain(step), "steps"),
        (seen and plain(seen[-1]), "images seen"),
        (taken, "time taken, with evaluations"),
        (speed is not None and plain(speed), "images a second (median)"),
        (wait is not None and percent(wait), "of the time spent waiting for data (median)"),
        ("step" in run.best and f"step {plain(run.best['step'])}", f"best checkpoint: {best}"),
        ("step" in run.last and f"step {plain(run.last['step'])}", "last checkpoint"),
    ]
    return [(str(value), what) for value, what in figures if value]


def data_tables(run: Run) -> list[Table]:
    """The images that the run was trained on and those held out, and how many of each class they
    have.
    """
    roles = ("training", "synthetic", "held-out")
    sets = {role: run.data[role] for role in roles if isinstance(run.data.get(role), dict)}
    if not sets:
        return []
    facts = {
        "file": lambda data: str(data.get("path", "-")),
        "images": lambda data: plain(data.get("count")),
        "size": lambda data: (
            f"{data.get('resolution') or '-'} px, {data.get('channels', '-')} channel(s)"
        ),
        "content": lambda data: str(data.get("content_hash", "-"))[:12],
    }
    rows = [[name, *(show(data) for data in sets.values())] for name, show in facts.items()]
    counts = {
        role: data["by_class"]
        for role, data in sets.items()
        if isinstance(data.get("by_class"), dict)
    }
    names = dict.fromkeys(name for count in counts.values() for name in count)
    classes = [[name, *(plain(counts.get(role, {}).get(name)) for role in sets)] for name in names]
    tables: list[Table] = [(["data", *sets], rows)]
    return [*tables, (["class", *sets], classes)] if classes else tables
