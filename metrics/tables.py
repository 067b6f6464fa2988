"""The figures of metrics.json as text for people."""

from typing import Any

from utils.text import columns, decimal


def _heading(document: dict[str, Any]) -> str:
    what = f"{document['checkpoint']} (step {document['step']}, {document['task']})"
    return f"{what}\non {document['n']} images of {document['data']}, seed {document['seed']}\n"


def classifier_table(document: dict[str, Any]) -> str:
    """A classifier's figures, then those of each class."""
    names = {"accuracy": "accuracy", "top5_accuracy": "top-5 accuracy", "ece": "calibration error (ECE)"}
    figures = [(name, decimal(document[key])) for key, name in names.items() if document[key] is not None]
    measures = ("precision", "recall", "f1")
    classes = [
        [name, *(decimal(row[key]) for key in measures), str(row["support"])]
        for name, row in document["per_class"].items()
    ]
    per_class = columns([["class", "precision", "recall", "F1", "images"], *classes])
    return "\n".join([_heading(document), columns(figures), "", per_class])


def gan_table(document: dict[str, Any]) -> str:
    """A generator's figures: distances with their floors, what was recognised, how varied the samples are."""
    digits = {"frechet": 3, "floor": 3, "kernel": 6, "kernel_floor": 6, "diversity_ratio": 3}
    distances = [
        [row["extractor"], *(decimal(row[key], count) for key, count in digits.items()), str(row["n"])]
        for row in document["distances"]
    ]
    figures = [
        ["recognised", decimal(document["recognised"])],
        [
            "diversity_ratio",
            f"{decimal(document['diversity_ratio'])}  (smallest class; {document['diversity_extractor']})",
        ],
    ]
    if document.get("memorisation") is not None:
        figures.append(["memorisation", memorisation_line(document["memorisation"])])
    head = ["extractor", "frechet", "floor", "kernel", "floor", "diversity", "n"]
    parts = [_heading(document), columns([head, *distances]), "", columns(figures, "<")]
    if document["diversity_by_class"] is not None:
        recognised = document["recognised_by_class"] or {}
        ratios = document["diversity_by_class"].items()
        rows = [[name, decimal(recognised.get(name)), decimal(ratio)] for name, ratio in ratios]
        parts += ["", columns([["class", "recognised", "diversity"], *rows])]
    return "\n".join([*parts, *(f"{key}: {note}" for key, note in document["notes"].items())])


def memorisation_line(copies: dict[str, Any]) -> str:
    """What the search for copies found, in one line."""
    verdict = "COPIES TRAINING IMAGES" if copies["copies"] else "no sign of copies"
    return (
        f"{verdict} (p {copies['p_value']:.2g}): {copies['share']:.1%} of the samples unusually near to training "
        f"images, {copies['expected']:.1%} expected; C_T {decimal(copies['c_t'], 1)} ({copies['extractor']}, "
        f"{copies['searched']} training images searched)"
    )
