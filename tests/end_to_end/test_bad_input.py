"""What a user gets wrong: one line with the remedy, exit code 2, nothing lost or written."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import evaluate
import predict
import train
from data import pack
from data.reading.dataset import Dataset
from data.records import pack_arrays
from tests.end_to_end.helpers import write_config
from utils.script import run_cli


def refused(capsys: pytest.CaptureFixture[str], main, *arguments: str | Path) -> str:
    """The one error line of a refused command."""
    capsys.readouterr()
    assert run_cli(main, [str(a) for a in arguments]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1, errors
    assert "Traceback" not in errors[0]
    return errors[0]


@pytest.fixture
def recipe(tmp_path: Path, packed: Path) -> Path:
    return write_config(tmp_path / "recipe.yaml", "classifier", packed)


@pytest.fixture(scope="module")
def gan_run(tmp_path_factory: pytest.TempPathFactory, packed: Path) -> Path:
    folder = tmp_path_factory.mktemp("gan")
    config = write_config(folder / "gan.yaml", "gan", packed)
    assert run_cli(train.main, ["--config", str(config), "--run-dir", str(folder / "run"), "--max-steps", "1"]) == 0
    return folder / "run"


def test_typo_in_a_key_of_the_file(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(recipe.read_text() + "optimiser: {lr: 0.1}\n")
    line = refused(capsys, train.main, "--config", recipe, "--run-dir", tmp_path / "run")
    assert "recipe.yaml" in line
    assert "did you mean 'optimizer'" in line
    assert not (tmp_path / "run").exists()


def test_typo_on_the_command_line(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, train.main, "--config", recipe, "--run-dir", tmp_path / "run", "--optimizer.lrr", "1")
    assert "did you mean 'optimizer.lr'" in line


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (["--max-step", "5"], "'max_step' (did you mean '--max-steps'?)"),  # not 'steps': that changes the schedule
        (["--proc=2"], "did you mean '--procs'"),
        (["--gpu", "0"], "did you mean '--gpus'"),
        (["--devise", "cpu"], "did you mean '--device'"),
        (["--rundir", "x"], "did you mean '--run-dir'"),
        (["--dryrun"], "did you mean '--dry-run'"),
        (["--profil", "3"], "did you mean '--profile'"),
        (["--lr-finds"], "did you mean '--lr-find'"),
        (["--debugg"], "did you mean '--debug'"),
        (["--step", "5"], "did you mean 'steps'"),
        (["--lr", "1"], "did you mean 'optimizer.lr'"),
        (["--resume"], "there is no --resume: the same command resumes from the run folder's last checkpoint"),
        (["--resume-from=x"], "there is no --resume-from"),
    ],
)
def test_typo_in_an_option_of_the_script(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: list[str], told: str
) -> None:
    assert told in refused(capsys, train.main, "--config", recipe, "--run-dir", tmp_path / "run", *override)
    assert not (tmp_path / "run").exists()


def test_an_option_of_the_script_in_the_recipe(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(recipe.read_text() + "max_steps: 5\n")
    line = refused(capsys, train.main, "--config", recipe)
    assert "recipe.yaml: unknown key 'max_steps' (did you mean '--max-steps'?)" in line


def test_without_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--confg (did you mean '--config'?)" in refused(capsys, train.main, "--confg", "x.yaml")
    assert "there is no --resume" in refused(capsys, train.main, "--resume", "runs/x")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--gpus", "2,3"], "--gpus 2,3: torchrun has started the processes; leave --gpus out"),
        (["--procs", "3"], "--procs 3: torchrun has started 2 processes; leave --procs out"),
        (["--procs", "2", "--data.path="], "data.path"),  # taken where it says the same
        (["--data.path="], "data.path"),
    ],
)
def test_processes_under_torchrun(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], told: str
) -> None:
    """Found by a reader: they started nothing, without a word."""
    monkeypatch.setattr("utils.distributed.collectives.start", lambda *_, **__: None)
    monkeypatch.setattr("utils.distributed.collectives.world_size", lambda: 1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("DUET_LAUNCHED", raising=False)
    assert told in refused(capsys, train.main, "--config", recipe, "--device", "cpu", *options)


def test_our_launchers_processes_take_its_options(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "DUET_LAUNCHED": "1"}.items():
        monkeypatch.setenv(name, value)
    options = ["--config", str(recipe), "--gpus", "0,1", "--device", "cpu", "--batch-size", "many"]
    assert "batch_size" in refused(capsys, train.main, *options)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (["--batch-size", "many"], "batch_size"),
        (["--data.path", "nowhere/train.lmdb"], "nowhere/train.lmdb"),
        (["--data.path="], "data.path"),
        (["--model.classes", "5"], "model.classes"),
        (["--micro-batch", "0"], "micro_batch 0: must be a whole number above 0"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--device", "gpu"], "gpu"),
        (["--procs", "0"], "--procs"),
        (["--gpus", "0,x"], "--gpus"),
    ],
)
def test_bad_values(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: list[str], told: str
) -> None:
    line = refused(capsys, train.main, "--config", recipe, "--run-dir", tmp_path / "run", *override)
    assert told in line
    assert not (tmp_path / "run").exists()


def test_missing_and_malformed_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "quickstart_gan.yaml" in refused(capsys, train.main, "--config", "configs/quickstart_gn.yaml")
    (tmp_path / "tabs.yaml").write_text("task: gan\ndata:\n\tpath: x\n")
    assert "tabs" in refused(capsys, train.main, "--config", tmp_path / "tabs.yaml")
    (tmp_path / "task.yaml").write_text("task: gans\n")
    assert "did you mean 'gan'" in refused(capsys, train.main, "--config", tmp_path / "task.yaml")
    assert "--config" in refused(capsys, train.main)
    (tmp_path / "config.yaml").write_text("task: gan\n")
    assert f"{tmp_path} is a folder: give {tmp_path}/config.yaml" in refused(capsys, train.main, "--config", tmp_path)


def test_folder_of_another_run_keeps_everything(
    recipe: Path, gan_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in sorted(gan_run.rglob("*")) if path.is_file()}
    line = refused(capsys, train.main, "--config", recipe, "--run-dir", gan_run)
    assert str(gan_run) in line
    assert "--run-dir" in line
    assert {path: path.read_bytes() for path in sorted(gan_run.rglob("*")) if path.is_file()} == before


def test_other_images_in_a_runs_folder_keep_everything(
    gan_run: Path, tmp_path: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by a new user: the refused start had rewritten config.yaml and status.json."""
    pack_arrays(
        tmp_path / "other.lmdb",
        np.zeros((20, 1, 16, 16), np.uint8),
        labels=np.arange(20) % 10,
        classes=Dataset(packed / "train.lmdb").classes,
    )
    before = {path: path.read_bytes() for path in sorted(gan_run.rglob("*")) if path.is_file() and path.name != ".lock"}
    line = refused(capsys, train.main, "--config", gan_run / "config.yaml", "--data.path", tmp_path / "other.lmdb")
    assert "was trained on other images" in line
    assert {path: path.read_bytes() for path in before} == before


