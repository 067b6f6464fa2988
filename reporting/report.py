"""Self-contained HTML reports from a run folder's files: curves, samples, evaluation, commands and versions.

One file, no scripts, nothing loaded from elsewhere; whatever a run has not written yet is left out with a word.
"""

import html
import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reporting.charts import line_chart, number
from reporting.page import Figure, image, missing, percent, plain, table, tiles
from reporting.run_files import Run, read_run
from utils.files import write_atomic
from utils.provenance import environment

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
CHARTS = {  # in whose chart a key of metrics.jsonl is drawn, where the rules of _chart_of do not say
    "loss/generator": "adversarial losses",
    "loss/discriminator": "adversarial losses",
    "loss/classifier": "loss",
    "logits/real_sign": "augmentation: strength p and mean sign of D(real)",
    "ada/p": "augmentation: strength p and mean sign of D(real)",
    "path_length/mean": "path length: moving mean",
}
SHOWN_AT_ONCE = ("loss", "logits", "ada", "accuracy", "val", "train")  # first parts of keys; other charts are folded
MOST_SAMPLES = 12  # grids shown of the samples over time


RESULTS: dict[str, tuple[str, Callable[[object], str]]] = {  # key of eval/metrics.json: name, format
    "accuracy": ("of the test images named right", percent),
    "top5_accuracy": ("top-5 accuracy", percent),
    "ece": ("expected calibration error", percent),
    "recognised": ("samples recognised as asked", percent),
    "diversity_ratio": ("diversity ratio of the least diverse class", plain),
}


def write_report(run_dir: str | Path, *, commands: Sequence[str] = ()) -> Path:
    """Write `run_dir/report.html` for one run and return its path.

    It shows how to train it again, the command of the last evaluation, and `commands` as they are.
    """
    run = read_run(run_dir)
    title = f"{'GAN' if run.is_gan else 'Classifier'} run {run.folder.resolve().name}"
    commands = list(dict.fromkeys([*_commands(run), *commands]))  # each once, in this order
    return _write(run.folder / "report.html", title, [tiles(_figures(run)), _run_body(run)], [run], commands)


def _commands(run: Run) -> list[str]:
    """The commands that train a run once more from its own config, and that evaluated it."""
    config, evaluation = run.folder / "config.yaml", run.folder / "eval" / "command.txt"
    train = ["python", "train.py", "--config", str(config), "--run-dir", f"{run.folder}-again"]
    commands = [shlex.join(train)] if config.is_file() else []
    if evaluation.is_file():
        commands += evaluation.read_text(errors="replace").strip().splitlines()
    return commands


def write_quickstart_report(
    folder: str | Path,  # the quickstart's folder, with the runs `gan` and `classifier` inside
    *,
    commands: Sequence[str] = (),  # every command that was run, in order
    seconds: float | None = None,  # what the commands took together
) -> Path:
    """Write `folder/report.html` with both runs of the quickstart in one page and return its path."""
    folder = Path(folder)
    gan, classifier = read_run(folder / "gan"), read_run(folder / "classifier")
    headline = _headline(gan, classifier, seconds)
    parts = [tiles(headline)]
    for title, run in (("What the GAN draws", gan), ("What the classifier gets right", classifier)):
        parts += [f"<h2>{title}</h2>", tiles(_figures(run)), _run_body(run)]
    return _write(folder / "report.html", "Duet quickstart", parts, [gan, classifier], commands)


def _write(path: Path, title: str, parts: Iterable[str], runs: Sequence[Run], commands: Sequence[str]) -> Path:
    css = (Path(__file__).parent / "report.css").read_text()
    notes = [missing(f"{run.folder.name}: {note}") for run in runs for note in run.notes]
    body = "\n".join([*parts, *notes, _reproduce(commands), *(_config(run) for run in runs)])
    document = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>\n{css}</style></head>\n'
        f"<body><main><h1>{html.escape(title)}</h1>\n{body}\n</main></body></html>\n"
    )
    write_atomic(path, document.encode())
    return path


