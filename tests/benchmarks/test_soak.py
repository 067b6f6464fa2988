"""The soak: what its verdict finds, and a very short one."""

import json

import pytest

from benchmarks import soak
from benchmarks.soaking import verdict
from benchmarks.soaking.verdict import trends


def row(second, saved, anon_mib, **more):
    life = {"run": "a", "start": 1, "role": "rank 0", "files": 9, "threads": 4} | more
    return life | {"time": second, "saved": saved, "anon_mib": anon_mib}


def test_a_leak_is_found_in_its_process_and_measure_alone():
    rows = []
    for second in range(600):
        for role, leak in (("rank 0", 0.0), ("rank 1", 0.05)):
            grown = 300 + leak * second + second % 3 + 50 * (second < 60 or second > 585)  # imports; the report
            rows.append(row(second, second // 20, grown, role=role))
    rows.append({"run": "a", "start": 1, "event": "stop", "time": 600})
    rows += [row(700 + i, i // 10, i, start=2) for i in range(190)]
    found = trends(rows)
    assert found.keys() == {("a", 1, "rank 0"), ("a", 1, "rank 1")}  # the other life was too short
    assert found["a", 1, "rank 1"]["anon_mib"].slope == pytest.approx(0.05, rel=0.01)
    allowed = verdict.MEASURES
    grows = {(life, name) for life, lines in found.items() for name in allowed if not lines[name].flat(allowed[name])}
    assert grows == {(("a", 1, "rank 1"), "anon_mib")}


def test_a_process_is_judged_once_it_has_saved_four_times():
    """On a busy machine a minute is a few steps, and what grew until the second evaluation was called a leak."""
    for every, judged in ((20, True), (100, True), (120, False)):  # 4 * 120: too little is left
        found = trends([row(i, i // every, min(i, 4 * every)) for i in range(600)])
        assert bool(found) is judged
        assert not judged or found["a", 1, "rank 0"]["anon_mib"].slope == 0


def test_rows_may_lack_and_must_not_differ(tmp_path):
    rows = [{"step": step, "loss/classifier": 1.0 / step, "data_wait": 0.5} for step in (1, 2, 3)]
    for name, kept in (("a", rows), ("b", [{**rows[0], "data_wait": 0.1}, {**rows[2], "loss/classifier": 9.0}])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert verdict.other_rows(tmp_path / "a", tmp_path / "b") == [3]
    assert verdict.other_rows(tmp_path / "a", tmp_path / "a") == []


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--no-mount"]])
def test_a_very_short_soak(tmp_path, capfd, more):
    code = soak.main(["--minutes", "1", "--out", str(tmp_path), "--json", *more])
    out = capfd.readouterr().out
    assert code == 0, out
    result = json.loads(out.splitlines()[-1])
    assert result["findings"] == 0
    assert result["starts"] >= 4
    rows = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    assert [row["differing"] for row in rows if "differing" in row] == [[], []]
    assert {row["role"] for row in rows if "role" in row} == {"launcher", "rank 0", "rank 1"}
    assert list((tmp_path / "disk").iterdir()) == []
