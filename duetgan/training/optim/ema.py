"""Exponential moving average of a network's weights."""

import copy
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import StateDict

from duetgan.utils.distributed.collectives import by_kind

Network = TypeVar("Network", bound=nn.Module)


class EMA(Generic[Network]):
    """An exponential moving average of a network: a copy with averaged parameters.

    An update computes ema = beta * ema + (1 - beta) * model for each parameter. Floating-point
    buffers are averaged too if `buffers` is "average" (for the statistics of BatchNorm), or copied
    if it is "copy" (for `w_avg` of a generator). Integer buffers are always copied.
    """

    def __init__(self, model: Network, buffers: Literal["average", "copy"]) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.average_buffers = buffers == "average"
        # Averages that equal their frozen parameters and need no update; None: not known yet.
        self._frozen: set[Tensor] | None = None

    @torch.no_grad()
    def update(
        self,
        model: nn.Module,
        beta: float,
        skipped: Tensor | None = None,
        average: Sequence[Tensor] | None = None,
    ) -> None:
        """Move the average towards `model`.

        Args:
            beta: Weight of the previous average.
            skipped: 0-d flag; 1.0 if the optimizer's step was masked. The averages then do not
                change.
            average: The averages of all parameters that a schedule-free optimizer has computed.
                They are copied, and `beta` is used only for buffers. None for other optimizers.
        """
        reference = next(self.model.parameters())
        if skipped is None:  # Filled on the device, since the host would have to wait for a copy.
            weight = torch.full((), 1 - beta, device=reference.device, dtype=reference.dtype)
        else:
            weight = torch.rsub(skipped.to(reference.dtype), 1 - beta, alpha=1 - beta)
        averaged: list[tuple[Tensor, Tensor]] = []
        copied: list[tuple[Tensor, Tensor]] = []
        for pair in zip(self.model.buffers(), model.buffers(), strict=True):
            is_averaged = self.average_buffers and pair[0].is_floating_point()
            (averaged if is_averaged else copied).append(pair)
        if average is None:
            pairs = list(zip(self.model.parameters(), model.parameters(), strict=True))
            if self._frozen is None:
                # A fake tensor has no values to compare.
                fixed = [pair for pair in pairs if not pair[1].requires_grad]
                self._frozen = {
                    a for a, b in fixed if not hasattr(b, "fake_mode") and torch.equal(a, b)
                }
            self._frozen -= {a for a, b in pairs if b.requires_grad}
            averaged += [(a, b) for a, b in pairs if a not in self._frozen]
        else:
            copied += zip(self.model.parameters(), average, strict=True)
        for (device, _), (targets, sources) in by_kind(*zip(*averaged, strict=True)).items():
            difference = torch._foreach_sub(sources, targets)
            torch._foreach_mul_(difference, weight.to(device))
            torch._foreach_add_(targets, difference)
        for targets, sources in by_kind(*zip(*copied, strict=True)).values():
            torch._foreach_copy_(targets, sources)

    def state_dict(self) -> StateDict:
        return self.model.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self.model.load_state_dict(state)
        self._frozen = None


def half_life_beta(
    batch_size: int, images_seen: int, half_life_images: float, ramp: float | None = 0.05
) -> float:
    """Return beta, the weight of the previous average, for a half-life in images (StyleGAN2-ADA).

    It is 0.5^(batch_size / min(half_life_images, ramp * images_seen)), where `images_seen` is the
    number of images before the step. If `ramp` is None, the half-life is constant.
    """
    half_life = half_life_images if ramp is None else min(half_life_images, ramp * images_seen)
    return 0.5 ** (batch_size / max(half_life, 1e-8))
