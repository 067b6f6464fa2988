import json
import math

import numpy as np
import pytest

from utils.logging import RunLog, cut_back, say


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log(folder, *, active=True):
    return RunLog(folder, active=active, tensorboard=False, total_steps=10)


def test_rows(tmp_path):
    run_log = log(tmp_path)
    run_log.open(0)
    run_log.metrics(5, {"loss/generator": 0.123456789, "images": 320, "np": np.float32(1.5)})
    run_log.advance()
    run_log.metrics(10, {"nan": math.nan, "inf": -math.inf, "np_nan": np.float64("nan"), "small": 1.23456789e-9})
    run_log.close()
    assert rows(tmp_path) == [
        {"step": 5, "loss/generator": 0.123457, "images": 320, "np": 1.5},
        {"step": 10, "nan": None, "inf": None, "np_nan": None, "small": 1.23457e-9},
    ]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_silent_log_writes_nothing(tmp_path):
    run_log = RunLog(tmp_path, active=False, tensorboard=True, total_steps=10)
    run_log.open(0)
    run_log.metrics(1, {"x": 1.0})
    run_log.image(1, "x", np.zeros((2, 2), np.uint8))
    run_log.advance()
    run_log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_log_goes_on_where_the_checkpoint_was(tmp_path):
    run_log = log(tmp_path)
    run_log.open(0)
    for step in (1, 2, 3, 4):
        run_log.metrics(step, {"x": float(step)})
    run_log.close()
    run_log = log(tmp_path)
    run_log.open(2)
    run_log.metrics(3, {"x": 33.0})
    run_log.close()
    assert rows(tmp_path) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}, {"step": 3, "x": 33.0}]


@pytest.mark.parametrize("torn", ['{"step": 4, "x"', '{"step"', "{", "\x00\x00\x00", ""])
def test_later_rows_and_half_lines_are_cut_off(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 3}\n{"step": 3, "val/x": 1}\n{"step": 4}\n' + torn)
    cut_back(path, 3)
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n{"step": 3, "val/x": 1}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    cut_back(path, 0)
    assert path.read_text() == ""


def test_nothing_to_cut(tmp_path):
    cut_back(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_messages_go_to_stderr(capsys):
    say("hello")
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "hello\n")
