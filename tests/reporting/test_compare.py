"""python -m reporting.compare: the tests of evaluate.py --compare on a page."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from duetgan.metrics.comparison.compare import compare
from duetgan.reporting.compare import main
from duetgan.utils.script import run_cli
from tests.metrics.comparison.test_compare import classified


@pytest.fixture
def runs(tmp_path):
    """Two run folders, the second with the better classifier; evaluated, with images and curves."""
    made = []
    for name, better in (("plain", 0.0), ("better", 0.6)):
        run = tmp_path / name
        run.mkdir()
        classified(run / "eval", better=better)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(run / "eval" / "confusion.png")
        rows = [{"step": step, "loss/classifier": 1.0 / step, "memory_mib": 5} for step in (1, 2)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "config.yaml").write_text("task: classifier\n")
        made.append(str(run))
    return made


def test_the_page_has_the_tests_the_images_and_the_curves_of_both(runs, tmp_path, capsys):
    assert run_cli(main, [*runs, "--out", str(tmp_path / "out")]) == 0
    path = tmp_path / "out" / "comparison.html"
    assert capsys.readouterr().out.strip() == str(path)
    document = compare(runs)
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == document
    page = path.read_text()
    shown = re.findall(r'<tr><td title="">([^<]+)</td><td class="\w*"><b>([^<]+)</b></td>', page)
    expected = [(row["figure"].replace("_", " "), row["verdict"]) for row in document["comparisons"][0]["figures"]]
    assert shown == expected
    assert ("accuracy", "better") in shown
    assert page.count('<img src="data:image/png') == 2
    assert page.count('<figure class="chart">') == 1
    assert len(page) < 10 * 2**20


def test_what_cannot_be_compared_is_one_line(runs, tmp_path, capsys):
    assert run_cli(main, [runs[0], "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "comparison.html").exists()
