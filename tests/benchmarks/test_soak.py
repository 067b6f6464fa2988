"""The soak: what its verdict finds, and a very short one."""

import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import soak
from benchmarks.soaking import verdict
from benchmarks.soaking.verdict import Trend, trend, trends, unequal
from duetgan.utils.config.build import build
from duetgan.utils.errors import UserError


def wandering(seed: int, n: int = 400) -> list[float]:
    """A stationary figure whose neighbours resemble each other (r = 0.9)."""
    draws, value, found = random.Random(seed), 0.0, []
    for _ in range(n):
        value = 0.9 * value + draws.gauss(0, 1)
        found.append(100 + value)
    return found


def test_the_line_is_that_of_least_squares_and_its_error_as_wide_as_slopes_vary():
    times = [0.0, 1.0, 2.0, 4.0]
    found = trend(times, [1.0, 3.0, 5.0, 9.0])
    assert found == pytest.approx((2.0, 0.0, 4.5, 4.0))
    noisy = trend(times, [1.0, 3.5, 4.0, 9.5])
    matrix = torch.tensor([[t, 1.0] for t in times], dtype=torch.float64)
    values = torch.tensor([1.0, 3.5, 4.0, 9.5], dtype=torch.float64)
    assert noisy.slope == pytest.approx(float(torch.linalg.lstsq(matrix, values).solution[0]))
    lines = [trend([float(i) for i in range(400)], wandering(seed)) for seed in range(60)]
    varies = (sum(line.slope**2 for line in lines) / 60) ** 0.5
    assert 0.6 < sum(line.error for line in lines) / 60 / varies < 1.5
    assert sum(line.flat(0.0) for line in lines) >= 55


@pytest.mark.parametrize(
    ("line", "flat"),
    [
        (Trend(1e-3, 1e-6, 1000.0, 3600.0), True),  # 3.6 MiB
        (Trend(2e-3, 1e-6, 1000.0, 3600.0), False),  # 7.2 MiB: the level does not excuse it
        (Trend(2e-3, 1e-6, 1000.0, 1200.0), True),
        (Trend(2e-3, 1.1e-3, 1000.0, 3600.0), True),
        (Trend(-1.0, 1e-6, 1000.0, 3600.0), True),
    ],
)
def test_what_counts_as_flat(line, flat):
    assert line.flat(verdict.MEASURES["anon_mib"]) is flat
    assert line.most == pytest.approx(line.slope + 2 * line.error)


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


def test_a_difference_of_one_bit_is_named_and_rows_may_lack(tmp_path):
    state: dict[str, Any] = {"w": torch.tensor([1.0, 2.0, float("nan")]), "n": [1, float("nan")], "step": 3}
    other: dict[str, Any] = {"w": state["w"].clone(), "n": [1, float("nan")], "step": 3}
    assert unequal(state, other) == []
    other["w"][0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert unequal(state, other) == ["state.w"]
    assert unequal(state, {**state, "n": [1, 2.0], "step": 3.0}) == ["state.n[1]", "state.step"]
    assert unequal(state, {"w": state["w"]}) == ["state"]
    rows = [{"step": step, "loss/classifier": 1.0 / step, "data_wait": 0.5} for step in (1, 2, 3)]
    for name, kept in (("a", rows), ("b", [{**rows[0], "data_wait": 0.1}, {**rows[2], "loss/classifier": 9.0}])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert verdict.other_rows(tmp_path / "a", tmp_path / "b") == [3]
    assert verdict.other_rows(tmp_path / "a", tmp_path / "a") == []


def test_processes_are_seen_with_their_memory_files_and_threads():
    own = soak.sample(os.getpid())
    kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert (own["anon_mib"] + own["file_mib"]) * 2**20 == pytest.approx(kept, rel=0.5)
    with open(os.devnull):
        assert soak.sample(os.getpid())["files"] == own["files"] + 1
    code = "import subprocess, sys; subprocess.run(['sleep', '30'], env={'RANK': '1'})"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        try:
            while "rank 1" not in (found := soak.family(parent.pid)):
                assert parent.poll() is None
            assert found["launcher"] == parent.pid
            os.kill(found["rank 1"], 9)
        finally:
            parent.kill()


GROWS = """
import mmap, sys
kept, file = [], open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
for part in range(64):
    if sys.argv[2] == "leaks":
        kept.append(b"x" * 2**20)
    else:  # reads on in a mapped file, as the loader does
        sum(mapped[part << 20 : (part + 1) << 20 : 4096])
    print(flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("does", ["leaks", "reads"])
def test_a_leak_counts_and_a_mapped_file_does_not(tmp_path, does):
    file = tmp_path / "images"
    file.write_bytes(os.urandom(1 << 20) * 64)
    samples = []
    command = [sys.executable, "-c", GROWS, str(file), does]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(64):
            process.stdout.readline()
            samples.append(soak.sample(process.pid))
            process.stdin.write(b"\n")
            process.stdin.flush()
        process.stdin.close()
        while "Z" not in Path(f"/proc/{process.pid}/stat").read_text():
            time.sleep(0.01)
        with pytest.raises(ProcessLookupError):
            soak.sample(process.pid)
    grown = {name: samples[-1][name] - samples[0][name] for name in ("anon_mib", "file_mib")}
    assert grown["anon_mib" if does == "leaks" else "file_mib"] == pytest.approx(63, rel=0.2)
    line = trend([10.0 * i for i in range(64)], [each["anon_mib"] for each in samples])
    assert line.flat(verdict.MEASURES["anon_mib"]) is (does == "reads")


@pytest.mark.parametrize("task", soak.TASKS)
def test_the_recipes_are_configs(task, tmp_path):
    from duetgan.training.engine.tasks import TASKS

    config = build(TASKS[task].config(), soak.recipe(task, tmp_path))
    assert config.steps > 10**6


def test_a_time_is_needed(tmp_path):
    with pytest.raises(UserError, match="must be above 0"):
        soak.main(["--hours", "-1", "--out", str(tmp_path)])


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
