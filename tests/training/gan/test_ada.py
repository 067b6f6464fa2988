import io
import math

import pytest
import torch

from duetgan.training.gan.ada import Ada, AdaConfig
from duetgan.training.gan.ada.operations import (
    DRAWS,
    Draws,
    blit_inverse,
    colour_matrix,
    geometry_inverse,
    move,
    recolour,
)
from duetgan.utils.seeding import generator
from tests.end_to_end.helpers import differing
from tests.training.gan.ada_oracle import random

CPU = torch.device("cpu")
ALL = dict.fromkeys(DRAWS, 1.0)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(mode="fixed", p=0.5, *, seed=0, channels=3, alpha=False, schedule_images=1000, transfer=False, **config):
    return Ada(
        AdaConfig(mode=mode, p=p, **({"operations": ALL} | config)),
        seed=seed,
        channels=channels,
        device=CPU,
        schedule_images=schedule_images,
        transfer=transfer,
        alpha=alpha,
    )


def numbers(draws):
    return {
        (name, part): value
        for name, group in draws.items()
        for part, value in group._asdict().items()
        if value is not None
    }


def equal(one, other):
    return differing(numbers(one), numbers(other)) == []


def test_draws_are_a_function_of_their_key_alone():
    ada = build()
    once = ada.draw(3, "generator", (8, 8), 13)
    assert set(once) == set(DRAWS)
    for name, (operations, uniform, normal) in DRAWS.items():
        group = once[name]
        assert [len(p.T) for p in (group.chance, group.uniform, group.normal)] == [operations, uniform, normal]
        assert len(group.chance) == len(group.uniform) == len(group.normal) == 13
    assert once["noise"].pixels.shape == (13, 3, 8, 8)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    assert equal(once, build().draw(3, "generator", (8, 8), 13))
    assert torch.random.get_rng_state().equal(state)
    for other in (
        build().draw(4, "generator", (8, 8), 13),
        build().draw(3, "real", (8, 8), 13),
        build(seed=1).draw(3, "generator", (8, 8), 13),
    ):
        assert not any(torch.equal(numbers(other)[key], value) for key, value in numbers(once).items() if value.numel())
    columns = [
        tuple(column.tolist())
        for group in once.values()
        for column in (*group.chance.T, *group.uniform.T, *group.normal.T)
    ]
    assert len(set(columns)) == len(columns) == sum(map(sum, DRAWS.values()))  # no number serves twice
    once = build().draw(0, "real", (8, 8), 13)
    strong = build(p=0.9)
    strong.p = torch.tensor(0.1)
    assert equal(strong.draw(0, "real", (8, 8), 13), once)
    for name in DRAWS:
        alone = build(operations={name: 0.5}).draw(0, "real", (8, 8), 13)
        assert equal(alone, Draws({name: once[name]}))


def test_opacity_is_no_colour_and_a_cutout_is_transparent():
    images = random(13, 4, 8, 8)
    found = {}
    for alpha in (False, True):
        ada = build(p=1.0, channels=4, alpha=alpha)
        draws = ada.draw(0, "real", (8, 8), 13)
        for name in ("colour", "cutout"):
            found[name, alpha] = ada.apply(images, {name: draws[name]}, slice(0, 13))
    matrix = colour_matrix(draws["colour"].rows(slice(0, 13), images.dtype), torch.tensor(1.0), 3)
    assert torch.equal(found["colour", True], recolour(images, matrix, alpha=True))
    assert torch.equal(found["colour", True][:, 3], images[:, 3])
    cut = found["cutout", True] != images
    assert 0.1 < cut.float().mean() < 0.3
    assert torch.all(found["cutout", True][cut] == -1)
    assert torch.all(found["cutout", False][cut] == 0)


def test_order_of_the_groups():
    """Moved, recoloured, filtered, noise added, cut out: each on what the one before it leaves."""
    ada, images = build(p=1.0), random(13, 3, 8, 8)
    draws, expected = ada.draw(0, "real", (8, 8), 13), images
    for names in (("blit", "geometry"), ("colour",), ("filter",), ("noise",), ("cutout",)):
        before, expected = expected, ada.apply(expected, {name: draws[name] for name in names}, slice(0, 13))
        assert (expected != before).flatten(1).any(1).sum() > 8
    torch.testing.assert_close(ada.apply(images, draws, slice(0, 13)), expected, rtol=0, atol=1e-12)


