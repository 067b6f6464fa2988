import copy
import errno
import zipfile
from collections import namedtuple
from unittest.mock import Mock

import pytest
import torch

from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint import CorruptCheckpoint, load, load_latest, save
from duetgan.utils.checkpoint import writer as checkpoint_writer
from duetgan.utils.checkpoint.writer import Snapshot
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import MOST_CHANNELS
from tests.conftest import assert_raises
from tests.utils.checkpoint.files import content, damage, names, without_checksum


def everything():
    """State of every kind: a trained module and its optimizer, shared and cut storages, layouts, types, aliases."""
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    flat, word = torch.arange(12.0), "twice"
    kinds = (torch.bfloat16, torch.float16, torch.int64, torch.bool)
    return {
        "module": module.state_dict(),
        "parameters": dict(module.named_parameters()),
        "adam": optimizer.state_dict(),
        "views": {"x": [flat[:4], flat[4:8].view(2, 2), flat[::3], flat]},
        "same": {"x": [flat, flat]},
        "types": {"x": [torch.zeros(2, dtype=kind) for kind in kinds]},
        "gradients": {"x": [torch.nn.Parameter(torch.ones(2), False), torch.ones(2, requires_grad=True)]},
        "empty": {"x": [torch.zeros(0), torch.zeros(0, 3), torch.tensor(5)]},
        "plain": {word: word, 3: (None, True, 1.5), "list": []},
    }


def test_a_copy_makes_the_same_file_to_the_byte(tmp_path):
    state = everything()
    bytes_of = {}
    for own in (False, True):
        path = save(tmp_path / str(own), Snapshot(content(state=state), copy_cpu=own))
        bytes_of[own] = path.read_bytes()
    assert bytes_of[True] == bytes_of[False]
    torch.save(content(state=state), tmp_path / "plain.pt")
    assert load(path)["state"]["views"]["x"][1].equal(torch.tensor([[4.0, 5.0], [6.0, 7.0]]))
    assert len(bytes_of[True]) == pytest.approx((tmp_path / "plain.pt").stat().st_size, abs=200)  # nothing twice
    big = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))  # more than any buffer on the way
    path = tmp_path / "x.pt"
    checkpoint_writer.write(Snapshot(content(state={"big": big, "small": torch.ones(3)}), copy_cpu=False), path)
    assert torch.load(path, weights_only=True)["state"]["big"].equal(big)


def test_a_copy_does_not_see_what_training_changes(tmp_path):
    state = everything()
    before = copy.deepcopy({name: tensor.clone() for name, tensor in state["module"].items()})
    taken = Snapshot(content(state=state), copy_cpu=True)
    with torch.no_grad():
        for part in (*state["module"].values(), *state["views"]["x"]):
            part.fill_(7)
    state["plain"]["list"].append(1)
    state["adam"]["param_groups"][0]["lr"] = 9.0
    found = load(save(tmp_path, taken))["state"]
    assert {name: tensor.equal(before[name]) for name, tensor in found["module"].items()} == dict.fromkeys(before, True)
    assert found["views"]["x"][3].equal(torch.arange(12.0))
    assert found["plain"]["list"] == []
    assert found["adam"]["param_groups"][0]["lr"] == 1e-3


def test_what_belongs_together_stays_together():
    taken = Snapshot(content(state=everything()), copy_cpu=True).content["state"]
    assert taken["same"]["x"][0] is taken["same"]["x"][1] is taken["views"]["x"][3]
    assert len({view.untyped_storage().data_ptr() for view in taken["views"]["x"]}) == 1
    assert isinstance(taken["parameters"]["0.weight"], torch.nn.Parameter)
    assert taken["parameters"]["0.weight"].untyped_storage().data_ptr() == taken["module"]["0.weight"].data_ptr()
    assert taken["module"]["0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert taken["module"]._metadata["1"] == {"version": 2}


def test_without_copying_tensors_are_the_trainings_and_every_storage_counts_once():
    state = everything()
    taken = Snapshot(content(state=state), copy_cpu=False).content["state"]
    assert taken["module"]["0.weight"] is state["module"]["0.weight"]
    flat = torch.zeros(1000)
    state = {"views": [flat, flat[:10], flat.view(10, 100)], "other": torch.zeros(50, dtype=torch.float64)}
    for own in (True, False):
        assert Snapshot(content(state=state), copy_cpu=own).size == 4400


def test_what_would_not_fit_is_not_begun(tmp_path, monkeypatch):
    taken = Snapshot(content(state={"w": torch.zeros(10_000)}), copy_cpu=False)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(40_000 + checkpoint_writer.SPARE - 1))
    assert_raises(OSError, "No space left on device", checkpoint_writer.write, taken, tmp_path / "x.pt")
    assert names(tmp_path) == []
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(40_000 + checkpoint_writer.SPARE))
    checkpoint_writer.write(taken, tmp_path / "x.pt")
    assert names(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_an_error_of_the_disk_behind_that_of_the_zip_writer_is_raised(tmp_path, monkeypatch, link):
    error = RuntimeError("unexpected position 64 vs 0")
    monkeypatch.setattr(torch, "save", Mock(side_effect=error))
    snapshot = Snapshot(content(), copy_cpu=False)
    assert_raises(RuntimeError, "unexpected position", checkpoint_writer.write, snapshot, tmp_path / "x.pt")
    setattr(error, link, OSError(errno.EFBIG, "File too large"))
    assert_raises(OSError, "File too large", checkpoint_writer.write, snapshot, tmp_path / "x.pt")


CUT = [{"keep": share} for share in (0, 0.001, 0.5, 0.999)]
FLIPPED = [{"flip": share} for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999)]


