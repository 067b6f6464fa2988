"""An evaluation's document as text for people."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from duetgan.metrics.figures import CLASSIFIER, GAN, LABELS, Figure
from duetgan.utils.text import columns, counted, decimal

FEW = 1000  # images a side, below which distances of features are rough
WIDE = 0.1  # an interval's width from which on a share is rough
BY_CLASS = {  # key of a class's row: its column
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "auroc": "AUROC",
    "average_precision": "av. prec.",
}


def few_images(
    n: int, *, interval: list[float] | None = None, what: str = "accuracy", distances: bool = False
) -> dict[str, str]:
    """Return a note under the key `n` where so few images leave much to chance, else nothing.

    Args:
        n: Number of images.
        interval: The 95 % interval of the metric `what`, a fraction.
        distances: Whether distances of features were computed.
    """
    words = []
    if interval is not None and interval[1] - interval[0] > WIDE:
        half = 50 * (interval[1] - interval[0])
        words.append(f"the {what} is uncertain by about {half:.0f} percentage points either way")
    if distances and n < FEW:
        words.append(
            f"distances of fewer than {FEW:,} images are rough and depend on n: compare them only with metrics of the "
            "same n, and only large differences"
        )
    return {"n": f"only {counted(n, 'test image')}: {'; '.join(words)}"} if words else {}


def classifier_table(document: dict[str, Any]) -> str:
    """A classifier's figures, then those of each class, then what was asked for besides."""
    several = "macro_f1" in document
    figures = list(_figures(LABELS if several else CLASSIFIER, document))
    if (rate := document.get("majority_class_rate")) is not None:
        figures.insert(
            1, ("majority class", f"{decimal(rate)}  (always predicting the most frequent class)")
        )
    if (fitted := document.get("temperature")) is not None:
        change = f"ECE {decimal(fitted['ece_before'])} -> {decimal(fitted['ece_after'])} on the other half"
        figures.append(("temperature", f"{decimal(fitted['value'], 3)}  ({change})"))
    if pairs := document.get("confused", [])[:3]:
        words = [f"{pair['true']} as {pair['predicted']} ({pair['n']})" for pair in pairs]
        figures.append(("most confused", ", ".join(words)))
    for key, name in (
        ("max_probability", "outliers by probability"),
        ("energy", "outliers by energy"),
    ):
        if row := document.get("ood", {}).get(key):
            figures.append(
                (name, f"AUROC {decimal(row['auroc'])}{_interval(row['auroc_interval'])}")
            )
    rows = document["per_class"].items()
    by_class = BY_CLASS | ({"threshold": "from"} if several else {})
    classes = [
        [name, *(decimal(row[key]) for key in by_class), str(row["support"])] for name, row in rows
    ]
    parts = [
        columns(figures, "<"),
        "",
        columns([["class", *by_class.values(), "images"], *classes]),
    ]
    if "robustness" in document:
        parts += ["", columns(accuracy_under(document, decimal))]
    return _page(document, parts)


def accuracy_under(document: Mapping[str, Any], show: Callable[[Any], str]) -> list[list[str]]:
    """Head and rows of the accuracy under each corruption, weakest first, as far as a document
    holds it.
    """
    rows = []
    for name, row in as_dict(as_dict(document.get("robustness")).get("corruptions")).items():
        shares = [each.get("accuracy") for each in as_dicts(as_dict(row).get("strengths"))]
        rows.append([name, show(document.get("accuracy")), *map(show, shares)])
    most = max(map(len, rows), default=2)
    head = ["accuracy under", "none", *(f"strength {place}" for place in range(1, most - 1))]
    return [head, *(row + ["-"] * (most - len(row)) for row in rows)]


