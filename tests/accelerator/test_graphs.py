"""Steps as CUDA graphs on the pretend accelerator have the numbers of other steps to the bit; faults are seen."""

import pytest
import torch

from duetgan.training.base.graphs import DEVICES, Graphs
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
