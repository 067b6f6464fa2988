"""The figures of a report: what a run's evaluation, training and data are in words and numbers.

A tile is a value and what it is. What a run's files do not hold gives no tile; what is odd in them gives a dash.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reporting.charts import number
from reporting.run_files import Run

Figure = tuple[str, str]  # (value, what it is)
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # (header, rows)
Show = Callable[[object], str]


def percent(value: object) -> str:
    """A share as `12.3 %`; a dash for what is no number."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else "-"


def plain(value: object) -> str:
    """A short figure; a dash for what is no number."""
    return number(value) if isinstance(value, int | float) else "-"


def change(value: float) -> str:
    """A short figure with its sign."""
    return ("-" if value < 0 else "+") + number(abs(value))


def time_taken(seconds: float) -> str:
    """A time as `45 s`, `12 min 5 s` or `3 h 20 min`."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


RESULTS: dict[str, tuple[str, Show]] = {  # key of eval/metrics.json: what it is, how it is written
    "accuracy": ("of the test images predicted correctly", percent),
    "balanced_accuracy": ("balanced accuracy, the mean of the classes", percent),
    "top5_accuracy": ("top-5 accuracy", percent),
    "auroc": ("AUROC, the mean of the classes", plain),
    "average_precision": ("average precision, the mean of the classes", plain),
    "ece": ("expected calibration error", percent),
    "recognised": ("samples recognised as asked", percent),
    "clipped_density": ("fidelity (clipped density): samples where the features of real images are dense", percent),
    "clipped_coverage": ("coverage (clipped): of what real images are like, samples show", percent),
    "diversity_ratio": ("diversity of the least diverse class, 1: as real images", plain),
    "precision": ("precision: samples among real images", percent),
    "recall": ("recall: real images among samples", percent),
    "density": ("density, about 1: as real images", plain),
    "coverage": ("coverage: real images with a sample nearby", percent),
    "intra_class_frechet": ("Frechet distance within classes, on average", plain),
    "class_score": ("class score: classes that the judge tells apart", plain),
}
VIEWS = {"flip": "mean of 2 views", "shift": "mean of 6 views"}  # by evaluate.py's --tta
HEADLINE = ("accuracy", "recognised", "clipped_density", "clipped_coverage", "diversity_ratio")  # at the top of a page
BY_CLASS: dict[str, tuple[str, Show]] = {  # key of eval/metrics.json: column of the table of classes
    "recognised_by_class": ("recognised", percent),
    "diversity_by_class": ("diversity ratio", plain),
    "intra_class_frechet_by_class": ("Frechet distance", plain),
}
DISTANCES = {  # key of each of eval/metrics.json's `distances`: column of their table
    "frechet": "Frechet",
    "floor": "its floor (real against real)",
    "kernel": "kernel",
    "kernel_floor": "its floor",
    "n": "n",
}


def headline(run: Run) -> list[Figure]:
    """What a person asks first."""
    figures = results(run, HEADLINE)
    for row in _distances(run)[:1]:
        words = [f"real images: {plain(row.get('floor'))}, n {plain(row.get('n'))}"]
        words += _interval(row.get("frechet_interval"), plain)
        figures.append((plain(row.get("frechet")), f"Frechet distance on {_extractor(row)} ({'; '.join(words)})"))
    return figures


def results(run: Run, keys: Iterable[str] = RESULTS) -> list[Figure]:
    """Those of the named figures of the evaluation that are there, with how sure they are."""
    found = run.evaluation
    return [
        (show(found[key]), what + _evidence(found, key, show))
        for key, (what, show) in ((key, RESULTS[key]) for key in keys)
        if found.get(key) is not None and (key, type(found[key])) != ("precision", str)  # a classifier's says fp32
    ]


def _evidence(found: Mapping[str, Any], key: str, show: Show) -> str:
    """A figure's 95 % interval, how many views of an image it is of, and how good the classifier is that judged it."""
    words, judge = _interval(found.get(f"{key}_interval"), show), found.get("judge")
    if key == "accuracy" and str(found.get("tta")) in VIEWS:
        words.append(VIEWS[str(found["tta"])])
    if key == "recognised" and isinstance(judge, dict):
        words.append(f"the judge predicts {percent(judge.get('accuracy'))} of the real images correctly")
    if key == "class_score" and isinstance(judge, dict) and judge.get("class_score") is not None:
        words.append(f"real images: {plain(judge['class_score'])}")
    return f" ({'; '.join(words)})" if words else ""


