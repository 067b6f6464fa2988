"""Steps as CUDA graphs on the pretend accelerator have the numbers of other steps to the bit; faults are seen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duetgan.data.reading.loader import Batch
from duetgan.training.base.graphs import DEVICES, Graphs
from duetgan.training.base.phases import PhaseClock, listening
from tests.accelerator.graph_cases import EAGER, FAST, FAST_FAULTS, FAULTS, FEW, SLOW

CASES = "tests.accelerator.graph_cases"
pytestmark = pytest.mark.timeout(1800)  # a part runs whole when its first row is asked for
ROWS = [("fast", name) for name in FAST] + [pytest.param("slow", name, marks=pytest.mark.slow) for name in SLOW]


@pytest.mark.parametrize(("part", "name"), ROWS)
def test_replayed_steps_have_the_numbers_of_others_to_the_bit(seen, part, name):
    """Also where training goes back to a state half way."""
    found = seen[part][name]
    assert found["differing"] == []
    if name in EAGER:
        assert (found["plan"], found["captured"]) == (EAGER[name], 0)
    else:
        assert found["plan"].startswith("CUDA graph, ")
        assert found["captured"] > 0


def test_what_the_plan_says_of_kinds_and_obstacles(monkeypatch):
    cpu = torch.device("cpu")
    assert Graphs("off", cpu, "").describe(["a"]) == "eager, because graphs is off"
    assert Graphs("auto", cpu, "").describe(["a"]) == "eager, because the device is cpu"
    monkeypatch.setitem(DEVICES, "cpu", lambda _: None)
    assert Graphs("auto", cpu, "it draws").describe(["a"]) == "eager, because it draws"
    assert Graphs("auto", cpu, "").describe("aba") == "CUDA graph, 2 kinds of steps"
    found = Graphs("auto", cpu, "").describe(["a", None, "a"])
    assert found == "CUDA graph, 1 kind of steps; eager where diagnostics are due"


def test_which_steps_are_recorded_captured_replayed_or_eager(monkeypatch, capsys):
    cpu, calls, replays = torch.device("cpu"), list[int](), list[int]()
    errors: dict[int, str] = {}  # by step, each raised once

    @contextmanager
    def capturing() -> Iterator[Any]:
        yield SimpleNamespace(replay=lambda: replays.append(calls[-1]))

    def update(_batches: list[Batch], step: int) -> dict[str, torch.Tensor]:
        calls.append(step)
        if step in errors:
            raise RuntimeError(errors.pop(step))
        return {"loss": torch.tensor(float(step))}

    def run(step: int, kind: str | None = "a", structure: int = 0, size: int = 2) -> tuple[int, int]:
        """Return how often the step was run by Python and by a graph."""
        before = len(calls), len(replays)
        batches = [Batch(torch.zeros(size, 1), torch.zeros(size))]
        kinds: Callable[[int], str | None] = lambda _: kind  # noqa: E731
        graphs.run(update, batches, step, kind=kinds, structure=lambda _: structure)
        return len(calls) - before[0], len(replays) - before[1]

    device = SimpleNamespace(device=cpu, working=nullcontext, capturing=capturing)
    monkeypatch.setitem(DEVICES, "cpu", lambda _: device)
    graphs = Graphs("auto", cpu, "")
    assert [run(0), run(1), run(2)] == [(1, 0), (1, 1), (0, 1)]
    with listening(PhaseClock(lambda: None, lambda: 0.0)):
        assert run(3) == (1, 0)  # which is profiled
    assert [run(4, kind=None), run(5, kind=None), run(6)] == [(1, 0), (1, 0), (0, 1)]
    assert [run(7, size=3), run(8, kind="b"), run(9)] == [(1, 0), (1, 0), (0, 1)]
    assert [run(10, structure=1), run(11, structure=1), run(12, structure=1)] == [(1, 0), (1, 1), (0, 1)]
    errors = {13: "no memory", 17: "a host read"}
    with pytest.raises(RuntimeError, match="no memory"):
        run(13, kind="b", structure=1)
    assert [run(step, kind="b", structure=1) for step in (14, 15)] == [(1, 0), (1, 1)]  # it is recorded anew
    assert [run(step, kind="c", structure=1) for step in (16, 17, 18, 19)] == [(1, 0), (2, 0), (1, 0), (1, 0)]
    assert capsys.readouterr().err == ("graphs: steps run eagerly, because the capture of a step failed: a host read\n")


def test_a_replay_allocates_what_enters_and_leaves_the_step_alone(seen):
    """Its steps are all of one kind: from the third on they hold no more from one to the next, and make few tensors."""
    first, _, *replayed = seen["fast"]["R3GAN, fp16, schedules"]["held"]
    assert len(replayed) == FEW - 2
    assert replayed[-1][0] - replayed[-3][0] < 1000  # the metrics that the case keeps
    assert max(peak for _, peak in replayed) < first[1] / 10


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault in FAST_FAULTS else pytest.mark.slow) for fault in FAULTS]
)
def test_planted_faults_are_seen(seen, fault):
    found = seen["fast" if fault in FAST_FAULTS else "slow"][fault]
    refusal = {"a generator used inside": "draws from a generator", "a host read": "(_local_scalar_dense)"}
    if fault in refusal:  # a GPU refuses the capture; the run says so, and goes on with the same numbers
        (plan,) = found
        assert plan.startswith("eager, because the capture of a step failed: operation not permitted")
        assert refusal[fault] in plan
    else:
        differing, plan = found
        assert differing
        assert plan.startswith("CUDA graph, ")
