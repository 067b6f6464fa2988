"""Two processes with a pretend device each: two CPU ranks' numbers; what they wait for."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import trainings
from tests.accelerator.ranks import cases
from tests.end_to_end.helpers import differing
from tests.end_to_end.ranks import together

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tested on Linux"),
    pytest.mark.timeout(900),  # a part runs whole when its first row is asked for
]
RANKS = (0, 1)
BUCKETS = "duetgan/training/base/compiled.py: return self.function(*args, **kwargs) (copy_)"


GRAPHS = [name for name in cases.SLOW if name != "GAN, gradients of each loss"]

PARTS: dict[str, Any] = {
    "fast": (cases.be_a_rank, list(cases.FAST)),
    "slow": (cases.be_a_rank, list(cases.SLOW)),
    "fast graphs": (cases.replay_as_a_rank, ["GAN", "classifier"]),
    "slow graphs": (cases.replay_as_a_rank, GRAPHS),
}


class Seen(dict[str, Any]):
    """What each rank has found in a part; it runs when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, part: str) -> Any:
        function, *names = PARTS[part]
        out = self.folder / part
        together(function, out, self.folder, *names, world=2, output=self.folder / f"{part}.txt")
        self[part] = [torch.load(f"{out}.{rank}", weights_only=True) for rank in RANKS]
        return self[part]


@pytest.fixture(scope="module")
def seen(tmp_path_factory, slim_module):
    folder = tmp_path_factory.mktemp("ranks")
    trainings.prepare(folder)
    return Seen(folder)


ROWS = [("fast", name) for name in cases.FAST] + [
    pytest.param("slow", name, marks=pytest.mark.slow) for name in cases.SLOW
]


@pytest.mark.parametrize(("part", "name"), ROWS)
def test_two_devices_have_the_numbers_of_two_cpu_ranks(seen, part, name):
    first, second = (rank["sim"][name] for rank in seen[part])
    assert differing(first["state"], second["state"]) == []
    assert differing(first["said"], second["said"]) == []
    at_home = seen[part][0]["cpu"][name]
    assert differing(at_home["said"], first["said"]) == []
    assert differing(at_home["state"], first["state"]) == []


@pytest.mark.parametrize(("part", "name"), ROWS)
def test_steps_wait_for_nothing_but_what_torch_itself_waits_for(seen, part, name):
    """DDP's ranks agree on its buckets in the second step with them; synchronised BatchNorms wait for nothing."""
    expected = [{BUCKETS: 4} if name.startswith("classifier") else {}, {}]
    if name == "classifier, unfrozen by and by":  # put into DDP anew in the second step
        expected.reverse()
    for rank in RANKS:
        assert seen[part][rank]["sim"][name]["waits"] == expected


@pytest.mark.parametrize("part", ["fast", pytest.param("slow", marks=pytest.mark.slow)])
def test_each_rank_uses_its_own_device_and_no_other(seen, part):
    for rank, found in enumerate(seen[part]):
        assert found["place"] == f"sim:{rank}"
        assert found["bytes"][rank] > 100_000
        assert found["bytes"][1 - rank] == 0
        assert found["chosen"] == [rank]  # by no thread: on CUDA that takes memory


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("fast graphs", "GAN"),
        ("fast graphs", "classifier"),
        *(pytest.param("slow graphs", name, marks=pytest.mark.slow) for name in GRAPHS),
    ],
)
def test_replayed_steps_of_two_ranks_have_the_numbers_of_others_to_the_bit(seen, part, name):
    """Gradients, statistics of BatchNorm and means over the batch are exchanged between the parts of the graphs."""
    for found in seen[part]:
        assert found[name]["differing"] == []
        assert found[name]["plan"].startswith("CUDA graph, ")
        assert found[name]["captured"] > 0
