"""Tensors in bulk."""

from collections.abc import Iterable

import torch
from torch import Tensor


def by_device(*lists: Iterable[Tensor]) -> dict[torch.device, list[list[Tensor]]]:
    """Device -> what each of the lists, which go together item by item, has there: for operations on many tensors,
    which take those of one device.
    """
    columns: dict[torch.device, list[list[Tensor]]] = {}
    for row in zip(*lists, strict=True):
        for column, tensor in zip(columns.setdefault(row[0].device, [[] for _ in row]), row, strict=True):
            column.append(tensor)
    return columns


def laid_like(tensor: Tensor, model: Tensor) -> Tensor:
    """`tensor` in the memory order of `model`, which has its shape: fused optimizers take both element by element as
    they lie in memory, whatever their strides say.
    """
    strides = zip(tensor.shape, tensor.stride(), model.stride(), strict=True)
    if tensor.stride() == model.stride() or all(size == 1 or own == other for size, own, other in strides):
        return tensor
    return torch.empty_like(model, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
