"""A page that compares evaluated runs: `duet compare RUN RUN... --out FOLDER`.

The metrics and their tests are those of `evaluate.py --compare`: paired by image or by sample of
the same seed, and corrected for multiple comparisons.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from duetgan.reporting.pictures import CAPTIONS, Chart, Picture, picture
from duetgan.reporting.run_files import Document, Run
from duetgan.utils.config.cli import Parser
from duetgan.utils.files import as_json, check_writable, write_atomic

# File names (without suffix) of the images in eval/ that the page shows for all runs.
SIDE_BY_SIDE = ("samples", "recognised_worst", "reliability", "confusion", "mistakes")
HEADER = ["", "the second is", "first", "second", "difference", "95 % interval", "p"]


def write_comparison(document: Document, folder: Path) -> Path:
    """Write FOLDER/comparison.html and comparison.json from the result of
    `metrics.comparison.compare.compare`, and return the page's path.
    """
    # Both modules import torch, through the table of metrics.
    from duetgan.metrics.comparison.compare import cells
    from duetgan.reporting.report import write_page

    names = list(document["runs"])
    # RUN,RUN,... are seeds of one run; the page shows the images and curves of the first.
    runs = {name: Run(name.partition(",")[0]) for name in names}
    pairs = []
    for comparison in document["comparisons"]:
        rows = [(row, cells(row)) for row in comparison["figures"]]
        pairs.append({"title": f"{comparison['run']} against {names[0]}", "rows": rows})
    data = f"data {document['data_hash'][:12]}"
    write_atomic(folder / "comparison.json", as_json(document))
    return write_page(
        folder / "comparison.html",
        "comparison.html.j2",
        title=" and ".join(dict.fromkeys(Path(name).name for name in names)),
        subtitle=f"{document['task']}, {document['n']} images, seed {document['seed']}, {data}",
        header=HEADER,
        pairs=pairs,
        images=_images(runs),
        curves=shared_charts(runs),
        notes=[f"{key}: {note}" for key, note in document["notes"].items()],
        command=shlex.join(["duet", "compare", *names]),
    )


def _images(runs: Mapping[str, Run]) -> list[tuple[str, list[Picture]]]:
    """Return (caption, pictures of the runs) for each kind of image that at least two runs have."""
    kinds = []
    for stem in SIDE_BY_SIDE:
        images: list[Picture] = []
        for name, run in runs.items():
            images += [picture(path, name) for path in run.images if path.stem == stem]
        if len(images) > 1:
            kinds.append((CAPTIONS[stem], images))
    return kinds


def shared_charts(runs: Mapping[str, Run]) -> list[Chart]:
    """Return a chart for each key of metrics.jsonl that all runs have, with a curve per run.

    Keys that a report folds away, and keys without a finite value, have no chart.
    """
    from duetgan.reporting.report import SHOWN_AT_ONCE, chart_of  # This module imports torch.

    series = {name: run.series for name, run in runs.items()}
    charts = []
    for key in next(iter(series.values())):
        in_all_runs = all(key in curves for curves in series.values())
        if not in_all_runs or key.split("/")[0] not in SHOWN_AT_ONCE:
            continue
        curves = {name: points[key] for name, points in series.items()}
        if any(not math.isnan(y) for points in curves.values() for _, y in points):
            charts.append(Chart(curves, title=key if "/" in key else chart_of(key)))
    return charts


def main(argv: Sequence[str]) -> None:
    parser = Parser(prog="duet compare", description="Compare evaluated runs on a page.")
    text = "run folders that were evaluated on the same images with the same seed; RUN,RUN: other seeds of one"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    text = "for comparison.html and comparison.json (default: here)"
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help=text)
    options = parser.parse_args(argv)
    check_writable(options.out)
    from duetgan.metrics.comparison.compare import compare

    print(write_comparison(compare(options.runs), options.out))
