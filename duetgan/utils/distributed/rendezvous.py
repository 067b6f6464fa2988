"""A key-value store for the processes of one start under torchrun.

torchrun's launcher gives every start of the workers the same store (torch 2.15). After a restart
the store still holds the keys of the killed processes. A process that reads such a key before it is
written again connects to an address without a listener ("Gloo connectFullMesh failed ... Connection
refused"). Numbering the starts does not help, because the launchers of different nodes count them
differently.
"""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

LOOK_SECONDS = 0.05


def fresh_store(timeout: timedelta) -> dist.Store | None:
    """Return the launcher's store without the keys of earlier starts; None without a launcher.

    Raises DistStoreError after `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    token = meet(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout)
    return dist.PrefixStore(f"duet/{token}", store)


def meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a word, chosen by rank 0, that only the ranks of this start share.

    Every other rank writes a hello with its own random word, and accepts only an answer to that
    word, whatever earlier starts have left in `store`.
    """
    word = uuid.uuid4().hex
    if rank:
        store.set(f"duet/hello/{rank}", word)
        token = store.get(f"duet/answer/{word}").decode()
        store.set(f"duet/met/{token}/{rank}", "")
        return token
    missing = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for peer in sorted(missing):
            if store.check([f"duet/met/{word}/{peer}"]):
                missing.remove(peer)
            # The hello may be from a killed process; then the living one's is still to come.
            elif store.check([f"duet/hello/{peer}"]):
                store.set(f"duet/answer/{store.get(f'duet/hello/{peer}').decode()}", word)
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"rank {min(missing)} has not come within {timeout.total_seconds():.0f} s"
            )
        time.sleep(LOOK_SECONDS)
    return word
