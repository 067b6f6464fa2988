import contextlib
import gzip
import itertools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from duetgan.training.base.phases import PhaseClock, listening, phase
from duetgan.training.engine.profile import WARM_UP, Profiler
from duetgan.utils.errors import UserError

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


def phases_of(summary: str) -> dict[str, tuple[float, float]]:
    """Phase -> (ms a step, share in percent)."""
    table = summary.split("\n\n")[1]
    rows = re.finditer(r"^(\S+) +([\d.]+) +([\d.]+) %$", table, re.MULTILINE)
    return {row[1]: (float(row[2]), float(row[3])) for row in rows}


class Task:
    """Trains a linear layer."""

    def __init__(self):
        self.model = nn.Linear(200, 200)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def images_at(self, step):
        return 8 * step

    def train(self):
        with phase("data"):
            time.sleep(0.002)
            x = torch.full((2500, 200), 0.001)
        self.optimizer.zero_grad(set_to_none=True)
        with phase("forward"):
            loss = (self.model(x) - 1).square().mean()
        with phase("discriminator/penalty"), phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self.optimizer.step()
        time.sleep(0.004)


def profiled(folder: Path, steps: int = WARM_UP + 3) -> Profiler:
    """Profile three steps of a run that ends after `steps`; nothing counts between steps."""
    task = Task()
    config, loader = SimpleNamespace(task="gan", steps=steps, precision="fp32"), SimpleNamespace(device=CPU)
    loop: Any = SimpleNamespace(step=0, task=task, config=config, loader=loader, folder=SimpleNamespace(path=folder))
    profiler = Profiler(loop, 3)
    while loop.step < profiler.last:
        profiler.before_step(loop)
        task.train()
        loop.step += 1
        profiler.after_step(loop, {})
        with phase("between"):
            time.perf_counter()
    return profiler


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    profiled(folder)
    return folder / "profile"


def test_the_phases_add_up_to_the_step_and_operators_are_counted(measured):
    text = (measured / "summary.txt").read_text()
    assert text.startswith("gan: steps 3 to 5, 8 images a step, 1 processes, rank 0 measured (cpu, ")
    found = phases_of(text)
    assert list(found) == ["data", "discriminator/penalty", "forward", "optimizer", "other/host", "step"]
    milliseconds, share = found.pop("step")
    assert share == 100
    assert sum(ms for ms, _ in found.values()) == pytest.approx(milliseconds, abs=0.05)
    assert sum(share for _, share in found.values()) == pytest.approx(100, abs=0.5)
    assert found["data"][0] >= 2
    assert found["other/host"][0] >= 4
    addmm: Any = re.search(r"^ +aten::addmm .* (\d+) *$", text, re.MULTILINE)
    assert addmm[1] == "3"  # calls
    shares = [float(share) for share in re.findall(r"^ *\S.*? +([\d.]+)% ", text.split("\n\n")[2], re.MULTILINE)]
    assert (len(shares), shares) == (12, sorted(shares, reverse=True))


def test_times_are_those_of_a_step(tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # each look at the clock takes a second
    seconds = {name: total / 3 for name, total in profiled(tmp_path).clock.seconds.items()}
    # a look at the beginning and the end of each phase, two more inside the penalty, and one at either end of all
    assert seconds == {"other/host": 6, "data": 1, "forward": 1, "discriminator/penalty": 3, "optimizer": 1}


def test_the_trace_holds_the_phases(measured):
    with gzip.open(measured / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    ranges = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    # what is in a penalty belongs to it
    names = ["step", "data", "forward", "discriminator/penalty", "optimizer"]
    assert sorted(set(ranges) & {*names, "backward"}) == sorted(names)
    assert all(ranges.count(name) == 3 for name in names)
    assert any(e.get("name") == "aten::addmm" for e in events)


def test_too_few_steps_are_refused(tmp_path):
    with pytest.raises(UserError, match="but 5 of 5 are left; give a smaller N"):
        profiled(tmp_path, WARM_UP + 2)
