"""What goes wrong while packing, by number in the project's table of faults (17): named, nothing half is left,
and the same command can be given again.
"""

import resource
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from duetgan.data.lmdb.reader import LMDBReader
from tests.data.conftest import save
from tests.faults.conftest import ended, own_process, start_python, with_mounts

NOISE = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    """A folder of 300 images of noise in two classes: seven megabytes of raw pixels at 88 px."""
    folder = tmp_path_factory.mktemp("many") / "many"
    for number in range(300):
        place = folder / ("cat", "dog")[number % 2] / f"{number:03d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(NOISE[number % 200 : number % 200 + 88, number // 2 : number // 2 + 88]).save(place)
    return folder


@pytest.fixture(scope="session")
def content_hash(many, command, tmp_path_factory):
    """Of `many` packed in peace, as PNG."""
    path = tmp_path_factory.mktemp("whole") / "x.lmdb"
    command(*packing(many, path)).success()
    return LMDBReader(path).meta.content_hash


def packing(source: Path, path: Path, encoding: str = "png") -> list[str]:
    """The command that is disturbed."""
    return ["data.pack", str(source), str(path), "--encoding", encoding, "--workers", "0"]


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


SMALL_MAP = """
import sys
from duetgan.commands import pack
from duetgan.data.lmdb import writer
from duetgan.utils.distributed.process import run_cli
writer.FIRST_MAP = 1 << 16  # bytes, instead of 64 MiB: doubled seven times
sys.exit(run_cli(pack.main))
"""


def test_fault_17_full_map_grows(many, content_hash, tmp_path):
    path = tmp_path / "x.lmdb"
    ended(start_python("-c", SMALL_MAP, *packing(many, path)[1:])).success()
    assert path.stat().st_size > 50 << 16
    own_process("data.inspect", path, "--verify", "--json").success()
    assert LMDBReader(path).meta.content_hash == content_hash


@pytest.mark.parametrize(("encoding", "size"), [("raw", 1 << 13), ("png", 2 << 20)])
def test_fault_17_disk_full(many, tmp_path, encoding, size):
    """Files may not grow beyond `size` bytes."""
    command = packing(many, tmp_path / "x.lmdb", encoding)
    done = own_process(*command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    done.refusal("cannot write", "x.lmdb", "make room")
    assert names(tmp_path) == []


def test_fault_17_disk_full_of_a_small_file_system(many, tmp_path):
    """An older file of the same name stays."""
    disk = tmp_path / "disk"
    disk.mkdir()
    prefix = with_mounts(f"mount -t tmpfs -o size=3m tmpfs {disk}", f"echo older > {disk}/x.lmdb")
    shown = f'"$@" || code=$?; ls -A {disk}; cat {disk}/x.lmdb; exit $code'
    done = own_process(*packing(many, disk / "x.lmdb"), "--overwrite", prefix=[*prefix, "sh", "-c", shown, "sh"])
    done.refusal("cannot write", "x.lmdb", "make room")
    assert done.out.split() == ["x.lmdb", "older"]


KILLED = """
import os, sys
from duetgan.commands import pack
from duetgan.data.lmdb import writer
from duetgan.utils.distributed.process import run_cli
name, calls, real = sys.argv[1], int(sys.argv[2]), None
def killing(*arguments, **options):
    global calls
    calls -= 1
    if calls < 0:
        os.kill(os.getpid(), 9)
    return real(*arguments, **options)
writer.BATCH_BYTES = 1 << 18  # transactions of a quarter of a megabyte
owner = writer.LMDBWriter if name == "add_record" else os
real = getattr(owner, name)
setattr(owner, name, killing)
sys.exit(run_cli(pack.main, sys.argv[3:]))
"""


@pytest.mark.parametrize(("name", "calls"), [("add_record", 200), ("replace", 0), ("fsync", 1)])
def test_fault_17_killed_while_packing(command, recipe, many, content_hash, tmp_path, name, calls):
    """kill -9 instead of a call: at the first image, in the middle, around the last write and the rename."""
    folder = tmp_path / "packed"
    path = folder / "x.lmdb"
    done = ended(start_python("-c", KILLED, name, str(calls), *packing(many, path)[1:]))
    assert done.code == -9, done.err
    if (name, calls) == ("fsync", 1):  # of the folder: the file is there, and whole
        assert names(folder) == ["x.lmdb"]
    else:
        assert names(folder) == [".x.lmdb.partial"]
        command(*recipe, "--data.path", path).refusal("x.lmdb was not finished: run duet pack again")
        command(*packing(many, path)).success()
        assert names(folder) == ["x.lmdb"]
    command("data.inspect", path, "--verify", "--json").success()
    assert LMDBReader(path).meta.content_hash == content_hash


def test_fault_17_killed_while_a_file_is_replaced(command, many, content_hash, tmp_path):
    """The older file stays."""
    save(tmp_path / "photos" / "a.png")
    path = tmp_path / "packed" / "x.lmdb"
    command(*packing(tmp_path / "photos", path)).success()
    before = path.read_bytes()
    assert ended(start_python("-c", KILLED, "replace", "0", *packing(many, path)[1:], "--overwrite")).code == -9
    assert path.read_bytes() == before
    command(*packing(many, path), "--overwrite").success()
    assert LMDBReader(path).meta.content_hash == content_hash
    assert names(path.parent) == ["x.lmdb"]
