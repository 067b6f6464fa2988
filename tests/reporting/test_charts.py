"""Charts as SVG: what is drawn where, and that nothing reaches beyond a chart."""

import math
import re
from types import SimpleNamespace

import pytest

from duetgan.reporting.pictures import Chart, number
from duetgan.reporting.report import charts
from tests.slim import no_curves

EVIL = "<script>alert('x')</script>"


def curves(chart) -> list[list[tuple[str, float, float]]]:
    """What the pen does for each curve: (M or L, x, y)."""
    paths = re.findall(r'<path d="([^"]*)" style="[^"]*stroke: var\(--c\d\)', chart.svg)
    return [[(pen, float(x), float(y)) for pen, x, y in re.findall(r"([ML]) (\S+) (\S+)", path)] for path in paths]


def test_what_is_drawn_where_and_what_is_not_finite():
    (((_, x0, y0), (_, x1, y1)),) = curves(Chart({"a": [(0, 1.0), (10, 2.0)]}, title="a"))
    assert x1 > x0
    assert y1 < y0  # SVG counts downwards
    (path,) = curves(Chart({"a": [(0, 1.0), (1, 2.0), (2, float("nan")), (3, 1.0), (4, 2.0)]}, title="a"))
    assert [pen for pen, _, _ in path] == ["M", "L", "M", "L"]
    assert "nan" not in Chart({"a": [(0, 0.0), (1, 0.0)], "b": [(1, 0.0)]}, title="a").svg
    with pytest.raises(ValueError, match="no finite value"):
        Chart({"a": [(0, float("inf"))]}, title="a")


def test_a_single_point_is_a_dot_and_a_chart_keeps_to_itself():
    chart = Chart({"a": [(1, 3.0)], "b": [(0, 1.0), (1, 2.0)]}, title="a")
    widths = re.findall(r"stroke: var\(--c(\d)\); stroke-width: ([\d.]+); stroke-linecap: round", chart.svg)
    assert widths == [("0", "5")]
    dot, line = curves(chart)
    assert (dot[0][1:] == dot[1][1:], line[0][1:] == line[1][1:]) == (True, False)
    evil, again = (Chart({EVIL: [(0, 1.0), (1, 2.0)], "b": [(1, 3.0)]}, title=EVIL) for _ in range(2))
    assert vars(evil) == vars(again)
    assert len(curves(evil)) == 2  # of a single point too
    assert re.findall(r"stroke: var\(--c(\d)\)", evil.svg) == ["0", "1"]
    assert evil.legend == [(EVIL, "2"), ("b", "3")]
    for word in ("script", "<style", " id=", "href=", "url(", "#"):
        assert word not in evil.svg


@pytest.mark.parametrize(
    ("values", "log"), [((0.01, 2.0), True), ((0.1, 2.0), False), ((0.0, 2.0), False), ((-0.01, 2.0), False)]
)
def test_chart_takes_a_log_scale_only_for_positive_values_far_apart(values, log):
    chart = Chart({"a": list(enumerate(values))}, title="a")
    assert ("log scale" in chart.title) is log


TITLES = {
    "adversarial losses": ["loss/generator", "loss/discriminator"],
    "loss": ["loss/classifier", "val/nll"],
    "accuracy": ["val/accuracy", "accuracy/train"],
    "ece": ["val/ece", "train/ece"],
    "r1 loss": ["loss/r1"],
    "lr": ["lr", "lr/generator", "lr/discriminator"],
    "images per second": ["images_per_second"],
    "frechet": ["val/frechet"],
    "D's mean logits: held-out, training and generated images": ["val/logits/real", "val/logits/train"],
    "p-value of the search for copies (small: the GAN copies)": ["val/memorised_p/pixels"],
    "fraction of samples unusually near to training images": ["val/memorised/pixels"],
    "path length: moving mean": ["path_length/mean"],
}


def test_curves_of_a_kind_are_in_one_chart_with_its_title(monkeypatch):
    monkeypatch.setattr("duetgan.reporting.pictures._svg", no_curves)
    curves = {key: [(0.0, float(number))] for number, keys in enumerate(TITLES.values()) for key in keys}
    drawn = charts(SimpleNamespace(series=curves | {"x": [(0.0, math.nan)]}))  # type: ignore[arg-type]
    assert drawn.pop() == "x: not one finite value."
    assert {chart.title: [name for name, _ in chart.legend] for chart in drawn} == TITLES


def test_numbers_are_short_and_a_long_curve_has_few_points():
    values = (0, 0.0123456, 4.567, 1234.5, 20000, 20001, 0.0000123, float("nan"))
    assert list(map(number, values)) == ["0", "0.0123", "4.57", "1,234", "20k", "20,001", "1.2e-05", "not finite"]
    chart = Chart({"a": [(float(i), float(i % 7)) for i in range(1000)], "b": []}, title="a")
    (path,) = curves(chart)
    assert 100 < len(path) <= 300
    assert chart.legend == [("a", "5"), ("b", "")]
