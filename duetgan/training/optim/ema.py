"""Exponential moving average of a network's weights."""

import copy
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from duetgan.utils.distributed.collectives import by_kind

Network = TypeVar("Network", bound=nn.Module)


class EMA(Generic[Network]):
    """A copy of `model` whose parameters follow it: ema = beta ema + (1 - beta) model.

    Buffers are averaged too (`"average"`: right for BatchNorm's statistics) or copied (`"copy"`:
    right for a generator's `w_avg`). Integer buffers are always copied.
    """

    def __init__(self, model: Network, buffers: Literal["average", "copy"]) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.average_buffers = buffers == "average"
        # averages of frozen parameters, and equal to them; None: not looked
        self._still: set[Tensor] | None = None

    @torch.no_grad()
    def update(
        self,
        model: nn.Module,
        beta: float,
        skipped: Tensor | None = None,
        # of the parameters, by the optimizer: taken instead of our own
        average: Sequence[Tensor] | None = None,
    ) -> None:
        """Move towards `model`; where the 0-d flag `skipped` is 1 the step was masked and the
        average stays.
        """
        reference = next(self.model.parameters())
        if skipped is None:  # made there: a copy would be waited for
            weight = torch.full((), 1 - beta, device=reference.device, dtype=reference.dtype)
        else:
            weight = (1 - beta) * (1 - skipped.to(reference.dtype))
        pairs = list(zip(self.model.buffers(), model.buffers(), strict=True))
        averaged = [(a, b) for a, b in pairs if self.average_buffers and a.is_floating_point()]
        copied = [(a, b) for a, b in pairs if not (self.average_buffers and a.is_floating_point())]
        if average is None:
            parameters = list(zip(self.model.parameters(), model.parameters(), strict=True))
            if self._still is None:
                frozen = [
                    pair
                    for pair in parameters
                    if not (pair[1].requires_grad or hasattr(pair[1], "fake_mode"))
                ]
                # fake tensors have no values
                self._still = {a for a, b in frozen if torch.equal(a, b)}
            self._still -= {a for a, b in parameters if b.requires_grad}
            averaged += [(a, b) for a, b in parameters if a not in self._still]
        else:
            copied += zip(self.model.parameters(), average, strict=True)
        for (device, _), (here, there) in by_kind(*zip(*averaged, strict=True)).items():
            difference = torch._foreach_sub(there, here)
            torch._foreach_mul_(difference, weight.to(device))
            torch._foreach_add_(here, difference)
        for here, there in by_kind(*zip(*copied, strict=True)).values():
            torch._foreach_copy_(here, there)

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)
        self._still = None


def half_life_beta(
    batch_size: int, images_seen: int, half_life_images: float, ramp: float | None = 0.05
) -> float:
    """0.5^(batch / min(half_life, ramp * images_seen)) (StyleGAN2-ADA), images before the step;
    `ramp` None: none.
    """
    half_life = half_life_images if ramp is None else min(half_life_images, ramp * images_seen)
    return 0.5 ** (batch_size / max(half_life, 1e-8))
