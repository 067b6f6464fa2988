import contextlib
import cProfile
import gzip
import itertools
import json
import os
import time
from typing import Any

import pytest
import torch
from torch import nn

from training.profile import trace as profile_trace
from training.profile.measure import (
    Function,
    Operator,
    Profile,
    Rewind,
    accompany,
    measure,
    overhead,
    python_functions,
)
from training.profile.ranges import PhaseClock, listening, phase
from training.profile.text import group_of, render, time_table, whole_shares
from training.profile.trace import PhaseMemory, read_timeline

CPU = torch.device("cpu")


class Clock:
    """A clock that is set by hand, and counts how often it was waited for."""

    def __init__(self):
        self.time, self.waits = 100.0, 0

    def __call__(self):
        return self.time

    def wait(self):
        self.waits += 1


def test_phases_divide_the_time():
    clock = Clock()
    phases = PhaseClock(clock.wait, clock)
    with listening(phases):
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
def test_a_penalty_keeps_what_is_inside(name):
    clock = Clock()
    phases = PhaseClock(clock.wait, clock)
    with listening(phases), phase(name):
        clock.time += 1
        with phase("discriminator/backward"):
            clock.time += 2
            with phase("augment"):
                clock.time += 4
    assert phases.seconds == {"other/host": 0, name: 7}


def test_a_phase_that_raises_ends():
    clock = Clock()
    phases = PhaseClock(clock.wait, clock)
    with listening(phases):
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


@pytest.mark.parametrize("seed", range(20))
def test_shares_add_up(seed):
    values = torch.rand(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).pow(4).tolist()
    seconds = {str(i): value for i, value in enumerate(values)}
    shares = whole_shares(seconds)
    assert sum(shares.values()) == 1000
    assert all(abs(shares[name] - 1000 * value / sum(values)) < 1 for name, value in seconds.items())
    assert list(shares) == list(seconds)


def test_shares_of_thirds_and_of_nothing():
    assert sorted(whole_shares({"a": 1.0, "b": 1.0, "c": 1.0}).values()) == [333, 333, 334]
    assert whole_shares({"a": 0.0}) == {"a": 0}
    assert whole_shares({"a": 0.0006, "b": 0.9994}) == {"a": 1, "b": 999}


# --- the trace


def range_event(name, start, duration, cat="user_annotation"):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration}


def memory_event(at, size, device=0):
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at,
            "args": {"Bytes": size, "Device Type": device, "Total Allocated": 0}}  # fmt: skip


def test_memory_goes_to_the_innermost_phase():
    events = [
        {"ph": "M", "name": "process_name"},
        range_event("step", 0, 100),
        range_event("forward", 10, 40),
        range_event("augment", 20, 10),
        range_event("backward", 50, 30),  # begins where forward ends
        memory_event(5, 1),
        memory_event(12, 10),
        memory_event(25, 100),
        memory_event(28, -100),
        memory_event(35, 1000),
        memory_event(60, -900),
        memory_event(70, 5000, device=1),
        memory_event(90, -50),
    ]
    found = read_timeline(events, {"forward", "augment", "backward"})
    assert found.memory == {
        "other/host": PhaseMemory(1 - 50, 61),
        "forward": PhaseMemory(1010, 1011),
        "augment": PhaseMemory(0, 111),
        "backward": PhaseMemory(-900, 1011),
    }
    assert found.peak == 1011
    assert read_timeline(events, {"forward"}, device_type=1).memory["other/host"] == PhaseMemory(5000, 5000)


def test_an_inner_phase_may_begin_with_the_outer_one():
    events = [range_event("step", 0, 100), range_event("augment", 10, 10), range_event("forward", 10, 40)]
    found = read_timeline([*events, memory_event(15, 8), memory_event(30, 1)], {"forward", "augment"})
    assert (found.memory["augment"].adds, found.memory["forward"].adds) == (8, 1)


def test_what_a_phase_adds_is_taken_from_the_second_step_on():
    events = [range_event("step", 100 * i, 90) for i in (2, 0, 1)]
    events += [range_event("forward", 100 * i + 10, 50) for i in range(3)]
    events += [memory_event(20, 7), memory_event(120, 100), memory_event(180, -90), memory_event(220, 40)]
    found = read_timeline(events, {"forward"})
    assert found.memory["forward"] == PhaseMemory(70, 107)
    assert found.memory["other/host"].adds == -45
    alone = read_timeline([range_event("step", 0, 90), memory_event(20, 7)], set())
    assert alone.memory == {"other/host": PhaseMemory(7, 7)}


