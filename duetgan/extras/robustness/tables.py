"""Tables of accuracies under corruptions, and of the detection of outliers."""

from pathlib import Path

from duetgan.metrics.protocol import Document
from duetgan.metrics.tables import FURTHER_TABLES, Table, as_dict, as_dicts, percent, plain


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


def outlier_table(document: Document) -> Table:
    """Return how well each score detects outliers, the images of another file."""
    outliers = as_dict(document.get("ood"))
    rows = []
    for key, name in (("max_probability", "largest probability"), ("energy", "energy")):
        if row := as_dict(outliers.get(key)):
            ends = row.get("auroc_interval")
            interval = " to ".join(map(plain, ends)) if isinstance(ends, list) else "-"
            rows.append([name, plain(row.get("auroc")), interval, percent(row.get("fpr95"))])
    title = f"outliers ({Path(str(outliers.get('data'))).name}) detected by"
    return [title, "AUROC", "95 % interval", "missed while 95 % pass"], rows


FURTHER_TABLES.extend((corruption_table, outlier_table))
