import contextlib
import gzip
import itertools
import json
import re
import time
from typing import Any

import pytest
import torch
from torch import nn

from duetgan.training.base.phases import PhaseClock, listening, phase
from duetgan.training.engine.profile import Rewind, measure

CPU = torch.device("cpu")


class Clock:
    """A clock that is set by hand, and counts how often it was waited for."""

    def __init__(self):
        self.time, self.waits = 100.0, 0

    def wait(self):
        self.waits += 1


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def phases(clock):
    """What listens, by this clock."""
    with listening(PhaseClock(clock.wait, lambda: clock.time)) as listener:
        yield listener


def test_phases_divide_the_time(clock, phases):
    clock.time += 1  # before the first phase
    with phase("a"):
        clock.time += 2
        with phase("augment"):
            clock.time += 4
        clock.time += 8
    clock.time += 16
    with phase("a"):
        clock.time += 32
    assert phases.seconds == {"other/host": 17, "a": 42, "augment": 4}
    assert clock.waits == 6  # at every beginning and end


@pytest.mark.parametrize("name", ["discriminator/penalty", "generator/path_length"])
def test_a_penalty_keeps_what_is_inside(clock, phases, name):
    with phase(name):
        clock.time += 1
        with phase("discriminator/backward"):
            clock.time += 2
            with phase("augment"):
                clock.time += 4
    assert phases.seconds == {"other/host": 0, name: 7}


def test_a_phase_that_raises_ends(clock, phases):
    with contextlib.suppress(ValueError), phase("a"):
        clock.time += 1
        raise ValueError
    with phase("b"):
        clock.time += 2
    assert phases.seconds == {"other/host": 0, "a": 1, "b": 2}


def test_phases_are_nothing_unless_somebody_listens():
    assert phase("a") is phase("b")
    with phase("a"), phase("b"):
        pass
    with contextlib.suppress(ValueError), listening(PhaseClock(lambda: None, time.perf_counter)):
        assert phase("a") is not phase("b")
        raise ValueError
    assert phase("a") is phase("b")


class Task:
    """Trains a linear layer; the third part of its state keeps what it is given and changes it in place."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(200, 200)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.total = torch.zeros(2)
        self.step = 0
        self.seen: list[int] = []
        self.stop_at = -1

    def registry(self):
        return {"model": self.model, "optimizer": self.optimizer, "task": self}

    def state_dict(self):
        return {"step": self.step, "total": self.total}

    def load_state_dict(self, state):
        self.step, self.total = state["step"], state["total"]

    def train(self):
        with phase("data"):
            time.sleep(0.002)
            x = torch.full((2500, 200), 0.001 * self.step)
        self.optimizer.zero_grad(set_to_none=True)
        with phase("forward"):
            loss = (self.model(x) - 1).square().mean()
        with phase("discriminator/penalty"), phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self.optimizer.step()
        time.sleep(0.004)
        self.total += self.step
        self.seen.append(self.step)
        self.step += 1
        return self.step != self.stop_at


def copied(task):
    state = {name: part.state_dict() for name, part in task.registry().items()}
    return json.dumps(state, default=lambda tensor: tensor.tolist())


def phases_of(summary: str) -> dict[str, tuple[float, float]]:
    """Phase -> (ms a step, share in percent)."""
    table = summary.split("\n\n")[1]
    rows = re.finditer(r"^(\S+) +([\d.]+) +([\d.]+) %$", table, re.MULTILINE)
    return {row[1]: (float(row[2]), float(row[3])) for row in rows}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    task, straight = Task(), Task()
    for _ in range(2):
        task.train()
        straight.train()
    before, task.seen = copied(task), []
    folder = tmp_path_factory.mktemp("profile") / "new"
    measure(task.train, 3, task.registry(), CPU, folder, "a heading")
    return task, straight, before, folder


def test_the_same_steps_twice_and_back_to_the_start(measured):
    task, straight, before, _ = measured
    assert task.seen == [2, 3, 4] * 2
    assert copied(task) == before
    assert task.model.weight.grad is None
    task.train()
    straight.train()
    assert copied(task) == copied(straight)


def test_the_phases_add_up_to_the_step_and_operators_are_counted(measured):
    text = (measured[-1] / "summary.txt").read_text()
    assert text.startswith("a heading\n\n")
    found = phases_of(text)
    assert list(found) == ["data", "discriminator/penalty", "forward", "optimizer", "other/host", "step"]
    milliseconds, share = found.pop("step")
    assert share == 100
    assert sum(ms for ms, _ in found.values()) == pytest.approx(milliseconds, abs=0.05)
    assert sum(share for _, share in found.values()) == pytest.approx(100, abs=0.5)
    assert found["data"][0] >= 2
    assert found["other/host"][0] >= 4
    assert f"data wait {found['data'][1]} % of the time" in text
    addmm: Any = re.search(r"^ +aten::addmm .* (\d+) *$", text, re.MULTILINE)
    memory: Any = re.search(r"memory: (\d+) MiB resident at most", text)
    assert (addmm[1], 50 < int(memory[1]) < 100_000) == ("3", True)  # calls


def test_times_are_those_of_a_step(tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # each look at the clock takes a second
    task = Task()
    assert Rewind(task.registry()).bytes == 4 * (200 * 200 + 200 + 2)
    measure(task.train, 3, task.registry(), CPU, tmp_path, "x")
    found = {name: ms for name, (ms, _) in phases_of((tmp_path / "summary.txt").read_text()).items()}
    # a look at the beginning and the end of each phase, two more inside the penalty, and one at either end of all
    phases = {"other/host": 4 + 2 / 3, "data": 1, "forward": 1, "discriminator/penalty": 3, "optimizer": 1}
    assert found.pop("step") == pytest.approx(1e3 * sum(phases.values()), abs=0.01)
    assert found == {name: pytest.approx(1e3 * seconds, abs=0.01) for name, seconds in phases.items()}


def test_the_trace_holds_the_phases(measured):
    with gzip.open(measured[-1] / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    ranges = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    # what is in a penalty belongs to it
    names = ["step", "data", "forward", "discriminator/penalty", "optimizer"]
    assert sorted(set(ranges) & {*names, "backward"}) == sorted(names)
    assert all(ranges.count(name) == 3 for name in names)
    assert any(e.get("name") == "aten::addmm" for e in events)


@pytest.mark.parametrize("stop_at", [-1, 1, 2, 3])
def test_the_other_ranks_do_the_same_steps_and_a_signal_ends_them(tmp_path, stop_at):
    """Both leave the state as it was, and write nothing."""
    one, other = Task(), Task()
    one.stop_at = other.stop_at = stop_at
    before = copied(other)
    measure(one.train, 3, one.registry(), CPU, tmp_path / "one", "x")
    measure(other.train, 3, other.registry(), CPU, None, "x")
    assert one.seen == other.seen == (list(range(3)) * 2 if stop_at == -1 else list(range(stop_at)))
    assert copied(one) == copied(other) == before
    assert {path.name for path in tmp_path.iterdir()} == ({"one"} if stop_at == -1 else set())
