"""Where the processes of one start meet under torchrun.

torchrun's launcher keeps one key-value store for the workers and hands it to every start of them
(torch 2.15): after a restart it still holds the keys of the killed generation, and whoever reads
one before it is written anew connects to an address where nobody is ("Gloo connectFullMesh failed
... Connection refused"). Numbering the starts does not help: the launchers of different nodes count
them differently.
"""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

LOOK_SECONDS = 0.05


def fresh_store(timeout: timedelta) -> dist.Store | None:
    """The launcher's store as this start alone sees it; None without one. Raises DistStoreError
    after `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    token = meet(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout)
    return dist.PrefixStore(f"duet/{token}", store)


def meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A word that rank 0 makes up and the ranks of this start share, whatever earlier ones have
    left in `store`.

    Every other rank says hello with a word of its own, and believes only an answer to that one.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"duet/hello/{rank}", own)
        token = store.get(f"duet/answer/{own}").decode()
        store.set(f"duet/met/{token}/{rank}", "")
        return token
    missing, deadline = set(range(1, world_size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"duet/met/{own}/{other}"]):
                missing.remove(other)
            elif store.check(
                [f"duet/hello/{other}"]
            ):  # it may be a dead one's: then the living one's is still to come
                store.set(f"duet/answer/{store.get(f'duet/hello/{other}').decode()}", own)
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"rank {min(missing)} has not come within {timeout.total_seconds():.0f} s"
            )
        time.sleep(LOOK_SECONDS)
    return own