def _figures(run: Run) -> list[Figure]:
    """How far a run has come and how fast it went."""
    figures = []
    if run.status:
        figures.append((str(run.status.get("state", "-")), str(run.status.get("reason") or "state of the training")))
    step = run.status.get("step", run.records[-1]["step"] if run.records else None)
    if step is not None:
        figures.append((plain(step), "steps"))
    seen = [record["images"] for record in run.records if "images" in record]
    if seen:
        figures.append((plain(seen[-1]), "images seen"))
    speeds = [y for _, y in run.series.get("images_per_second", [])]
    if speeds:
        figures.append((plain(statistics.median(speeds)), "images a second (median)"))
    if "step" in run.last:
        figures.append((f"step {plain(run.last['step'])}", "last checkpoint"))
    return figures


def _results(run: Run, keys: Iterable[str] = RESULTS) -> list[Figure]:
    """Those of the named figures of the evaluation that are there."""
    figures = []
    for key in keys:
        name, show = RESULTS[key]
        if run.evaluation.get(key) is not None:
            figures.append((show(run.evaluation[key]), name))
    return figures


def _distances(run: Run) -> list[dict[str, Any]]:
    rows = run.evaluation.get("distances")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _headline(gan: Run, classifier: Run, seconds: float | None) -> list[Figure]:
    figures = _results(classifier, ["accuracy"]) + _results(gan, ["recognised", "diversity_ratio"])
    for row in _distances(gan)[:1]:
        floor = f"floor {plain(row.get('floor'))}, n {plain(row.get('n'))}"
        figures.append((plain(row.get("frechet")), f"Frechet distance on {row.get('extractor')} ({floor})"))
    if seconds is not None:
        figures.append((f"{int(seconds // 60)} min {int(seconds % 60)} s", "all steps together"))
    return figures


def _run_body(run: Run) -> str:
    return "\n".join([_curves(run), _samples(run) if run.is_gan else "", _evaluation(run)])


def _chart_of(key: str) -> str:
    """The title of a key's chart: `val/accuracy` and `accuracy/train` share one, all `logits/...` another."""
    first, _, rest = key.partition("/")
    if key in CHARTS:
        return CHARTS[key]
    if key.startswith("val/logits/"):
        return "logits at evaluations"
    if key.startswith("val/memorised"):
        return "memorisation"
    if rest and first in ("val", "train"):
        return rest.replace("_", " ")
    return (f"{rest} loss" if first == "loss" else first).replace("_", " ")


def _charts(groups: Mapping[str, list[str]], series: Mapping[str, list[tuple[float, float]]]) -> str:
    """A grid of charts: title -> the keys drawn in it."""
    charts = []
    for title, keys in groups.items():
        if any(math.isfinite(y) for key in keys for _, y in series[key]):
            charts.append(line_chart({key: series[key] for key in keys}, title=title))
        else:
            charts.append(missing(f"{', '.join(keys)}: not one finite value."))
    return f'<div class="charts">{"".join(charts)}</div>'


def _curves(run: Run) -> str:
    series = run.series
    if not series:
        return "<h3>Curves</h3>" + missing("No metrics.jsonl with figures yet.")
    groups: dict[str, list[str]] = {}
    for key in series:
        groups.setdefault(_chart_of(key), []).append(key)
    # by charts, not by keys: a chart that is shown at once keeps all its curves
    first = {t: keys for t, keys in groups.items() if any(key.split("/")[0] in SHOWN_AT_ONCE for key in keys)}
    rest = {title: keys for title, keys in groups.items() if title not in first}
    shown = _charts(first or rest, series)
    more = f"<details><summary>More curves</summary>{_charts(rest, series)}</details>" if first and rest else ""
    return f"<h3>Curves</h3>{shown}{more}"


def _samples(run: Run) -> str:
    if not run.samples:
        return "<h3>Samples</h3>" + missing("No sample grids yet.")
    last = len(run.samples) - 1
    count = min(MOST_SAMPLES, last + 1)
    picked = [run.samples[round(i * last / max(1, count - 1))] for i in range(count)]
    captions = [f"step {number(int(path.stem.removeprefix('step-')))}" for path in picked]
    strip = "".join(image(path, caption) for path, caption in zip(picked, captions, strict=True))
    newest = image(picked[-1], f"{captions[-1]}, the newest", large=True)
    over_time = f'<h3>Samples over time</h3><div class="strip samples">{strip}</div>' if count > 1 else ""
    return f'<h3>Samples</h3><div class="samples">{newest}</div>{over_time}'


