"""What packing does with the files it writes: targets that are no files, full disks, deep trees, long lists."""

import contextlib
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from duetgan.data.inspect import main as inspect
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.pack import main as pack
from duetgan.data.sources import open_source
from duetgan.utils.errors import UserError
from duetgan.utils.files import replace_file
from duetgan.utils.script import run_cli
from tests.conftest import assert_raises

ROOT = Path(__file__).parents[3]


def test_h4_overwrite_replaces_regular_files_only(photos, tmp_path, refused):
    os.mkfifo(tmp_path / "pipe.lmdb")
    (tmp_path / "null.lmdb").symlink_to("/dev/null")
    for name, what in (("pipe.lmdb", "a named pipe"), ("null.lmdb", "a device")):
        error = refused(pack, photos, tmp_path / name, "--size", "8", "--overwrite", alone=True)
        assert f"{name} is {what}, not a regular file: choose another name" in error
    assert stat.S_ISFIFO((tmp_path / "pipe.lmdb").stat().st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert_raises(OSError, "is a named pipe, not a regular file", replace_file, tmp_path / "pipe.lmdb", b"")


def test_h4_a_link_stays_and_its_file_is_replaced(photos, tmp_path, refused, capsys):
    """Also one that points to nothing yet, and other files than data sets."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real.lmdb").write_bytes(b"stale")
    for name, target in (("a.lmdb", "real.lmdb"), ("b.lmdb", "new.lmdb")):
        (tmp_path / name).symlink_to(f"disk/{target}")
        if target == "real.lmdb":
            error = refused(pack, photos, tmp_path / name, "--size", "8")
            assert "exists: choose another name or add --overwrite" in error
        assert run_cli(pack, [str(photos), str(tmp_path / name), "--size", "8", "--overwrite"]) == 0
        assert f"a link: {tmp_path}/disk/{target} was written" in capsys.readouterr().out
        assert (tmp_path / name).is_symlink()
        with LMDBReader(tmp_path / "disk" / target) as reader:
            assert len(reader) == len(open_source(str(photos)))
    (tmp_path / "x.json").symlink_to("disk/x.json")
    replace_file(tmp_path / "x.json", b"{}")
    assert (tmp_path / "x.json").is_symlink()
    assert (tmp_path / "disk" / "x.json").read_bytes() == b"{}"
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["new.lmdb", "real.lmdb", "x.json"]


@pytest.mark.parametrize("module", ["data.pack", "data.inspect"])
def test_h18_no_room_at_all(photos: Path, tmp_path: Path, module: str) -> None:
    """Not even for the first page; what is seen of a full disk before packing begins, and of a grid that fails."""
    assert run_cli(pack, [str(photos), str(tmp_path / "x.lmdb"), "--size", "64"]) == 0
    before = sorted(tmp_path.iterdir())
    arguments = {
        "data.pack": [str(photos), str(tmp_path / "y.lmdb"), "--size", "8", "--workers", "0"],
        "data.inspect": [str(tmp_path / "x.lmdb"), "--out", str(tmp_path / "grid.png")],
    }[module]
    command, limits = [sys.executable, "-m", module, *arguments], partial(resource.setrlimit, resource.RLIMIT_FSIZE)
    done = subprocess.run(command, cwd=ROOT, stderr=-1, text=True, preexec_fn=partial(limits, (1024, 1024)))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1
    assert "cannot write" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.symlink_to("nowhere"), r"cannot be read \(No such file or directory\); fix it"),
        (os.mkfifo, "is a named pipe, not a regular file; fix it"),
        (lambda path: path.write_text('{"labels": ' + "[" * 100_000), "is not"),
    ],
    ids=["link", "pipe", "deep"],
)
def test_h19_h23_dataset_json_that_is_none(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    make(tmp_path / "dataset.json")
    assert_raises(UserError, rf"dataset\.json {message}", open_source, str(tmp_path))


@pytest.mark.parametrize("depth", [1100, 2100])  # deeper than Python recurses; beyond a path
def test_h23_tree_that_is_too_deep(tmp_path: Path, depth: int) -> None:
    """A path has at most 4,096 bytes: up to there it is read, beyond it is refused by one line."""
    (tmp_path / "in").mkdir()
    with contextlib.chdir(tmp_path / "in"):
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        Image.new("RGB", (8, 8)).save("a.png")
    try:
        if depth == 1100:
            assert len(open_source(str(tmp_path / "in"))) == 1
        else:
            with pytest.raises(UserError, match=r"File name too long.*move its files") as refused:
                open_source(str(tmp_path / "in"))
            assert len(str(refused.value)) < 400
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / "in")], check=True)  # shutil's own would recurse


def test_h25_all_skipped_files_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    bad = [tmp_path / "in" / f"bad{number:02d}.png" for number in range(12)]
    for path in bad:
        path.touch()
    Image.new("RGB", (8, 8)).save(tmp_path / "in" / "good.png")
    command = [str(tmp_path / "in"), str(tmp_path / "x.lmdb"), "--on-error", "skip", "--overwrite"]
    assert run_cli(pack, command) == 0
    assert f"all of them: {tmp_path}/x.skipped.txt" in capsys.readouterr().out
    assert (tmp_path / "x.skipped.txt").read_text() == "".join(f"{path} is an empty file\n" for path in bad)
    for path in bad[2:]:
        path.unlink()
    assert run_cli(pack, command) == 0
    assert "all of them" not in capsys.readouterr().out
    assert not (tmp_path / "x.skipped.txt").exists()
    assert run_cli(inspect, [str(tmp_path / "x.lmdb"), "--json"]) == 0
