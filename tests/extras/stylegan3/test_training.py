"""Fine-tuning of NVIDIA's networks, and exact resume."""

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.utils.seeding import generator as keyed
from tests.end_to_end.helpers import check_same, state_of, train_in_process, write_config
from tests.end_to_end.test_transfer import STILL
from tests.extras.stylegan3.conftest import GOLDEN, R

MOVING = ("w_avg", "magnitude_ema")  # means that change without an update of weights


@pytest.fixture
def config(tmp_path):
    images = torch.randint(0, 256, (48, 3, 16, 16), dtype=torch.uint8, generator=keyed(0, "test")).numpy()
    for split in ("train", "test"):
        pack_arrays(tmp_path / f"{split}.lmdb", images, labels=np.arange(48) % 3, classes=["0", "1", "2"])
    return write_config(tmp_path / "recipe.yaml", "gan", tmp_path)


def options():
    g = GOLDEN[R]["arguments"]
    sizes = {"z_dim": g["z_dim"], "w_dim": g["w_dim"], "layers": g["num_layers"], "margin": g["margin_size"]}
    sizes |= {"channel_base": g["channel_base"], "channel_max": g["channel_max"]}
    critic = {"channel_base": 64, "channel_max": 6, "mapping_layers": 2, "minibatch_std_group": 2}
    texts = [
        "--architecture",
        "stylegan3-r",
        "--evaluation.every",
        "0",
        "--batch-size",
        "8",
        "--log.samples_every",
        "0",
    ]
    texts += [text for name, value in sizes.items() for text in (f"--generator.{name}", str(value))]
    return texts + [text for name, value in critic.items() for text in (f"--discriminator.{name}", str(value))]


def test_from_nvidias_network_and_on_to_the_bit(config, donors, tmp_path, capsys):
    donor = ["--init-from", str(donors[R])]
    assert train_in_process(config, tmp_path / "still", *options(), *donor, *STILL, "--max-steps", "1") == 0
    assert "does not fit" not in capsys.readouterr().err
    theirs, ours = state_of(donors[R], 0), state_of(tmp_path / "still", 1)
    for network in ("generator", "discriminator"):
        names = [name for name in theirs[network] if not name.endswith(MOVING)]
        assert all(torch.equal(theirs[network][name], ours[network][name]) for name in names)
        if network == "generator":
            moved = [name for name in theirs[network] if name.endswith(MOVING)]
            assert not any(torch.equal(theirs[network][name], ours[network][name]) for name in moved)
    train = [*options(), *donor, "--loss.path_length_weight", "1", "--loss.path_length_interval", "2"]
    assert train_in_process(config, tmp_path / "straight", *train, "--max-steps", "4") == 0
    for step in ("2", "4"):
        assert train_in_process(config, tmp_path / "resumed", *train, "--max-steps", step) == 0
    check_same(tmp_path / "straight", tmp_path / "resumed", 4)
