"""Embed images and line charts in a report.

Images are embedded as data URLs. Line charts are embedded as SVG, which matplotlib draws. The CSS
of the page sets the colours of the charts, for light and for dark mode.
"""

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from duetgan.reporting.run_files import Run
from duetgan.utils import files
from duetgan.utils.text import number

Points = Sequence[tuple[float, float]]  # (x, y); a non-finite y breaks the line

SIZE = 4.4, 2.2  # width and height in inches of 100 CSS px
MOST_POINTS = 300  # largest number of points of a curve; a longer curve is thinned evenly
DOT = 5.0  # diameter in points (1/72 inch) of the dot for a value without a line
# The y axis is logarithmic if the largest value is at least this many times the smallest.
LOG_FROM = 100.0
NAMES = ("c0", "c1", "c2", "c3", "soft", "line")  # CSS variables of the page's colours
# matplotlib draws in these placeholder colours, which `_svg` replaces by the CSS variables.
COLOURS = {f"#00000{index}": f"var(--{name})" for index, name in enumerate(NAMES, 1)}
*CURVES, SOFT, LINE = COLOURS
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "duet",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LINE,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class Chart:
    """A line chart of one or several curves, as SVG.

    The y axis is logarithmic if all values are positive and the largest is at least LOG_FROM times
    the smallest.
    """

    def __init__(self, series: Mapping[str, Points], *, title: str) -> None:
        """Draw the chart. `series` is a dict from the name of a curve in the legend to its points.

        Raises ValueError if no series has a finite value.
        """
        # name and last finite value of each curve, in the order of the colours
        self.legend: list[tuple[str, str]] = []
        values: list[float] = []
        for name, points in series.items():
            finite = [y for _, y in points if math.isfinite(y)]
            values += finite
            self.legend.append((name, number(finite[-1]) if finite else ""))
        if not values:
            raise ValueError(f"chart {title!r} has no finite value")
        log = min(values) > 0 and max(values) / min(values) >= LOG_FROM
        self.title = f"{title} (log scale)" if log else title
        # Markup is not escaped: the drawing contains only numbers and "step", no text of the run.
        curves = [
            points[:: math.ceil(len(points) / MOST_POINTS) or 1] for points in series.values()
        ]
        self.svg = Markup(_svg(curves, log=log))


def _svg(curves: Sequence[Points], *, log: bool) -> str:
    # This import takes a second, which the start of a training should not wait for.
    from matplotlib import rc_context, ticker
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=SIZE)
        axes = figure.add_axes((0.12, 0.17, 0.85, 0.8), yscale="log" if log else "linear")
        for index, points in enumerate(curves):
            colour = CURVES[index % 4]
            if len(points) == 1:
                # A dot is a line of no length: a marker would be in <defs>, which is removed.
                x, y = points[0]
                axes.plot((x, x), (y, y), color=colour, linewidth=DOT, solid_capstyle="round")
            elif points:
                axes.plot(*zip(*points, strict=True), color=colour)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(
            ticker.LogLocator(numticks=6) if log else ticker.MaxNLocator(5, steps=[1, 2, 5, 10])
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: number(value))
        axes.minorticks_off()
        axes.set_xlabel("step")
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    # CSS rules of a chart would apply to the whole page, and ids occur in every chart: remove both.
    svg = re.sub(r"<defs>.*?</defs>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' (id|clip-path|width|height)="[^"]*"', "", svg)
    return re.sub("|".join(COLOURS), lambda match: COLOURS[match[0]], svg)


MOST_SAMPLES = 12  # largest number of a training's sample grids to embed
# Exceptions that Pillow raises for bad images.
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
EMBED_WHOLE = 100_000  # bytes; larger images are shrunk before they are embedded
LARGEST_SIDE = 1400  # pixels of a shrunk image
CAPTIONS = {  # captions of the images in eval/, by the stem of the file name
    "samples": "Samples, a row for each class",
    "real": "Real test images, a row for each class",
    "recognised_best": "The best recognised samples, with the requested class and its probability",
    "recognised_worst": "The worst recognised samples, with the requested and the predicted class",
    "neighbours": "Samples (left), each next to the most similar of the searched training images: "
    "first the nearest samples, then the first samples drawn. The usual distance is the median "
    "distance of held-out images to their nearest training image",
    "truncation": "Truncation: the same samples from the mean image (psi 0) to no truncation (psi 1)",
    "mixing": "Style mixing: samples A with the coarse styles (pose, shape) of samples B",
    "confusion": "Confusion matrix: true classes in rows, predicted classes in columns",
    "reliability": "Accuracy by confidence; for a well calibrated classifier it follows the diagonal",
    "robustness": "A test image without corruption, and with each corruption at each strength",
    "evidence": "The most confident mistakes and correct predictions, each next to its Grad-CAM heat map",
    "mistakes": "The most confident mistakes: image number, true class, predicted class and its "
    "probability",
}
WITHOUT_CLASSES = {"samples": "Samples", "real": "Real test images"}
FIRST = ("samples", "real")  # stems of the images that come first, side by side

# Keys: `caption`, and `address`, a data URL, which is empty if the image cannot be shown.
Picture = dict[str, str]


def pictures(run: Run) -> list[Picture]:
    """Return the images of the evaluation, samples and real images first."""
    ordered = sorted(run.images, key=lambda path: (*FIRST, path.stem).index(path.stem))
    captions = CAPTIONS if run.evaluation.get("diversity_by_class") else CAPTIONS | WITHOUT_CLASSES
    return [picture(path, captions.get(path.stem, path.stem.replace("_", " "))) for path in ordered]


def samples(run: Run) -> list[Picture]:
    """Return at most MOST_SAMPLES sample grids of the training, evenly spaced, the newest last."""
    interval = math.ceil(len(run.samples) / MOST_SAMPLES)
    grids = []
    for path in run.samples[::-1][:: max(1, interval)][::-1]:
        step = int(path.stem.removeprefix("step-"))
        caption = f"step {number(step)}"
        # A classifier's only grid shows training images.
        if step == 0 and run.task == "classifier":
            caption = "the first training images, as the network sees them"
        grids.append(picture(path, caption))
    return grids


def picture(path: Path, caption: str) -> Picture:
    """Read an image file, and return its caption and its `address`, a data URL.

    An image that is large, or neither PNG nor JPEG, is shrunk and stored as JPEG. If the file
    cannot be read, the caption is the error and the address is empty.
    """
    try:
        content = files.read_file(path, files.IMAGE)
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
