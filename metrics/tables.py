"""An evaluation's document as text for people: what both tasks share, and a classifier's table."""

from typing import Any

from utils.text import columns, decimal

HEADLINE = {  # key of a classifier's document, which may be None: what it is called
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "top5_accuracy": "top-5 accuracy",
    "auroc": "AUROC (mean of the classes)",
    "average_precision": "average precision",
    "nll": "negative log-likelihood",
    "ece": "calibration error (ECE)",
}
BY_CLASS = {  # key of a class's row: its column
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "auroc": "AUROC",
    "average_precision": "av. prec.",
}


def heading(document: dict[str, Any]) -> str:
    """What was evaluated, on what."""
    what = f"{document['checkpoint']} (step {document['step']}, {document['task']})"
    return f"{what}\non {document['n']} images of {document['data']}, seed {document['seed']}\n"


def note_lines(document: dict[str, Any]) -> list[str]:
    """What is to be said of the figures."""
    return [f"{key}: {note}" for key, note in document["notes"].items()]


def interval_words(interval: list[float] | None) -> str:
    """`  (95 %: 0.8541 to 0.8799)`, nothing where there is no interval."""
    return "" if interval is None else f"  (95 %: {decimal(interval[0])} to {decimal(interval[1])})"


def classifier_table(document: dict[str, Any]) -> str:
    """A classifier's figures, then those of each class, then what was asked for besides."""
    figures = [
        (name, decimal(document[key]) + interval_words(document[f"{key}_interval"]))
        for key, name in HEADLINE.items()
        if document[key] is not None
    ]
    if (fitted := document["temperature"]) is not None:
        change = f"ECE {decimal(fitted['ece_before'])} -> {decimal(fitted['ece_after'])} on the other half"
        figures.append(("temperature", f"{decimal(fitted['value'], 3)}  ({change})"))
    if pairs := document["confused"][:3]:
        words = [f"{pair['true']} as {pair['predicted']} ({pair['n']})" for pair in pairs]
        figures.append(("most confused", ", ".join(words)))
    figures += _outlier_rows(document)
    rows = document["per_class"].items()
    classes = [[name, *(decimal(row[key]) for key in BY_CLASS), str(row["support"])] for name, row in rows]
    per_class = columns([["class", *BY_CLASS.values(), "images"], *classes])
    parts = [heading(document), columns(figures, "<"), "", per_class]
    if "robustness" in document:
        parts += ["", _robustness_table(document)]
    return "\n".join([*parts, *note_lines(document)])


def _outlier_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    found = document.get("ood", {})
    names = {"max_probability": "outliers by probability", "energy": "outliers by energy"}
    return [
        (name, f"AUROC {decimal(found[key]['auroc'])}{interval_words(found[key]['auroc_interval'])}")
        for key, name in names.items()
        if key in found
    ]


def _robustness_table(document: dict[str, Any]) -> str:
    """Accuracy by corruption and strength."""
    found = document["robustness"]["corruptions"]
    rows = [
        [name, decimal(document["accuracy"]), *(decimal(each["accuracy"]) for each in row["strengths"])]
        for name, row in found.items()
    ]
    most = max(len(row["strengths"]) for row in found.values())
    return columns([["accuracy under", "none", *(f"strength {place}" for place in range(1, most + 1))], *rows])
