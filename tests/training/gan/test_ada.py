import io
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from duetgan.training.gan.ada import Ada, AdaConfig
from duetgan.training.gan.ada_operations import DRAWS, Draws, GroupDraws
from duetgan.utils.seeding import forked, generator
from tests.end_to_end.helpers import differing
from tests.training.gan.ada_oracle import random

CPU = torch.device("cpu")
ALL = dict.fromkeys(DRAWS, 1.0)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(mode="fixed", p=0.5, *, seed=0, channels=3, schedule_images=1000, transfer=False, **config):
    return Ada(
        AdaConfig(mode=mode, p=p, **({"operations": ALL} | config)),
        seed=seed,
        channels=channels,
        device=CPU,
        schedule_images=schedule_images,
        transfer=transfer,
    )


def numbers(draws):
    return {
        (name, part): value for name, group in draws.items() for part, value in vars(group).items() if value is not None
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


@pytest.mark.parametrize("channels", [1, 3])
def test_any_split_of_the_batch_gives_the_same_images(channels):
    ada, images = build(channels=channels), random(13, channels, 9, 9)
    draws = ada.draw(0, "real", (9, 9), 13)
    whole = ada.apply(images, draws, slice(0, 13))
    assert whole.shape == images.shape
    assert (whole != images).flatten(1).any(1).sum() > 8
    pieces = [slice(0, 5), slice(5, 6), slice(6, 13)]
    split = torch.cat([ada.apply(images[rows], draws, rows) for rows in pieces])
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_at_strength_0_it_is_the_identity_to_the_bit(channels, dtype):
    ada, images = build("adaptive", 0.0, channels=channels), random(13, channels, 10, 10).to(dtype)
    found = ada.apply(images, ada.draw(0, "real", (10, 10), 13), slice(0, 13))
    assert found.dtype == dtype
    assert torch.equal(found, images)


def test_switched_off_it_does_nothing():
    ada = build("off", channels=5)
    assert not ada.active
    ada.update(13, 3, torch.tensor(1.0), 13)
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


def test_r1_through_it_reaches_the_parameters_and_is_right(double):
    """The penalty on D(T x) by x against one with T, which is linear but for an offset, as an explicit matrix."""
    ada = build(p=0.7, channels=1, operations={"blit": 1.0, "geometry": 1.0, "colour": 1.0, "filter": 1.0})
    images, draws = random(4, 1, 8, 8), ada.draw(0, "real", (8, 8), 13)

    def augment(sample_images):
        return ada.apply(sample_images, draws, slice(0, 4))

    offset = augment(torch.zeros(4, 1, 8, 8))
    units = torch.eye(64).reshape(64, 1, 1, 8, 8).expand(-1, 4, -1, -1, -1)
    matrices = torch.stack([(augment(unit) - offset).flatten(1) for unit in units], dim=2)  # [4, 64, 64]
    with forked(0, "init", "test"):
        net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Softplus(), nn.Conv2d(3, 2, 3), nn.Softplus(), nn.Flatten())
        net.append(nn.Linear(32, 1))

    def penalty(transform):
        inputs = images.clone().requires_grad_()
        logits = net(transform(inputs))
        (gradient,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
        return gradient.square().sum()

    def explicit(x):
        return (matrices @ x.reshape(4, 64, 1)).reshape(4, 1, 8, 8) + offset

    parameters = [p for p in net.parameters() if p is not net[-1].bias]
    found = torch.autograd.grad(penalty(augment), parameters)
    expected = torch.autograd.grad(penalty(explicit), parameters)
    for one, other in zip(found, expected, strict=True):
        assert other.abs().max() > 1e-6
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-14)


class Operators(TorchDispatchMode):
    """Lists the operators that run inside the block, and those that are given a tensor of the host."""

    def __init__(self):
        super().__init__()
        self.names, self.from_host = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.names.add(name)
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.device == CPU:
                self.from_host.add((name, value.ndim))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("channels", [1, 3])
