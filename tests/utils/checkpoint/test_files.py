import collections
import hashlib
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint import (
    forget_after,
    load,
    load_latest,
    newest_first,
    point,
    pointer,
    resolve,
    rotate,
    save,
)
from duetgan.utils.checkpoint.provenance import Lineage, TrainedOn, data_history, describe_history, join, recorded
from duetgan.utils.errors import StoppedBySignal, UserError
from tests.conftest import assert_raises
from tests.utils.checkpoint.files import content, names, value_of, without_checksum


def latest(folder):
    """What `load_latest` finds, where it must not warn."""
    found = load_latest(folder, warn=pytest.fail)
    assert found is not None
    return found


def test_what_is_saved_is_loaded_whatever_its_step(tmp_path):
    path = save(tmp_path / "new" / "checkpoints", content(1234))
    assert path.name == "step-00001234.pt"
    assert names(path.parent) == ["step-00001234.pt", "step-00001234.pt.sha256"]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (path.parent / "step-00001234.pt.sha256").read_text() == f"{digest}  step-00001234.pt\n"
    found = load(path)
    assert found.keys() == {*content(), "file"}
    assert found["state"]["list"] == content()["state"]["list"]
    assert found["state"]["model"]["w"].equal(torch.ones(300))
    assert found["state"]["model"]["w"].device.type == "cpu"
    path = save(tmp_path, content(123456789))
    save(tmp_path, content(99999999))
    assert [checkpoints.step_of(p) for p in newest_first(tmp_path)] == [123456789, 99999999]
    assert newest_first(tmp_path)[0] == path
    assert_raises(ValueError, "not a checkpoint's name", checkpoints.step_of, tmp_path / "best.pt")


class Killed(BaseException):
    """Stands for kill -9: nothing that the program wrote to tidy up runs after it."""


def temporary_stays(patch):
    """As after a kill."""
    plain = Path.unlink

    def unlink(path, **how):
        if path.suffix != ".tmp":
            plain(path, **how)

    patch.setattr(Path, "unlink", unlink)


def interrupted_save(folder, monkeypatch, name, call, error, step=6):
    """`save` with the `call`-th use of os.<name> raising; after Killed no file is removed."""
    real, calls = getattr(os, name), []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise error
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing)
        if isinstance(error, Killed):
            temporary_stays(patch)
        with pytest.raises(type(error)):
            save(folder, content(step, value=2.0))
    assert len(calls) == call


POINTS = [("fsync", 1), ("replace", 1)]  # of the file itself; then come its checksum's, then the folder's


@pytest.mark.parametrize(("name", "call"), POINTS)
@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")])
def test_a_save_cut_short_leaves_the_one_before(tmp_path, monkeypatch, name, call, error):
    first = save(tmp_path, content(5))
    interrupted_save(tmp_path, monkeypatch, name, call, error)
    assert newest_first(tmp_path) == [first]
    path, found = latest(tmp_path)
    assert (path, value_of(found)) == (first, 1.0)
    if not isinstance(error, Killed):
        assert [n for n in names(tmp_path) if n.endswith(".tmp")] == []
    rotate(tmp_path, keep=2)
    assert names(tmp_path) == [first.name, f"{first.name}.sha256"]
    again = save(tmp_path, content(6, value=3.0))
    assert value_of(load(again)) == 3.0


@pytest.mark.parametrize(
    ("step", "name", "call", "value"),
    [
        (6, "fsync", 2, 2.0),
        (6, "replace", 2, 2.0),
        (6, "fsync", 3, 2.0),
        (5, "replace", 1, 1.0),  # a step again
        (5, "replace", 2, 2.0),
    ],
)
def test_killed_after_the_rename_the_new_one_counts(tmp_path, monkeypatch, step, name, call, value):
    save(tmp_path, content(5))
    interrupted_save(tmp_path, monkeypatch, name, call, Killed(), step=step)
    assert value_of(latest(tmp_path)[1]) == value


