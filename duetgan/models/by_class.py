"""Weights that belong to a class, copied by the class's name: its number depends on how the images
were packed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from duetgan.models.classifier import Classifier
from duetgan.models.layers import EqualizedLinear
from duetgan.utils.text import listed

LISTED = 6  # class names in a message


class ClassPart(NamedTuple):
    """Where a tensor has a part for each class, and whether the network divides it by the root of
    their number.
    """

    dimension: int
    is_scaled: bool = False


def class_parts(network: nn.Module) -> dict[str, ClassPart]:
    """Return the tensors of a network's state with a part for each class: embeddings, heads and
    thresholds.
    """
    parts = {"thresholds": ClassPart(0)}
    for name, module in network.named_modules():
        kind = name.rpartition(".")[2]
        if kind == "embed":
            parts[f"{name}.weight"] = ClassPart(1, isinstance(module, EqualizedLinear))
            parts[f"{name}.v"] = ClassPart(0)  # of a spectral norm
        elif kind == "auxiliary":
            parts |= {f"{name}.weight": ClassPart(0), f"{name}.bias": ClassPart(0)}
    if isinstance(network, Classifier):
        head = f"network.{network.backbone.head}"
        layers = [
            f"{head}.{name}".rstrip(".")
            for name, module in network.head.named_modules()
            if hasattr(module, "weight")
        ]
        parts |= {f"{layers[-1]}.weight": ClassPart(0), f"{layers[-1]}.bias": ClassPart(0)}
    return {name: part for name, part in parts.items() if name in network.state_dict()}


def copy_by_name(
    here: Tensor, there: Tensor, part: ClassPart, ours: Sequence[str], theirs: Sequence[str]
) -> Tensor:
    """Return `here` with the parts in `there` of the classes that both have; `there` where more
    than these differs.
    """
    expected = list(here.shape)
    expected[part.dimension] = len(theirs)
    if list(there.shape) != expected or here.shape[part.dimension] != len(ours):
        return there
    number = {name: place for place, name in enumerate(theirs)}
    pairs = [(place, number[name]) for place, name in enumerate(ours) if name in number]
    to, source = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    copied = there.index_select(part.dimension, source).to(here.dtype)
    copied = copied * (len(ours) / len(theirs)) ** 0.5 if part.is_scaled else copied
    return here.cpu().index_copy(part.dimension, to, copied)


def matched(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Return what becomes of the classes, for a person; empty where both lists are the same."""
    new = [name for name in ours if name not in set(theirs)]
    if list(ours) == list(theirs):
        return ""
    if not ours:
        return f"without the {len(theirs)} classes there: this network has none"
    if not new:
        return f"all {len(ours)} classes taken by name"
    return (
        f"{len(ours) - len(new)} of {len(ours)} classes taken by name, new: {listed(new, LISTED)}"
    )
