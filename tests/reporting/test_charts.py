"""Charts as SVG: what is drawn where, and that nothing reaches beyond a chart."""

import re

import pytest

from duetgan.reporting.pictures import Chart, number

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
    assert evil.legend == [(EVIL, "2"), ("b", "3")]
    for word in ("script", "<style", " id=", "href=", "url(", "#"):
        assert word not in evil.svg


@pytest.mark.parametrize(
    ("values", "log"), [((0.01, 2.0), True), ((0.1, 2.0), False), ((0.0, 2.0), False), ((-0.01, 2.0), False)]
)
def test_chart_takes_a_log_scale_only_for_positive_values_far_apart(values, log):
    chart = Chart({"a": list(enumerate(values))}, title="a")
    assert ("log scale" in chart.title) is log


def test_numbers_are_short_and_a_long_curve_has_few_points():
    values = (0, 0.0123456, 4.567, 1234.5, 20000, 20001, 0.0000123, float("nan"))
    assert list(map(number, values)) == ["0", "0.0123", "4.57", "1,234", "20k", "20,001", "1.2e-05", "not finite"]
    chart = Chart({"a": [(float(i), float(i % 7)) for i in range(1000)], "b": []}, title="a")
    (path,) = curves(chart)
    assert 100 < len(path) <= 300
    assert chart.legend == [("a", "5"), ("b", "")]
