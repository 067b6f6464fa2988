"""`deterministic: true`: the same numbers on the same machine, run after run, also on accelerators.

Orders, draws and the CPU's arithmetic are the same anyway (docs/randomness.md); this is about kernels that choose among
algorithms by speed, or add up in the order in which threads happen to finish.
"""

import os

import torch

REFUSED = "does not have a deterministic implementation"


def switch_on() -> None:
    """Choose deterministic algorithms in this process, before its first step; an operation that has none raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS looks here when it starts, and only then
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def switch_off() -> None:
    """Let accelerators choose each convolution's algorithm by speed: shapes are the same step after step."""
    torch.backends.cudnn.benchmark = True


def refused(error: BaseException) -> str | None:
    """The operation that has no deterministic form, if that is what `error` says."""
    text = str(error)
    return text.split(REFUSED)[0].strip() if isinstance(error, RuntimeError) and REFUSED in text else None
