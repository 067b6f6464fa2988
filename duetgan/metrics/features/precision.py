"""Full float32 for evaluation, so that figures mean the same on every day and machine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import nn

_lock, _inside, _undo = Lock(), 0, ExitStack()


@contextmanager
def full_float32(device: torch.device | str) -> Iterator[None]:
    """No autocast, no TF32 and deterministic convolutions inside the block; the settings come back
    afterwards. They are the process's: of several threads the first to enter changes them, the last
    to leave brings them back.
    """
    global _inside, _undo
    with _lock:
        _undo = _undo if _inside else _full()
        _inside += 1
    try:
        with torch.autocast(torch.device(device).type, enabled=False):
            yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _undo.close()


def _full() -> ExitStack:
    """Change the settings; leaving the stack brings them back."""
    cudnn, undo = torch.backends.cudnn, ExitStack()
    backends: Any = torch.backends
    # "none"; or what is compiled is compiled again
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
    """The module in evaluation mode, without a graph; it returns to the mode it was in."""
    mode = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(mode)


def device_of(module: nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
