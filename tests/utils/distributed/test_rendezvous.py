"""Processes that are started again meet one another, not what an earlier start has left behind."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from duetgan.utils.distributed import rendezvous

TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def client(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=TIMEOUT)


def start_of(store: dist.TCPStore, world_size: int, *, late: int | None = None) -> set[str]:
    """The words of all ranks of one start; rank `late` comes when the others wait already."""
    others_wait = threading.Event()

    def rank(number: int) -> str:
        if number == late:
            others_wait.wait(1)
        return rendezvous.meet(client(store), number, world_size, TIMEOUT)

    with ThreadPoolExecutor(world_size) as pool:
        return set(pool.map(rank, range(world_size)))


@pytest.mark.parametrize("late", [0, 1])
def test_every_start_has_a_word_of_its_own(store: dist.TCPStore, late: int) -> None:
    words = [start_of(store, world_size, late=late) for world_size in (3, 3, 2, 4)]
    assert [len(found) for found in words] == [1, 1, 1, 1]
    assert len(set.union(*words)) == 4


def test_a_rank_that_was_killed_while_it_waited_is_not_in_the_way(store: dist.TCPStore) -> None:
    store.set("duet/hello/1", "a word of the dead")
    assert len(start_of(store, 2, late=1)) == 1
    assert store.check(["duet/answer/a word of the dead"])  # nobody reads it


def test_rank_0_does_not_wait_for_ever(store: dist.TCPStore) -> None:
    with pytest.raises(dist.DistStoreError, match="rank 1 has not come"):
        rendezvous.meet(store, 0, 2, timedelta(seconds=0.2))


def test_keys_of_an_earlier_start_are_not_seen(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert rendezvous.fresh_store(TIMEOUT) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first, second = rendezvous.fresh_store(TIMEOUT), rendezvous.fresh_store(TIMEOUT)
    assert second is not None
    first.set("address", "of rank 0")
    assert first.check(["address"])
    assert not second.check(["address"])
