"""Copy the weights of single classes from one network to another, by class name.

Copying by index would be wrong, because the index of a class may differ between packed files.
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
    """The dimension along which a weight tensor has one slice per class."""

    dimension: int
    exponent: float = 0.0  # the network divides the tensor by (number of classes)^exponent


def class_parts(network: nn.Module) -> dict[str, ClassPart]:
    """Return a dict from state-dict key to `ClassPart` for all tensors with one slice per class.

    These tensors belong to label embeddings, classification heads and thresholds.
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
    """Return a copy of `target` with slices of `source` for the classes that both networks have.

    Each network divides the tensor by (number of its classes)^exponent, see `ClassPart`. The slices
    are multiplied by (len(names) / len(source_names))^exponent, so that their values after this
    division stay the same.

    If the shapes of the tensors differ in anything but the number of classes, slices cannot be
    copied. `source` is then returned unchanged, and the caller handles it like any other tensor
    whose shape does not fit.

    Args:
        target: A tensor of the network that receives weights.
        source: The tensor of the same name of the network that gives weights.
        part: The class dimension of both tensors.
        names: Class names of the receiving network.
        source_names: Class names of the giving network.
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
    """Return a message about the classes that are copied by name.

    `names` are the classes of the network that receives weights, `source_names` those of the
    network that gives them. The message lists the copied, the new and the dropped classes. It is
    empty if both lists of names are equal.
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
