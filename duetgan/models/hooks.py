"""Forward and backward hooks as tools: each takes its hooks away again."""

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
# of a layer's values; the last two are shares
STATISTICS = ("mean", "std", "max_abs", "zeros", "nonfinite")
Objective = Callable[[Any], Tensor]  # what is differentiated: the model's output -> a 0-d tensor


# --- layers by name


def find_layer(model: nn.Module, name: str) -> nn.Module:
    """The layer of that name, such as `network.layer4`; a name's end will do (`layer4`) where the
    least deep is one.

    Raises:
        UserError: no layer has the name (the near one is told), or several do.
    """
    layers = dict(model.named_modules())
    ends = [name] if name in layers else [full for full in layers if full.endswith(f".{name}")]
    depth = min((full.count(".") for full in ends), default=0)
    matches = [full for full in ends if full.count(".") == depth]
    if not name or not matches:
        raise UserError(f"no layer is called {name!r}{_near(name, layers)}")
    if len(matches) > 1:
        raise UserError(f"layer {name!r} could be {', '.join(matches[:4])}; give the whole name")
    return layers[matches[0]]


def matching_layers(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Name -> layer of those whose name, or its end after a dot, fits one of the patterns, in the
    model's order.

    In a pattern `*` stands for anything, dots too: `layer*.0.conv1`. Raises UserError for a pattern
    that fits none.
    """
    layers = {name: layer for name, layer in model.named_modules() if name}
    matches = {
        pattern: {n for n in layers if fnmatch.fnmatchcase(f".{n}", f"*.{pattern}")}
        for pattern in patterns
    }
    for pattern, names in matches.items():
        if not names:
            raise UserError(f"no layer fits {pattern!r}{_near(pattern, layers)}")
    return {
        name: layer
        for name, layer in layers.items()
        if any(name in names for names in matches.values())
    }


def _near(name: str, layers: Mapping[str, nn.Module]) -> str:
    """A layer's name that is near, its end alone if that is what is near; and where there is none,
    some layers.
    """
    names = list(filter(None, layers))
    ends = {
        ".".join(full.split(".")[start:]) for full in names for start in range(full.count(".") + 1)
    }
    return did_you_mean(name, sorted(ends)) or f"; there are {', '.join(names[:6])}, ..."


# --- gradients of one layer


def output_gradient(
    model: nn.Module, name: str, inputs: Sequence[Any], objective: Objective
) -> tuple[Tensor, Tensor]:
    """A layer's output for `inputs` and the gradient of `objective(model(*inputs))` with respect to
    it.

    The graph begins at the layer: nothing before it keeps activations or is differentiated, and no
    `.grad` is touched; parameters need not require gradients. Of a layer that is called several
    times it is the last call.

    Raises:
        UserError: an unknown layer, or one whose output does not reach the objective.
    """
    kept: list[Tensor] = []

    def cut(_module: nn.Module, _inputs: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise UserError(
                f"layer {name!r} gives a {type(output).__name__}, not a tensor; choose a layer inside it"
            )
        kept[:] = [leaf := output.detach().requires_grad_()]
        return leaf.clone()  # a leaf must not be written into, and what comes after may

    with find_layer(model, name).register_forward_hook(cut), torch.enable_grad():
        value = objective(model(*inputs))
    gradient = (
        torch.autograd.grad(value, kept, allow_unused=True)[0]
        if kept and value.requires_grad
        else None
    )
    if gradient is None:
        raise UserError(f"layer {name!r} does not contribute to this output; choose another layer")
    return kept[0].detach(), gradient


# --- statistics of layers


class LayerStatistics:
    """Statistics of layers' outputs and of the gradients that reach them, over everything that runs
    inside `watching`.

    Values are added up on the device; nobody waits for them until `collect`. A non-finite value
    counts in `nonfinite` alone, the others are of the finite ones. All calls of a layer and all
    backward passes count, a gradient penalty's too. Where an output is written into by the next
    layer, these are the values before that.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = dict(layers)
        # (layer, "activation" or "gradient") -> [6]
        self._moments: dict[tuple[str, str], Tensor] = {}

    @contextmanager
    def watching(self, scale: Tensor | float = 1.0) -> Iterator[None]:
        """Count what runs inside the block; gradients are divided by `scale`, the loss scale of
        fp16.
        """

        def gradient(name: str, grad: Tensor) -> None:
            divisor = scale.to(grad.device) if isinstance(scale, Tensor) else scale
            self._add((name, "gradient"), grad.detach() / divisor)

        def hook(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    self._add((name, "activation"), tensor.detach())
                    if tensor.requires_grad:
                        # not a module's backward hook: those do not bear layers that work in place
                        stack.callback(tensor.register_hook(partial(gradient, name)).remove)

        with ExitStack() as stack:
            for name, layer in self.layers.items():
                stack.callback(layer.register_forward_hook(partial(hook, name)).remove)
            yield

    def _add(self, key: tuple[str, str], values: Tensor) -> None:
        moments = _moments(values)
        self._moments[key] = merge(self._moments[key], moments) if key in self._moments else moments

    def packed(self) -> Tensor:
        """The moments of all layers, [layers, 2, 6] on the device; zeros for what has not been
        seen. See `merge`.
        """
        device = next((moments.device for moments in self._moments.values()), torch.device("cpu"))
        keys = [(name, kind) for name in self.layers for kind in KINDS]
        rows = torch.stack(
            [self._moments.get(key, torch.zeros(6)).to(device, widest(device)) for key in keys]
        )
        return rows.unflatten(0, (-1, len(KINDS)))

    def collect(self, packed: Tensor | None = None) -> dict[str, float]:
        """`layer/activation_mean`, `layer/gradient_zeros`, ... of what was seen; and start anew.
        Waits for the device.

        Args: `packed` in place of this process's own, e.g. merged over the ranks.
        """
        packed = self.packed() if packed is None else packed
        self._moments.clear()
        figures: dict[str, float] = {}
        for name, kinds in zip(self.layers, packed.tolist(), strict=True):
            for kind, (finite, mean, squares, largest, zeros, nonfinite) in zip(
                KINDS, kinds, strict=True
            ):
                if total := finite + nonfinite:
                    std = (squares / finite) ** 0.5 if finite else 0.0
                    values = (mean, std, largest, zeros / total, nonfinite / total)
                    figures |= {
                        f"{name}/{kind}_{what}": value
                        for what, value in zip(STATISTICS, values, strict=True)
                    }
        return figures


def _moments(values: Tensor) -> Tensor:
    """[finite count, mean, sum of squared deviations, largest size, zeros, non-finite count], on
    the device.
    """
    wide = values if values.dtype == torch.float64 else values.float()
    finite = wide.isfinite()
    count = finite.sum().to(wide.dtype)
    known = torch.where(finite, wide, 0.0)
    mean = known.sum() / count.clamp(min=1)
    squares = torch.where(finite, wide - mean, 0.0).square().sum()
    largest = known.abs().amax() if values.numel() else mean
    zeros = (wide == 0).sum().to(wide.dtype)
    return torch.stack([count, mean, squares, largest, zeros, (~finite).sum().to(wide.dtype)])


def merge(a: Tensor, b: Tensor) -> Tensor:
    """The moments [..., 6] of two sets of values together (Chan, Golub and LeVeque 1979, equations
    2.1).
    """
    (
        (n_a, mean_a, squares_a, largest_a, zeros_a, bad_a),
        (n_b, mean_b, squares_b, largest_b, zeros_b, bad_b),
    ) = (m.unbind(-1) for m in (a, b))
    count = n_a + n_b
    apart, share = mean_b - mean_a, n_b / count.clamp(min=1)
    mean = mean_a + apart * share
    squares = squares_a + squares_b + apart.square() * n_a * share
    return torch.stack(
        [count, mean, squares, largest_a.maximum(largest_b), zeros_a + zeros_b, bad_a + bad_b], -1
    )
