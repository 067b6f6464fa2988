"""Films: the image goes where the options say."""

import math
from dataclasses import replace

import numpy as np
import torch

from duetgan.commands.generate import main
from duetgan.extras.stylegan3.film import Motion, transforms
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.extras.stylegan3.test_networks import build
from tests.inference.conftest import sampler_of, styled


def test_transforms_are_the_inverse_of_the_motion():
    angles = torch.tensor([0.0, math.pi / 2, 0.3])
    shifts = torch.tensor([[0.25, 0.0], [0.0, 0.5], [0.1, -0.2]])
    point = torch.tensor([0.2, 0.1])
    for transform, angle, shift in zip(transforms(shifts, angles), angles.tolist(), shifts, strict=True):
        clockwise = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        place = clockwise @ point + shift  # y goes down
        torch.testing.assert_close(transform @ torch.cat([place, torch.ones(1)]), torch.tensor([0.2, 0.1, 1.0]))


def test_frames_move_right_and_the_film_ends_where_it_began():
    sizes = {"margin": 10, "layers": 6, "critical_layers": 2, "channel_base": 64, "channel_max": 8}
    network = build("T", channels=1, **sizes).float().eval()
    sampler = sampler_of(network, batch_size=3)
    frames = [frame.astype(float) for frame in Motion(sampler, 1, 4, (0.25, 0.0), 0.0)]
    still = next(iter(Motion(sampler, 1, 4, (0.0, 0.0), 360.0))).astype(float)
    assert np.array_equal(frames[0], still)
    assert np.abs(frames[2] - still).max() <= 1  # sin(pi)
    spread = still.std()
    assert np.abs(frames[1][:, 4:] - still[:, :-4]).mean() < 0.1 * spread < np.abs(frames[1] - still).mean()
    assert np.abs(frames[3][:, :-4] - still[:, 4:]).mean() < 0.1 * spread
    assert torch.equal(network.input.transform, torch.eye(3))
    films = []  # the motion is that of the whole film, however many samples it visits
    for sources in ([5], [5, 5]):
        film = Motion(replace(sampler, sources=sources), 1, 4 // len(sources), (0.25, 0.0), 90.0)
        films.append(np.stack(list(film)).astype(float))
    assert np.abs(films[0] - films[1]).max() <= 1
    assert_raises(UserError, "move needs a generator of StyleGAN3", Motion, sampler_of(styled()), 1, 4, (0.0, 0.0), 0.0)


def test_a_broken_option():
    options = ["move", "--checkpoint", "x", "--out", "x.gif", "--translate", "1"]
    assert_raises(UserError, "give two numbers, X,Y", main, options)