def as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def credible(document: dict[str, Any]) -> dict[str, Any]:
    """Return a generator's document without the metrics that a weak classifier made, and with a
    note instead.

    The metrics at the top come from the first extractor that is not such a classifier's features.
    """
    judge, weak = as_dict(document.get("judge")), document.get("weak_extractors") or ()
    weak_judge = bool(judge.get("is_weak"))
    if not weak_judge and not weak:
        return document
    distances = as_dicts(document.get("distances"))
    first, *_ = distances or [{}]
    trusted = [row for row in distances if row.get("extractor") not in weak]
    result = {**document, "distances": trusted}
    replaced = trusted[0] if trusted else {}
    for row in GAN:
        keys = (row.key, f"{row.key}_interval", row.by_class)
        if row.by_judge and weak_judge:
            result |= dict.fromkeys(keys)
        elif not row.by_judge and first.get("extractor") in weak:
            result |= {key: replaced.get(key) for key in keys}
    if weak_judge and isinstance(document.get("images"), list):
        result["images"] = [
            name for name in document["images"] if not str(name).startswith("recognised_")
        ]
    return result


def gan_table(document: dict[str, Any]) -> str:
    """A generator's figures: distances with their floors, what was recognised, how varied the
    samples are.
    """
    of_space = [row for row in GAN if row.place == "column" or row.key == "diversity_ratio"]
    distances = [
        [row["extractor"], *(_with_error(row, figure) for figure in of_space), str(row["n"])]
        for row in document["distances"]
    ]
    head = ["extractor", *(figure.title for figure in of_space), "n"]
    figures = list(_figures([row for row in GAN if row.place != "column"], document))
    if (judge := document["judge"]) is not None:
        words = f"{decimal(judge['accuracy'])}  of the real images"
        if (rate := judge.get("majority_class_rate")) is not None:  # not in documents of before
            words += f"; the most frequent class: {decimal(rate)}"
        figures.append(("the judge itself", words))
    if (copies := document.get("memorisation")) is not None:
        verdict = "COPIES TRAINING IMAGES" if copies["copies"] else "no sign of copies"
        words = (
            f"{verdict} (p {copies['p_value']:.2g}): {copies['share']:.1%} of the samples unusually near to training "
            f"images, {copies['expected']:.1%} expected; C_T {decimal(copies['c_t'], 1)} ({copies['extractor']}, "
            f"{copies['searched']} training images searched)"
        )
        figures.append(("memorisation", words))
    parts = [columns([head, *distances]), "", columns(figures, "<")]
    if by_class := {
        row.title: document[row.by_class]
        for row in GAN
        if row.by_class and document.get(row.by_class)
    }:
        names = next(iter(by_class.values()))
        rows = [[name, *(decimal(each.get(name)) for each in by_class.values())] for name in names]
        parts += ["", columns([["class", *by_class], *rows])]
    return _page(document, parts)


def _page(document: dict[str, Any], parts: Sequence[str]) -> str:
    """What was evaluated, on what; the tables; what is to be said of the figures."""
    what = f"{document['checkpoint']} (step {document['step']}, {document['task']})"
    head = f"{what}\non {document['n']} images of {document['data']}, seed {document['seed']}\n"
    return "\n".join([head, *parts, *(f"{key}: {note}" for key, note in document["notes"].items())])


def _figures(rows: Sequence[Figure], document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name, value and interval of those that there are."""
    for row in rows:
        if (value := document.get(row.key)) is not None:
            yield (
                row.title,
                decimal(value, row.digits) + _interval(document.get(f"{row.key}_interval")),
            )


def _interval(interval: list[float] | None) -> str:
    return "" if interval is None else f"  (95 %: {decimal(interval[0])} to {decimal(interval[1])})"


def _with_error(document: dict[str, Any], row: Figure) -> str:
    """`36.345 +-0.263`: a figure and how far the upper end of its 95 % interval lies from it, if it
    has one.
    """
    value, interval = document.get(row.key), document.get(f"{row.key}_interval")
    error = (
        ""
        if value is None or interval is None
        else f" +-{decimal(interval[1] - value, row.digits)}"
    )
    return decimal(value, row.digits) + error
