"""Gradients of every image's own loss: of any parameters one by one, of a linear head in closed form."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from utils.cli import did_you_mean
from utils.errors import UserError

MOST_ELEMENTS = 1 << 26  # of gradients held at once: 256 MiB of float32


@dataclass(frozen=True)
class Gradients:
    """Gradients of n images as outer products of two factors, [n, K] x [n, F], which need not be made.

    Of the last linear layer, with p = softmax(logits), y the label as one-hot and f what the layer takes: the weight's
    is (p - y) f^T, the bias's p - y. Gradients that are at hand [n, P] have ones [n, 1] as their first factor.
    """

    errors: Tensor  # [n, K]
    inputs: Tensor  # [n, F]
    bias: bool = False  # whether `errors` are a part of the gradients too

    def dot(self, other: "Gradients") -> Tensor:
        """Dot products [n, m] of all these gradients with all of `other`'s."""
        return (self.errors @ other.errors.T) * (self.inputs @ other.inputs.T + self.bias)

    def squared_norms(self) -> Tensor:
        """[n]: the dot product of each with itself."""
        return self.errors.square().sum(1) * (self.inputs.square().sum(1) + self.bias)

    def full(self) -> Tensor:
        """The gradients themselves, [n, P]: K F of the weight, then K of the bias."""
        weight = (self.errors[:, :, None] * self.inputs[:, None]).flatten(1)
        return torch.cat([weight, self.errors], 1) if self.bias else weight


def sample_gradients(
    model: nn.Module,  # images -> logits, in evaluation mode: BatchNorm must not mix the images
    images: Tensor,  # [n, C, H, W] as the model takes them
    labels: Tensor,  # int64 [n]
    names: Sequence[str],  # of the parameters that gradients are taken of
    *,
    chunk: int | None = None,  # images at once by vmap; None: one by one on a CPU, else as many as MOST_ELEMENTS allows
) -> Gradients:
    """d cross_entropy(model(x_i), y_i) / d parameters, [n, P]: the named parameters flattened one after the other.

    On a CPU a loop is faster than vmap, whose convolutions with a weight for each image are slow there. Parameters need
    not require gradients and their `.grad` is not touched. Raises ValueError for a model in training mode.
    """
    if any(module.training for module in model.modules()):
        raise ValueError("per-sample gradients need a model in evaluation mode: BatchNorm mixes the images otherwise")
    tensors = {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())
    asked = {name: tensors.pop(name) for name in names}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, (parameters, tensors), (image[None],))
        return F.cross_entropy(logits, label[None])

    if chunk is None and images.device.type == "cpu":
        each = [grad(loss)(asked, image, label) for image, label in zip(images, labels, strict=True)]
        found = torch.stack([torch.cat([own[name].flatten() for name in names]) for own in each])
    else:
        chunk = chunk or max(1, MOST_ELEMENTS // sum(tensor.numel() for tensor in asked.values()))
        together = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=chunk)(asked, images, labels)
        found = torch.cat([together[name].flatten(1) for name in names], dim=1)
    return Gradients(torch.ones_like(found[:, :1]), found)


def head_gradients(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Gradients, Tensor]:
    """Gradients of each image's cross entropy with respect to the last linear layer, and the logits [n, K].

    One forward pass. Raises UserError for a model whose output is not that of its last linear layer.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)] or [nn.Linear(1, 1)]
    handle = layers[-1].register_forward_hook(lambda _layer, inputs, output: seen.append((inputs[0], output)))
    try:
        with torch.no_grad():
            logits = model(images)
    finally:
        handle.remove()
    if not seen or not torch.equal(seen[-1][1], logits):
        raise UserError("the network does not end in a linear layer; name the layers with --layers")
    errors = logits.softmax(1) - F.one_hot(labels, logits.shape[1])
    return Gradients(errors, seen[-1][0], layers[-1].bias is not None), logits


def matching_parameters(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Parameters whose name, or its end after a dot, fits a pattern, or lies below it: `layer4.1`, `layer4.*.weight`.

    Raises UserError for a pattern that fits none; the near name is told.
    """
    names = [name for name, _ in model.named_parameters()]
    found = set()
    for pattern in patterns:
        fits = {n for n in names if any(fnmatchcase(f".{n}", f"*.{p}") for p in (pattern, f"{pattern}.*"))}
        if not fits:
            paths = [name.split(".") for name in names]
            spans = [(path, i, j) for path in paths for i in range(len(path)) for j in range(i + 1, len(path) + 1)]
            layers = {".".join(path[i:j]) for path, i, j in spans}
            raise UserError(f"--layers {pattern}: fits no parameter{did_you_mean(pattern, sorted(layers))}")
        found |= fits
    return [name for name in names if name in found]
