"""Write HTML reports with the evaluation, samples, curves, commands and versions of a run.

A report is one file. It has no scripts and loads no other file. It names the parts that are missing
because the run has not written them yet.
"""

import math
import shlex
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from duetgan.metrics import tables
from duetgan.reporting import figures, pictures
from duetgan.reporting.figures import headline
from duetgan.reporting.pictures import Chart
from duetgan.reporting.run_files import Run
from duetgan.utils import files
from duetgan.utils.files import write_atomic
from duetgan.utils.runlog.versions import environment
from duetgan.utils.text import duration

# --- titles of the charts

SIGN_AND_STRENGTH = "augmentation: strength p and mean sign of D(real)"
CLASS_HEAD_LOSS = "D's class head: loss on samples (auxiliary) and on real images (auxiliary_real)"

# Titles of charts, by a pattern of keys of metrics.jsonl. If several patterns match, the first one
# counts. `chart_of` makes the titles for other keys.
CHARTS = {
    "loss/generator": "adversarial losses",
    "loss/discriminator": "adversarial losses",
    "loss/classifier": "loss",
    "val/nll": "loss",  # in one chart with the training loss
    "loss/auxiliary": CLASS_HEAD_LOSS,
    "loss/auxiliary_real": CLASS_HEAD_LOSS,
    "accuracy/auxiliary": "D's class head: accuracy",
    "logits/real_sign": SIGN_AND_STRENGTH,
    "ada/p": SIGN_AND_STRENGTH,
    "path_length/mean": "path length: moving mean",
    "val/logits/*": "D's mean logits: held-out, training and generated images",
    "val/memorised_p/*": "p-value of the search for copies (small: the GAN copies)",
    "val/memorised/*": "fraction of samples unusually near to training images",
}


# Titles of charts that have only this curve, although their title in CHARTS is of several.
SINGLE_CURVES = {
    "logits/real_sign": "mean sign of D(real)",
    "ada/p": "augmentation: strength p",
    "loss/auxiliary": "D's class head: loss on samples",
    "loss/auxiliary_real": "D's class head: loss on real images",
}


def chart_of(key: str) -> str:
    """Return the title of the chart that shows the curve of `key`, a key of metrics.jsonl.

    Keys with the same title share a chart. For example, `val/accuracy` and `accuracy/train` share
    one, and `loss/generator` and `loss/discriminator` share another.
    """
    first, _, name = key.partition("/")
    title = first
    if name and first in ("val", "train"):
        title = name
    elif first == "loss":
        title = f"{name} loss"
    for pattern, shared_title in CHARTS.items():
        if fnmatchcase(key, pattern):
            return shared_title
    return title.replace("_", " ")


# --- the page


def write_report(run_dir: str | Path) -> Path:
    """Write RUN_DIR/report.html and return its path.

    The page includes the commands to repeat the training and the last evaluation.
    """
    run = Run(run_dir)
    config, evaluation = run.folder / "config.yaml", run.folder / "eval" / "command.txt"
    commands = []
    if config.is_file():
        train = ["python", "train.py", "--config", str(config), "--run-dir", f"{run.folder}-again"]
        commands.append(shlex.join(train))
    if evaluation.is_file():
        text = files.read_file(evaluation, files.TABLE).decode(errors="replace")
        commands += text.strip().splitlines()
    return write_page(
        run.folder / "report.html",
        title=f"Run {run.name}" if run.task in ("", run.name) else f"Run {run.name} ({run.task})",
        headline=headline(run),
        choices=(),
        runs={"": run},
        commands_title="Commands to repeat this run",
        commands=commands,
        answers=(),
    )


def write_quickstart_report(
    folder: str | Path,  # the quickstart's folder, with the runs `gan` and `classifier` inside
    *,
    commands: Sequence[str],  # every command that was run, in order
    seconds: float | None,  # duration of all commands together
    notes: Sequence[str],  # the settings that were chosen, with the reasons
    classifier: bool,  # True if a classifier was trained
    answers: Sequence[str],  # sentences about the metrics
) -> Path:
    """Write `folder/report.html`, a page about all runs of the quickstart, and return its path."""
    folder = Path(folder)
    runs = {}
    if classifier:
        runs["What the classifier gets right"] = Run(folder / "classifier")
    runs["What the GAN draws"] = Run(folder / "gan")
    tiles = []
    for run in runs.values():
        tiles += headline(run)
    if seconds is not None:
        tiles.append((duration(seconds), "total time of all commands", ""))
    return write_page(
        folder / "report.html",
        title="Duet quickstart",
        headline=tiles,
        choices=notes,
        runs=runs,
        commands_title="Commands that were run",
        commands=commands,
        answers=answers,
    )


def write_page(path: Path, **values: object) -> Path:
    """Fill the template report.html.j2 with `values`, write the page to `path`, and return `path`.

    Text in the values is escaped. The template also gets the versions and the hardware that
    `environment` returns, as `versions`.
    """
    # This import is here so that the start of a training does not wait for it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    page = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.globals.update(
        figures=figures, metric_tables=tables, pictures=pictures, report=sys.modules[__name__]
    )
    text = page.get_template("report.html.j2").render(versions=environment(), **values)
    write_atomic(path, text.encode(errors="replace"))
    return path


def charts(run: Run) -> list[Chart | str]:
    """Return the charts of a training.

    If a chart would have no finite value, the list has a message in place of the chart.
    """
    series = run.series
    groups: dict[str, list[str]] = {}
    for key in series:
        groups.setdefault(chart_of(key), []).append(key)
    result: list[Chart | str] = []
    for title, keys in groups.items():
        if len(keys) == 1:
            title = SINGLE_CURVES.get(keys[0], title)
        if any(math.isfinite(y) for key in keys for _, y in series[key]):
            result.append(Chart({key: series[key] for key in keys}, title=title))
        else:
            result.append(f"{', '.join(keys)}: not one finite value.")
    return result
