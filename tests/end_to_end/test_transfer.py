"""`train.py --init-from`: a run that starts from another one's weights."""

import pytest
import torch

from duetgan.commands import train
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.checkpoint import file_sha256
from duetgan.utils.config.yaml_files import read_yaml
from tests.end_to_end import ranks
from tests.end_to_end.helpers import check_same, differing, state_of, train_in_process, write_config

# steps that change no weight; the average stays because its ramp is off after a transfer
STILL = ["--generator_optimizer.lr", "1e-30", "--discriminator_optimizer.lr", "1e-30", "--ema.ema_kimg", "1e18"]


@pytest.fixture(scope="module")
def donor(tmp_path_factory, packed):
    """A GAN of 16 px and ten classes, three steps old."""
    folder = tmp_path_factory.mktemp("donor")
    config = write_config(folder / "donor.yaml", "gan", packed)
    assert train_in_process(config, folder / "run", "--max-steps", "3") == 0
    return folder / "run"


@pytest.fixture(scope="module")
def other(tmp_path_factory, packed):
    """Other data: four of the classes, at 32 px."""
    folder = tmp_path_factory.mktemp("other")
    for split in ("train", "test"):
        with Dataset(packed / f"{split}.lmdb") as reader:
            kept = [i for i in range(len(reader)) if reader.labels()[i] < 4]
            images = torch.stack([torch.from_numpy(reader.image(i)[0].copy()) for i in kept]).reshape(-1, 1, 16, 16)
            labels, classes = reader.labels()[kept], list(reader.classes)[:4]
        large = images.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3).numpy()
        pack_arrays(folder / f"{split}.lmdb", large, labels=labels, classes=classes)
    return folder


def test_to_another_data_set_resolution_and_classes(tmp_path, donor, other, capsys):
    config, run = write_config(tmp_path / "recipe.yaml", "gan", other), tmp_path / "run"
    assert train_in_process(config, run, "--init-from", str(donor), "--max-steps", "1", *STILL) == 0
    said = capsys.readouterr().err
    file = donor / "checkpoints" / "step-00000003.pt"
    assert f"weights from {file}, step 3:" in said
    assert "all 4 classes taken by name" in said

    theirs, ours = state_of(donor, 3), state_of(run, 1)
    # 16 px -> 8 px is the discriminator's first block there, its second here
    places = [(name, "constant", "constant") for name in ("generator", "generator_ema")]
    for name, there, here in [*places, ("discriminator", "blocks.0.first.weight", "blocks.1.first.weight")]:
        assert torch.equal(ours[name][here], theirs[name][there])
    # nothing else is taken
    assert ours["loop"]["step"] == 1
    assert all(int(s["step"]) == 1 for s in ours["generator_optimizer"]["state"].values())

    saved = torch.load(run / "checkpoints" / "step-00000001.pt", weights_only=True)
    assert saved["origin"] == {"file": str(file), "step": 3, "sha256": file_sha256(file)}
    assert read_yaml(run / "config.yaml")["init_from"] == saved["config"]["init_from"] == str(file)

    assert train_in_process(config, run, "--init-from", "nowhere", "--max-steps", "4") == 0  # it trains on
    lines = capsys.readouterr().err.splitlines()
    assert f"--init-from nowhere is ignored: {run} resumes from its own checkpoint" in lines
    assert not any("init_from was" in line or "weights from" in line for line in lines)
    later = torch.load(run / "checkpoints" / "step-00000004.pt", weights_only=True)
    assert later["origin"] == saved["origin"]
    assert read_yaml(run / "config.yaml")["init_from"] == str(file)
    assert not torch.equal(
        later["state"]["generator"]["blocks.0.second.conv.weight"], theirs["generator"]["blocks.0.second.conv.weight"]
    )


def test_killed_after_a_transfer_and_resumed_equals_straight(tmp_path, donor, other):
    config = write_config(tmp_path / "recipe.yaml", "gan", other)
    straight, killed, again = tmp_path / "straight", tmp_path / "killed", tmp_path / "again"
    assert train_in_process(config, straight, "--init-from", str(donor)) == 0
    argv = ["--config", str(config), "--run-dir", str(killed), "--init-from", str(donor)]
    ranks.run(argv, tmp_path / "notes", kill_at=3 * 16, saved=2)
    assert train_in_process(config, killed) == 0  # without the option: it is the run's, not the command's
    check_same(straight, killed, 8)
    # the run's own config trains it once more, from the same weights
    assert train_in_process(config, tmp_path / "short", "--init-from", str(donor), "--max-steps", "1") == 0
    assert train_in_process(straight / "config.yaml", again, "--max-steps", "1") == 0
    assert differing(state_of(tmp_path / "short", 1), state_of(again, 1)) == []


def test_all_processes_start_from_the_same_weights(tmp_path, donor, packed):
    config = write_config(tmp_path / "recipe.yaml", "gan", packed)
    more = ["--init-from", str(donor), "--max-steps", "1", "--micro-batch", "8"]
    assert train_in_process(config, tmp_path / "one", *more) == 0
    argv = ["--config", str(config), "--run-dir", str(tmp_path / "two"), *more]
    ranks.run(argv, tmp_path / "notes", world=2)
    one, two = state_of(tmp_path / "one", 1), state_of(tmp_path / "two", 1)
    for name in ("generator", "discriminator", "generator_ema"):
        for key, value in one[name].items():
            torch.testing.assert_close(two[name][key], value, rtol=1e-3, atol=1e-3)


def test_a_refusal_writes_nothing(tmp_path, donor, packed, refused):
    small = ["--generator.z_dim", "5", "--generator.w_dim", "5", "--generator.channel_max", "3"]
    small += ["--discriminator.channel_max", "3", "--run-dir", str(tmp_path / "run"), "--init-from", str(donor)]
    config = write_config(tmp_path / "gan.yaml", "gan", packed)
    assert "none of its weights fit" in refused(train.main, "--config", config, *small)
    assert not (tmp_path / "run").exists()
