"""Self-contained HTML reports from a run folder's files: evaluation, samples, curves, commands and versions.

One file, no scripts, nothing loaded from elsewhere; whatever a run has not written yet is left out with a word.
"""

import base64
import io
import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from PIL import Image

from reporting.charts import Chart, line_chart, number
from reporting.run_files import Run, read_run
from utils.files import write_atomic
from utils.provenance import environment

MOST_SAMPLES = 12  # grids shown of the samples over time
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises for bad images
EMBED_WHOLE = 300_000  # bytes; larger images are shrunk before they are embedded
LARGEST_SIDE = 1400  # pixels of a shrunk image

# --- what the figures are called; a curve whose key is not named here is shown under the first part of it

CHARTS = {  # pattern of keys of metrics.jsonl: the chart that they share; the first that fits counts
    "loss/generator": "adversarial losses",
    "loss/discriminator": "adversarial losses",
    "loss/classifier": "loss",
    "logits/real_sign": "augmentation: strength p and mean sign of D(real)",
    "ada/p": "augmentation: strength p and mean sign of D(real)",
    "path_length/mean": "path length: moving mean",
    "val/logits/*": "logits at evaluations",
    "val/memorised*": "memorisation",
}
SHOWN_AT_ONCE = ("loss", "logits", "ada", "accuracy", "val", "train")  # first parts of keys; other charts are folded


def chart_of(key: str) -> str:
    """The title of a key's chart: `val/accuracy` and `accuracy/train` share one, all `logits/...` another."""
    title = next((title for pattern, title in CHARTS.items() if fnmatchcase(key, pattern)), None)
    first, _, rest = key.partition("/")
    if title is None and rest and first in ("val", "train"):
        title = rest
    if title is None:
        title = f"{rest} loss" if first == "loss" else first
    return title.replace("_", " ")