def test_nothing_waits_for_the_device(channels, monkeypatch):
    """On tensors without values to read one, or have a shape depend on one, raises; and nothing comes from the host."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # knows no such device
    device = torch.device("meta")
    ada = Ada(
        AdaConfig(mode="adaptive", operations=ALL),
        seed=0, channels=channels, device=device, schedule_images=1,
    )  # fmt: skip
    draws = Draws({
        name: GroupDraws(*(torch.empty(4, k, device=device) for k in counts)) for name, counts in DRAWS.items()
    })  # fmt: skip
    draws["noise"].pixels = torch.empty(4, channels, 8, 8, device=device)
    images = torch.empty(4, channels, 8, 8, device=device)

    def step():
        inputs = images.clone().requires_grad_()
        result = ada.apply(inputs, draws, slice(0, 4)).square().sum()
        (gradient,) = torch.autograd.grad(result, inputs, create_graph=True)
        gradient.square().sum().backward()
        ada.update(4, 3, torch.empty((), device=device), 4)
        return inputs.grad

    step()  # constants are made
    with Operators() as seen:
        assert step().shape == images.shape
    assert {"grid_sampler_2d", "grid_sampler_2d_backward", "gather", "baddbmm"} - seen.names <= (
        {"baddbmm"} if channels == 1 else set()
    )
    assert not seen.names & {"lift_fresh", "_local_scalar_dense", "nonzero"}
    assert not {(name, ndim) for name, ndim in seen.from_host if ndim > 0 or "copy" in name}  # 0-d: an argument


def by_hand(signs, sizes, *, p=0.0, target=0.6, kimg=500.0, interval=4):
    """The law of 2006.06676, section 2.2, with the logits' signs of whole batches."""
    found, gathered, images = [], 0.0, 0
    for step, (sign, size) in enumerate(zip(signs, sizes, strict=True)):
        gathered, images = gathered + sign * size, images + size
        if step % interval == interval - 1:
            r = gathered / images
            p += (1 if r > target else -1 if r < target else 0) * images / (kimg * 1000)
            p, gathered, images = min(1.0, max(0.0, p)), 0.0, 0
        found.append(p)
    return found


def follow(ada, signs, sizes, start=0):
    found = []
    for step in range(start, len(signs)):
        ada.update(0, step, torch.tensor(signs[step]), sizes[step])
        found.append(ada.p)
    return torch.stack(found).tolist()


SIGNS = torch.rand(60, generator=generator(0, "signs"), dtype=torch.float64).mul(0.8).add(0.25).tolist()
SIZES = [64] * 30 + [16] * 30  # a growing GAN's batches shrink


@pytest.mark.parametrize(
    ("config", "transfer", "kimg"),
    [
        ({}, False, 500),
        ({}, True, 100),
        ({"kimg": 0.5}, False, 0.5),
        ({"kimg": 0.5}, True, 0.5),
        ({"kimg": 2.0, "interval": 1, "target": 0.7}, False, 2.0),
        ({"kimg": 1.0, "interval": 7, "p": 0.3, "target": 0.65}, False, 1.0),
    ],
)
def test_the_law_against_a_loop_by_hand(config, transfer, kimg, double):
    expected = by_hand(SIGNS, SIZES, **(config | {"kimg": kimg}))
    found = follow(build("adaptive", transfer=transfer, **({"p": 0.0} | config)), SIGNS, SIZES)
    assert found == pytest.approx(expected, abs=1e-12)
    assert len(set(expected)) > 4
    assert max(expected) > min(expected)


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
    ],
)
def test_where_the_strength_goes(config, signs, expected, double):
    ada = build(**({"mode": "adaptive", "p": 0.5} | config))
    kept = ada.p
    assert follow(ada, signs, [10] * len(signs))[-1] == pytest.approx(expected, abs=1e-12)
    assert kept == 0.5  # p is never changed in place
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
