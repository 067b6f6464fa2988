"""HTML reports of a run folder's evaluation, samples, curves, commands and versions, and of a
study's verdicts, comparisons, controls, tables and images.

A report is one file without scripts that loads no other file. It names the parts that are missing
because the run has not written them yet.
"""

import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import yaml
from markupsafe import Markup
from PIL import Image

from duetgan.reporting import figures, pictures
from duetgan.reporting.figures import change, headline
from duetgan.reporting.pictures import Chart, picture
from duetgan.reporting.run_files import Document, Run
from duetgan.utils import bounded
from duetgan.utils.errors import UserError
from duetgan.utils.files import write_atomic
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import Events
from duetgan.utils.text import counted, duration
from duetgan.utils.versions import environment

# --- titles of the charts

# Pattern of keys of metrics.jsonl -> title of their chart. The first matching pattern counts;
# `chart_of` gives the titles of other keys.
CHARTS = {
    "loss/generator": "adversarial losses",
    "loss/discriminator": "adversarial losses",
    "loss/classifier": "loss",
    "val/nll": "loss",  # in one chart with the training loss
    "loss/auxiliary*": "auxiliary loss",
    "logits/real_sign": "augmentation: strength p and mean sign of D(real)",
    "ada/p": "augmentation: strength p and mean sign of D(real)",
    "path_length/mean": "path length: moving mean",
    "val/logits/*": "logits at evaluations",
    "val/memorised_p/*": "p-value of the search for copies (small: the GAN copies)",
    "val/memorised/*": "fraction of samples unusually near to training images",
}
# Charts whose keys begin with one of these parts are shown; the others are folded away.
SHOWN_AT_ONCE = ("loss", "logits", "ada", "accuracy", "val", "train")
FOLDED = "val/memorised_p/*"  # keys that are folded away in spite of SHOWN_AT_ONCE


def chart_of(key: str) -> str:
    """Return the title of the chart with the curve of `key`: `val/accuracy` and `accuracy/train`
    are in one chart, all `logits/...` in another.
    """
    first, _, name = key.partition("/")
    title = first
    if name and first in ("val", "train"):
        title = name
    elif first == "loss":
        title = f"{name} loss"
    for pattern, shared_title in CHARTS.items():
        if fnmatchcase(key, pattern):
            title = shared_title
            break
    return title.replace("_", " ")


# --- the page


def write_report(run_dir: str | Path) -> Path:
    """Write RUN_DIR/report.html and return its path. The page includes the commands to repeat the
    training and the last evaluation.
    """
    run = Run(run_dir)
    config, evaluation = run.folder / "config.yaml", run.folder / "eval" / "command.txt"
    commands = []
    if config.is_file():
        train = ["python", "train.py", "--config", str(config), "--run-dir", f"{run.folder}-again"]
        commands.append(shlex.join(train))
    if evaluation.is_file():
        text = bounded.read_file(evaluation, bounded.TABLE).decode(errors="replace")
        commands += text.strip().splitlines()
    return write_page(
        run.folder / "report.html",
        "report.html.j2",
        title=f"Run {run.name} ({run.task})" if run.task else f"Run {run.name}",
        headline=headline(run),
        choices=(),
        runs={"": run},
        commands=commands,
        answers=(),
    )


def refresh(output: Path) -> None:
    """Rewrite the report of the run whose folder contains `output`, if there is one, so that it
    shows this file.
    """
    for folder in output.resolve().parents[:2]:
        if (folder / "config.yaml").is_file():
            print(f"report: {write_report(folder)}", file=sys.stderr)
            return


def write_quickstart_report(
    folder: str | Path,  # the quickstart's folder, with the runs `gan` and `classifier` inside
    *,
    commands: Sequence[str] = (),  # every command that was run, in order
    seconds: float | None = None,  # duration of all commands together
    notes: Sequence[str] = (),  # the settings that were chosen, with the reasons
    classifier: bool = True,  # True if a classifier was trained
    answers: Sequence[str] = (),  # sentences about the metrics
) -> Path:
    """Write `folder/report.html` with the quickstart's runs in one page and return its path."""
    folder = Path(folder)
    runs = {}
    if classifier:
        runs["What the classifier gets right"] = Run(folder / "classifier")
    runs["What the GAN draws"] = Run(folder / "gan")
    tiles = []
    for run in runs.values():
        tiles += headline(run)
    if seconds is not None:
        tiles.append((duration(seconds), "all steps together", ""))
    return write_page(
        folder / "report.html",
        "report.html.j2",
        title="Duet quickstart",
        headline=tiles,
        choices=notes,
        runs=runs,
        commands=commands,
        answers=answers,
    )


def write_page(path: Path, template: str, **values: object) -> Path:
    """Write a page from a template and `values`, and return its path. The template also gets the
    page's folder and the versions of the environment.
    """
    page = render(template, folder=path.parent, versions=environment(), **values)
    write_atomic(path, page.encode(errors="replace"))
    return path


def render(template: str, **values: object) -> str:
    """Return the HTML of a template in this folder; `values` are escaped."""
    # This import is here so that the start of a training does not wait for it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.globals.update(figures=figures, pictures=pictures, report=sys.modules[__name__])
    return page.get_template(template).render(**values)


