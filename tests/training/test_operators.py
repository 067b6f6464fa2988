"""The table of docs/measurements/operators.md: upper bounds of the operators that a step dispatches."""

import pytest

from benchmarks.operators.__main__ import PRESETS, operators
from tests.conftest import REPOSITORY

SPREAD = 5  # operators that depend on the draws of augmentation


def rows_of_page() -> list[list[str]]:
    lines = (REPOSITORY / "docs" / "measurements" / "operators.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")][2:]


def test_the_table_has_every_recipe():
    assert list(dict.fromkeys((row[0], row[1]) for row in rows_of_page())) == list(PRESETS)


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [pytest.param(*preset, marks=pytest.mark.slow if preset[1] == "fp16" else ()) for preset in PRESETS],
)
def test_a_step_dispatches_no_more_operators_than_the_table_says(recipe, precision, tmp_path):
    bounds = {row[2]: int(row[4]) for row in rows_of_page() if row[:2] == [recipe, precision]}
    counts = operators(REPOSITORY / "configs", recipe, precision, tmp_path)
    assert counts.keys() == bounds.keys()
    for kind, count in counts.items():
        assert 0.95 * bounds[kind] - SPREAD <= count.total() <= bounds[kind], f"{kind}: {count}"
