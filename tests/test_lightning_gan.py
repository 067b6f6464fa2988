"""examples/lightning_gan.py trains the GAN of docs/library.md's loop: the same weights from the same draws."""

import warnings
from typing import Any

import pytest
import torch

from duetgan.data import Dataset
from duetgan.utils.seeding import forked
from tests.end_to_end.recipes import image_folders
from tests.test_package import EXAMPLES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own
    from examples import lightning_gan


@pytest.mark.filterwarnings("ignore")  # Lightning's hints on workers and accelerators
def test_lightning_trains_the_same_gan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DUET_CACHE", str(tmp_path / "cache"))
    image_folders(tmp_path / "folder", 12, 0)
    (loop,) = (text for text in EXAMPLES if "for step in range(STEPS)" in text)
    names: dict[str, Any] = {}
    with forked(0):
        exec(loop, names)
    with forked(0), Dataset("folder", resolution=16) as images:
        same = {"gamma": names["GAMMA"], "r1_every": names["R1_EVERY"], "channel_base": 512}
        gan = lightning_gan.train(images, names["STEPS"], names["BATCH"], **same)
    for ours, theirs in ((names["g"], gan.g), (names["d"], gan.d), (names["average"].model, gan.average.model)):
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(theirs.state_dict()[name], value, rtol=0, atol=1e-7, msg=name)
