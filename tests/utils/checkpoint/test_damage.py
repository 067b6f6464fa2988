import os
import pickle
import zipfile

import pytest
import torch

from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint import CorruptCheckpoint, load, load_latest, save
from duetgan.utils.errors import UserError
from tests.utils.checkpoint.files import content, damage, without_checksum

CUT = [{"keep": share} for share in (0, 0.001, 0.5, 0.999)]
FLIPPED = [{"flip": share} for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999)]


@pytest.mark.parametrize(("how", "checksum"), [*((how, True) for how in CUT + FLIPPED), *((how, False) for how in CUT)])
def test_a_damaged_checkpoint_is_named(tmp_path, how, checksum):
    path = save(tmp_path, content())
    damage(path, **how)
    if not checksum:
        without_checksum(path)
    message = "damaged .its SHA-256" if checksum else "damaged|not a checkpoint"
    with pytest.raises(CorruptCheckpoint, match=message) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"\n", b"0" * 64])
def test_whatever_a_checksum_file_holds(tmp_path, text):
    """Found by a fault: a flipped high bit makes it no text, which was a traceback. Verification can be left out."""
    path = save(tmp_path, content())
    path.with_name(path.name + ".sha256").write_bytes(text)
    with pytest.raises(CorruptCheckpoint, match="damaged"):
        load(path)
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
            with pytest.raises(CorruptCheckpoint, match=f"{path.name}: damaged .the checksum of its part .*/data"):
                load(path)


def fallback(folder, first):
    """The one warning where not the latest checkpoint but `first` is loaded."""
    warnings: list[str] = []
    latest = load_latest(folder, warn=warnings.append)
    assert latest is not None
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


@pytest.mark.parametrize("kind", ["truncated", "flipped", "malicious", "newer"])
def test_the_latest_falls_back_loudly(tmp_path, kind):
    first, second = save(tmp_path, content(5)), save(tmp_path, content(6))
    if kind == "truncated":
        damage(second, keep=0.5)
    elif kind == "flipped":
        damage(second, flip=0.5)
    elif kind == "malicious":
        sign(malicious(second, tmp_path / "marker"))
    else:
        second = save(tmp_path, content(6, schema=checkpoints.SCHEMA + 1))
    warning = fallback(tmp_path, first)
    assert str(second) in warning
    assert "falling back to the previous one" in warning
    with pytest.raises(CorruptCheckpoint):
        load(second)  # named explicitly it is an error


def test_only_damaged_checkpoints_are_an_error_and_no_checkpoint_is_none(tmp_path):
    assert load_latest(tmp_path) is load_latest(tmp_path / "nowhere") is None
    for step in (5, 6):
        damage(save(tmp_path, content(step)), keep=0.5)
    warnings: list[str] = []
    with pytest.raises(CorruptCheckpoint, match=f"{tmp_path}: none of its 2 checkpoints can be read"):
        load_latest(tmp_path, warn=warnings.append)
    assert len(warnings) == 2


class Bomb:
    """Unpickled freely, it makes a folder."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def malicious(path, marker, plain=False):
    bad = content()
    bad["state"]["model"]["w"] = Bomb(marker)
    if plain:
        path.write_bytes(pickle.dumps(bad, protocol=2))
    else:
        torch.save(bad, path)
    return path


def sign(path):
    path.with_name(path.name + ".sha256").write_text(f"{checkpoints.file_sha256(path)}  {path.name}\n")
    return path


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_a_malicious_checkpoint_is_refused_and_nothing_executed(tmp_path, plain, signed):
    marker = tmp_path / "marker"
    path = malicious(tmp_path / "step-00000007.pt", marker, plain)
    if signed:
        sign(path)
    with pytest.raises(CorruptCheckpoint, match="nothing in it was executed") as error:
        load(path)
    assert str(path) in str(error.value)
    with pytest.raises(CorruptCheckpoint, match="none of its 1 checkpoints"):
        load_latest(tmp_path, warn=lambda _: None)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists()  # the test itself works: unpickled freely, the bomb goes off


@pytest.mark.parametrize("other", [[1], {"step": 3}, {"state": {}}, torch.zeros(3), "a text file"])
def test_files_of_others_are_refused(tmp_path, other):
    path = tmp_path / "model.pt"
    if isinstance(other, str):
        path.write_text("this is not a checkpoint\n" * 10)
    else:
        torch.save(other, path)
    with pytest.raises(CorruptCheckpoint, match=r"model.pt: .*a checkpoint"):
        load(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schema": checkpoints.SCHEMA + 1}, r"schema 2 is newer than this program's 1; update"),
        *(({"schema": schema}, "schema") for schema in ("1", None, 1.5, True)),
        ({"config": None}, "not a checkpoint of Duet"),
    ],
)
def test_what_a_checkpoint_says_is_checked(tmp_path, changed, message):
    with pytest.raises(CorruptCheckpoint, match=message):
        load(save(tmp_path, content() | changed))


def test_a_missing_file_is_no_corrupt_one(tmp_path):
    with pytest.raises(UserError, match="no such checkpoint") as error:
        load(tmp_path / "step-00000001.pt")
    assert not isinstance(error.value, CorruptCheckpoint)
