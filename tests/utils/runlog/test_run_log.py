import json
import math
import resource
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from duetgan.utils.runlog.run_log import Events, RunLog, cut_back
from tests.end_to_end.helpers import events_of


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def logging(folder, start=0, *, tensorboard=False):
    """A log that is opened at a step, and closed."""
    run_log = RunLog(folder, active=True, tensorboard=tensorboard, total_steps=10)
    run_log.open(start)
    yield run_log
    run_log.close()


def test_rows(tmp_path):
    with logging(tmp_path) as run_log:
        run_log.metrics(5, {"loss/generator": 0.123456789, "images": 320, "np": np.float32(1.5)})
        run_log.advance()
        run_log.metrics(10, {"nan": math.nan, "inf": -math.inf, "np_nan": np.float64("nan"), "small": 1.23456789e-9})
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
    with logging(tmp_path) as run_log:
        for step in (1, 2, 3, 4):
            run_log.metrics(step, {"x": float(step)})
    with logging(tmp_path, 2) as run_log:
        run_log.metrics(3, {"x": 33.0})
    assert rows(tmp_path) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}, {"step": 3, "x": 33.0}]


@pytest.mark.parametrize("resumed", [0, 1, 3])
@pytest.mark.parametrize("later", [0, 1])
def test_tensorboard_shows_the_rows_of_a_resumed_run(tmp_path, resumed, later):
    """The checkpoint is at a row; the process may have written rows after it before it was killed."""

    def train(start, last):
        with logging(tmp_path, start, tensorboard=True) as run_log:
            for step in range(start + 1, last + 1):
                run_log.metrics(step, {"x": 10.0 * last + step})
                run_log.metrics(step, {"val/x": 20.0 * last + step})

    train(0, resumed + later)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.rename(file.with_name("events.out.tfevents.0"))  # before the next one, also in the same second
    train(resumed, 5)
    events = events_of(tmp_path)
    for key in ("x", "val/x"):
        shown = [(event.step, event.value) for event in events.Scalars(key)]
        assert shown == [(row["step"], row[key]) for row in rows(tmp_path) if key in row]
        assert [step for step, _ in shown] == [1, 2, 3, 4, 5]


@contextmanager
def no_file_larger_than(size):
    """What a full disk does: the bytes up to there are written, the rest is refused."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_refused_row_costs_no_other(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with logging(tmp_path) as run_log:
        run_log.metrics(1, {"x": 1.0})
        for step in (2, 4):
            with no_file_larger_than(path.stat().st_size + 10):
                run_log.metrics(step, {"x": float(step)})
                run_log.metrics(step, {"val/x": float(step)})
            run_log.metrics(step + 1, {"x": step + 1.0})
    whole = [{"step": 1, "x": 1.0}, {"step": 3, "x": 3.0}, {"step": 5, "x": 5.0}]
    assert rows(tmp_path) == whole
    warning = f"warning: {path}: cannot be written (File too large); training continues without its rows"
    assert [line for line in capsys.readouterr().err.splitlines() if "warning" in line] == [warning]
    with logging(tmp_path, 5):
        assert rows(tmp_path) == whole


def tensorboard_threads():
    return [thread for thread in threading.enumerate() if type(thread).__module__.startswith("tensorboard.")]


@pytest.fixture
def no_thread_left():
    before = tensorboard_threads()
    yield
    assert tensorboard_threads() == before


def check_told_once(folder, error):
    assert "Traceback" not in error
    (warning,) = [line for line in error.splitlines() if "warning" in line]
    assert warning.startswith(f"warning: {folder}: cannot be written (File ")
    assert warning.endswith("); training continues without TensorBoard")


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize("count", [1, 100])
def test_refused_events_are_no_error(tmp_path, capsys, count):
    """Seen at the end, or at one of many."""
    events = Events(tmp_path, purge_step=None)
    with no_file_larger_than(100):
        for step in range(count):
            events.scalars(step, {"x": 1.0})
        assert events.refused or count == 1
        events.close()
    assert events.refused
    check_told_once(tmp_path, capsys.readouterr().err)


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize("first", ["open", "image"])
def test_tensorboard_on_a_full_disk(tmp_path, capsys, first):
    """Whatever is refused first, it is said once and given up, and rows go on."""
    run_log = RunLog(tmp_path, active=True, tensorboard=True, total_steps=10)
    folder = tmp_path / "tensorboard"
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    if first == "open":
        folder.write_text("in the way")
    run_log.open(0)
    with no_file_larger_than(200):
        if first == "image":
            for _ in range(50):  # more than the queue of the thread that writes takes
                run_log.image(1, "noise", noise)
    for step in (2, 3):  # there is room again
        run_log.metrics(step, {"x": 1.0})
        run_log.image(step, "noise", noise)
    run_log.close()
    run_log.open(3)  # as after a roll-back
    run_log.metrics(4, {"x": 1.0})
    run_log.close()
    assert [row["step"] for row in rows(tmp_path)] == [2, 3, 4]
    check_told_once(folder, capsys.readouterr().err)


@pytest.mark.parametrize("going_on", [False, True])
def test_the_row_between_two_ticks_stays_unless_training_goes_on(tmp_path, going_on):
    """The last row of a run that ended between two log ticks; a repeated command trains nothing."""
    rows = '{"step": 4}\n{"step": 6, "partial": true}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    log = RunLog(tmp_path, active=True, tensorboard=False, total_steps=8)
    log.open(6, going_on=going_on)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ('{"step": 4}\n' if going_on else rows)


@pytest.mark.parametrize("torn", ['{"step": 4, "x"', '{"step"', "{", "\x00\x00\x00", ""])
def test_later_rows_and_half_lines_are_cut_off(tmp_path, torn):
    """On a full disk, too."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 3}\n{"step": 3, "val/x": 1}\n{"step": 4}\n' + torn)
    for step, left in ((3, '{"step": 1}\n{"step": 3}\n{"step": 3, "val/x": 1}\n'), (1, '{"step": 1}\n'), (0, "")):
        with no_file_larger_than(5):
            cut_back(path, step, partial=True)
        assert path.read_text() == left
        assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    rows = ['{"step": 2}\n', '{"step": 9}\n', '{"step": 3, "partial": true}\n', '{"step": 1}\n']  # not in order
    for partial, numbers in ((True, [0, 3]), (False, [0, 2, 3])):
        path.write_text("".join(rows))
        cut_back(path, 3, partial=partial)
        assert path.read_text() == "".join(rows[number] for number in numbers)
