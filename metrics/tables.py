"""The figures of metrics.json as text for people."""

from typing import Any


def number(value: float | None, digits: int = 4) -> str:
    """A figure with so many digits after the point; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _heading(document: dict[str, Any]) -> str:
    what = f"{document['checkpoint']} (step {document['step']}, {document['task']})"
    return f"{what}\non {document['n']} images of {document['data']}, seed {document['seed']}\n"


def classifier_table(document: dict[str, Any]) -> str:
    """A classifier's figures, then those of each class."""
    figures = [["accuracy", number(document["accuracy"])]]
    if document["top5_accuracy"] is not None:
        figures.append(["top-5 accuracy", number(document["top5_accuracy"])])
    figures.append(["calibration error (ECE)", number(document["ece"])])
    classes = [
        [name, number(row["precision"]), number(row["recall"]), number(row["f1"]), str(row["support"])]
        for name, row in document["per_class"].items()
    ]
    per_class = table(["class", "precision", "recall", "F1", "images"], classes)
    return "\n".join([_heading(document), table(["", ""], figures).lstrip("\n"), "", per_class])


def gan_table(document: dict[str, Any]) -> str:
    """A generator's figures: distances beside their floors, what was recognised, how varied the samples are."""
    distances = [
        [
            row["extractor"],
            number(row["frechet"], 3),
            number(row["floor"], 3),
            number(row["kernel"], 6),
            number(row["kernel_floor"], 6),
            number(row["diversity_ratio"], 3),
            str(row["n"]),
        ]
        for row in document["distances"]
    ]
    parts = [
        _heading(document),
        table(["extractor", "frechet", "floor", "kernel", "floor", "diversity", "n"], distances),
        "",
        f"recognised       {number(document['recognised'])}",
        f"diversity_ratio  {number(document['diversity_ratio'])}  (smallest class; {document['diversity_extractor']})",
    ]
    copies = document.get("memorisation")
    if copies is not None:
        parts.append(f"memorisation     {memorisation_line(copies)}")
    if document["diversity_by_class"] is not None:
        recognised = document["recognised_by_class"] or {}
        ratios = document["diversity_by_class"].items()
        rows = [[name, number(recognised.get(name)), number(ratio)] for name, ratio in ratios]
        parts += ["", table(["class", "recognised", "diversity"], rows)]
    parts += [f"{key}: {note}" for key, note in document["notes"].items()]
    return "\n".join(parts)


def memorisation_line(copies: dict[str, Any]) -> str:
    """What the search for copies found, in one line."""
    verdict = "COPIES TRAINING IMAGES" if copies["copies"] else "no sign of copies"
    return (
        f"{verdict} (p {copies['p_value']:.2g}): {copies['share']:.1%} of the samples unusually near to training "
        f"images, {copies['expected']:.1%} expected; C_T {number(copies['c_t'], 1)} ({copies['extractor']}, "
        f"{copies['searched']} training images searched)"
    )