def percent(value: object) -> str:
    """A share as `12.3 %`; a dash for what is no number."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else "-"


def plain(value: object) -> str:
    """A short figure; a dash for what is no number."""
    return number(value) if isinstance(value, int | float) else "-"


Show = Callable[[object], str]
RESULTS: dict[str, tuple[str, Show]] = {  # key of eval/metrics.json: what it is, how it is written
    "accuracy": ("of the test images predicted correctly", percent),
    "top5_accuracy": ("top-5 accuracy", percent),
    "ece": ("expected calibration error", percent),
    "recognised": ("samples recognised as asked", percent),
    "diversity_ratio": ("diversity ratio of the least diverse class", plain),
}
HEADLINE = ("accuracy", "recognised", "diversity_ratio")  # of RESULTS, at the top of a page of several runs
BY_CLASS: dict[str, tuple[str, Show]] = {  # key of eval/metrics.json: column of the table of classes
    "recognised_by_class": ("recognised", percent),
    "diversity_by_class": ("diversity ratio", plain),
}
DISTANCES = {  # key of each of eval/metrics.json's `distances`: column of their table
    "frechet": "Frechet",
    "floor": "its floor (real against real)",
    "kernel": "kernel",
    "kernel_floor": "its floor",
    "n": "images a side",
}


# --- the page

Figure = tuple[str, str]  # (value, what it is)
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # (header, rows)


def write_report(run_dir: str | Path) -> Path:
    """Write `run_dir/report.html` for one run, with the commands to train it again and of the last evaluation; returns
    its path.
    """
    run = read_run(run_dir)
    title = f"Run {run.folder.resolve().name}" + (f" ({run.task})" if run.task else "")
    return _write(run.folder / "report.html", title, {"": run}, _commands(run))


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
    titles = {"gan": "What the GAN draws", "classifier": "What the classifier gets right"}
    runs = {title: read_run(Path(folder) / name) for name, title in titles.items()}
    headline = [figure for run in runs.values() for figure in _headline(run)]
    if seconds is not None:
        headline.append((f"{int(seconds // 60)} min {int(seconds % 60)} s", "all steps together"))
    return _write(Path(folder) / "report.html", "Duet quickstart", runs, commands, headline)


def _headline(run: Run) -> list[Figure]:
    figures = _results(run, HEADLINE)
    for row in _distances(run)[:1]:
        floor = f"floor {plain(row.get('floor'))}, n {plain(row.get('n'))}"
        figures.append((plain(row.get("frechet")), f"Frechet distance on {row.get('extractor')} ({floor})"))
    return figures


def _write(
    path: Path, title: str, runs: Mapping[str, Run], commands: Sequence[str], headline: Sequence[Figure] = ()
) -> Path:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not at the start of a training

    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = page.get_template("report.html.j2").render(
        title=title,
        headline=headline,
        runs={heading: _view(run) for heading, run in runs.items()},
        commands=commands,
        versions=environment(),
    )
    write_atomic(path, text.encode(errors="replace"))
    return path


def _view(run: Run) -> dict[str, Any]:
    """Everything that the page shows of a run."""
    notes = run.evaluation.get("notes")
    return {
        "name": run.folder.resolve().name,
        "config": run.config,
        "notes": run.notes,
        "progress": _progress(run),
        "evaluation": _evaluation_facts(run) if run.evaluation else None,
        "results": _results(run) + _memorisation(run),
        "tables": [table for table in (_distance_table(run), _class_table(run)) if table[1]],
        "remarks": notes.items() if isinstance(notes, dict) else (),
        "images": [_image(path, path.stem.replace("_", " ")) for path in run.images],
        "samples": _samples(run),
        "charts": _charts(run),
    }


def _progress(run: Run) -> list[Figure]:
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


# --- evaluation


def _evaluation_facts(run: Run) -> tuple[str, str]:
    """At which step it was and of what: it need not be the last one of the curves."""
    found = run.evaluation
    facts = [Path(str(found["checkpoint"])).name] if "checkpoint" in found else []
    facts += [f"{plain(found['n'])} images"] if "n" in found else []
    facts += [f"{name} {found[name]}" for name in ("data", "seed") if name in found]
    return f" at step {found['step']:,}" if isinstance(found.get("step"), int) else "", ", ".join(facts)


def _results(run: Run, keys: Iterable[str] = RESULTS) -> list[Figure]:
    """Those of the named figures of the evaluation that are there."""
    found = run.evaluation
    return [(RESULTS[key][1](found[key]), RESULTS[key][0]) for key in keys if found.get(key) is not None]


def _memorisation(run: Run) -> list[Figure]:
    found = run.evaluation.get("memorisation")
    if not isinstance(found, dict):
        return []
    verdict = "copies training images" if found.get("copies") else "no sign of copies"
    near = f"{percent(found.get('share'))} of the samples unusually near to training images"
    text = f"{near}, {percent(found.get('expected'))} expected; p {plain(found.get('p_value'))}"
    return [(verdict, f"{text} ({found.get('extractor')}, {plain(found.get('searched'))} searched)")]


def _distances(run: Run) -> list[dict[str, Any]]:
    rows = run.evaluation.get("distances")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _distance_table(run: Run) -> Table:
    rows = [[str(row.get("extractor", "-")), *(plain(row.get(key)) for key in DISTANCES)] for row in _distances(run)]
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


# --- images and curves


def _image(path: Path, caption: str) -> dict[str, str]:
    """The caption and the address of an image inside the page; what is wrong with one that cannot be read."""
    try:
        return {"caption": caption, "address": _data_address(path)}
    except UNREADABLE as error:
        return {"caption": f"{path.name} cannot be shown: {error}", "address": ""}


def _data_address(path: Path) -> str:
    """The `data:` address of a checked image; a large one is shrunk and stored as JPEG. Raises UNREADABLE."""
    content = path.read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        kind = "png" if image.format == "PNG" else "jpeg"
        if len(content) > EMBED_WHOLE or image.format not in ("PNG", "JPEG"):
            small = image.convert("RGB")
            small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            buffer = io.BytesIO()
            small.save(buffer, format="JPEG", quality=88)
            content, kind = buffer.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _samples(run: Run) -> list[dict[str, str]]:
    """At most MOST_SAMPLES of the grids, evenly chosen, the newest last."""
    last = len(run.samples) - 1
    count = min(MOST_SAMPLES, last + 1)
    picked = [run.samples[round(i * last / max(1, count - 1))] for i in range(count)]
    return [_image(path, f"step {number(int(path.stem.removeprefix('step-')))}") for path in picked]


def _charts(run: Run) -> tuple[list[Chart | str], list[Chart | str]]:
    """The charts that are shown at once and the others; words in the place of curves that cannot be drawn."""
    series = run.series
    groups: dict[str, list[str]] = {}
    for key in series:
        groups.setdefault(chart_of(key), []).append(key)
    shown: list[Chart | str] = []
    folded: list[Chart | str] = []
    for title, keys in groups.items():
        chart: Chart | str = f"{', '.join(keys)}: not one finite value."
        if any(math.isfinite(y) for key in keys for _, y in series[key]):
            chart = line_chart({key: series[key] for key in keys}, title=title)
        # by charts, not by keys: a chart that is shown at once keeps all its curves
        (shown if any(key.split("/")[0] in SHOWN_AT_ONCE for key in keys) else folded).append(chart)
    return (shown, folded) if shown else (folded, [])
