"""`train.py --init-from` of a converted network."""

import numpy as np
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.extras.official import convert
from duetgan.utils.seeding import generator as keyed
from tests.end_to_end.helpers import rows, state_of, train_in_process, write_config
from tests.end_to_end.test_transfer import STILL
from tests.extras.official import layouts


def test_from_a_converted_network_of_nvidias(tmp_path, capsys):
    """Every tensor of both networks is taken, and training goes on from there."""
    layouts.write_nvidia(tmp_path / "network.pkl")
    assert convert.main([str(tmp_path / "network.pkl"), str(tmp_path / "donor")]) == 0
    images = torch.randint(0, 256, (48, 3, 16, 16), dtype=torch.uint8, generator=keyed(0, "test")).numpy()
    for split in ("train", "test"):
        pack_arrays(tmp_path / f"{split}.lmdb", images, labels=np.arange(48) % 3, classes=["0", "1", "2"])
    config, run = write_config(tmp_path / "recipe.yaml", "gan", tmp_path), tmp_path / "run"
    sizes = [f"--{name}.channel_{size}" for name in ("generator", "discriminator") for size in ("base", "max")]
    options = [part for pair in zip(sizes, ["64", "6"] * 2, strict=True) for part in pair]
    options += ["--generator.z_dim", "5", "--generator.w_dim", "7", "--discriminator.mapping_layers", "2"]
    options += ["--discriminator.minibatch_std_group", "2"]
    donor, still = str(tmp_path / "donor"), [*options, *STILL]
    assert train_in_process(config, run, "--init-from", donor, "--max-steps", "1", *still) == 0
    assert "does not fit" not in capsys.readouterr().err
    theirs, ours = state_of(tmp_path / "donor", 0), state_of(run, 1)
    for network in ("generator", "discriminator"):
        kept = [key for key in theirs[network] if key != "w_avg"]
        assert all(torch.equal(theirs[network][key], ours[network][key]) for key in kept)
    assert train_in_process(config, run, "--max-steps", "4", *still) == 0
    assert rows(run)[-1]["step"] == 4
