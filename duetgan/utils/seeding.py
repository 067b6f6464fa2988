"""Randomness is derived, not carried: a key gives a seed, a seed a generator. docs/randomness.md
lists every draw.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

Key = int | str
# what torch says, after the operation's name
NO_KERNEL = "does not have a deterministic implementation"


def seed_of(*key: Key) -> int:
    """A 63-bit seed from a key of integers and strings: stable across processes, machines and
    Python versions.
    """
    if any(type(part) not in (int, str) for part in key):
        # np.int64(1) would not give the seed of 1
        raise TypeError(f"a key is made of int and str, not {key!r}")
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*key: Key, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator on `device`, seeded by `key`."""
    return torch.Generator(device=device).manual_seed(seed_of(*key))


def numpy_generator(*key: Key) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed_of(*key)))


@contextmanager
def forked(*key: Key) -> Iterator[None]:
    """Seed torch's global CPU generator by `key` inside the block and put it back afterwards.

    For library code that draws from the global generator: module initialisation, torchvision's
    transforms.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(*key))
        yield


def use_deterministic_kernels() -> None:
    """`deterministic: true`: the same numbers on the same machine, run after run, also on
    accelerators, whose kernels else choose among algorithms by speed or add up in the order in
    which threads happen to finish.

    To be called before the first step; an operation that has no such kernel raises.
    """
    # cuBLAS looks here when it starts, and only then
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
