"""Text tables of an evaluation's results."""

from collections.abc import Callable, Iterator, Sequence

from duetgan.metrics.figures import CLASSIFIER, GAN, LABELS, Figure
from duetgan.metrics.protocol import Document
from duetgan.utils import extras
from duetgan.utils.text import columns, counted, decimal

FEW_IMAGES = 1000  # distances between features of fewer images are rough
WIDE_INTERVAL = 0.1  # width of an interval above which a fraction is rough
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # (header, rows)
# Functions of a classifier's results, which may be damaged, that return a table for the report and
# the text; extras add theirs.
FURTHER_TABLES: list[Callable[[Document], Table]] = []
BY_CLASS = {  # key of a metric of a class -> title of its column
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "auroc": "AUROC",
    "average_precision": "av. prec.",
}


def few_images(
    n: int,
    *,
    interval: list[float] | None = None,
    metric: str = "accuracy",
    distances: bool = False,
) -> dict[str, str]:
    """Return {"n": note} if the number of images makes metrics uncertain, else {}.

    Args:
        interval: The 95 % interval of a metric that is a fraction, if there is one.
        metric: The metric's name.
        distances: True if distances between features were computed.
    """
    words = []
    if interval is not None and interval[1] - interval[0] > WIDE_INTERVAL:
        half = 50 * (interval[1] - interval[0])
        words.append(f"the {metric} is uncertain by about {half:.0f} percentage points either way")
    if distances and n < FEW_IMAGES:
        words.append(
            f"distances of fewer than {FEW_IMAGES:,} images are rough and depend on n: compare them only "
            "with metrics of the same n, and only large differences"
        )
    return {"n": f"only {counted(n, 'test image')}: {'; '.join(words)}"} if words else {}


def classifier_table(document: Document) -> str:
    """Format a classifier's results as text: metrics, metrics of each class, and robustness."""
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
    for header, rows in further_tables(document):
        parts += ["", columns([header, *rows])]
    return _page(document, parts)


def further_tables(document: Document) -> list[Table]:
    """Return the non-empty tables of FURTHER_TABLES."""
    tables = [make(document) for make in FURTHER_TABLES]
    return [(header, rows) for header, rows in tables if rows]


def as_dict(value: object) -> Document:
    """Return a value that is a dict, or an empty dict instead of any other value."""
    return value if isinstance(value, dict) else {}


def as_dicts(value: object) -> list[Document]:
    """Return the items of a list that are dicts; an empty list for any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def credible(document: Document) -> Document:
    """Return a generator's results without the metrics that depend on a weak classifier.

    The metrics at the top level then come from the first extractor that is not a weak classifier.
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


def gan_table(document: Document) -> str:
    """Format a generator's results as text: distances by extractor, other metrics, classes."""
    by_space = [row for row in GAN if row.place == "column" or row.key == "diversity_ratio"]
    distances = []
    for row in document["distances"]:
        values = [_with_error(row, figure) for figure in by_space]
        distances.append([row["extractor"], *values, str(row["n"])])
    head = ["extractor", *(figure.title for figure in by_space), "n"]
    figures = list(_figures([row for row in GAN if row.place != "column"], document))
    if (judge := document["judge"]) is not None:
        words = f"{decimal(judge['accuracy'])}  of the real images"
        if (rate := judge.get("majority_class_rate")) is not None:  # older results lack it
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
    named = [(row.title, document.get(row.by_class)) for row in GAN if row.by_class]
    if by_class := {title: values for title, values in named if values}:
        names = next(iter(by_class.values()))
        rows = [[name, *(decimal(row.get(name)) for row in by_class.values())] for name in names]
        parts += ["", columns([["class", *by_class], *rows])]
    return _page(document, parts)


def _page(document: Document, parts: Sequence[str]) -> str:
    """Join a heading that names checkpoint and data, the tables `parts`, and the notes."""
    subject = f"{document['checkpoint']} (step {document['step']}, {document['task']})"
    head = f"{subject}\non {document['n']} images of {document['data']}, seed {document['seed']}\n"
    return "\n".join([head, *parts, *(f"{key}: {note}" for key, note in document["notes"].items())])


def _figures(rows: Sequence[Figure], document: Document) -> Iterator[tuple[str, str]]:
    """Yield the title, and the value with its interval, of each metric that the document has."""
    for row in rows:
        if (value := document.get(row.key)) is not None:
            yield (
                row.title,
                decimal(value, row.digits) + _interval(document.get(f"{row.key}_interval")),
            )


def _interval(interval: list[float] | None) -> str:
    return "" if interval is None else f"  (95 %: {decimal(interval[0])} to {decimal(interval[1])})"


def _with_error(document: Document, row: Figure) -> str:
    """Format a metric with the upper half of its 95 % interval, as in `36.345 +-0.263`."""
    value, interval = document.get(row.key), document.get(f"{row.key}_interval")
    text = decimal(value, row.digits)
    if value is None or interval is None:
        return text
    return f"{text} +-{decimal(interval[1] - value, row.digits)}"


extras.attach(__name__)
