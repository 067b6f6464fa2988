"""Find layers by name, and read their gradients and statistics through temporary hooks."""

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from duetgan.utils.distributed.collectives import widest
from duetgan.utils.errors import UserError
from duetgan.utils.text import did_you_mean

KINDS = ("activation", "gradient")
# Statistics of a layer's values; the last two are fractions.
STATISTICS = ("mean", "std", "max_abs", "zeros", "nonfinite")
Objective = Callable[[Any], Tensor]  # the model's output -> a 0-d tensor to differentiate


# --- layers by name


def find_layer(model: nn.Module, name: str) -> nn.Module:
    """Return the layer whose full name is `name`, or ends in `name` after a dot.

    For example, both `network.layer4` and `layer4` find `network.layer4`. If several names end in
    `name`, return the layer that is nested least deeply.

    Raises:
        UserError: No layer matches (the message suggests a similar name), or several layers of the
            least depth do.
    """
    layers = dict(model.named_modules())
    ends = [name] if name in layers else [full for full in layers if full.endswith(f".{name}")]
    depth = min((full.count(".") for full in ends), default=0)
    matches = [full for full in ends if full.count(".") == depth]
    if not name or not matches:
        raise UserError(f"no layer is called {name!r}{_suggestion(name, layers)}")
    if len(matches) > 1:
        raise UserError(f"layer {name!r} could be {', '.join(matches[:4])}; give the whole name")
    return layers[matches[0]]


