import errno
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from duetgan.commands import train
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.gan.config import GanConfig
from duetgan.utils.config.build import build, to_tree
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_folder import RunFolder, is_finished
from tests.conftest import assert_raises


def opened(path):
    folder = RunFolder(path)
    folder.open()
    return folder


def test_in_one_process_too_and_close_gives_it_back(tmp_path):
    place = tmp_path / "a" / "b"  # which is made, and its parents
    first = opened(place)
    assert_raises(UserError, f"process {os.getpid()}", opened, place)
    first.close()
    first.close()
    opened(place).close()
    assert list(tmp_path.iterdir()) == []  # no run was begun


def test_what_a_refused_start_has_made_is_gone_and_nothing_else(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_bytes(b"x")
    opened(tmp_path / "photos").close()
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["me.jpg"]
    run = opened(tmp_path / "run")
    run.save_config({"task": "gan"}, data=None)
    run.close()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "config.yaml"}
    assert not (tmp_path / "run" / ".lock").stat().st_mode & 0o111  # no program


def test_another_runs_folder_is_refused_before_torch_is_imported(tmp_path, monkeypatch, capsys):
    """M6: beside other work a second start was refused after 39 s of preparation."""
    monkeypatch.setitem(sys.modules, "duetgan.training.engine.run", None)  # whoever imports it fails
    arguments = ["--config", "configs/quickstart_gan.yaml", "--run-dir", str(tmp_path)]
    first = opened(tmp_path)
    assert run_cli(train.main, arguments) == 2
    assert f"{tmp_path}: another run (process {os.getpid()}) is writing here" in capsys.readouterr().err
    first.close()
    assert_raises(ModuleNotFoundError, r"training\.engine\.run", run_cli, train.main, arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "local_rank", "words", "holds"),
    [(0, 0, [], True), (2, 0, [], False), (0, 0, ["--dry-run"], False), (1, 1, ["--device", "cpu"], False)],
)
def test_rank_0_holds_the_folder_and_no_other_machines_first_rank(
    tmp_path, monkeypatch, rank, local_rank, words, holds
):
    seen: list[object] = []

    def run(config, overrides, *, run_dir, device, **options):
        locks = [path.read_text() for path in tmp_path.glob("run/.lock")]
        seen.extend([Path(config).name, overrides, run_dir.path, device, locks])
        return 7

    engine: Any = ModuleType("duetgan.training.engine.run")
    engine.train = run
    monkeypatch.setitem(sys.modules, "duetgan.training.engine.run", engine)
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", 4), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    arguments = ["--config", "configs/quickstart_gan.yaml", "--run-dir", str(tmp_path / "run"), "--steps", "9"]
    assert run_cli(train.main, [*arguments, *words]) == 7
    device = "cpu" if "cpu" in words else None
    locks = [str(os.getpid())] * holds
    assert seen == ["quickstart_gan.yaml", ["--steps", "9"], tmp_path / "run", device, locks]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"cannot be written \(.*\); choose another --run-dir") as error:
            opened(place)
        assert str(place) in str(error.value)


