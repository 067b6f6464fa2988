"""Self-contained HTML reports from a run folder's files: evaluation, samples, curves, commands and
versions.

One file, no scripts, nothing loaded from elsewhere; whatever a run has not written yet is left out
with a word. The page of a study has the same style: verdict, differences with their intervals,
controls, tables, images.
"""

import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from markupsafe import Markup
from PIL import Image

from duetgan.reporting import figures, pictures
from duetgan.reporting.figures import change, headline
from duetgan.reporting.pictures import Chart, picture
from duetgan.reporting.run_files import Run
from duetgan.utils import bounded
from duetgan.utils.errors import UserError
from duetgan.utils.files import write_atomic
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import Events
from duetgan.utils.text import duration
from duetgan.utils.versions import environment

# --- what the figures are called; a curve whose key is not named here is shown under the first part
# of it

# pattern of keys of metrics.jsonl: the chart that they share; the first that fits counts
CHARTS = {
    "loss/generator": "adversarial losses",
    "loss/discriminator": "adversarial losses",
    "loss/classifier": "loss",
    "val/nll": "loss",  # of held-out images, beside that of the training
    "loss/auxiliary*": "auxiliary loss",
    "logits/real_sign": "augmentation: strength p and mean sign of D(real)",
    "ada/p": "augmentation: strength p and mean sign of D(real)",
    "path_length/mean": "path length: moving mean",
    "val/logits/*": "logits at evaluations",
    "val/memorised_p/*": "p-value of the search for copies, small: it copies",
    "val/memorised/*": "share of samples unusually near to training images",
}
# first parts of keys; other charts are folded
SHOWN_AT_ONCE = ("loss", "logits", "ada", "accuracy", "val", "train")
FOLDED = "val/memorised_p/*"  # in spite of that


def chart_of(key: str) -> str:
    """The title of a key's chart: `val/accuracy` and `accuracy/train` share one, all `logits/...`
    another.
    """
    first, _, rest = key.partition("/")
    other = (
        rest if rest and first in ("val", "train") else f"{rest} loss" if first == "loss" else first
    )
    return next(
        (title for pattern, title in CHARTS.items() if fnmatchcase(key, pattern)), other
    ).replace("_", " ")


# --- the page


def write_report(run_dir: str | Path) -> Path:
    """Write RUN_DIR/report.html, with the commands to train it again and of the last evaluation;
    returns its path.
    """
    run = Run(run_dir)
    title = f"Run {run.name}" + (f" ({run.task})" if run.task else "")
    config, evaluation = run.folder / "config.yaml", run.folder / "eval" / "command.txt"
    train = ["python", "train.py", "--config", str(config), "--run-dir", f"{run.folder}-again"]
    commands = [shlex.join(train)] if config.is_file() else []
    if evaluation.is_file():
        commands += (
            bounded.read_file(evaluation, bounded.TABLE)
            .decode(errors="replace")
            .strip()
            .splitlines()
        )
    page = {
        "title": title,
        "headline": headline(run),
        "choices": (),
        "runs": {"": run},
        "commands": commands,
    }
    return write_page(run.folder / "report.html", "report.html.j2", **page, answers=())


def refresh(output: Path) -> None:
    """Write the report of the run in whose folder `output` lies once more, if it lies in one: the
    report shows it.
    """
    run = next(
        (folder for folder in output.resolve().parents[:2] if (folder / "config.yaml").is_file()),
        None,
    )
    if run is not None:
        print(f"report: {write_report(run)}", file=sys.stderr)


