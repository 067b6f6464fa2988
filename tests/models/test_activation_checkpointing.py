"""`checkpoint: true` keeps fewer activations and changes no number; and steps leave nothing behind."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from duetgan.models.growing import GrowingDiscriminator, GrowingGenerator
from duetgan.models.layers.convolution import penalised
from tests.models import test_discriminator, test_generator
from tests.models.helpers import draw, gradients, kept_bytes, same

CONTEXTS = [None, torch.bfloat16, torch.float16]
SIZES = {"channel_base": 128, "channel_max": 8, "fp16_resolutions": 2}
LABELS = torch.tensor([0, 2, 1, 1])


def precision(dtype):
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def build_generator(checkpoint, **more):
    sizes: dict[str, Any] = {"z_dim": 4, "w_dim": 4, **SIZES, **more}
    return test_generator.build(32, 3, 3, activation_checkpointing=checkpoint, **sizes).float()


def build_discriminator(checkpoint, architecture="residual", **more):
    sizes: dict[str, Any] = {"activation_checkpointing": checkpoint, "architecture": architecture, **SIZES, **more}
    return test_discriminator.build(32, 3, 3, **sizes).float()


def same_bits(both, least):
    """Both runs' outputs and gradients are equal to the bit, and there are at least `least` gradients."""
    (first, found), (second, expected) = both
    assert first.equal(second)
    assert len(found) >= least
    same(found, expected)


def run_generator(checkpoint, dtype, *, path_length, stage):
    generator = build_generator(checkpoint, **({"kind": GrowingGenerator} if stage else {}))
    if stage:
        generator.enter(*stage)
    maps = [draw(4, *shape, key=f"{shape}").float() for shape in generator.noise_shapes()]
    with precision(dtype):
        w = generator.mapping(draw(4, 4, key="z").float(), LABELS)
        ws = w[:, None].repeat(1, generator.num_ws, 1)
        images = generator.synthesis(ws, maps)
    loss = images.square().mean()
    if path_length:
        noise = draw(*images.shape, key="path").float() / images.shape[-1]
        (slopes,) = torch.autograd.grad((images * noise).sum(), ws, create_graph=True)
        loss = loss + (slopes.square().sum(dim=2).mean(dim=1).sqrt() - 1).square().mean()
    loss.backward()
    return images, gradients(generator)


@pytest.mark.parametrize("dtype", CONTEXTS)
@pytest.mark.parametrize("path_length", [False, True])
@pytest.mark.parametrize("stage", [(), (16, torch.tensor(0.3))])
def test_a_generator_is_the_same_to_the_bit(dtype, path_length, stage):
    same_bits([run_generator(again, dtype, path_length=path_length, stage=stage) for again in (False, True)], 25)


def run_discriminator(checkpoint, dtype, *, architecture, penalty, alpha):
    network = build_discriminator(checkpoint, architecture, **({} if alpha is None else {"kind": GrowingDiscriminator}))
    if alpha is not None:
        network.enter(16, alpha)
    images = draw(4, 3, 16 if alpha is not None else 32, 16 if alpha is not None else 32).float().requires_grad_()
    with precision(dtype):
        logits = network(images, LABELS)
    loss = torch.nn.functional.softplus(-logits).mean()
    if penalty:
        (slopes,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
        loss = loss + slopes.square().sum(dim=(1, 2, 3)).mean()
    loss.backward()
    return logits, gradients(network) | {"images": images.grad}


@pytest.mark.parametrize("dtype", CONTEXTS)
@pytest.mark.parametrize("architecture", ["residual", "plain"])
@pytest.mark.parametrize(("penalty", "alpha"), [(False, None), (True, None), (True, torch.tensor(0.3))])
def test_a_discriminator_is_the_same_to_the_bit(dtype, architecture, penalty, alpha):
    options = {"architecture": architecture, "penalty": penalty, "alpha": alpha}
    same_bits([run_discriminator(checkpoint, dtype, **options) for checkpoint in (False, True)], 17)


def test_images_without_a_penalty_are_computed_again_as_they_were_beside_others_with_one():
    """Relativistic pairs with R1 alone: both go back in one pass, in which second derivatives are needed."""

    def run(checkpoint):
        network = build_discriminator(checkpoint)
        real, fake = (draw(4, 3, 32, 32, key=key).float().requires_grad_() for key in ("real", "fake"))
        judged = []
        for images, due in ((real, True), (fake, False)):
            with penalised(due):
                judged.append(network(images, LABELS))
        with penalised():
            (slopes,) = torch.autograd.grad(judged[0].sum(), real, create_graph=True)
            loss = torch.nn.functional.softplus(judged[1] - judged[0]).mean() + slopes.square().sum()
            loss.backward()
        return judged[0], gradients(network) | {"real": real.grad, "fake": fake.grad}

    same_bits([run(checkpoint) for checkpoint in (False, True)], 17)


def test_a_frozen_discriminator_hands_the_gradient_on_and_fewer_bytes_are_kept():
    found = []
    for checkpoint in (False, True):
        network = build_discriminator(checkpoint).requires_grad_(False)
        images = draw(4, 3, 32, 32).float().requires_grad_()
        network(images, LABELS).sum().backward()
        found.append(images.grad)
    assert found[0].equal(found[1])
    assert found[0].ne(0).any()
    for build, shape in ((build_generator, [4]), (build_discriminator, [3, 32, 32])):
        kept = [kept_bytes(build(checkpoint), draw(4, *shape).float(), LABELS) for checkpoint in (False, True)]
        assert kept[1] < 0.5 * kept[0]
    generator = build_generator(True)
    with torch.no_grad():
        images = generator(draw(4, 4).float(), LABELS)
    assert not images.requires_grad
    assert images.equal(build_generator(False)(draw(4, 4).float(), LABELS))


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("side", [None, 16, 32])  # of a stage of growth
def test_blocks_are_computed_again_once(checkpoint, side):
    networks = GrowingGenerator, GrowingDiscriminator
    kinds: list[dict[str, Any]] = [{}, {}] if side is None else [{"kind": kind} for kind in networks]
    generator, network = build_generator(checkpoint, **kinds[0]), build_discriminator(checkpoint, **kinds[1])
    used, from_rgb = [*generator.blocks, *network.blocks], network.from_rgb
    if side is not None:
        generator.enter(side, 1.0)
        network.enter(side, 1.0)
    if side == 16:  # without the blocks of 32 px
        used.remove(generator.blocks[-1])
        used.remove(network.blocks[0])
        from_rgb = network.from_rgbs["16"]
    calls = []
    for block in (*generator.blocks, *network.blocks, from_rgb):
        block.register_forward_pre_hook(lambda *hook: calls.append(hook[0]))
    blocks = len(used) + 1
    loss = network(generator(draw(4, 4).float(), LABELS), LABELS).sum()
    assert len(calls) == blocks
    loss.backward()
    assert len(calls) == (2 * blocks if checkpoint else blocks)


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
def test_200_steps_leave_memory_flat():
    generator = test_generator.build(8, 1, 3, z_dim=4)
    network = test_discriminator.build(8, 1, 3, activation_checkpointing=True)
    z, marks = draw(4, 4), []
    for step in range(201):
        w = generator.mapping(z, LABELS)
        images = generator.synthesis(w[:, None].expand(-1, generator.num_ws, -1), "const")
        network(images, LABELS).sum().backward()
        generator.update_w_avg(w.mean(dim=0))
        generator.zero_grad()
        network.zero_grad()
        if step in (20, 110, 200):
            del w, images
            marks.append(live_tensors())
    assert marks[0] == marks[1] == marks[2]