def charts(run: Run) -> tuple[list[Chart | str], list[Chart | str]]:
    """Return the charts that are shown at once, and those that are folded away. A message replaces
    a chart without finite values.
    """
    series = run.series
    groups: dict[str, list[str]] = {}
    for key in series:
        groups.setdefault(chart_of(key), []).append(key)
    visible: list[Chart | str] = []
    folded: list[Chart | str] = []
    for title, keys in groups.items():
        chart: Chart | str = f"{', '.join(keys)}: not one finite value."
        if any(math.isfinite(y) for key in keys for _, y in series[key]):
            chart = Chart({key: series[key] for key in keys}, title=title)
        # A chart with at least one visible key keeps all its curves.
        if any(key.split("/")[0] in SHOWN_AT_ONCE and not fnmatchcase(key, FOLDED) for key in keys):
            visible.append(chart)
        else:
            folded.append(chart)
    return (visible, folded) if visible else (folded, [])


def show_images(run: Path, step: int, files: Iterable[Path]) -> None:
    """Add image files to the TensorBoard events of a run, if it has events and is not training.

    TensorBoard reads only the newest file of a folder, and would miss the events of a training.
    """
    if not (run / "tensorboard").is_dir():
        return
    with suppress(UserError), closing(RunFolder(run)) as folder:
        folder.open()  # raises UserError if the run trains, or its folder is not writable
        with closing(Events(run / "tensorboard")) as events:
            for file in files:
                with Image.open(file) as image:
                    events.image(step, f"evaluation/{file.stem}", np.asarray(image.convert("RGB")))


HEADINGS = {"main": "Main comparisons", "classes": "By class", "all arms": "All arms"}
VERDICT_CLASSES = {"helps": "good", "hurts": "bad", "better": "good", "worse": "bad"}  # CSS classes
# value of a control's `ok` -> text
OUTCOMES = {True: "as expected", False: "WRONG", None: "unknown yet"}
WIDTH, MIDDLE = 150, 9  # width and half height of the drawing of an interval, in px


def write_study_page(
    folder: Path, document: Document, *, command: str, config: Mapping[str, object]
) -> Path:
    """Write FOLDER/report.html from the content of study.json, and return its path."""
    rows, runs = document["comparisons"], document["runs"]
    state = "finished" if document["complete"] else "unfinished"
    seeds = counted(len(document["seeds"]), "complete seed")
    families: dict[str, list[Document]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    # The headline has a tile for each metric or group of classes of the first pair of arms.
    verdicts = document["verdicts"]
    tiles = {}
    for row in verdicts:
        if (row["first"], row["second"]) == (verdicts[0]["first"], verdicts[0]["second"]):
            title = row["figure"] or f"{row['group']} classes"
            tiles[title] = (row["verdict"], f"{title}: {row['second']} against {row['first']}")
    arms = []
    for arm in document["arms"]:
        arms.append([arm["name"], arm["family"], len(arm["figures"]), arm["what"]])
    images = document.get("pictures", [])
    return write_page(
        folder / "report.html",
        "study.html.j2",
        study=document,
        state=f"{state}: {runs['done']} of {runs['planned']} runs, {seeds}",
        headline=list(tiles.values()),
        families=families,
        controls=[_control(row) for row in document["controls"]],
        arms=arms,
        images=[picture(folder / image["file"], image["caption"]) for image in images],
        command=command,
        config=yaml.safe_dump(dict(config), sort_keys=False),
    )


def _control(row: Document) -> list[str]:
    """Return the table cells of a study's control."""
    is_fraction = row["figure"] is None
    cells = [row["arm"], row["against"], row["expected"], row["found"]]
    cells.append(signed(row["difference"], is_fraction=is_fraction))
    cells.append(span(row["interval"], is_fraction=is_fraction))
    return [*cells, OUTCOMES[row["ok"]], row["why"]]


def signed(value: float | None, *, is_fraction: bool) -> str:
    """Format a difference with its sign, and a difference of fractions in percentage points."""
    if value is None:
        return "-"
    return f"{100 * value:+z.1f}" if is_fraction else change(value)


def span(interval: Sequence[float] | None, *, is_fraction: bool) -> str:
    """Format the interval of a difference as `LOW to HIGH`."""
    if interval is None:
        return "-"
    return " to ".join(signed(end, is_fraction=is_fraction) for end in interval)


def p_value(p: float | None) -> str:
    """Format a p-value."""
    if p is None:
        return "-"
    return "<0.0001" if p < 1e-4 else f"{p:.2g}"


def draw_interval(row: Document, rows: Sequence[Document]) -> Markup:
    """Draw a row's difference and its interval as SVG, on one scale with all `rows` of the same
    metric. The drawing contains only numbers, so it needs no escaping.
    """
    ends = [1e-9]
    for comparable in rows:
        if comparable["figure"] == row["figure"]:
            ends += [comparable["difference"], *(comparable["interval"] or [])]
    reach = max(map(abs, ends))

    def position(difference: float) -> str:
        return f"{WIDTH / 2 + (WIDTH / 2 - 5) * difference / reach:.1f}"

    drawing = f'<line class="zero" x1="{WIDTH / 2}" x2="{WIDTH / 2}" y1="0" y2="{2 * MIDDLE}"/>'
    if row["interval"]:
        low, high = map(position, row["interval"])
        drawing += f'<line class="span" x1="{low}" x2="{high}" y1="{MIDDLE}" y2="{MIDDLE}"/>'
    drawing += f'<circle cx="{position(row["difference"])}" cy="{MIDDLE}" r="4"/>'
    return Markup(f'<svg class="forest" viewBox="0 0 {WIDTH} {2 * MIDDLE}">{drawing}</svg>')
