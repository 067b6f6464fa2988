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
    """Return torchrun's store without keys of earlier starts, or None if torchrun is not used.

    Raises DistStoreError if a rank is missing after `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    token = meet(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout)
    return dist.PrefixStore(f"duet/{token}", store)


def meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a random word, chosen by rank 0, that only the ranks of this start share.

    Each other rank writes a greeting with its own random word, and accepts only an answer to this
    word. Keys of earlier starts in `store` are therefore harmless. Raises DistStoreError if a rank
    is missing after `timeout`.
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
            # The greeting may be a killed process's; then that of this start is still to come.
            elif store.check([f"duet/hello/{peer}"]):
                store.set(f"duet/answer/{store.get(f'duet/hello/{peer}').decode()}", word)
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"rank {min(missing)} has not come within {timeout.total_seconds():.0f} s"
            )
        time.sleep(LOOK_SECONDS)
    return word
