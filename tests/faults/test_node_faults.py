"""A node that is lost while torchrun may go on with fewer (fault 29 of the project's table): of two nodes the one that
keeps the rendezvous survives. docs/scaling.md tells what to do about that one.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from duetgan.commands import train
from duetgan.utils.distributed.process import run_cli
from tests.end_to_end.helpers import check_same, status, write_config
from tests.faults.torchrun import PATIENCE
from tests.faults.two_nodes import Node, two_nodes

STEPS, LOST_AT = 14, 7
LONG = ["--steps", str(STEPS), "--data.workers", "0", "--evaluation.every", "0", "--log.every", "2"]


def wait_for(condition: Callable[[], object], *nodes: Node) -> None:
    """Until it holds; what runs on the nodes may not end before."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        assert all(process.poll() is None for node in nodes for process in node.processes)
        time.sleep(0.05)


@contextlib.contextmanager
def nodes(first: int) -> Iterator[tuple[Node, Node]]:
    """The one that survives, and the other. Ranks go by address: `first` is the survivor's."""
    with two_nodes() as both:
        yield both[first], both[1 - first]


def stopped(node: Node) -> bool:
    """Whether a process there has been stopped (SIGSTOP), as the injector does."""
    for pid in node.pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return True
    return False


def check_survived(run: Path, survivor: str, lost: str, config: Path, tmp_path: Path) -> None:
    """The run was finished by one process, from a checkpoint of two. Two processes and then one, on one machine and
    undisturbed, end in the same state to the bit: no sample was lost or taken twice.
    """
    assert status(run, "state", "step", "exit_code") == ("finished", STEPS, 0), survivor
    assert "cpu x 2 processes" in survivor + lost
    alone = survivor.partition("cpu x 1 process,")[2]
    assert "resumed at step" not in lost
    resumed = alone.partition("resumed at step ")[2].split()[0]
    assert 0 < int(resumed) <= LOST_AT
    straight = tmp_path / "straight"
    command = ["--config", str(config), "--run-dir", str(straight), "--device", "cpu", *LONG]
    assert run_cli(train.main, [*command, "--procs", "2", "--max-steps", resumed]) == 0
    assert run_cli(train.main, command) == 0
    check_same(straight, run, STEPS)


def lose_one(
    tmp_path: Path, packed: Path, first: int, how: Callable[[Node], None], *more: str, apart: bool = False
) -> None:
    """Train on two nodes, of which the survivor is number `first`, lose the other by `how`, and check what came of it.
    `apart`: the rendezvous is kept by a process that does not train.
    """
    config, run = write_config(tmp_path / "recipe.yaml", "gan", packed), tmp_path / "run"
    logs = [tmp_path / "survivor.log", tmp_path / "lost.log"]
    with nodes(first) as (survivor, lost):
        host = survivor.keep_store() if apart else survivor
        process = survivor.train(config, run, *LONG, *more, host=host, log=logs[0])
        lost.train(config, run, *LONG, *more, host=host, log=logs[1], DUET_FAIL_AT=f"*:{LOST_AT}:stop")
        wait_for(lambda: stopped(lost) and (run / "checkpoints" / "last.json").exists(), survivor, lost)
        how(lost)
        assert process.wait(PATIENCE) == 0, logs[0].read_text()
    check_survived(run, logs[0].read_text(), logs[1].read_text(), config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_fault_29_the_survivor_of_a_lost_node_goes_on(tmp_path, packed, first):
    """`first` 1: the node that is lost holds rank 0, which writes."""
    lose_one(tmp_path, packed, first, Node.lose)


@pytest.mark.slow
def test_fault_29_the_rendezvous_on_a_machine_that_does_not_train(tmp_path, packed):
    """Then any node may be lost; the command is that of docs/scaling.md."""
    lose_one(tmp_path, packed, 1, Node.lose, apart=True)


@pytest.mark.slow
def test_fault_29_a_node_behind_a_broken_cable(tmp_path, packed):
    """Nothing says that it is gone: the survivor's operation fails at its time-out."""
    lose_one(tmp_path, packed, 0, Node.unplug, "--distributed.timeout", "30")
