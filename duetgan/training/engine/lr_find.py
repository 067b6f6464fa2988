"""The learning-rate search `train.py --lr-find`: a short training at growing rates.

Afterwards the state before the search is restored. The search is the range test of Smith
(1506.01186, section 3.3), with rates in geometric sequence. While rates are too small, the loss
hardly changes. At higher rates it falls, and at the highest rates training diverges. A good rate
is one at which the loss falls.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from duetgan.metrics.images import new_figure, save_figure
from duetgan.training.engine.loop import Loop
from duetgan.training.optim.config import OptimizerConfig
from duetgan.training.optim.updater import Updater
from duetgan.utils.checkpoint.writer import Snapshot
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.files import as_json, write_atomic
from duetgan.utils.runlog.run_folder import SEARCHED

IMAGE, NUMBERS = SEARCHED  # file names in the run folder
SMOOTHING = 0.9  # decay of the running mean of losses
DIVERGED = 4.0  # multiple of the lowest smoothed loss at which the search stops
FEWEST = 10  # least number of losses for a suggestion


@dataclass(kw_only=True)
class Sweep:
    """The learning rates to try: `steps` rates in geometric sequence from `first` to `last`."""

    steps: int = 100
    first: float = 1e-6
    last: float = 10.0

    def __post_init__(self) -> None:
        refuse(
            (
                self.steps < FEWEST,
                f"--lr-find-steps {self.steps}: a curve needs {FEWEST} steps or more",
            ),
            (
                not 0 < self.first < self.last < math.inf,
                f"--lr-find-from {self.first:g}, --lr-find-to {self.last:g}: the first rate must be positive and below "
                "the last",
            ),
        )

    def rate(self, step: int) -> float:
        return self.first * (self.last / self.first) ** (step / (self.steps - 1))


@dataclass(kw_only=True)
class Curve:
    """The result of a search: learning rates, and the loss after an update at each of them.

    The loss is measured on the batch that follows the update.
    """

    # optimizer.lr divided by the rate at this batch size (optimizer.lr_batch_size)
    scale: float
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    stopped: str = "all rates were tried"  # the reason why the sweep ended

    def steepest(self) -> float | None:
        """Return the rate at which the smoothed curve falls fastest; None if it does not fall."""
        # The first tenth of the smoothed curve is skipped, as a mean of few losses.
        first = len(self.rates) // 10
        lowest = int(np.argmin(self.smoothed)) if self.smoothed else 0
        if lowest + 1 - first < FEWEST:
            return None
        rates, losses = self.rates[first : lowest + 1], self.smoothed[first : lowest + 1]
        return rates[int(np.argmin(np.gradient(np.asarray(losses), np.log(rates))))]


def search(loop: Loop, sweep: Sweep) -> Curve:
    """Train at the rates of `sweep` from the current state of `loop`, then restore that state.

    The state comprises weights, optimizer, averages, BatchNorm's statistics, the loader's position,
    counters and torch's random state. Every rank must call this. Returns the curve of the losses.
    """
    updater = next(part for part in loop.task.registry().values() if isinstance(part, Updater))
    loop.window.fold()
    configured = updater.config
    for section in vars(loop.config).values():
        if isinstance(section, OptimizerConfig):
            configured = section
            break
    registry = loop.registry()
    states = {name: part.state_dict() for name, part in registry.items()}
    saved = Snapshot({"step": 0, **states}, copy_cpu=True).content
    wait_seconds, device = loop.loader.wait_seconds, loop.loader.device
    devices = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices, device_type=device.type):
        try:
            curve = Curve(scale=configured.lr / updater.config.lr)
            return _sweep(loop, sweep, updater, curve)
        finally:
            updater.rate = None
            for name, part in registry.items():
                part.load_state_dict(saved[name])
                if isinstance(part, torch.nn.Module):
                    part.zero_grad(set_to_none=True)
            loop.loader.wait_seconds = wait_seconds


def _sweep(loop: Loop, sweep: Sweep, updater: Updater, curve: Curve) -> Curve:
    """Train one step at each rate of `sweep`; fill in and return `curve`.

    A step returns the loss before its update. So one more step than rates is needed.
    """
    losses: list[float] = []
    for number in range(sweep.steps + 1):
        updater.rate = sweep.rate(min(number, sweep.steps - 1))
        value = loop.task.step(loop.loader, loop.step + number)[loop.task.loss_metric]
        # All ranks need the same loss.
        loss = collectives.all_reduce_sum_(value.to(collectives.widest(value.device))).item()
        if not math.isfinite(loss):
            curve.stopped = "the loss was not finite"
            break
        losses.append(loss)
        if number == 0:
            continue
        curve.rates.append(sweep.rate(number - 1))
        curve.losses.append(loss)
        # This running mean has no bias towards 0, like Adam's moments (1412.6980, section 3).
        curve.smoothed.append(
            float(np.average(losses, weights=SMOOTHING ** np.arange(number, -1, -1)))
        )
        if curve.smoothed[-1] > DIVERGED * min(curve.smoothed):
            curve.stopped = f"the smoothed loss was {DIVERGED:g} times its lowest"
            break
    return curve


def draw(curve: Curve, steepest: float | None, path: Path) -> None:
    """Write the curve as a PNG file, with a line at the rate `steepest` if there is one."""
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    if curve.losses:
        axes.set_yscale("log")
    axes.plot(curve.rates, curve.losses, color="0.75", linewidth=1, label="loss")
    axes.plot(curve.rates, curve.smoothed, color="C0", linewidth=2, label="smoothed")
    if steepest is not None:
        axes.axvline(steepest, color="C3", label=f"steepest {steepest:.2g}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss of the next batch")
    axes.set_title(curve.stopped, fontsize=9)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def write(curve: Curve, folder: Path) -> str:
    """Write the curve into `folder`, the run folder, as an image and as numbers.

    Returns the text for the user: the option that sets the learning rate at which the loss falls
    fastest, with explanations.

    Raises UserError if the disk is full, or if the loss falls at no rate.
    """
    steepest = curve.steepest()
    write_atomic(folder / NUMBERS, as_json(asdict(curve) | {"steepest": steepest}))
    draw(curve, steepest, folder / IMAGE)
    tried = f"{curve.rates[0]:.2g} to {curve.rates[-1]:.2g}" if curve.rates else "the first on"
    if steepest is None:
        raise UserError(
            f"--lr-find: the loss falls at no rate from {tried} ({curve.stopped}; {folder / IMAGE}); give a lower "
            "--lr-find-from or more --lr-find-steps, and look at the labels if that changes nothing"
        )
    rate = float(f"{steepest * curve.scale:.2g}")
    scaled = ""
    if curve.scale != 1:
        scaled = f"; rates of the curve times {curve.scale:g}, for optimizer.lr_batch_size"
    return (
        f"--optimizer.lr {rate:g}\n"
        f"  where the loss falls fastest{scaled}\n"
        f"  {len(curve.rates)} rates from {tried}: {curve.stopped}; curve: {folder / IMAGE}"
    )
