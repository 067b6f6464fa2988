"""Make random generators from keys, which are sequences of strings and integers.

Equal keys give equal random numbers, so no generator's state has to be saved. docs/randomness.md
lists every use.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

Key = int | str
# torch's message for an operation without a deterministic kernel, after the operation's name
NO_KERNEL = "does not have a deterministic implementation"


def seed_of(*key: Key) -> int:
    """Return a 63-bit seed for a key of integers and strings.

    The seed is the same in all processes, machines and Python versions.
    """
    if any(type(part) not in (int, str) for part in key):
        # For example np.int64(1) would not give the seed of 1.
        raise TypeError(f"a key is made of int and str, not {key!r}")
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*key: Key, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator on `device`, seeded by `key`."""
    return torch.Generator(device=device).manual_seed(seed_of(*key))


def numpy_generator(*key: Key) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed_of(*key)))


@contextmanager
def forked(*key: Key) -> Iterator[None]:
    """Seed torch's global CPU generator by `key` inside the block and restore it afterwards.

    This is for library code that draws from the global generator, such as module initialisation and
    torchvision's transforms.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(*key))
        yield


def use_deterministic_kernels() -> None:
    """Make torch use deterministic kernels (config key `deterministic`).

    Call this before the first step. Repeated runs on one machine then give equal numbers, also on
    accelerators. By default their kernels may choose an algorithm by its speed, or add numbers in
    the order in which threads finish. An operation without a deterministic kernel raises
    RuntimeError.
    """
    # cuBLAS reads this variable once, when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
