"""Copying of per-class weights between networks by class name.

Indices will not do: those of the same class differ between differently packed files.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from duetgan.models.classifier import Classifier
from duetgan.models.layers import EqualizedLinear
from duetgan.utils.text import listed

LISTED = 6  # maximum number of class names in a message


class ClassPart(NamedTuple):
    """The dimension of a weight tensor that has one entry per class."""

    dimension: int
    exponent: float = 0.0  # the network divides the tensor by (number of classes)^exponent


def class_parts(network: nn.Module) -> dict[str, ClassPart]:
    """Return state-dict key -> class dimension for the tensors with one slice per class.

    Such tensors are those of embeddings, heads and thresholds.
    """
    parts = {"thresholds": ClassPart(0)}
    for name, module in network.named_modules():
        kind = name.rpartition(".")[2]
        if kind == "embed":
            parts[f"{name}.weight"] = ClassPart(1, isinstance(module, EqualizedLinear) / 2)
            parts[f"{name}.v"] = ClassPart(0)  # singular vector of a spectral norm
        elif kind == "auxiliary":
            # `u` is the other singular vector.
            parts |= {f"{name}.{tensor}": ClassPart(0) for tensor in ("weight", "bias", "u")}
    if isinstance(network, Classifier):
        head = f"network.{network.backbone.head}"
        layers = [
            name for name, module in network.head.named_modules() if hasattr(module, "weight")
        ]
        last = f"{head}.{layers[-1]}".rstrip(".")
        parts |= {f"{last}.weight": ClassPart(0), f"{last}.bias": ClassPart(0)}
    return {name: part for name, part in parts.items() if name in network.state_dict()}


def copy_by_name(
    target: Tensor,
    source: Tensor,
    part: ClassPart,
    names: Sequence[str],
    source_names: Sequence[str],
) -> Tensor:
    """Return `target` with the slices of `source` for the classes that both networks have.

    Returns `source` if the shapes differ in more than the number of classes.

    Args:
        target: A tensor of the network.
        source: The same tensor of another network.
        part: The class dimension of both.
        names: Names of the network's classes.
        source_names: Names of the other network's classes.
    """
    expected = list(target.shape)
    expected[part.dimension] = len(source_names)
    if list(source.shape) != expected or target.shape[part.dimension] != len(names):
        return source
    number = {name: index for index, name in enumerate(source_names)}
    pairs = [(index, number[name]) for index, name in enumerate(names) if name in number]
    to, origin = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    copied = source.index_select(part.dimension, origin).to(target.dtype)
    if part.exponent and len(names) != len(source_names):
        copied = copied * (len(names) / len(source_names)) ** part.exponent
    return target.cpu().index_copy(part.dimension, to, copied)


def describe_match(names: Sequence[str], source_names: Sequence[str]) -> str:
    """Return a message about the classes that are copied by name; empty if both lists are equal.

    The message names the classes that were taken, those that are new, and those that were dropped.
    """
    if list(names) == list(source_names):
        return ""
    if not names:
        return f"without the {len(source_names)} classes there: this network has none"
    targets, sources = set(names), set(source_names)
    common = [name for name in names if name in sources]
    new = [name for name in names if name not in sources]
    dropped = [name for name in source_names if name not in targets]
    message = f"{len(common)} of {len(names)} classes taken by name"
    if not new:
        message = f"all {len(names)} classes taken by name"
    for text, group in ((": ", common), ("; new: ", new), ("; dropped: ", dropped)):
        if group:
            message += text + listed(group, LISTED)
    return message