def _evaluation(run: Run) -> str:
    if not run.evaluation:
        return "<h3>Evaluation</h3>" + missing("Not evaluated yet: eval/metrics.json is missing.")
    parts = [
        _evaluation_heading(run),
        tiles(_results(run) + _memorisation(run)),
        _distance_table(run),
        _class_table(run),
    ]
    notes = run.evaluation.get("notes")
    if isinstance(notes, dict):
        parts += [missing(f"{key}: {text}") for key, text in notes.items()]
    images = [image(path, path.stem.replace("_", " ")) for path in run.images]
    parts.append(f'<div class="images">{"".join(images)}</div>' if images else missing("No images in eval/."))
    return "".join(parts)


def _evaluation_heading(run: Run) -> str:
    """Which checkpoint was evaluated on what: it need not be the last one of the curves above."""
    found = run.evaluation
    step = f" at step {found['step']:,}" if isinstance(found.get("step"), int) else ""
    facts = [f"{Path(str(found['checkpoint'])).name}"] if "checkpoint" in found else []
    facts += [f"{plain(found['n'])} images"] if "n" in found else []
    facts += [f"{name} {found[name]}" for name in ("data", "seed") if name in found]
    told = f'<p class="soft">{html.escape(", ".join(facts))}</p>' if facts else ""
    return f"<h3>Evaluation{step}</h3>{told}"


def _memorisation(run: Run) -> list[Figure]:
    found = run.evaluation.get("memorisation")
    if not isinstance(found, dict):
        return []
    verdict = "copies training images" if found.get("copies") else "no sign of copies"
    near = f"{percent(found.get('share'))} of the samples unusually near to training images"
    text = f"{near}, {percent(found.get('expected'))} expected; p {plain(found.get('p_value'))}"
    return [(verdict, f"{text} ({found.get('extractor')}, {plain(found.get('searched'))} searched)")]


def _distance_table(run: Run) -> str:
    keys = ("extractor", "frechet", "floor", "kernel", "kernel_floor", "n")
    header = ("extractor", "Frechet", "its floor (real against real)", "kernel", "its floor", "images a side")
    rows = [[str(row.get("extractor", "-")), *(plain(row.get(key)) for key in keys[1:])] for row in _distances(run)]
    return table(header, rows) if rows else ""


def _class_table(run: Run) -> str:
    """A row a class: precision and recall, or recognised and diversity, whatever the evaluation holds."""
    columns: dict[str, dict[str, str]] = {}
    per_class = run.evaluation.get("per_class")
    for name, figures in per_class.items() if isinstance(per_class, dict) else ():
        for key, value in figures.items() if isinstance(figures, dict) else ():
            columns.setdefault(key, {})[name] = plain(value) if key == "support" else percent(value)
    for key, name, show in (
        ("recognised_by_class", "recognised", percent),
        ("diversity_by_class", "diversity ratio", plain),
    ):
        by_class = run.evaluation.get(key)
        if isinstance(by_class, dict):
            columns[name] = {label: show(value) for label, value in by_class.items()}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [[name, *(column.get(name, "-") for column in columns.values())] for name in names]
    return table(["class", *columns], rows) if rows else ""


def _reproduce(commands: Sequence[str]) -> str:
    versions = table(("what", "version"), environment().items())
    unknown = missing("The commands were not recorded.")
    lines = f"<pre>{html.escape(chr(10).join(commands))}</pre>" if commands else unknown
    return f"<h2>How this was made</h2><h3>Commands</h3>{lines}<h3>Versions and machine</h3>{versions}"


def _config(run: Run) -> str:
    if not run.config:
        return missing(f"{run.folder.name}: no config.yaml.")
    summary = html.escape(f"Resolved configuration: {run.folder.resolve().name}")
    return f'<details><summary>{summary}</summary><pre class="wrap">{html.escape(run.config)}</pre></details>'
