"""A page that compares evaluated runs: `duet compare RUN RUN... --out FOLDER`.

The figures and their tests are those of `evaluate.py --compare`: image by image or sample by sample
on the same seed, corrected for their number. Beside them stand the runs' images and their curves.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duetgan.reporting.pictures import CAPTIONS, Chart, picture
from duetgan.reporting.run_files import Run
from duetgan.utils.config.cli import Parser
from duetgan.utils.files import as_json, check_writable, write_atomic

# images in eval/
SIDE_BY_SIDE = ("samples", "recognised_worst", "reliability", "confusion", "mistakes")
HEADER = ["", "the second is", "first", "second", "difference", "95 % interval", "p"]


def write_comparison(document: Mapping[str, Any], folder: Path) -> Path:
    """Write FOLDER/comparison.html and comparison.json of what `metrics.comparison.compare.compare`
    found.
    """
    # both know the figures, whose functions bring torch along
    from duetgan.metrics.comparison.compare import cells
    from duetgan.reporting.report import write_page

    names = list(document["runs"])
    runs = {name: Run(name.partition(",")[0]) for name in names}  # of seeds alike the first
    pairs = [
        {
            "title": f"{each['run']} against {names[0]}",
            "rows": [(row, cells(row)) for row in each["figures"]],
        }
        for each in document["comparisons"]
    ]
    write_atomic(folder / "comparison.json", as_json(document))
    return write_page(
        folder / "comparison.html",
        "comparison.html.j2",
        title=" and ".join(dict.fromkeys(Path(name).name for name in names)),
        about=f"{document['task']}, {document['n']} images, seed {document['seed']}, data {document['data_hash'][:12]}",
        header=HEADER,
        pairs=pairs,
        images=_images(runs),
        curves=shared_charts(runs),
        notes=[f"{key}: {note}" for key, note in document["notes"].items()],
        command=shlex.join(["python", "-m", "reporting.compare", *names]),
    )


def _images(runs: Mapping[str, Run]) -> list[tuple[str, list[dict[str, str]]]]:
    """What an image shows, and that image of every run that has it, for images that two runs have
    or more.
    """
    have = {
        stem: [
            (path, name) for name, run in runs.items() for path in run.images if path.stem == stem
        ]
        for stem in SIDE_BY_SIDE
    }
    return [
        (CAPTIONS[stem], [picture(*each) for each in those])
        for stem, those in have.items()
        if len(those) > 1
    ]


def shared_charts(runs: Mapping[str, Run]) -> list[Any]:
    """A chart for each key of metrics.jsonl that all runs have and that a report shows at once."""
    from duetgan.reporting.report import SHOWN_AT_ONCE, chart_of  # see above

    series = {name: run.series for name, run in runs.items()}
    first = next(iter(series.values()))
    keys = [
        k
        for k in first
        if all(k in other for other in series.values()) and k.split("/")[0] in SHOWN_AT_ONCE
    ]
    curves = {key: {name: of_run[key] for name, of_run in series.items()} for key in keys}
    return [
        Chart(those, title=key if "/" in key else chart_of(key))
        for key, those in curves.items()
        if any(y == y for points in those.values() for _, y in points)
    ]


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