def test_a_file_that_is_no_checkpoint_gets_words_for_people(tmp_path):
    """J30: `--init-from /etc/passwd` was answered with "list index out of range"."""
    (tmp_path / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    with pytest.raises(UserError, match=r"passwd: (cannot be read as|refused, it is not plain data)") as error:
        load(tmp_path / "passwd")
    assert "index" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float64(1.0), "float64"),
        (np.int64(1), "int64"),
        (np.zeros(2), "ndarray"),
        (torch.__version__, "TorchVersion"),  # a str to isinstance, a class to the unpickler
        (Path("x"), "PosixPath"),
        ({1, 2}, "set"),
        (torch.float32, "dtype"),
        (collections.defaultdict(int), "defaultdict"),
        (torch.Size([1]), "Size"),
        (lambda: None, "function"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path, value, kind):
    bad = content(state={"optimizer": {"groups": [{"lr": value}]}})
    with pytest.raises(TypeError, match=rf"checkpoint\['state'\]\['optimizer'\]\['groups'\]\[0\]\['lr'\] is a {kind};"):
        save(tmp_path, bad)
    assert names(tmp_path) == []


def test_keys_are_checked(tmp_path):
    assert_raises(TypeError, "key of checkpoint", save, tmp_path, content(state={np.int64(1): 2}))


def test_nothing_points_at_checkpoints_that_are_forgotten(tmp_path):
    paths = [save(tmp_path, content(step)) for step in (1, 2, 3)]
    point(tmp_path, "best", paths[1], metric="frechet")
    (tmp_path / "last.json").write_text(f'{{"file": "{paths[2].name}"}}')  # the file's name is enough
    for step, best in ((2, 2), (1, None)):
        assert forget_after(tmp_path, step)
        assert newest_first(tmp_path) == paths[step - 1 :: -1]
        assert [(pointer(tmp_path, which) or {}).get("step") for which in ("last", "best")] == [step, best]
    without_checksum(paths[0])
    (tmp_path / "last.json").unlink()
    save(tmp_path, content(2))
    assert forget_after(tmp_path, 1)
    assert (pointer(tmp_path, "last"), names(tmp_path)) == (None, [paths[0].name])  # nobody has verified it
    assert not forget_after(tmp_path, 0)
    assert newest_first(tmp_path) == paths[:1]


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    paths = [save(tmp_path, content(step)) for step in range(1, 7)]
    point(tmp_path, "best", paths[1], metric="frechet", value=1.5)
    point(tmp_path, "last", paths[5])
    (tmp_path / "notes.txt").write_text("mine")
    rotate(tmp_path, keep=2)
    kept = [paths[index].name for index in (1, 4, 5)]
    assert [p.name for p in newest_first(tmp_path)] == kept[::-1]
    assert names(tmp_path) == sorted([*kept, *(f"{k}.sha256" for k in kept), "best.json", "last.json", "notes.txt"])
    for path in newest_first(tmp_path):
        load(path)


@pytest.mark.parametrize(
    ("steps", "options", "left"),
    [
        (range(1, 11), {"keep": 2, "keep_every": 4, "also": {5, 77}}, [10, 9, 8, 5, 4]),
        ((2, 4, 5, 8), {"keep": 1, "until": 5}, [8, 5]),  # what is newer neither counts nor goes
    ],
)
def test_what_rotation_keeps(tmp_path, steps, options, left):
    for step in steps:
        save(tmp_path, content(step))
    rotate(tmp_path, **options)
    assert [checkpoints.step_of(path) for path in newest_first(tmp_path)] == left


