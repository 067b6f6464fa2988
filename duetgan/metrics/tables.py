"""Format the results of an evaluation for people, as text and as tables for the report.

The results may be damaged or of another version of the program. A value of an unexpected type is
therefore shown as a dash.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from duetgan.metrics.figures import CLASSIFIER, FIGURES, GAN, UNLABELLED, Figure
from duetgan.metrics.protocol import Document
from duetgan.utils import extras
from duetgan.utils.text import columns, number

FEW_IMAGES = 1000  # distances between features of fewer images are rough
WIDE_INTERVAL = 0.1  # width of an interval above which a fraction is rough
VIEWS = {"flip": "mean of 2 views", "shift": "mean of 6 views"}  # keys: values of --tta
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # (header, rows)
Formatter = Callable[[object], str]
# Functions that make a table of an evaluation's results; extras add functions.
FURTHER_TABLES: list[Callable[[Document], Table]] = []


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
            f"distances of fewer than {FEW_IMAGES:,} images are rough and depend on n, so compare them only "
            "with distances of the same n, and trust only large differences"
        )
    return {"n": "; ".join(words)} if words else {}


def note_lines(document: Document) -> list[str]:
    """Return a line of text for each note of the results, with the subject of the note in front."""
    titles = {row.key: row.title for row in FIGURES}
    titles |= {"n": f"few test images ({plain(document.get('n'))})"}
    titles |= {"weak_extractors": "weak classifier"}
    if as_dict(document.get("judge")).get("is_weak"):
        titles["recognised"] = "weak classifier"
    lines = []
    for key, note in as_dict(document.get("notes")).items():
        title = titles.get(key, key.replace("_", " ") if key.isidentifier() else key)
        lines.append(f"{title[:1].upper()}{title[1:]}: {note}")
    return lines


# --- numbers


def percent(value: object) -> str:
    """Format a fraction as `12.3 %`, and anything but a number as a dash."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else "-"


def plain(value: object) -> str:
    """Format a number briefly, and anything else as a dash."""
    return number(value) if isinstance(value, int | float) else "-"


def formatter(row: Figure) -> Formatter:
    """Return the function that formats values of the metric `row` in its unit."""
    return percent if row.unit == "share" else plain


def interval_words(interval: object, show: Formatter) -> list[str]:
    """Return a list with the text `95 % interval 12.3 to 14.5 %`, or an empty list.

    The list is empty if `interval` is not a list of two values. `show` formats these values.
    """
    if not isinstance(interval, list) or len(interval) != 2:
        return []
    low, high = (show(bound) for bound in interval)
    return [f"95 % interval {low.removesuffix(' %')} to {high}"]


def as_dict(value: object) -> Document:
    """Return `value` if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def as_dicts(value: object) -> list[Document]:
    """Return the items of a list that are dicts; an empty list if `value` is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


# --- metrics


def metric_values(document: Document, rows: Iterable[Figure]) -> list[tuple[Figure, str, str]]:
    """Return (row, value, context) for each metric of `rows` that the results have.

    `value` is the formatted value, and `context` is the text of `_context`.
    """
    values = []
    for row in rows:
        value = document.get(row.key)
        # In the evaluation of a classifier, "precision" is the name of a number format.
        if value is None or (row.key == "precision" and isinstance(value, str)):
            continue
        values.append((row, formatter(row)(value), _context(document, row)))
    return values


def _context(document: Document, row: Figure) -> str:
    """Return text in brackets to show after a metric's value, or "" if there is none.

    The text has the 95 % interval, the extractor of the features, the number of views of each image
    (`--tta`), and values to compare with: for the accuracy, that of always predicting the most frequent class; for the
    recognised fraction, the judge's accuracy on real images.
    """
    context = interval_words(document.get(f"{row.key}_interval"), formatter(row))
    if row in GAN and not row.by_judge:
        first = as_dicts(document.get("distances"))[:1]
        context += [f"features of {extractor_name(results)}" for results in first]
    judge = as_dict(document.get("judge"))
    if row.key == "accuracy" and str(document.get("tta")) in VIEWS:
        context.append(VIEWS[str(document["tta"])])
    if row.key == "accuracy" and "majority_class_rate" in document:
        context.append(
            f"always predicting the most frequent class: {percent(document['majority_class_rate'])}"
        )
    if row.key == "recognised" and judge:
        accuracy = percent(judge.get("accuracy"))
        text = f"the classifier is right on {accuracy} of the real images of this size"
        if "majority_class_rate" in judge:
            majority = percent(judge["majority_class_rate"])
            text += f"; always predicting the most frequent class would be right on {majority}"
        context.append(text)
    return f" ({'; '.join(context)})" if context else ""


def copies_found(document: Document) -> list[tuple[str, str, str]]:
    """Return a list with the result of the search for copies: (verdict, numbers, extractor).

    All three are text. The list is empty if there was no search.
    """
    copies = as_dict(document.get("memorisation"))
    if not copies:
        return []
    verdict = "copies training images" if copies.get("copies") else "no sign of copies"
    near = f"{percent(copies.get('share'))} of the samples are unusually near to a training image"
    expected = f"expected without copying: {percent(copies.get('expected'))}"
    text = f"{near} ({expected}); p-value {plain(copies.get('p_value'))}"
    searched = f"{plain(copies.get('searched'))} training images searched"
    search = f" (features of {copies.get('extractor')}, {searched})"
    return [(verdict, text, search)]


# --- tables