def test_pythons_share_is_where_no_operator_runs():
    steps = [range_event("step", 0, 100), range_event("step", 200, 100)]
    operators = [
        range_event("aten::a", 10, 20, "cpu_op"),
        range_event("aten::b", 15, 5, "cpu_op"),  # called by a
        range_event("aten::c", 25, 15, "cpu_op"),  # on another thread
        range_event("aten::d", 95, 55, "cpu_op"),  # only 5 of it in the step
        range_event("kernel", 60, 20, "kernel"),
    ]
    assert read_timeline(steps + operators, set()).python_share == pytest.approx(1 - 35 / 200)
    assert read_timeline(operators, set()).python_share == 0


def test_quiet_leaves_out_one_message_only(capfd):
    with contextlib.suppress(ValueError), profile_trace.quiet():
        os.write(2, b"first\n[W] block was allocated before the profiling started, results\nlast\n")
        raise ValueError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "first\nlast\nafter\n"


# --- what the instruments cost


def test_overhead():
    assert overhead([1.0, 2.0, 4.0], [1.1, 2.2, 400.0], by_step=True) == pytest.approx(0.1)
    assert overhead([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], by_step=False) == pytest.approx(1.0)
    assert overhead([1.0, 3.0], [3.0, 3.0], by_step=False) == pytest.approx(0.5)


def spin(times):
    return sum(i * i for i in range(times))


def test_functions_of_ours_by_their_own_time():
    counter = cProfile.Profile()
    counter.enable()
    spin(20_000)
    spin(20_000)
    json.loads(json.dumps([1] * 2000, indent=1))
    counter.disable()
    functions, sums = python_functions(counter, 4)
    # `ours` goes by the folder: this file is in it, json is not
    names = {f.name: f for f in functions}
    assert "spin" in names
    assert not any("json" in f.place for f in functions)
    assert names["spin"].calls == 0.5
    assert names["spin"].place == f"tests/training/profile/test_profile.py:{spin.__code__.co_firstlineno}"
    assert names["spin"].seconds > names["spin"].own_seconds
    assert [f.own_seconds for f in functions] == sorted((f.own_seconds for f in functions), reverse=True)
    assert sums["ours"] == pytest.approx(sum(f.own_seconds for f in functions))
    assert sums["libraries"] > 0
    assert sums["built-in"] > 0


# --- the whole


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


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    task, straight = Task(), Task()
    for _ in range(2):
        task.train()
        straight.train()
    before, task.seen = copied(task), []
    trace = tmp_path_factory.mktemp("profile") / "new" / "trace.json.gz"
    found = measure(task.train, 3, task.registry(), CPU, trace)
    return task, straight, before, found, trace


def test_the_same_steps_for_every_instrument_and_back_to_the_start(measured):
    task, straight, before, _, _ = measured
    assert task.seen == [2, 3, 4] * 4
    assert copied(task) == before
    task.train()
    straight.train()
    assert copied(task) == copied(straight)


def test_the_phases_of_a_task(measured):
    _, _, _, found, _ = measured
    assert list(found.phases) == ["other/host", "data", "forward", "discriminator/penalty", "optimizer"]
    assert found.steps == 3
    assert found.phases["data"] >= 0.002
    assert found.phases["other/host"] >= 0.004
    assert found.phases["discriminator/penalty"] > 0
    assert sum(found.phases.values()) >= 0.006
    assert found.plain >= 0.006
    assert set(found.overhead) == {"clocks at the phases", "torch.profiler", "cProfile"}
    assert 0 < found.python_share < 1