def test_a_checkpoint_of_a_machine_with_more_devices_is_loaded(tmp_path):
    """Tensors that the file says belong on the eighth GPU, which is not here."""
    path = save(tmp_path, content())
    with zipfile.ZipFile(path) as file:
        parts = {info.filename: file.read(info) for info in file.infolist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, part in parts.items():
            cpu, gpu = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:7"
            assert name.endswith("data.pkl") == (cpu in part)
            file.writestr(name, part.replace(cpu, gpu))
    checksum = path.with_name(path.name + ".sha256")
    checksum.write_text(f"{checkpoints.file_sha256(path)}  {path.name}\n")
    assert_raises(RuntimeError, "CUDA", torch.load, path, weights_only=True)
    weights = load(path)["state"]["model"]["w"]
    assert (weights.device.type, weights[0].item()) == ("cpu", 1.0)


def test_pointers(tmp_path, monkeypatch):
    path = without_checksum(save(tmp_path, content(8)))  # as after a kill
    synced = []
    monkeypatch.setattr(checkpoints, "sync_folder", lambda folder: synced.append(pointer(folder, "best")))
    point(tmp_path, "best", path, metric="accuracy", value=0.5)
    expected = {"file": path.name, "step": 8, "sha256": checkpoints.file_sha256(path)}
    expected |= {"metric": "accuracy", "value": 0.5}
    assert json.loads((tmp_path / "best.json").read_text()) == expected
    assert pointer(tmp_path, "best") == expected
    assert synced == [expected]  # so that a loss of power leaves no older pointer
    load(path)
    assert names(tmp_path) == ["best.json", path.name, f"{path.name}.sha256"]
    assert pointer(tmp_path, "last") is None
    for text in ("", "{", "[1]", "{}", '{"file": "../../etc/passwd"}', '{"file": 3}'):
        (tmp_path / "last.json").write_text(text)
        assert pointer(tmp_path, "last") is None


@pytest.fixture
def run(tmp_path):
    """A run folder with checkpoints of steps 1, 2 and 3; best is 1, last is 2 (killed before 3 was pointed at)."""
    folder = tmp_path / "quickstart"
    for step in (1, 2, 3):
        path = save(folder / "checkpoints", content(step))
        if step < 3:
            point(folder / "checkpoints", "best" if step == 1 else "last", path)
    return folder


def test_resolve(run, tmp_path):
    checkpoint = run / "checkpoints" / "step-00000003.pt"
    last, best = (run / "checkpoints" / f"{name}.json" for name in ("last", "best"))
    assert resolve(checkpoint) == checkpoint
    assert resolve(str(run), "best").name == "step-00000001.pt"
    assert resolve(run).name == resolve(run / "checkpoints").name == "step-00000002.pt"
    for damaged in ("{", '{"file": "step-00000099.pt"}'):
        last.write_text(damaged)
        assert resolve(run).name == "step-00000003.pt"
    best.write_bytes(b"\xff")
    assert_raises(UserError, r"best.json: damaged, .*use --which last or name a file", resolve, run, "best")
    best.unlink()
    assert_raises(UserError, r"has no best.json .*use --which last", resolve, run, "best")
    with pytest.raises(UserError, match="no such run folder or checkpoint") as error:
        resolve(tmp_path / "quickstrat")
    assert f"did you mean {str(run)!r}" in str(error.value)
    assert_raises(UserError, "no such run folder", resolve, tmp_path / "nowhere" / "x")
    folder = tmp_path / "timm"
    folder.mkdir()
    for name in ("pytorch_model.bin", "model.safetensors"):
        assert_raises(UserError, "timm: holds no checkpoint", resolve, folder)
        (folder / name).touch()
    (folder / "config.json").touch()
    assert resolve(folder) == folder / "model.safetensors"
    assert resolve("timm:resnet18") == Path("timm:resnet18")


def test_a_signal_that_comes_while_a_checkpoint_is_read_is_no_damage(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise StoppedBySignal("SIGTERM")

    path = save(tmp_path, content(1))
    monkeypatch.setattr(torch, "load", stop)
    assert_raises(StoppedBySignal, "SIGTERM", load, path)


def test_the_images_of_a_run_are_listed_if_they_were_replaced():
    data = {"content_hash": "f00d", "count": 7}
    checkpoint = {"config": {"data": {"path": "a.lmdb"}}, "data": data, "teachers": ["t"]}
    first = TrainedOn(step=0, content_hash="f00d", count=7, path="a.lmdb")
    assert (data_history(checkpoint), describe_history(checkpoint)) == ([first], "")
    lineage = Lineage.of(trained_on=["f00d"], teachers=["t"])
    assert (recorded(checkpoint), recorded({})) == (lineage, Lineage.of())
    more = Lineage.of(trained_on=["cafe"], teachers=["u"], pretrained=["p"])
    assert recorded(checkpoint | {"lineage": more.document()}) == join(lineage, more)
    second = {"step": 4000, "content_hash": "0123456789abcdef", "count": 8000}
    data["history"] = [first.model_dump(), second]
    line = "training images: 7 of a.lmdb from step 0, 8,000 of 0123456789ab from step 4,000"
    assert describe_history(checkpoint) == line
