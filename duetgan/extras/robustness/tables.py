"""The table of accuracies under corruptions."""

from duetgan.metrics.protocol import Document
from duetgan.metrics.tables import FURTHER_TABLES, Table, as_dict, as_dicts, percent


def corruption_table(document: Document) -> Table:
    """Return a table of accuracies, with a row for each corruption and a column for each strength.

    The first column of numbers is the accuracy without corruption. A missing value is "-".
    """
    rows = []
    for name, row in as_dict(as_dict(document.get("robustness")).get("corruptions")).items():
        strengths = as_dicts(as_dict(row).get("strengths"))
        accuracies = [document.get("accuracy"), *(part.get("accuracy") for part in strengths)]
        rows.append([name, *map(percent, accuracies)])
    width = max(map(len, rows), default=2)
    head = ["accuracy under", "none", *(f"strength {index}" for index in range(1, width - 1))]
    return head, [row + ["-"] * (width - len(row)) for row in rows]


FURTHER_TABLES.append(corruption_table)
