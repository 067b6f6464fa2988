"""Adaptive discriminator augmentation (ADA): its strength, its random draws, its application.

Source: Karras et al. 2020, "Training Generative Adversarial Networks with Limited Data"
(2006.06676). The discriminator D sees only augmented images, both real and generated, in both
halves of a step. The strength p is the probability of an operation. In mode adaptive it follows
r_t = E[sign D(real)], a measure of overfitting (section 2.2).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from duetgan.training.base import phases
from duetgan.training.base.graphs import per_step, value
from duetgan.training.gan.ada import operations as ops
from duetgan.training.gan.ada.operations import Draws, GroupDraws
from duetgan.training.optim.config import cosine
from duetgan.utils.config.cli import entry
from duetgan.utils.config.model import Config, PositiveFloat, PositiveInt, Probability
from duetgan.utils.errors import refuse
from duetgan.utils.seeding import generator

# thousand images in which p can go from 0 to 1, by default and with pretrained networks
KIMG, KIMG_TRANSFER = 500, 100


class AdaConfig(Config):
    """Augmentation of the images that the discriminator sees: operations and their probability.

    Raises UserError for values out of range.
    """

    # rule for p; adaptive: p follows the sign of D(real), for small data sets
    mode: Literal["off", "adaptive", "fixed", "scheduled"] = "off"
    # probability of each operation; adaptive, scheduled: initial probability
    p: Probability = 0.0
    p_final: Probability = 0.0  # scheduled: final probability, by a cosine over schedule_kimg
    # adaptive: mean sign of D(real) above which p grows
    target: Annotated[float, Interval(gt=-1, lt=1)] = 0.6
    # adaptive: thousand images in which p can go from 0 to 1; null: 500, or 100 with init_from
    kimg: PositiveFloat | None = None
    interval: PositiveInt = 4  # adaptive: steps between two changes of p
    # Groups of operations and their multipliers of p; other groups are off. blit: flip, turn by 90
    # degrees, shift by whole pixels; geometry: scale, turn, stretch, shift; colour: brightness,
    # contrast, luma flip, hue, saturation; also filter, noise, cutout. Default: bgc of the paper.
    operations: dict[str, Probability] = {"blit": 1.0, "geometry": 1.0, "colour": 1.0}

    def check(self) -> None:
        for name in self.operations:
            entry(ops.DRAWS, name, "operations: group")
        refuse(
            (
                self.mode == "fixed" and self.p == 0,
                "mode fixed with p 0 changes no image; set ada.p, or ada.mode off",
            ),
            (
                self.mode == "scheduled" and self.p == self.p_final == 0,
                "mode scheduled goes from p 0 to p_final 0; set one of them, or ada.mode off",
            ),
            (
                self.mode != "off" and not any(self.operations.values()),
                f"mode {self.mode} without operations changes nothing; name one, or ada.mode off",
            ),
        )


class Ada:
    """The augmentation of all images that the discriminator sees in a run.

    Its state is the strength p, with the sums from which the next change of p is computed.
    """

    def __init__(
        self,
        config: AdaConfig,
        *,
        seed: int,
        channels: int,
        alpha: bool,  # the last channel is transparency
        device: torch.device,
        schedule_images: int,  # scheduled: images over which p goes from config.p to config.p_final
        # True if the networks are pretrained: p changes five times as fast by default.
        transfer: bool,
    ) -> None:
        self.config = config
        self.seed = seed
        self.channels = channels
        self.alpha = alpha
        self.device = device
        self.schedule_images = schedule_images
        self.adjustment_images = (config.kimg or (KIMG_TRANSFER if transfer else KIMG)) * 1000
        self.active = config.mode != "off"
        self.p = torch.full((), config.p, device=device)
        # Since the last change of p: the sum of sign D(real), and the number of images.
        self._sign_sum = torch.zeros((), device=device)
        self._count = torch.zeros((), device=device)

    @per_step
    def draw(self, step: int, phase: str, size: Sequence[int], batch_size: int) -> Draws:
        """Draw the random numbers for the augmentation of a global batch, on the device.

        The numbers of a group of operations depend only on (seed, "augment", step, phase, group)
        and the batch size. The noise also depends on `size`, the height and width in px. `phase`
        names the use of the images, such as "fake".
        """
        draws = {}
        for name, (operations, uniform, normal) in ops.DRAWS.items():
            if not self.config.operations.get(name):
                continue
            keyed = generator(self.seed, "augment", step, phase, name, device=self.device)
            numbers = torch.rand(
                batch_size, operations + uniform, generator=keyed, device=self.device
            )
            normals = torch.randn(batch_size, normal, generator=keyed, device=self.device)
            pixels = None
            if name == "noise":
                shape = (batch_size, self.channels, *size)
                pixels = torch.randn(shape, generator=keyed, device=self.device)
            draws[name] = GroupDraws(
                numbers[:, :operations], numbers[:, operations:], normals, pixels
            )
        return draws

    def augmented(
        self, images: Tensor, step: int, phase: str, batch_size: int, rows: slice
    ) -> Tensor:
        """Return `images` after augmentation, or unchanged if ADA is off.

        They are the rows `rows` of a global batch of `batch_size` images. The random numbers are
        drawn for the whole global batch. `phase`, such as "fake", is part of their seed key.
        """
        if not self.active:
            return images
        with phases.phase("augment"):
            return self.apply(images, self.draw(step, phase, images.shape[2:], batch_size), rows)

    def apply(self, images: Tensor, draws: Draws, rows: slice) -> Tensor:
        """Augment images; the result is differentiable twice.

        The operations run without autocast, in float32, or in the dtype of the images if it is
        wider. The result is rounded to the dtype of the images. With p = 0 no bit changes.

        Args:
            images: [n, C, H, W] in [-1, 1], both sides at least 4 px.
            draws: Random numbers for the global batch, from `draw`.
            rows: The rows of the global batch at which these images are.

        Returns:
            Images of the same shape and dtype; colours may be out of [-1, 1].
        """
        result = images.to(torch.promote_types(images.dtype, torch.float32))
        groups = {name: group.rows(rows, result.dtype) for name, group in draws.items()}
        size = images.shape[2:]
        blit, geometry = None, None
        with torch.autocast(images.device.type, enabled=False):
            p = {name: self.p * factor for name, factor in self.config.operations.items()}
            if "blit" in groups:
                blit = ops.blit_inverse(groups["blit"], p["blit"], size)
            if "geometry" in groups:
                geometry = ops.geometry_inverse(groups["geometry"], p["geometry"], size)
            result = ops.move(result, blit, geometry)
            for name, change in ops.CHANGES.items():
                if name in groups:
                    result = change(result, groups[name], p[name], self.alpha)
        return result.to(images.dtype)

    def is_changed(self, step: int) -> bool:
        """Return True if the mode is adaptive and p changes after update number `step`."""
        interval = self.config.interval
        return self.config.mode == "adaptive" and step % interval == interval - 1

    def update(
        self, images_at: Callable[[int], int], step: int, real_sign: Tensor, batch_size: int
    ) -> None:
        """Change p in place after update number `step`, without waiting for the device.

        In mode adaptive, p += sign(r_t - target) * images / (kimg * 1000) every `interval` steps,
        limited to [0, 1]. Here r_t is the mean sign of D(real), and `images` the number of images,
        since the last change. In mode scheduled, p is a function of the number of images seen.

        Args:
            images_at: Returns the number of images seen before a step.
            real_sign: 0-d, the mean of sign D(real) over the global batch. It is ignored if it is
                not finite; the update of D is then skipped too.
        """
        config = self.config
        if config.mode == "scheduled":
            ends = (config.p, config.p_final)
            self.p.copy_(
                value(
                    lambda step: torch.full_like(
                        self.p, cosine(*ends, images_at(step + 1), self.schedule_images)
                    ),
                    step,
                )
            )
        if config.mode != "adaptive":
            return
        finite = real_sign.isfinite()
        sign_sum = torch.where(finite, real_sign.detach() * batch_size, 0)
        self._sign_sum += sign_sum.to(self._sign_sum)
        self._count += finite * batch_size
        if self.is_changed(step):
            direction = (self._sign_sum - config.target * self._count).sign()
            change = direction * (self._count / self.adjustment_images)
            self.p.add_(change).clamp_(0, 1)
            self._sign_sum.zero_()
            self._count.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        return {"p": self.p, "sign_sum": self._sign_sum, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a saved state; in mode fixed, keep the p of the config."""
        if self.config.mode != "fixed":
            self.p.copy_(state["p"])
        self._sign_sum.copy_(state["sign_sum"])
        self._count.copy_(state["count"])
