from typing import Any

import numpy as np
import pytest
import torch

from duetgan.models.gan import draw, generate
from duetgan.models.stylegan2 import Generator, GeneratorConfig
from duetgan.utils.seeding import forked, seed_of
from tests.models.helpers import to_uint8


@pytest.fixture(scope="module")
def model():
    """A conditional generator with loud noise."""
    config = GeneratorConfig(z_dim=6, w_dim=6, mapping_layers=1, channel_base=64, channel_max=8)
    with forked(0, "init", "test sampling"):
        model = Generator(config, resolution=8, channels=3, classes=3).eval()
    with torch.no_grad():
        for layer in model.styled_layers():
            layer.noise_strength.fill_(0.5)
    return model


def same(found, expected):
    """Equal images; a rounding of the last bit may differ, since kernels depend on the batch's size."""
    assert found.shape == expected.shape
    difference = (found.int() - expected.int()).abs()
    assert difference.max() <= 1
    assert (difference == 0).float().mean() > 0.99


def test_draws_belong_to_their_index_alone(model):
    z, maps = draw(model, range(6), 3)
    assert z.shape == (6, 6)
    assert [m.shape for m in maps] == [(6, *shape) for shape in model.noise_shapes()]
    order = [4, 0, 5]
    some, some_maps = draw(model, order, 3)
    assert some.equal(z[order])
    assert all(a.equal(b[order]) for a, b in zip(some_maps, maps, strict=True))
    assert not draw(model, [0], 4)[0].equal(z[:1])
    assert len({row.numpy().tobytes() for row in z}) == 6
    # the key of docs/randomness.md: a changed one would change everybody's figures
    keyed = torch.Generator().manual_seed(seed_of(3, "eval", 4))
    assert torch.randn(sum(m[0].numel() for m in maps) + 6, generator=keyed)[:6].equal(z[4])


@pytest.mark.parametrize("noise_mode", ["random", "const", "none"])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_images_are_equal_for_every_split_and_order(model, batch_size, noise_mode):
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    whole = generate(model, labels=labels, indices=range(7), seed=1, noise_mode=noise_mode, batch_size=7)
    assert whole.dtype == torch.uint8
    assert whole.shape == (7, 3, 8, 8)
    options = {"seed": 1, "noise_mode": noise_mode, "batch_size": batch_size}
    same(generate(model, labels=labels, indices=range(7), **options), whole)
    order = [6, 2, 2, 0]
    same(generate(model, labels=labels[order], indices=order, **options), whole[order])


@pytest.mark.parametrize(
    "options",
    [
        {"seed": [5, 3, 5, 8, 3]},
        {"seed": [5, 3, 5, 8, 3], "numpy_seeds": [7, 1, 4, 4, 0]},
        {"seed": 3, "stream": ("grid", 2)},
    ],
)
def test_each_image_has_its_own_seed_in_batches_of_any_size(model, options):
    labels, indices = torch.tensor([0, 1, 2, 0, 1]), [4, 0, 1, 6, 9]
    seeds, stream, numbers = options["seed"], options.get("stream", ("eval",)), options.get("numpy_seeds")
    found = generate(model, labels=labels, indices=indices, batch_size=2, truncation_mean="global", **options)
    for place, index in enumerate(indices):
        seed = seeds if isinstance(seeds, int) else seeds[place]
        keyed = torch.Generator().manual_seed(seed_of(seed, *stream, index))
        sizes = [6, *(height * width for _, height, width in model.noise_shapes())]
        z, *maps = torch.randn(sum(sizes), generator=keyed).split(sizes)
        if numbers is not None:
            z = torch.from_numpy(np.random.RandomState(numbers[place]).randn(6)).float()
        noise = [m.view(1, *shape) for m, shape in zip(maps, model.noise_shapes(), strict=True)]
        with torch.no_grad():
            expected = to_uint8(model(z[None], labels[place, None], noise=noise))
        same(found[place, None], expected)


def test_labels_seeds_and_settings_reach_the_images(model):
    """No gradient is kept, and the global generator is untouched."""
    zeros, before = torch.zeros(3, dtype=torch.int64), torch.random.get_rng_state()
    options: dict[str, Any] = {"labels": zeros, "indices": range(3), "seed": 1}
    first = generate(model, **options)
    assert generate(model, **options).equal(first)
    changes: list[dict[str, Any]] = [{"labels": zeros + 1}, {"seed": 2}, {"noise_mode": "const"}]
    for change in [*changes, {"truncation_psi": 0.5}, {"truncation_psi": 0.0, "truncation_cutoff": 2}]:
        other = generate(model, **(options | change))
        assert (other != first).float().mean() > 0.1, change
    assert torch.random.get_rng_state().equal(before)
    assert all(p.grad is None for p in model.parameters())
