"""A run that stops at --max-steps between two log ticks has a row of what it did, until it goes on."""


import pytest

from tests.end_to_end.helpers import differing, log_of, rows, state_of, train_in_process, write_config

pytestmark = pytest.mark.usefixtures("slim")
QUIET = ["--device", "cpu", "--precision", "fp32", "--evaluation.every", "0", "--log.samples_every", "0"]


def test_max_steps_between_two_ticks_leaves_a_row_that_a_resume_takes_away(tmp_path, packed):
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed, tensorboard=True)  # log.every 3
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert train_in_process(config, straight, *QUIET) == 0
    assert train_in_process(config, stopped, *QUIET, "--max-steps", "2") == 0
    (row,) = log_of(stopped)
    assert (row["step"], row["partial"], row["images"]) == (2, True, 40)
    assert row["loss/classifier"] > 0
    assert row["images_per_second"] > 0
    assert row["memory_mib"] > 0
    before = (stopped / "metrics.jsonl").read_bytes()
    assert train_in_process(config, stopped, *QUIET, "--max-steps", "2") == 0  # there is nothing left to do
    assert (stopped / "metrics.jsonl").read_bytes() == before
    assert train_in_process(config, stopped, *QUIET, "--max-steps", "4") == 0
    assert [(row["step"], row.get("partial", False)) for row in log_of(stopped)] == [(3, False), (4, True)]
    assert train_in_process(config, stopped, *QUIET) == 0
    assert rows(stopped) == rows(straight)
    assert differing(state_of(straight, 8), state_of(stopped, 8)) == []


def test_at_a_tick_there_is_one_row(tmp_path, packed):
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    run = tmp_path / "run"
    assert train_in_process(config, run, *QUIET, "--max-steps", "3") == 0
    assert [(row["step"], "partial" in row) for row in log_of(run)] == [(3, False)]