def matching_layers(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return a dict from full name to layer for the layers that match a pattern, in model order.

    A pattern matches a full name, or the end of a full name after a dot. `*` stands for any text,
    also with dots: `layer*.0.conv1`. Raises UserError for a pattern that matches no layer.
    """
    layers = {name: layer for name, layer in model.named_modules() if name}
    matches: set[str] = set()
    for pattern in patterns:
        names = {name for name in layers if fnmatch.fnmatchcase(f".{name}", f"*.{pattern}")}
        if not names:
            raise UserError(f"no layer fits {pattern!r}{_suggestion(pattern, layers)}")
        matches |= names
    return {name: layer for name, layer in layers.items() if name in matches}


def _suggestion(name: str, layers: Mapping[str, nn.Module]) -> str:
    names = list(filter(None, layers))
    ends: set[str] = set()
    for full_name in names:
        parts = full_name.split(".")
        ends |= {".".join(parts[start:]) for start in range(len(parts))}
    return did_you_mean(name, sorted(ends)) or f"; there are {', '.join(names[:6])}, ..."


# --- gradients of one layer


def output_gradient(
    model: nn.Module, name: str, inputs: Sequence[object], objective: Objective
) -> tuple[Tensor, Tensor]:
    """Return the output of the layer `name`, and a gradient with respect to this output.

    The gradient is that of `objective(model(*inputs))`. Its graph begins at the layer, so earlier
    layers are not differentiated. No `.grad` changes, and parameters need not require gradients. If
    the layer is called several times, the last call counts.

    Raises:
        UserError: The layer is unknown, its output is not a tensor, or the objective does not
            depend on this output.
    """
    leaves: list[Tensor] = []

    def cut(_module: nn.Module, _inputs: object, output: object) -> Tensor:
        if not isinstance(output, Tensor):
            raise UserError(
                f"layer {name!r} gives a {type(output).__name__}, not a tensor; "
                "choose a layer inside it"
            )
        leaf = output.detach().requires_grad_()
        leaves[:] = [leaf]
        return leaf.clone()  # the next layer may work in place, which a leaf does not permit

    with find_layer(model, name).register_forward_hook(cut), torch.enable_grad():
        value = objective(model(*inputs))
    gradient = None
    if leaves and value.requires_grad:
        gradient = torch.autograd.grad(value, leaves, allow_unused=True)[0]
    if gradient is None:
        raise UserError(f"layer {name!r} does not contribute to this output; choose another layer")
    return leaves[0].detach(), gradient


# --- statistics of layers


class LayerStatistics:
    """Collector of statistics of layers' outputs, and of the gradients with respect to the outputs.

    It covers every call of a layer inside `watching`, and every backward pass, including those of a
    gradient penalty. The statistics are accumulated on the device; the host waits only in
    `collect`. Non-finite values count in `nonfinite` only. Outputs are recorded before the next
    layer changes them in place.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = dict(layers)
        # (layer, "activation" or "gradient") -> moments [6], see `_moments`
        self._moments: dict[tuple[str, str], Tensor] = {}

    @contextmanager
    def watching(self, scale: Tensor | float) -> Iterator[None]:
        """Record passes inside the block. Gradients are divided by `scale`, fp16's loss scale."""

        def gradient(name: str, grad: Tensor) -> None:
            divisor = scale.to(grad.device) if isinstance(scale, Tensor) else scale
            self._add((name, "gradient"), grad.detach() / divisor)

        def hook(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    self._add((name, "activation"), tensor.detach())
                    if tensor.requires_grad:
                        # A module's backward hook would fail for layers that work in place.
                        stack.callback(tensor.register_hook(partial(gradient, name)).remove)

        with ExitStack() as stack:
            for name, layer in self.layers.items():
                stack.callback(layer.register_forward_hook(partial(hook, name)).remove)
            yield

    def _add(self, key: tuple[str, str], values: Tensor) -> None:
        moments = _moments(values)
        self._moments[key] = merge(self._moments[key], moments) if key in self._moments else moments

    def packed(self) -> Tensor:
        """Return the six moments (`_moments`) of all layers on the device, [layers, 2, 6].

        The second dimension is KINDS: activation, gradient. Layers without values have zeros.
        """
        device = next((moments.device for moments in self._moments.values()), torch.device("cpu"))
        keys = [(name, kind) for name in self.layers for kind in KINDS]
        rows = torch.stack(
            [self._moments.get(key, torch.zeros(6)).to(device, widest(device)) for key in keys]
        )
        return rows.unflatten(0, (-1, len(KINDS)))

    def collect(self, packed: Tensor) -> dict[str, float]:
        """Return the statistics as a dict, and reset them.

        Keys are `LAYER/activation_mean`, `LAYER/gradient_zeros`, ... (KINDS and STATISTICS).

        Args:
            packed: The result of `packed`, e.g. after merging over the ranks.
        """
        self._moments.clear()
        metrics: dict[str, float] = {}
        for name, kinds in zip(self.layers, packed.tolist(), strict=True):
            for kind, moments in zip(KINDS, kinds, strict=True):
                finite, mean, squares, largest, zeros, nonfinite = moments
                total = finite + nonfinite
                if not total:
                    continue
                std = (squares / finite) ** 0.5 if finite else 0.0
                values = (mean, std, largest, zeros / total, nonfinite / total)
                for statistic, value in zip(STATISTICS, values, strict=True):
                    metrics[f"{name}/{kind}_{statistic}"] = value
        return metrics


def _moments(values: Tensor) -> Tensor:
    """Return six moments [6] of a tensor's values, on its device.

    They are the number of finite values, their mean, their sum of squared deviations, their largest
    absolute value, the number of zeros, and the number of non-finite values.
    """
    wide = values if values.dtype == torch.float64 else values.float()
    is_finite = wide.isfinite()
    count = is_finite.sum().to(wide.dtype)
    finite = torch.where(is_finite, wide, 0.0)
    mean = finite.sum() / count.clamp(min=1)
    squares = torch.where(is_finite, wide - mean, 0.0).square().sum()
    largest = finite.abs().amax() if values.numel() else mean
    zeros = (wide == 0).sum().to(wide.dtype)
    nonfinite = (~is_finite).sum().to(wide.dtype)
    return torch.stack([count, mean, squares, largest, zeros, nonfinite])


def merge(a: Tensor, b: Tensor) -> Tensor:
    """Merge the moments `a` and `b` [..., 6] of two sets of values into those of their union.

    See `_moments`. Source: Chan, Golub and LeVeque 1979, equations 2.1.
    """
    n_a, mean_a, squares_a, largest_a, zeros_a, nonfinite_a = a.unbind(-1)
    n_b, mean_b, squares_b, largest_b, zeros_b, nonfinite_b = b.unbind(-1)
    count = n_a + n_b
    difference = mean_b - mean_a
    fraction = n_b / count.clamp(min=1)
    mean = mean_a + difference * fraction
    squares = squares_a + squares_b + difference.square() * n_a * fraction
    largest = largest_a.maximum(largest_b)
    zeros = zeros_a + zeros_b
    return torch.stack([count, mean, squares, largest, zeros, nonfinite_a + nonfinite_b], -1)
