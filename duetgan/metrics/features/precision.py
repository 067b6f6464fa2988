"""Full float32 precision for evaluation, so that metrics are comparable between machines."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import nn

_lock = Lock()
_inside = 0  # number of open `full_float32` blocks
_undo = ExitStack()


@contextmanager
def full_float32(device: torch.device | str) -> Iterator[None]:
    """Disable autocast and TF32 and use deterministic convolutions inside the block.

    The settings apply to the whole process: of several threads, the first to enter a block changes
    them and the last to leave restores them.
    """
    global _inside, _undo
    with _lock:
        if not _inside:
            _undo = _change_settings()
        _inside += 1
    try:
        with torch.autocast(torch.device(device).type, enabled=False):
            yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _undo.close()


def _change_settings() -> ExitStack:
    """Set full precision; return a stack whose closing restores the previous settings."""
    cudnn, undo = torch.backends.cudnn, ExitStack()
    backends: Any = torch.backends
    # restored one by one, because set_float32_matmul_precision would turn "none" into "ieee" and
    # so cause compiled functions to be compiled again
    for matmul in (backends.cuda.matmul, backends.mkldnn.matmul):
        undo.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
    undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    undo.enter_context(
        cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=False)
    )
    torch.set_float32_matmul_precision("highest")
    return undo


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put the module into evaluation mode without gradients inside the block."""
    mode = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(mode)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter or buffer; the CPU if it has none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