def write_quickstart_report(
    folder: str | Path,  # the quickstart's folder, with the runs `gan` and `classifier` inside
    *,
    commands: Sequence[str] = (),  # every command that was run, in order
    seconds: float | None = None,  # what the commands took together
    notes: Sequence[str] = (),  # what was chosen and why
    classifier: bool = True,  # whether one was trained
    answers: Sequence[str] = (),  # the figures in sentences
) -> Path:
    """Write `folder/report.html` with the quickstart's runs in one page and return its path."""
    titles = {"classifier": "What the classifier gets right"} if classifier else {}
    titles["gan"] = "What the GAN draws"
    runs = {title: Run(Path(folder) / name) for name, title in titles.items()}
    first = [figure for run in runs.values() for figure in headline(run)]
    if seconds is not None:
        first.append((duration(seconds), "all steps together", ""))
    page = {
        "title": "Duet quickstart",
        "headline": first,
        "choices": notes,
        "runs": runs,
        "commands": commands,
    }
    return write_page(Path(folder) / "report.html", "report.html.j2", **page, answers=answers)


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Write a page of a template, which knows its folder and the versions too, and return its path."""
    write_atomic(
        path,
        render(template, folder=path.parent, versions=environment(), **values).encode(
            errors="replace"
        ),
    )
    return path


def render(template: str, **values: Any) -> str:
    """A page of one of the templates beside this file; values are escaped."""
    # not at the start of a training
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
    """The charts that are shown at once and the others; words in the place of curves that cannot be
    drawn.
    """
    series = run.series
    groups: dict[str, list[str]] = {}
    for key in series:
        groups.setdefault(chart_of(key), []).append(key)
    shown: list[Chart | str] = []
    folded: list[Chart | str] = []
    for title, keys in groups.items():
        chart: Chart | str = f"{', '.join(keys)}: not one finite value."
        if any(math.isfinite(y) for key in keys for _, y in series[key]):
            chart = Chart({key: series[key] for key in keys}, title=title)
        # by charts, not by keys: a chart that is shown at once keeps all its curves
        at_once = any(
            key.split("/")[0] in SHOWN_AT_ONCE and not fnmatchcase(key, FOLDED) for key in keys
        )
        (shown if at_once else folded).append(chart)
    return (shown, folded) if shown else (folded, [])


def show_images(run: Path, step: int, files: Iterable[Path]) -> None:
    """Add image files to the events of a run that has any. Not while it trains: TensorBoard follows
    the newest file of a folder, and would no longer see what the training writes.
    """
    if not (run / "tensorboard").is_dir():
        return
    with suppress(UserError), closing(RunFolder(run)) as folder:
        folder.open()  # else it trains, or cannot be written
        with closing(Events(run / "tensorboard")) as events:
            for file in files:
                with Image.open(file) as image:
                    events.image(step, f"evaluation/{file.stem}", np.asarray(image.convert("RGB")))


HEADINGS = {"main": "The answer", "classes": "The same by class", "all arms": "Every arm"}
KINDS = {"helps": "good", "hurts": "bad", "better": "good", "worse": "bad"}  # verdict -> its colour
WIDTH, MIDDLE = 150, 9  # of the drawing of an interval, in px


def write_study_page(
    folder: Path, document: Mapping[str, Any], *, command: str, config: Mapping[str, Any]
) -> Path:
    """Write FOLDER/report.html of study.json's document, and return its path."""
    rows, runs = document["comparisons"], document["runs"]
    done = "finished" if document["complete"] else "unfinished"
    seeds = f"{len(document['seeds'])} complete seed{'s' * (len(document['seeds']) != 1)}"
    families = dict.fromkeys(row["family"] for row in rows)
    # of the first comparison a tile for a group
    pair = [(row["first"], row["second"]) for row in document["verdicts"]]
    first = [row for row, arms in zip(document["verdicts"], pair, strict=True) if arms == pair[0]]
    tiles = {row["figure"] or f"{row['group']} classes": row for row in first}
    return write_page(
        folder / "report.html",
        "study.html.j2",
        study=document,
        state=f"{done}: {runs['done']} of {runs['planned']} runs, {seeds}",
        headline=[
            (row["verdict"], f"{what}: {row['second']} against {row['first']}")
            for what, row in tiles.items()
        ],
        families={name: [row for row in rows if row["family"] == name] for name in families},
        controls=[_control(row) for row in document["controls"]],
        arms=[
            [arm["name"], arm["family"], len(arm["figures"]), arm["what"]]
            for arm in document["arms"]
        ],
        images=[
            picture(folder / item["file"], item["caption"]) for item in document.get("pictures", [])
        ],
        command=command,
        config=yaml.safe_dump(dict(config), sort_keys=False),
    )


def _control(row: Mapping[str, Any]) -> list[str]:
    share, came = (
        row["figure"] is None,
        {True: "as it must", False: "WRONG", None: "not known yet"}[row["ok"]],
    )
    words = [
        row["arm"],
        row["against"],
        row["expected"],
        row["found"],
        signed(row["difference"], share=share),
    ]
    return [*words, span(row["interval"], share=share), came, row["why"]]


def signed(value: float | None, *, share: bool) -> str:
    """A difference with its sign; of shares in percentage points."""
    return "-" if value is None else f"{100 * value:+z.1f}" if share else change(value)


def span(interval: Sequence[float] | None, *, share: bool) -> str:
    return "-" if interval is None else " to ".join(signed(end, share=share) for end in interval)


def chance(p: float | None) -> str:
    return "-" if p is None else "<0.0001" if p < 1e-4 else f"{p:.2g}"


def drawn(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Markup:
    """A row's difference and its interval on a line, to one scale with those of `rows` that are of
    the same figure. It holds numbers alone.
    """
    alike = [each for each in rows if each["figure"] == row["figure"]]
    reach = max(
        1e-9,
        *(abs(end) for each in alike for end in (each["difference"], *(each["interval"] or []))),
    )

    def place(x: float) -> str:
        return f"{WIDTH / 2 + (WIDTH / 2 - 5) * x / reach:.1f}"

    drawing = f'<line class="zero" x1="{WIDTH / 2}" x2="{WIDTH / 2}" y1="0" y2="{2 * MIDDLE}"/>'
    if row["interval"]:
        low, high = map(place, row["interval"])
        drawing += f'<line class="span" x1="{low}" x2="{high}" y1="{MIDDLE}" y2="{MIDDLE}"/>'
    drawing += f'<circle cx="{place(row["difference"])}" cy="{MIDDLE}" r="4"/>'
    return Markup(f'<svg class="forest" viewBox="0 0 {WIDTH} {2 * MIDDLE}">{drawing}</svg>')
