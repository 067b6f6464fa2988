"""The table of accuracies under corruptions."""

from duetgan.metrics.protocol import Document
from duetgan.metrics.tables import FURTHER_TABLES, Table, as_dict, as_dicts, percent


def corruption_table(document: Document) -> Table:
    """Return the accuracy under each corruption, by rising strength; "-" for a missing value."""
    rows = []
    for name, row in as_dict(as_dict(document.get("robustness")).get("corruptions")).items():
        strengths = as_dicts(as_dict(row).get("strengths"))
        accuracies = [document.get("accuracy"), *(part.get("accuracy") for part in strengths)]
        rows.append([name, *map(percent, accuracies)])
    width = max(map(len, rows), default=2)
    head = ["accuracy under", "none", *(f"strength {index}" for index in range(1, width - 1))]
    return head, [row + ["-"] * (width - len(row)) for row in rows]


FURTHER_TABLES.append(corruption_table)