def test_folder_that_is_no_run(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    line = refused(capsys, train.main, "--config", recipe, "--run-dir", tmp_path / "thesis")
    assert "chapter1.txt" in line
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"


def test_gan_checkpoint_given_to_the_classifier(
    gan_run: Path, tmp_path: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "a.png"
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(image)
    assert "'gan'" in refused(capsys, predict.main, "--checkpoint", gan_run, image)
    line = refused(capsys, evaluate.main, "--checkpoint", gan_run, "--classifier", gan_run, "--out", tmp_path / "eval")
    assert "'gan'" in line
    assert not (tmp_path / "eval").exists()


def test_missing_and_damaged_checkpoints(gan_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing-here" in refused(capsys, evaluate.main, "--checkpoint", tmp_path / "nothing-here")
    copy = tmp_path / "copy.pt"
    shutil.copy(next((gan_run / "checkpoints").glob("*.pt")), copy)
    with open(copy, "r+b") as file:
        file.truncate(copy.stat().st_size // 2)
    assert "copy.pt" in refused(capsys, evaluate.main, "--checkpoint", copy)


def test_labels_beyond_the_classes_are_refused_before_the_first_step(
    recipe: Path, tmp_path: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.zeros((12, 1, 16, 16), np.uint8)
    pack_arrays(tmp_path / "three.lmdb", images, labels=np.arange(12) % 3, classes=["a", "b", "c"])
    line = refused(
        capsys,
        train.main,
        "--config",
        recipe,
        "--run-dir",
        tmp_path / "run",
        "--data.val-path",
        tmp_path / "three.lmdb",
    )
    assert "three.lmdb: its classes are not those of" in line
    assert not (tmp_path / "run").exists()


def test_sources_that_hold_no_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.lmdb"
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, pack.main, tmp_path / "empty", out)
    (tmp_path / "texts" / "a").mkdir(parents=True)
    (tmp_path / "texts" / "a" / "notes.txt").write_text("x")
    assert "texts" in refused(capsys, pack.main, tmp_path / "texts", out)
    (tmp_path / "liar" / "a").mkdir(parents=True)
    (tmp_path / "liar" / "a" / "fake.jpg").write_text("not an image")
    assert "fake.jpg" in refused(capsys, pack.main, tmp_path / "liar", out, "--size", "16")
    assert not out.exists()


def test_the_extractor_is_checked_before_the_first_step(
    tmp_path: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "gan.yaml", "gan", packed)
    run = ["--config", str(config), "--run-dir", str(tmp_path / "run")]
    assert "did you mean 'pixels'" in refused(capsys, train.main, *run, "--evaluation.extractor", "pixel")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("gpus", "usable", "told"),
    [("0", 0, "--gpus 0: no usable GPU"), ("0,1,5", 2, "--gpus 0,1,5: only 2 of these 3 can be used")],
)
def test_a_gpu_that_was_asked_for_is_not_replaced_in_silence(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gpus: str,
    usable: int,
    told: str,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: usable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # train.py sets it; this puts it back
    options = ["--config", str(recipe), "--run-dir", str(tmp_path / "run"), "--gpus", gpus, "--procs", "1"]
    line = refused(capsys, train.main, *options)
    assert told in line
    assert "--device" not in line  # which nobody has typed


def test_a_device_that_was_asked_for_is_not_replaced_in_silence(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    line = refused(capsys, train.main, "--config", recipe, "--run-dir", tmp_path / "run", "--device", "cuda")
    assert "no usable cuda device" in line


def test_dry_run_writes_nothing(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(train.main, ["--config", str(recipe), "--run-dir", str(tmp_path / "run"), "--dry-run"]) == 0
    out = capsys.readouterr()
    assert len(out.out.splitlines()) < 10  # U17: not a hundred lines of layers
    assert "conv1" not in out.out
    assert "memory of its training step" in out.out
    more = ["--config", str(recipe), "--run-dir", str(tmp_path / "run"), "--dry-run", "--layers"]
    assert run_cli(train.main, more) == 0
    out = capsys.readouterr()
    assert "conv1" in out.out
    assert "memory of its training step" in out.out
    assert "Non-trainable params: 0" in out.out
    assert "200 images" in out.err
    assert not (tmp_path / "run").exists()