@pytest.mark.parametrize(("how", "checksum"), [*((how, True) for how in CUT + FLIPPED), *((how, False) for how in CUT)])
def test_a_damaged_checkpoint_is_named(tmp_path, how, checksum):
    path = save(tmp_path, content())
    damage(path, **how)
    if not checksum:
        without_checksum(path)
    message = "damaged .its SHA-256" if checksum else r"pt: (cannot be read as|refused, it is not plain)"
    with pytest.raises(CorruptCheckpoint, match=message) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"\n", b"0" * 64])
def test_whatever_a_checksum_file_holds(tmp_path, text):
    """Found by a fault: a flipped high bit makes it no text, which was a traceback. Verification can be left out."""
    path = save(tmp_path, content())
    path.with_name(path.name + ".sha256").write_bytes(text)
    assert_raises(CorruptCheckpoint, "damaged", load, path)
    assert load(path, verify=False)["step"] == 5


def test_damage_is_named_without_a_checksum_too(tmp_path):
    """By the zip file's own checksums, of the metadata and of the tensors."""
    path = without_checksum(save(tmp_path, content()))
    whole = path.read_bytes()
    load(path)
    with zipfile.ZipFile(path) as file:
        parts = [info for info in file.infolist() if info.file_size > 100]
    assert [info.filename.split("/", 1)[1] for info in parts] == ["data.pkl", "data/0"]
    for info in parts:
        start = info.header_offset + 30 + len(info.filename)
        for place in range(start + 64, start + info.file_size - 64, 29):
            data = bytearray(whole)
            data[place] ^= 2
            path.write_bytes(bytes(data))
            assert_raises(CorruptCheckpoint, f"{path.name}: damaged .the checksum of its part .*/data", load, path)


def fallback(folder, first):
    """The one warning where not the latest checkpoint but `first` is loaded."""
    warnings: list[str] = []
    latest = load_latest(folder, warn=warnings.append)
    assert (latest[0], latest[1]["step"]) == (first, 5)
    (warning,) = warnings
    return warning


def test_a_disk_that_cannot_be_read_is_damage_too(tmp_path, monkeypatch):
    first, second = save(tmp_path, content(5)), save(tmp_path, content(6))
    real = checkpoints.file_sha256

    def failing(path):
        if path == second:
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(checkpoints, "file_sha256", failing)
    assert "Input/output error" in fallback(tmp_path, first)


def test_the_latest_falls_back_loudly_where_it_is_newer(tmp_path):
    first, second = save(tmp_path, content(5)), save(tmp_path, content(6, schema=checkpoints.SCHEMA + 1))
    warning = fallback(tmp_path, first)
    assert str(second) in warning
    assert "falling back to the previous one" in warning
    with pytest.raises(CorruptCheckpoint):
        load(second)  # named explicitly it is an error


@pytest.mark.parametrize("other", [[1], {"step": 3}, {"state": {}}, torch.zeros(3), "a text file"])
def test_files_of_others_are_refused(tmp_path, other):
    path = tmp_path / "model.pt"
    if isinstance(other, str):
        path.write_text("this is not a checkpoint\n" * 10)
    else:
        torch.save(other, path)
    assert_raises(CorruptCheckpoint, r"model.pt: .*a checkpoint", load, path)


WRONG: list[dict[str, int]] = [{"channels": channels} for channels in (0, MOST_CHANNELS + 1)]
WRONG += [{"resolution": side} for side in (0, 2**16 + 1)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schema": checkpoints.SCHEMA + 1}, r"schema 2 is newer than this program's 1; update"),
        *(({"schema": schema}, "schema") for schema in ("1", None, 1.5, True)),
        ({"config": None}, "not a checkpoint of Duet"),
        ({"classes": ["a", "b"]}, r"shape\.classes is 1, but classes has 2 names"),
        ({"sets": [[0], [0, 1]]}, "sets has a label beyond the 1 classes"),
        *(({"stage": stage}, "stage") for stage in ([8], [8, 0.5, 1])),
        *(({"shape": content()["shape"] | wrong}, f"shape.*{key}") for wrong in WRONG for key in wrong),
    ],
)
def test_what_a_checkpoint_says_is_checked(tmp_path, changed, message):
    path = save(tmp_path, content() | changed)
    with pytest.raises(CorruptCheckpoint, match=message) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")


def test_the_limits_of_what_a_checkpoint_says(tmp_path):
    shape = {"channels": MOST_CHANNELS, "classes": 0, "resolution": 2**16}
    changed = {"classes": [], "sets": [[]], "stage": [2**16, 0.5], "shape": shape}
    assert load(save(tmp_path, content() | changed))["shape"] == shape


def test_a_missing_file_is_no_corrupt_one_and_only_damaged_ones_are_an_error(tmp_path):
    with pytest.raises(UserError, match="no such checkpoint") as error:
        load(tmp_path / "step-00000001.pt")
    assert not isinstance(error.value, CorruptCheckpoint)
    assert load_latest(tmp_path, pytest.fail) is load_latest(tmp_path / "nowhere", pytest.fail) is None
    for step in (5, 6):
        damage(save(tmp_path, content(step)), keep=0.5)
    warnings: list[str] = []
    with pytest.raises(CorruptCheckpoint, match=f"{tmp_path}: none of its 2 checkpoints can be read"):
        load_latest(tmp_path, warn=warnings.append)
    assert len(warnings) == 2
