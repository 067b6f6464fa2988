"""A run for the table of options."""

from pathlib import Path

import torch

from duetgan.extras.stylegan3.networks import Stylegan3Generator
from duetgan.utils.checkpoint import load, point, resolve, save
from tests.extras.stylegan3.test_networks import TINY, build
from tests.metrics.conftest import make_run


def write(folder: Path) -> None:
    """A run with two checkpoints, of which the first is the best."""
    generator: Stylegan3Generator = build(classes=3, channels=1).float()
    config = {"architecture": "stylegan3-t", "generator": TINY}
    shape = {"channels": 1, "classes": 3, "resolution": 16}
    state = {"generator_ema": generator.state_dict()}
    run = make_run(folder / "stylegan3", task="gan", config=config, shape=shape, state=state)
    with torch.no_grad():
        generator.input.weight.mul_(0.5)
    state = {"generator_ema": generator.state_dict()}
    point(run / "checkpoints", "last", save(run / "checkpoints", load(resolve(run)) | {"step": 9, "state": state}))
