"""Full float32 for evaluation, so that figures mean the same on every day and machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def full_float32(device: torch.device | str) -> Iterator[None]:
    """No autocast, no TF32 and deterministic convolutions inside the block; the settings come back afterwards."""
    cudnn = torch.backends.cudnn
    backends: Any = torch.backends
    matmuls = (backends.cuda.matmul, backends.mkldnn.matmul)
    precision, kept = torch.get_float32_matmul_precision(), [matmul.fp32_precision for matmul in matmuls]
    flags = cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=False)
    with flags, torch.autocast(torch.device(device).type, enabled=False):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            for matmul, own in zip(matmuls, kept, strict=True):  # "none" before; or what is compiled is compiled again
                matmul.fp32_precision = own


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
