"""The images of a report, embedded in the page, and links to what else lies in a run folder; line
charts as inline SVG, drawn by matplotlib, coloured by the page's CSS, light or dark.
"""

import base64
import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from PIL import Image

from duetgan.reporting.run_files import Run
from duetgan.utils import bounded

Points = Sequence[tuple[float, float]]  # (x, y); a non-finite y breaks the line

SIZE = 4.4, 2.2  # inches of 100 CSS px
MOST_POINTS = 300  # more than a chart this wide can show
DOT = 5.0  # width in points of a point without a line
# a chart whose largest value is this many times its smallest gets a logarithmic axis
LOG_FROM = 100.0
NAMES = ("c0", "c1", "c2", "c3", "soft", "line")  # of the page's colours
COLOURS = {f"#00000{index}": f"var(--{name})" for index, name in enumerate(NAMES, 1)}
*CURVES, SOFT, LINE = COLOURS  # stand-ins that no other part of a drawing has
STYLE: dict[Any, Any] = {
    **{
        "svg.fonttype": "none",
        "svg.hashsalt": "duet",
        "font.family": "DejaVu Sans",
        "font.size": 8,
    },
    **{
        "axes.edgecolor": SOFT,
        "axes.labelcolor": SOFT,
        "xtick.labelcolor": SOFT,
        "ytick.labelcolor": SOFT,
    },
    **{
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": LINE,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
    },
    **{"axes.spines.top": False, "axes.spines.right": False},
}


