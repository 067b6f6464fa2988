"""A very short soak."""

import json

import pytest

from benchmarks import soak


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