def _interval(interval: object, show: Show) -> list[str]:
    """`95 % interval 12.3 to 14.5 %`, if there is one."""
    if not isinstance(interval, list) or len(interval) != 2:
        return []
    low, high = (show(bound) for bound in interval)
    return [f"95 % interval {low.removesuffix(' %')} to {high}"]


def memorisation(run: Run) -> list[Figure]:
    """What the search for copies found."""
    found = run.evaluation.get("memorisation")
    if not isinstance(found, dict):
        return []
    verdict = "copies training images" if found.get("copies") else "no sign of copies"
    near = f"{percent(found.get('share'))} of the samples unusually near to training images"
    text = f"{near}, {percent(found.get('expected'))} expected; p {plain(found.get('p_value'))}"
    return [(verdict, f"{text} ({found.get('extractor')}, {plain(found.get('searched'))} searched)")]


def evaluation_facts(run: Run) -> tuple[str, str]:
    """At which step the evaluation was and of what: it need not be the last one of the curves."""
    found = run.evaluation
    facts = [Path(str(found["checkpoint"])).name] if "checkpoint" in found else []
    facts += [f"{plain(found['n'])} images"] if "n" in found else []
    facts += [f"{name} {found[name]}" for name in ("data", "seed") if name in found]
    return f" at step {found['step']:,}" if isinstance(found.get("step"), int) else "", ", ".join(facts)


REMARKS = {"n": "number of images", "floor": "floor of the distances", "memorisation": "search for copies"}


def remarks(run: Run) -> list[tuple[str, str]]:
    """The evaluation's notes: what each is about, as the page calls it, and its words."""
    notes = run.evaluation.get("notes")
    names = {key: what.partition(":")[0].partition(" (")[0] for key, (what, _) in RESULTS.items()} | REMARKS
    found = notes.items() if isinstance(notes, dict) else ()
    return [(names.get(key, str(key).replace("_", " ")), str(words)) for key, words in found]


def tables(run: Run) -> list[Table]:
    """The evaluation's tables: of distances and of classes, as far as they have rows."""
    found = (_distance_table(run), _class_table(run), _robustness_table(run), _outlier_table(run))
    return [table for table in found if table[1]]


def _distances(run: Run) -> list[dict[str, Any]]:
    rows = run.evaluation.get("distances")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _extractor(row: Mapping[str, Any]) -> str:
    """An extractor's name; of a path its last part alone."""
    kind, _, path = str(row.get("extractor", "-")).partition(":")
    return kind if Path(path).name in ("", kind) else f"{kind} ({Path(path).name})"


def _distance_table(run: Run) -> Table:
    rows = [[_extractor(row), *(plain(row.get(key)) for key in DISTANCES)] for row in _distances(run)]
    return ["extractor", *DISTANCES.values()], rows


def _class_table(run: Run) -> Table:
    """A row per class: precision and recall, or recognised and diversity, whatever the evaluation holds."""
    columns: dict[str, dict[str, str]] = {}
    per_class = run.evaluation.get("per_class")
    for name, figures in per_class.items() if isinstance(per_class, dict) else ():
        for key, value in figures.items() if isinstance(figures, dict) else ():
            columns.setdefault(key, {})[name] = plain(value) if key == "support" else percent(value)
    for key, (title, show) in BY_CLASS.items():
        by_class = run.evaluation.get(key)
        if isinstance(by_class, dict):
            columns[title] = {label: show(value) for label, value in by_class.items()}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return ["class", *columns], [[name, *(column.get(name, "-") for column in columns.values())] for name in names]