def tables(document: Document) -> list[Table]:
    """Return the tables of distances, temperature, classes and extras that are not empty."""
    made = [_distance_table(document), temperature_table(document), _class_table(document)]
    made += [make(document) for make in FURTHER_TABLES]
    return [table for table in made if table[1]]


def _distance_table(document: Document) -> Table:
    """Return a table with a row for each extractor and a column for each distance.

    A cell is `value ± d`, where value + d is the upper end of the distance's interval.
    """
    distances = [row for row in GAN if row.place == "column"]
    rows = []
    for results in as_dicts(document.get("distances")):
        cells = [extractor_name(results)]
        for row in distances:
            cells.append(plain(results.get(row.key)))
            interval = results.get(f"{row.key}_interval")
            if isinstance(interval, list) and isinstance(interval[-1], float):
                cells[-1] += f" ± {plain(interval[-1] - results[row.key])}"
        rows.append([*cells, plain(results.get("n"))])
    return ["extractor", *(row.title for row in distances), "n"], rows


def temperature_table(document: Document) -> Table:
    """Return a table of a classifier's metrics, without and with a temperature.

    `judged_temperature` computes these metrics. The table is empty if there is no temperature.
    """
    fitted = as_dict(document.get("temperature"))
    rows = []
    for row in CLASSIFIER if fitted else ():
        cells = [row.title]
        for name in ("before", "after"):
            interval = interval_words(fitted.get(f"{row.key}_interval_{name}"), formatter(row))
            value = formatter(row)(fitted.get(f"{row.key}_{name}"))
            cells.append(" ".join([value, *map("({})".format, interval)]))
        if cells[1:] != ["-", "-"]:
            rows.append(cells)
    return ["temperature", "1", plain(fitted.get("value"))], rows


def extractor_name(results: Document) -> str:
    """Return the extractor's name in an entry of `distances`, shortened for a table.

    For example, `classifier:runs/a` becomes `classifier (a)`.
    """
    kind, _, path = str(results.get("extractor", "-")).partition(":")
    return kind if Path(path).name in ("", kind) else f"{kind} ({Path(path).name})"


def _class_table(document: Document) -> Table:
    """Return a table with a row for each class and a column for each metric by class."""
    by_metric: dict[str, dict[str, str]] = {}
    formats = {row.key: formatter(row) for row in FIGURES} | {"support": plain}
    for name, metrics in as_dict(document.get("per_class")).items():
        for key, value in as_dict(metrics).items():
            by_metric.setdefault(key, {})[name] = formats.get(key, percent)(value)
    for row in FIGURES:
        for name, value in as_dict(document.get(row.by_class)).items():
            by_metric.setdefault(row.title, {})[name] = formatter(row)(value)
    return joined(by_metric)


def joined(by_class: Mapping[str, Mapping[str, str]]) -> Table:
    """Return a table with a row for each class and a column for each entry of `by_class`.

    `by_class` maps a column's title to a dict from class name to cell. A missing cell is a dash.
    """
    names = dict.fromkeys(chain.from_iterable(by_class.values()))
    rows = [[name, *(column.get(name, "-") for column in by_class.values())] for name in names]
    return ["class", *by_class], rows


def comparison_text(document: Document) -> str:
    """Format the results of `compare_images` as text: a table for each extractor, and notes."""
    parts = [
        f"{document['images']} compared with {document['reference']}",
        f"n {document['n']:,} of each, {document['size']} px, seed {document['seed']}",
    ]
    for results in document["distances"]:
        floors = {row.key: value for row, value, _ in metric_values(results["floors"], UNLABELLED)}
        table = [[extractor_name(results), "value", f"floor (n {results['floors']['n']:,})"]]
        for row, value, context in metric_values(results, UNLABELLED):
            table.append([row.title, value + context, floors.get(row.key, "-")])
        parts += ["", columns(table, "<")]
    copies = document["memorisation"]
    origin = document.get("training", "one half of the reference")
    parts += ["", f"floor: the metric between {origin} and the other images of the reference"]
    text = f"{percent(copies['share'])} of the images are unusually near to the reference "
    expected = percent(copies["expected"])
    text += f"(expected without copying: {expected}; features of {copies['extractor']})"
    if "training" in document:
        ((verdict, numbers, search),) = copies_found(document)
        text = f"{verdict}: {numbers}{search}"
    parts.append(f"copies: {text}")
    return "\n".join([*parts, *note_lines(document)])


def results_text(document: Document) -> str:
    """Format results as text: a heading, metrics, tables and notes.

    As in the report, metrics that depend on a weak classifier are left out.
    """
    document = credible(document)
    metrics = []
    rows = [row for row in FIGURES if row.place != "column"]
    for row, value, context in metric_values(document, rows):
        metrics.append([row.title, value + context])
    for verdict, text, search in copies_found(document):
        metrics.append(["memorisation", f"{verdict}: {text}{search}"])
    parts = [
        f"{document['checkpoint']} (step {document['step']}, {document['task']})",
        f"on {document['n']} images of {document['data']}, seed {document['seed']}",
        "",
        columns(metrics, "<"),
    ]
    for header, cells in tables(document):
        parts += ["", columns([header, *cells])]
    return "\n".join([*parts, *note_lines(document)])


def credible(document: Document) -> Document:
    """Return a generator's results without the metrics that depend on a weak classifier.

    A weak classifier predicts real images too badly to judge samples. The metrics of features at
    the top level of `document` are those of the first extractor. If its classifier is weak, they
    are replaced by those of the first extractor that does not have a weak classifier.
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


extras.attach(__name__)