def number(value: float) -> str:
    """A short figure for people: `0.0123`, `4.57`, `1,234`, `20k`, `1.2e-05`; `not finite` for NaN
    and infinities.
    """
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size >= 10_000 and value % 1000 == 0:
        return f"{value / 1000:,.0f}k"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-4 or value == 0 else f"{value:.2g}"


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points: means of runs of equal length; a non-finite value makes its mean
    non-finite.
    """
    size = math.ceil(len(points) / most)
    if size <= 1:
        return points
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


class Chart:
    """The curves of some series in one chart; the y axis is logarithmic where all values are
    positive and the largest is LOG_FROM times the smallest or more.
    """

    def __init__(self, series: Mapping[str, Points], *, title: str) -> None:
        """Raises ValueError if there is no finite value in any series."""
        values = [y for points in series.values() for _, y in points if math.isfinite(y)]
        if not values:
            raise ValueError(f"chart {title!r} has no finite value")
        log = min(values) > 0 and max(values) / min(values) >= LOG_FROM
        last = {
            name: [y for _, y in points if math.isfinite(y)][-1:] for name, points in series.items()
        }
        self.title = title + " (log scale)" * log
        # a curve's name and its last finite value, in the order of the colours
        self.legend = [(name, number(value[0]) if value else "") for name, value in last.items()]
        # holds numbers and the word for the x axis alone: nothing that a run wrote
        self.svg = Markup(_svg([thin(points) for points in series.values()], log=log))


def _svg(curves: Sequence[Points], *, log: bool) -> str:
    # a second that no start of a training should wait for
    from matplotlib import rc_context, ticker
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=SIZE)
        axes = figure.add_axes((0.12, 0.17, 0.85, 0.8), yscale="log" if log else "linear")
        for index, points in enumerate(curves):
            colour, there = (
                CURVES[index % 4],
                [False, *(math.isfinite(y) for _, y in points), False],
            )
            # the finite points that no line leads to, because their neighbours are not
            dots = [
                p
                for at, p in enumerate(points, 1)
                if there[at] and not (there[at - 1] or there[at + 1])
            ]
            if len(dots) < sum(there):
                axes.plot(*zip(*points, strict=True), color=colour)
            for dot in dots:  # not a marker: those stand in <defs>
                axes.plot(
                    *zip(dot, dot, strict=True), color=colour, linewidth=DOT, solid_capstyle="round"
                )
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(
            ticker.LogLocator(numticks=6) if log else ticker.MaxNLocator(5, steps=[1, 2, 5, 10])
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: number(value))
        axes.minorticks_off()
        axes.set_xlabel("step")
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    # what would reach the whole page is left out: rules for every element, and names that each
    # chart has
    svg = re.sub(r"<defs>.*?</defs>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' (id|clip-path|width|height)="[^"]*"', "", svg)
    return re.sub("|".join(COLOURS), lambda found: COLOURS[found[0]], svg)


MOST_SAMPLES = 12  # grids shown of the samples over time
MOST_OUTPUTS = 12  # images shown of what other commands have written
# what Pillow raises for bad images
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
EMBED_WHOLE = 100_000  # bytes; larger images are shrunk before they are embedded
LARGEST_SIDE = 1400  # pixels of a shrunk image
CAPTIONS = {  # name of an image in eval/: what it shows
    "samples": "Samples, a row for each class",
    "real": "Real test images, in the same rows",
    "recognised_best": "Samples that the classifier is surest of: the class asked for, its probability",
    "recognised_worst": "Samples that the classifier is least sure of: asked for, and predicted",
    "neighbours": "Samples beside the training images nearest to them",
    "truncation": "Truncation: the same samples from the mean image (psi 0) to as they are (psi 1)",
    "mixing": "Style mixing: A with the coarse styles (pose, shape) of B",
    "confusion": "Confusion matrix: true classes in rows, predicted ones in columns",
    "reliability": "Accuracy by confidence: on the diagonal the classifier is as often right as it is sure",
    "confused": "The classes that are confused most often: true class as predicted class, and how many images",
    "robustness": "A test image under each corruption, as it is and at each strength",
    "evidence": "The surest mistakes, then right answers, each beside the evidence for what was named (Grad-CAM)",
    "mistakes": "The most confident mistakes: record and true class, and predicted",
}
WITHOUT_CLASSES = {"samples": "Samples", "real": "Real test images"}
BESIDE = ("samples", "real")  # come first, side by side

# caption, and the address inside the page; empty where the image cannot be shown
Picture = dict[str, str]


def pictures(run: Run) -> list[Picture]:
    """The images of the evaluation: samples and real ones first."""
    ordered = sorted(run.images, key=lambda path: (*BESIDE, path.stem).index(path.stem))
    captions = CAPTIONS if run.evaluation.get("diversity_by_class") else CAPTIONS | WITHOUT_CLASSES
    return [picture(path, captions.get(path.stem, path.stem.replace("_", " "))) for path in ordered]


def samples(run: Run) -> list[Picture]:
    """At most MOST_SAMPLES of the grids, evenly chosen, the newest last."""
    last = len(run.samples) - 1
    count = min(MOST_SAMPLES, last + 1)
    picked = [run.samples[round(i * last / max(1, count - 1))] for i in range(count)]
    steps = [int(path.stem.removeprefix("step-")) for path in picked]
    # a classifier's grid of step 0 is its first batch, see
    # `training.classifier.task.ClassifierTask.sample_grid`
    first = (
        {0: "the first training images, as the network sees them"}
        if run.task == "classifier"
        else {}
    )
    captions = [first.get(step, f"step {number(step)}") for step in steps]
    return [picture(path, caption) for path, caption in zip(picked, captions, strict=True)]


def outputs(run: Run, folder: Path) -> tuple[list[Picture], list[tuple[str, str, str]]]:
    """What other commands have written into the run folder: Grad-CAM maps, grids, projections; and
    links, (address seen from the page in `folder`, name, size), of films, exports and more images.
    """
    shown = [path for path in run.outputs if path.suffix == ".png"][:MOST_OUTPUTS]
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in run.outputs
        if path not in shown
    }
    links = [
        (
            quote(os.fsencode(name)),
            name,
            f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB",
        )
        for name, size in sizes.items()
    ]
    return [picture(path, str(path.relative_to(run.folder))) for path in shown], links


def picture(path: Path, caption: str) -> Picture:
    """The caption and the address of a checked image inside the page, a large one shrunk and stored
    as JPEG; what is wrong with one that cannot be read.
    """
    try:
        content = bounded.read_file(path, bounded.IMAGE)
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            kind = "png" if image.format == "PNG" else "jpeg"
            if len(content) > EMBED_WHOLE or image.format not in ("PNG", "JPEG"):
                small = image.convert("RGB")
                small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
                buffer = io.BytesIO()
                small.save(buffer, format="JPEG", quality=88)
                content, kind = buffer.getvalue(), "jpeg"
    except UNREADABLE as error:
        return {"caption": f"{path.name} cannot be shown: {error}", "address": ""}
    return {
        "caption": caption,
        "address": f"data:image/{kind};base64,{base64.b64encode(content).decode()}",
    }