def _robustness_table(run: Run) -> Table:
    """Accuracy under each corruption, weakest first."""
    found = run.evaluation.get("robustness")
    corruptions = found.get("corruptions") if isinstance(found, dict) else None
    rows = []
    for name, row in corruptions.items() if isinstance(corruptions, dict) else ():
        strengths = row.get("strengths") if isinstance(row, dict) else None
        there = strengths if isinstance(strengths, list) else []
        shares = [each.get("accuracy") for each in there if isinstance(each, dict)]
        rows.append([name, percent(run.evaluation.get("accuracy")), *map(percent, shares)])
    most = max(map(len, rows), default=2)
    rows = [row + ["-"] * (most - len(row)) for row in rows]
    return ["accuracy under", "none", *(f"strength {place}" for place in range(1, most - 1))], rows


def _outlier_table(run: Run) -> Table:
    """How well images of another file are told from the test images."""
    given = run.evaluation.get("ood")
    found = given if isinstance(given, dict) else {}
    names = {"max_probability": "largest probability", "energy": "energy"}
    rows = []
    for key, name in names.items():
        row = found.get(key)
        if isinstance(row, dict):
            ends = row.get("auroc_interval")
            interval = " to ".join(map(plain, ends)) if isinstance(ends, list) else "-"
            rows.append([name, plain(row.get("auroc")), interval, percent(row.get("fpr95"))])
    told_by = f"outliers ({Path(str(found.get('data'))).name}) told by"
    return [told_by, "AUROC", "95 % interval", "missed while 95 % pass"], rows


# --- training and data


def progress(run: Run) -> list[Figure]:
    """How far a run has come, how long that took and how fast it went."""
    figures = []
    if run.status:
        figures.append((str(run.status.get("state", "-")), str(run.status.get("reason") or "state of the training")))
    step = run.status.get("step", run.records[-1]["step"] if run.records else None)
    if step is not None:
        figures.append((plain(step), "steps"))
    seen = [record["images"] for record in run.records if "images" in record]
    if seen:
        figures.append((plain(seen[-1]), "images seen"))
    seconds = run.status.get("seconds")
    if isinstance(seconds, int | float) and math.isfinite(seconds):
        figures.append((time_taken(seconds), "time taken, with evaluations"))
    speeds = [y for _, y in run.series.get("images_per_second", [])]
    if speeds:
        figures.append((plain(statistics.median(speeds)), "images a second (median)"))
    waits = [y for _, y in run.series.get("data_wait", []) if math.isfinite(y)]
    if waits:
        figures.append((percent(statistics.median(waits)), "of the time spent waiting for data (median)"))
    if "step" in run.best:
        metric = str(run.best.get("metric", "")).replace("_", " ")
        figures.append((f"step {plain(run.best['step'])}", f"best checkpoint: {metric} {plain(run.best.get('value'))}"))
    if "step" in run.last:
        figures.append((f"step {plain(run.last['step'])}", "last checkpoint"))
    return figures


def data_tables(run: Run) -> list[Table]:
    """The images that the run was trained on and those held out, and how many of each class they have."""
    roles = ("training", "synthetic", "held-out")
    sets = {role: run.data[role] for role in roles if isinstance(run.data.get(role), dict)}
    if not sets:
        return []
    facts = {
        "file": lambda data: str(data.get("path", "-")),
        "images": lambda data: plain(data.get("count")),
        "size": lambda data: f"{data.get('resolution') or '-'} px, {data.get('channels', '-')} channel(s)",
        "content": lambda data: str(data.get("content_hash", "-"))[:12],
    }
    rows = [[name, *(show(data) for data in sets.values())] for name, show in facts.items()]
    counts = {role: data["by_class"] for role, data in sets.items() if isinstance(data.get("by_class"), dict)}
    names = dict.fromkeys(name for count in counts.values() for name in count)
    classes = [[name, *(plain(counts.get(role, {}).get(name)) for role in sets)] for name in names]
    found: list[Table] = [(["data", *sets], rows)]
    return [*found, (["class", *sets], classes)] if classes else found