def test_times_are_those_of_a_step(tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # each look at the clock takes a second
    task = Task()
    found = measure(task.train, 3, task.registry(), CPU, tmp_path / "t.json.gz")
    assert found is not None
    # a look at the beginning and the end of each phase, two more inside the penalty, one after each step and at the end
    phases = {"other/host": 5 + 1 / 3, "data": 1, "forward": 1, "discriminator/penalty": 3, "optimizer": 1}
    assert found.phases == pytest.approx(phases)
    assert found.plain == pytest.approx(1 + 1 / 3)
    assert found.overhead == {"clocks at the phases": 10, "torch.profiler": 0, "cProfile": 0}


def test_the_memory_of_a_task(measured):
    _, _, _, found, _ = measured
    mib = 2**20
    activations = 2500 * 200 * 4
    assert found.memory["data"].adds == pytest.approx(activations, rel=0.01)
    assert activations <= found.memory["forward"].adds < 4 * activations
    assert found.memory["forward"].peak >= 3 * activations  # the batch, the outputs and their differences at once
    assert found.memory["discriminator/penalty"].adds < 0  # gives back more than the gradients take
    assert 2 * activations < found.peak < 100 * mib
    assert sum(m.adds for m in found.memory.values()) == pytest.approx(0, abs=1000)  # a step leaves nothing behind
    assert 50 * mib < found.process_peak < 100_000 * mib


def test_the_operators_and_functions_of_a_task(measured):
    _, _, _, found, _ = measured
    operators = {o.name: o for o in found.operators}
    assert [o.seconds for o in found.operators] == sorted((o.seconds for o in found.operators), reverse=True)
    assert 0 < operators["aten::addmm"].seconds < found.plain * 100
    assert operators["aten::addmm"].calls == 1
    assert sum(o.share for o in found.operators) == pytest.approx(1)
    assert not {"step", "forward", "data"} & set(operators)
    train = next(f for f in found.functions if f.name == "Task.train")
    assert train.calls == 1
    assert train.seconds > 0.006


def test_the_trace_holds_the_phases(measured):
    *_, trace = measured
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    ranges = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    # what is in a penalty belongs to it
    names = ["step", "data", "forward", "discriminator/penalty", "optimizer"]
    assert sorted(set(ranges) & {*names, "backward"}) == sorted(names)
    assert all(ranges.count(name) == 3 for name in names)
    assert any(e.get("name") == "aten::addmm" for e in events)


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_a_signal_ends_it(tmp_path, stop_at):
    task = Task()
    before, task.stop_at = copied(task), stop_at
    assert measure(task.train, 3, task.registry(), CPU, tmp_path / "t.json.gz") is None
    assert task.seen == list(range(stop_at))
    assert copied(task) == before
    assert not (tmp_path / "t.json.gz").exists()


@pytest.mark.parametrize("stop_at", [-1, 2])
def test_the_other_ranks_do_the_same_steps(tmp_path, stop_at):
    one, other = Task(), Task()
    one.stop_at = other.stop_at = stop_at
    before = copied(other)
    measure(one.train, 3, one.registry(), CPU, tmp_path / "t.json.gz")
    accompany(other.train, 3, other.registry())
    assert one.seen == other.seen
    assert copied(other) == before


def test_rewind_twice():
    task = Task()
    state = Rewind(task.registry())
    before = copied(task)
    for _ in range(2):
        task.train()
        task.train()
        assert copied(task) != before
        state.rewind()
        assert copied(task) == before
    assert state.bytes == 4 * (200 * 200 + 200 + 2)
    assert task.model.weight.grad is None


# --- text


def example(**more):
    values: dict[str, Any] = {
        "steps": 4,
        "phases": {"other/host": 0.001, "discriminator/forward": 0.002, "data": 0.0005, "generator/forward": 0.003,
                   "strange": 0.0015, "discriminator/penalty": 0.002},
        "plain": 0.0099,
        "overhead": {"clocks at the phases": 0.01, "torch.profiler": 0.256},
        "python_share": 0.125,
        "operators": [Operator(f"aten::op{i}", 2.5, 0.001, 0.01) for i in range(12)],
        "functions": [Function(f"a.py:{i}", f"f{i}", 3, 0.0012, 0.004) for i in range(12)],
        "python": {"ours": 0.001, "libraries": 0.002, "built-in": 0.003},
        "memory": {"generator/forward": PhaseMemory(3 * 2**20, 5 * 2**20),
                   "discriminator/forward": PhaseMemory(-(2**20), 4 * 2**20)},
        "peak": 5 * 2**20,
        "process_peak": 900 * 2**20,
    }  # fmt: skip
    return Profile(**(values | more))


def test_the_table():
    assert time_table(example()).splitlines() == [
        "                         ms a step    share  adds MiB  holds MiB at most",
        "data wait                     0.50    5.0 %      +0.0                0.0",
        "forward                       5.00   50.0 %      +2.0                5.0",
        "  discriminator/forward       2.00   20.0 %      -1.0                4.0",
        "  generator/forward           3.00   30.0 %      +3.0                5.0",
        "penalty                       2.00   20.0 %      +0.0                0.0",
        "  discriminator/penalty       2.00   20.0 %      +0.0                0.0",
        "strange                       1.50   15.0 %      +0.0                0.0",
        "other/host                    1.00   10.0 %      +0.0                0.0",
        "step                         10.00  100.0 %      +2.0                5.0",
    ]


def test_the_text():
    text = render(example(), "gan: steps 3 to 6", "runs/x/profile/trace.json.gz")
    assert text.startswith("gan: steps 3 to 6\n\n")
    assert "A step takes 9.90 ms with no instrument." in text
    assert "clocks at the phases +1 %, torch.profiler +26 %\n(median of each step" in text
    assert "in 12.5 % of the time" in text
    assert "the process was resident with 900 MiB at most" in text
    assert text.count("aten::op") == text.count("a.py:") == 10
    assert "runs/x/profile/trace.json.gz" in text
    assert max(map(len, text.splitlines())) <= 120
    text = render(example(accelerator=True), "x", "y")
    assert "the accelerator had 900 MiB allocated at most" in text
    assert "wait for the accelerator" in text
    assert "operators, own time on the accelerator" in text


def test_groups():
    assert group_of("generator/path_length") == group_of("discriminator/penalty") == "penalty"
    assert group_of("discriminator/samples") == group_of("forward") == "forward"
    assert group_of("mine/thing") == "mine/thing"
    assert group_of("other/host") == "other/host"