def test_multipliers_of_p():
    images = torch.ones(4000, 1, 8, 8)
    ada = build(p=0.5, channels=1, operations={"cutout": 0.4, "noise": 1.0, "colour": 0.0})
    found = ada.apply(images, ada.draw(0, "real", (8, 8), 4000), slice(0, 4000))
    changed = lambda happened: happened.double().mean().item()  # noqa: E731
    assert changed((found == 0).flatten(1).any(1)) == pytest.approx(0.2, abs=4 * math.sqrt(0.16 / 4000))
    noisy = ((found != 1) & (found != 0)).flatten(1).any(1)
    assert changed(noisy) == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 4000))
    ada, images = build(p=0.5, operations={"blit": 0.2, "geometry": 0.8}), random(40, 3, 8, 8)
    draws = ada.draw(0, "real", (8, 8), 40)
    groups = {name: group.rows(slice(0, 40), images.dtype) for name, group in draws.items()}
    blit = blit_inverse(groups["blit"], torch.tensor(0.1), (8, 8))
    geometry = geometry_inverse(groups["geometry"], torch.tensor(0.4), (8, 8))
    assert torch.equal(ada.apply(images, draws, slice(0, 40)), move(images, blit, geometry))


def test_switched_off_it_does_nothing():
    ada = build("off", channels=5)
    assert not ada.active
    ada.update(lambda _: 13, 3, torch.tensor(1.0), 13)
    assert ada.p == 0.5
    assert all(build(mode, p_final=0.1).active for mode in ("adaptive", "fixed", "scheduled"))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(half):
    ada, images = build(), random(13, 3, 16, 16).float()
    draws = ada.draw(0, "real", (16, 16), 13)
    expected = ada.apply(images, draws, slice(0, 13))
    with torch.autocast("cpu", half):
        found = ada.apply(images, draws, slice(0, 13))
        rounded = ada.apply(images.to(half), draws, slice(0, 13))
    assert torch.equal(found, expected)
    assert rounded.dtype == half
    exact = ada.apply(images.to(half).float(), draws, slice(0, 13))
    assert torch.equal(rounded, exact.to(half))


def follow(ada, signs, sizes, start=0):
    found = []
    for step in range(start, len(signs)):
        ada.update(lambda _: 0, step, torch.tensor(signs[step]), sizes[step])
        found.append(ada.p.clone())
    return torch.stack(found).tolist()


SIGNS = torch.rand(60, generator=generator(0, "signs"), dtype=torch.float64).mul(0.8).add(0.25).tolist()


@pytest.mark.parametrize(
    ("config", "signs", "expected"),
    [
        ({"kimg": 0.1}, [1.0] * 4, 0.5 + 40 / 100),
        ({"kimg": 0.1}, [1.0] * 12, 1.0),  # NVIDIA's may rise beyond 1
        ({"kimg": 0.1}, [-1.0] * 12, 0.0),
        # a step that is not finite counts for nothing
        ({"kimg": 1.0}, [math.nan, 1.0, math.inf, 0.5], 0.5 + 20 / 1000),
        ({"kimg": 1.0}, [math.nan] * 4, 0.5),
        ({"kimg": 1.0}, [0.5] * 4, 0.5 - 40 / 1000),
        ({"target": 0.5}, [0.25, 0.75, 0.5, 0.5], 0.5),  # met exactly
        ({"mode": "fixed", "kimg": 0.1}, [1.0] * 8, 0.5),
        ({}, [1.0] * 4, 0.5 + 40 / 500_000),
        ({"transfer": True}, [1.0] * 4, 0.5 + 40 / 100_000),
        # 10 images a step, adjusted after the third and the sixth: means 0.5 and 0.2
        ({"kimg": 1.0, "interval": 3, "target": 0.3}, [0.0, 0.5, 1.0, 0.1, 0.2, 0.3, 1.0], 0.5),
    ],
)
def test_where_the_strength_goes(config, signs, expected, double):
    ada = build(**({"mode": "adaptive", "p": 0.5} | config))
    p = ada.p
    assert follow(ada, signs, [10] * len(signs))[-1] == pytest.approx(expected, abs=1e-12)
    assert ada.p is p  # CUDA graphs read its memory
    assert not ada.p.requires_grad


@pytest.mark.parametrize("stop", [1, 3, 4, 6, 7])
def test_resumed_amid_an_interval_it_goes_on_to_the_bit(stop):
    config = {"mode": "adaptive", "p": 0.3, "kimg": 1.0, "target": 0.62}
    signs, sizes = SIGNS[:12], [64] * 6 + [16] * 6
    straight = follow(build(**config), signs, sizes)
    first = build(**config)
    follow(first, signs[:stop], sizes[:stop])
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = build(**config)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert follow(second, signs, sizes, start=stop) == straight[stop:]
    assert len(set(straight)) == 4


def test_what_a_resumed_run_takes_over():
    state = build("adaptive", 0.3).state_dict()
    for mode, expected in [("adaptive", 0.3), ("scheduled", 0.3), ("fixed", 0.5)]:
        ada = build(mode, 0.5)
        ada.load_state_dict(state)
        assert ada.p == torch.tensor(expected)
