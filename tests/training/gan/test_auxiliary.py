"""The head on the discriminator that names classes: what it learns, and who has it."""

from typing import Any

import numpy as np
import pytest

from duetgan.data.records import pack_arrays
from duetgan.models.restore import discriminator_from
from duetgan.utils.errors import UserError
from tests.distributed.worker import GAN
from tests.training.gan.test_steps import CLASSES, Run, same, state


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """data.lmdb: 48 grey images of 16 px, whose class is their brightness."""
    path = tmp_path_factory.mktemp("auxiliary")
    labels = np.arange(48) % 3
    noise = np.random.default_rng(0).integers(0, 60, (48, 1, 16, 16))
    pack_arrays(path / "data.lmdb", (noise + 90 * labels[:, None, None, None]).astype(np.uint8), labels, CLASSES)
    return path


def test_the_head_learns_what_the_images_show(folder):
    """Real images' classes from them alone: after 40 steps nearly all are named right, and it is told."""
    fast = {"name": "adam", "lr": 0.01, "betas": [0.0, 0.99]}
    tree = GAN | {"discriminator_optimizer": fast, "augment": {}}
    run = Run(folder, tree, loss={"auxiliary_weight": 1.0, "r1_gamma": 0.0})
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
