"""The head on the discriminator that names classes: what it adds to both players' gradients, and who has it."""

from typing import Any

import numpy as np
import pytest
import torch

from data.records import pack_arrays
from models.restore import discriminator_from
from tests.distributed.worker import GAN, R3
from tests.training.gan.test_steps import CLASSES, Run, gradients, same, state
from training.gan.context import Images
from utils.errors import UserError

WEIGHT = 0.7
STILL = {"name": "adam", "lr": 1e-12}  # a paired objective's second half sees the networks of the first
COMMON = {key: GAN[key] for key in ("batch_size", "steps", "seed", "task", "augment")} | {
    "generator_optimizer": STILL,
    "discriminator_optimizer": STILL,
}
TREES: dict[str, dict[str, Any]] = {
    "stylegan2": GAN | COMMON | {"loss": {"r1_gamma": 0.0}},
    "dcgan": COMMON | {"architecture": "dcgan", "generator": {"z_dim": 8, "width": 4}, "discriminator": {"width": 4}},
    "r3gan": COMMON
    | {
        "architecture": "r3gan",
        "generator": R3 | {"z_dim": 8},
        "discriminator": R3,
        "loss": {"r1_gamma": 0.0, "r2_gamma": 0.0},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """data.lmdb: 48 grey images of 16 px, whose class is their brightness."""
    path = tmp_path_factory.mktemp("auxiliary")
    labels = np.arange(48) % 3
    noise = np.random.default_rng(0).integers(0, 60, (48, 1, 16, 16))
    pack_arrays(path / "data.lmdb", (noise + 90 * labels[:, None, None, None]).astype(np.uint8), labels, CLASSES)
    return path


def cross_entropy(discriminator, batch):
    """-mean log p(label), written out."""
    named = discriminator.auxiliary(discriminator.hidden(batch.images))
    return (named.exp().sum(dim=1).log() - named.gather(1, batch.labels[:, None])[:, 0]).mean()


def by_hand(run, *, fakes):
    """What the head adds to the first step's gradients of G's and of D's parameters, from a run that has not begun."""
    task = run.task
    share, context, paired = task._begin(0), task.context, task.config.loss.functions.paired
    (real,) = context.reals(next(run.loader), share)
    latents, noise = context.latents(share, "generator", [real] if paired else [])
    images, *_ = context.sample(latents, noise, slice(0, share.batch_size), share.stage)
    of_samples = cross_entropy(task.discriminator, Images(images, latents.labels))
    generator = torch.autograd.grad(of_samples, list(task.generator.parameters()), allow_unused=True)
    samples = Images(images.detach(), latents.labels)
    if paired:
        (real,) = context.reals(next(run.loader), share, "discriminator")
        (samples,) = task._paired_samples(share, [real])
    taught = cross_entropy(task.discriminator, real)
    if fakes:
        taught = taught + cross_entropy(task.discriminator, samples)
    return generator, torch.autograd.grad(taught, list(task.discriminator.parameters()), allow_unused=True)


@pytest.mark.parametrize("fakes", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_both_players_gradients_get_the_cross_entropy_and_nothing_else(folder, name, fakes):
    loss = {"auxiliary_weight": WEIGHT, "auxiliary_fakes": fakes}
    run, without = Run(folder, TREES[name], loss=loss), Run(folder, TREES[name])
    expected = by_hand(Run(folder, TREES[name], loss=loss), fakes=fakes)
    run.step()
    without.step()
    for player, wanted in zip(("generator", "discriminator"), expected, strict=True):
        found, plain = gradients(getattr(run.task, player)), gradients(getattr(without.task, player))
        assert max(float(own.abs().max()) for own in wanted if own is not None) > 1e-3
        for (parameter, gradient), own in zip(found.items(), wanted, strict=True):
            before = plain.get(parameter)
            added = gradient if before is None else gradient - before
            expected_added = torch.zeros_like(gradient) if own is None else own * WEIGHT
            torch.testing.assert_close(added, expected_added, rtol=1e-3, atol=1e-5, msg=f"{player} {parameter}")


def test_the_head_learns_what_the_images_show(folder):
    """Real images' classes from them alone: after 40 steps nearly all are named right, and it is told."""
    fast = {"name": "adam", "lr": 0.01, "betas": [0.0, 0.99]}
    tree = TREES["stylegan2"] | {"discriminator_optimizer": fast, "augment": {}}
    run = Run(folder, tree, loss={"auxiliary_weight": 1.0})
    rows = [run.step() for _ in range(40)]
    assert sum(row["accuracy/auxiliary"] for row in rows[-5:]) / 5 > 0.9
    assert rows[-1]["loss/auxiliary_real"] < 0.5 * rows[0]["loss/auxiliary_real"]


def test_the_networks_begin_as_without_the_head(folder):
    """A comparison with and without it is paired: nothing but the head is drawn anew."""
    run, without = Run(folder, GAN, loss={"auxiliary_weight": 1.0}), Run(folder, GAN)
    assert same(state(run.task.generator), state(without.task.generator))
    with_head = state(run.task.discriminator)
    head = {name: with_head.pop(name) for name in ("auxiliary.weight", "auxiliary.bias")}
    assert same(with_head, state(without.task.discriminator))
    assert head["auxiliary.weight"].shape == (3, 8)


def test_a_checkpoints_discriminator_has_its_head(folder):
    run = Run(folder, GAN, loss={"auxiliary_weight": 1.0})
    config = {"discriminator": GAN["discriminator"]}
    content: dict[str, Any] = {"task": "gan", "config": config, "shape": run.task.shape}
    content["state"] = {"discriminator": state(run.task.discriminator)}
    assert same(state(discriminator_from(content)), content["state"]["discriminator"])


def test_images_without_classes_are_refused(tmp_path):
    pack_arrays(tmp_path / "data.lmdb", np.zeros((16, 1, 16, 16), np.uint8))
    with pytest.raises(UserError, match=r"loss\.auxiliary_weight needs images of two classes"):
        Run(tmp_path, GAN, loss={"auxiliary_weight": 1.0, "mismatch_weight": 0.0})
