"""What a user gets wrong: one line with the remedy, exit code 2, nothing lost or written."""

import numpy as np
import pytest

from duetgan.commands import train
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.distributed.launch import VISIBLE
from duetgan.utils.distributed.process import run_cli
from tests.end_to_end.helpers import contents, write_config


@pytest.fixture(autouse=True)
def default_runs(tmp_path, monkeypatch):
    """Give a run without --run-dir a folder of the test's own."""
    monkeypatch.setenv("DUET_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def command(tmp_path, packed):
    """Options of a classifier's training, whose folder is `run`."""
    recipe = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    return ["--config", str(recipe), "--run-dir", str(tmp_path / "run")]


@pytest.fixture(scope="module")
def gan_run(tmp_path_factory, packed):
    folder = tmp_path_factory.mktemp("gan")
    config = write_config(folder / "gan.yaml", "gan", packed)
    assert run_cli(train.main, ["--config", str(config), "--run-dir", str(folder / "run"), "--max-steps", "1"]) == 0
    return folder / "run"


@pytest.mark.parametrize(("wrong", "right"), [("optimiser: {lr: 0.1}", "optimizer"), ("max_steps: 5", "--max-steps")])
def test_unknown_keys_of_the_file(command, tmp_path, refused, wrong, right):
    with (tmp_path / "recipe.yaml").open("a") as recipe:
        recipe.write(f"{wrong}\n")
    told = f"recipe.yaml: unknown key '{wrong.partition(':')[0]}' (did you mean '{right}'?)"
    assert told in refused(train.main, *command)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (["--optimizer.lrr", "1"], "did you mean 'optimizer.lr'"),
        (["--max-step", "5"], "'max_step' (did you mean '--max-steps'?)"),  # not 'steps': that changes the schedule
        (["--proc=2"], "did you mean '--procs'"),
        (["--step", "5"], "did you mean 'steps'"),
        (["--lr", "1"], "did you mean 'optimizer.lr'"),
        (["--gpu", "0"], "did you mean '--gpus'"),
        (["--resume"], "unknown key 'resume'"),
        (["--batch-size", "many"], "batch_size"),
        (["--data.path", "nowhere/train.lmdb"], "nowhere/train.lmdb"),
        (["--micro-batch", "0"], "micro_batch 0: must be greater than 0"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--procs", "0"], "--procs"),
        (["--gpus", "0,x"], "--gpus"),
        (["--device", "cuda"], "no usable cuda device"),
        (["--profile", "2", "--dry-run"], "leave --dry-run and --max-steps out"),
        (["--profile", "2", "--max-steps", "3"], "leave --dry-run and --max-steps out"),
        (["--profile", "0"], "at least 1"),
        (["--profile", "6"], "6 to trace, but 8 of 8 are left"),
        (["--lr-find", "--dry-run"], "leave --dry-run, --max-steps and --profile out"),
        (["--lr-find", "--max-steps", "3"], "leave --dry-run, --max-steps and --profile out"),
        (["--lr-find", "--profile", "2"], "leave --dry-run, --max-steps and --profile out"),
        (["--lr-find-to", "1"], "belong to --lr-find; add it"),
        (["--lr-find", "--lr-find-from", "20"], "must be positive and below the last"),
    ],
)
def test_options_and_values(command, tmp_path, refused, monkeypatch, override, told):
    if override == ["--device", "cuda"]:
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    assert told in refused(train.main, *command, *override)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--gpus", "2,3"], "torchrun has started the processes; leave both out"),
        (["--procs", "3"], "torchrun has started the processes; leave both out"),
        (["--procs", "2", "--data.path="], "data.path"),  # taken where it says the same
        (["--data.path="], "data.path"),
    ],
)
def test_processes_under_torchrun(command, refused, monkeypatch, options, told):
    """Found by a reader: they started nothing, without a word."""
    monkeypatch.setattr("duetgan.utils.distributed.collectives.start", lambda *_, **__: None)
    monkeypatch.setattr("duetgan.utils.distributed.collectives.world_size", lambda: 1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DUET_LAUNCHED", raising=False)
    assert told in refused(train.main, *command[:2], "--device", "cpu", *options)


def test_our_launchers_processes_take_its_options(command, refused, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "DUET_LAUNCHED": "1"}.items():
        monkeypatch.setenv(name, value)
    options = ["--gpus", "0,1", "--device", "cpu", "--batch-size", "many"]
    assert "batch_size" in refused(train.main, *command[:2], *options)


def test_without_a_config(refused, tmp_path):
    assert "--config FILE is missing" in refused(train.main, "--confg", "x.yaml")
    assert "--config" in refused(train.main)
    assert "quickstart_gan.yaml" in refused(train.main, "--config", "configs/quickstart_gn.yaml")
    (tmp_path / "config.yaml").touch()
    assert f"{tmp_path} is a folder: give {tmp_path}/config.yaml" in refused(train.main, "--config", tmp_path)


def test_folders_of_others_keep_everything(command, gan_run, tmp_path, packed, refused):
    """Also where other images are given: the refused start had rewritten config.yaml and status.json."""
    before = contents(gan_run)
    line = refused(train.main, *command[:2], "--run-dir", gan_run)
    assert str(gan_run) in line
    assert "--run-dir" in line
    classes = Dataset(packed / "train.lmdb").classes
    pack_arrays(tmp_path / "other.lmdb", np.zeros((20, 1, 16, 16), np.uint8), np.arange(20) % 10, classes)
    line = refused(train.main, "--config", gan_run / "config.yaml", "--data.path", tmp_path / "other.lmdb")
    assert "was trained on other images (200 then, 20 in" in line
    assert "add --new-data to continue with these" in line
    assert contents(gan_run) == before
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "chapter1.txt").write_text("years of work")
    assert "chapter1.txt" in refused(train.main, *command)
    assert (tmp_path / "run" / "chapter1.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--evaluation.extractor", "pixel"], "did you mean 'pixels'"),
        (["--lr-find"], "--lr-find is not for task gan: the losses of a GAN measure two networks"),
    ],
)
def test_options_of_a_gan(tmp_path, packed, refused, options, told):
    config = write_config(tmp_path / "gan.yaml", "gan", packed)
    assert told in refused(train.main, "--config", config, "--run-dir", tmp_path / "run", *options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("gpus", "usable", "told"),
    [("0", 0, "--gpus 0: no usable GPU"), ("0,1,5", 2, "--gpus 0,1,5: only 2 of these 3 can be used")],
)
def test_a_gpu_that_was_asked_for_is_not_replaced_in_silence(command, refused, monkeypatch, gpus, usable, told):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: usable)
    for name in ("CUDA_DEVICE_ORDER", *VISIBLE):
        monkeypatch.setenv(name, "")  # train.py sets it; this puts it back
    line = refused(train.main, *command, "--gpus", gpus, "--procs", "1")
    assert told in line
    assert "--device" not in line  # which nobody has typed


def test_dry_run_writes_nothing(command, tmp_path, capsys):
    assert run_cli(train.main, [*command, "--dry-run"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 10  # U17: not a hundred lines of layers
    assert "conv1" not in short
    assert run_cli(train.main, [*command, "--dry-run", "--layers"]) == 0
    out = capsys.readouterr()
    assert "conv1" in out.out
    assert "200 images" in out.err
    assert not (tmp_path / "run").exists()