def test_d11_a_new_folder_on_a_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        UserError, match=r"run: cannot be written \(No space left on device\); choose another --run-dir"
    ):
        opened(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_empty_and_missing_folders_have_no_config(tmp_path):
    """Nor has what a first start left that was killed."""
    assert RunFolder(tmp_path / "nowhere").saved_config() is None
    (tmp_path / ".lock").write_text("1")
    (tmp_path / ".config.yaml.123.tmp").write_text("task: g")
    folder = opened(tmp_path)
    assert folder.saved_config() is None
    assert folder.accept_config(to_tree(GanConfig()), defaults=None) == []
    folder.close()


def test_a_folder_of_other_things_is_refused_and_not_touched(tmp_path):
    for name in ("d.jpg", "b.jpg", "c.jpg", "a.jpg"):
        (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match=r"is not empty and holds no run \(found a.jpg, b.jpg, c.jpg\)"):
        RunFolder(tmp_path).accept_config(to_tree(GanConfig()), defaults=None)
    assert len(list(tmp_path.iterdir())) == 4
    (tmp_path / "config.yaml").write_text("task: [gan")
    with pytest.raises(UserError, match=r"config\.yaml: not valid YAML"):
        RunFolder(tmp_path).saved_config()


def holding(tmp_path, tree):
    """The folder of a run with this configuration."""
    folder = RunFolder(tmp_path)
    folder.save_config(tree, data=None)
    return folder


@pytest.mark.parametrize(
    ("config_class", "key", "value"),
    [
        (GanConfig, "discriminator.architecture", "plain"),
        (ClassifierConfig, "model.stem", "small"),
        (ClassifierConfig, "model.normalise", "imagenet"),
        (ClassifierConfig, "optimizer.name", "adam"),
        (GanConfig, "generator_optimizer.name", "sgd"),
        (GanConfig, "discriminator_optimizer.name", "sgd"),
    ],
)
def test_changes_that_break_the_state_are_refused(tmp_path, config_class, key, value):
    folder = holding(tmp_path, to_tree(config_class()))
    with pytest.raises(UserError, match=rf"holds another run \({key}: .* there, {value!r} now") as error:
        folder.accept_config(to_tree(build(config_class, {}, [f"--{key}", str(value)])), defaults=None)
    assert "\n" not in str(error.value)


def test_other_weights_do_not_change_how_images_are_normalised_unseen(tmp_path):
    given, none = (to_tree(build(ClassifierConfig, {}, more)) for more in (["--model.weights", "IMAGENET1K_V2"], []))
    for saved, now in ((given, none), (none, given)):
        with pytest.raises(UserError, match=r"model.normalise: '\w+' there, '\w+' now"):
            holding(tmp_path, saved).accept_config(now, defaults=None)
    before = given | {"model": given["model"] | {"normalise": "auto"}}  # as it was saved
    (notice,) = holding(tmp_path, before).accept_config(given, defaults=None)
    assert notice.endswith("model.normalise was 'auto', is 'imagenet'")


def test_another_task_is_refused_and_of_many_differences_the_first_are_named(tmp_path):
    with pytest.raises(UserError, match=r"task: 'gan' there, 'classifier' now"):
        holding(tmp_path, to_tree(GanConfig())).accept_config(to_tree(ClassifierConfig()), defaults=None)
    folder = holding(tmp_path, {"task": "gan", "generator": dict.fromkeys("abcdef", 1)})
    with pytest.raises(UserError, match=r"\(generator.a: 1 there, 2 now; .*generator.d: 1 there, 2 now\)"):
        folder.accept_config({"task": "gan", "generator": dict.fromkeys("abcdef", 2)}, defaults=None)


def test_status(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_status("running", 3, reason="", exit_code=None)
    assert not is_finished(tmp_path, 3)  # its checkpoint may still be written
    folder.write_status("stopped", 3, reason="", exit_code=None)
    assert [is_finished(tmp_path, 3), is_finished(tmp_path, 4), is_finished(tmp_path, None)] == [True, False, False]
    folder.write_status("failed", 7, "non-finite gradients", 4)
    status = json.loads((tmp_path / "status.json").read_text())
    expected = {"state": "failed", "step": 7, "reason": "non-finite gradients", "exit_code": 4, "pid": os.getpid()}
    assert {key: status[key] for key in expected} == expected
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_the_time_of_all_processes_of_a_run_is_counted(tmp_path, monkeypatch):
    """U9: the report says how long a run took; a resume goes on counting."""
    now = 100.0
    monkeypatch.setattr("duetgan.utils.runlog.run_folder.time.monotonic", lambda: now)
    for expected in (7.5, 15.0):
        folder = RunFolder(tmp_path)
        folder.open()
        now += 7.5
        folder.write_status("stopped", 3, reason="", exit_code=None)
        folder.close()
        assert json.loads((tmp_path / "status.json").read_text())["seconds"] == expected
    folder = RunFolder(tmp_path)  # of another rank, which does not open it but reports that rank 0 is lost
    now += 5
    folder.write_status("failed", 3, reason="", exit_code=4)
    assert json.loads((tmp_path / "status.json").read_text())["seconds"] == 20.0
    (tmp_path / "status.json").write_text("{")
    RunFolder(tmp_path).open()


def test_an_older_config_gets_the_defaults_of_missing_keys_and_harmless_changes_are_named(tmp_path):
    defaults = {"task": "gan", "steps": 5, "threads": "auto", "data": {"crop": 0, "mix": {}}, "generator": {"z_dim": 8}}
    saved = {"task": "gan", "threads": 2, "gone": 1, "data": {"mix": {"x": 1}, "old": 3}}
    now = defaults | {"steps": 7, "threads": 3, "data": {"crop": 4, "mix": {"x": 2}}}
    begin = "config changed since the last start: "
    changes = ["data.crop was 0, is 4", "data.mix.x was 1, is 2", "steps was 5, is 7", "threads was 2, is 3"]
    changes[3] += "; not the same to the bit from here on"
    folder = holding(tmp_path, saved)
    assert folder.accept_config(now, defaults=defaults) == [f"{begin}{change}" for change in changes]
    folder.save_config(saved | {"threads": "auto", "steps": 7, "data": now["data"]}, data=None)
    assert folder.accept_config(now, defaults=defaults) == [f"{begin}threads was 'auto', is 3"]
    other = now | {"generator": {"z_dim": 9}}
    assert_raises(UserError, r"\(generator.z_dim: 8 there, 9 now\)", folder.accept_config, other, defaults=defaults)
