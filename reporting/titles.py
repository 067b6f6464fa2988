"""What the report calls the figures that runs write: the one place that knows their names.

A figure that is not named here is shown all the same: a curve under the first part of its key.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase

from reporting.charts import number

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
