"""What packing does with the files it writes: targets that are no files, full disks, deep trees, long lists."""

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from duetgan.data.inspect import main as inspect
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.pack import main as pack
from duetgan.data.sources import open_source
from duetgan.utils.errors import UserError
from duetgan.utils.files import replace_file
from duetgan.utils.script import run_cli

ROOT = Path(__file__).parents[3]


def test_h4_overwrite_replaces_regular_files_only(photos, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.lmdb")
    (tmp_path / "null.lmdb").symlink_to("/dev/null")
    for name, what in (("pipe.lmdb", "a named pipe"), ("null.lmdb", "a device")):
        assert run_cli(pack, [str(photos), str(tmp_path / name), "--size", "8", "--overwrite"]) == 2
        error = capsys.readouterr().err
        assert f"{name} is {what}, not a regular file: choose another name" in error
        assert error.count("\n") == 1
    assert stat.S_ISFIFO((tmp_path / "pipe.lmdb").stat().st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match="is a named pipe, not a regular file"):
        replace_file(tmp_path / "pipe.lmdb", b"")


def test_h4_a_link_stays_and_its_file_is_replaced(photos, tmp_path, capsys):
    """Also one that points to nothing yet, and other files than data sets."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real.lmdb").write_bytes(b"stale")
    for name, target in (("a.lmdb", "real.lmdb"), ("b.lmdb", "new.lmdb")):
        (tmp_path / name).symlink_to(f"disk/{target}")
        if target == "real.lmdb":
            assert run_cli(pack, [str(photos), str(tmp_path / name), "--size", "8"]) == 2
            assert "exists: choose another name or add --overwrite" in capsys.readouterr().err
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
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1
    assert "cannot write" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_h19_dataset_json_that_is_no_file(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "dataset.json").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"dataset\.json cannot be read \(No such file or directory\); fix it"):
        open_source(str(tmp_path))
    (tmp_path / "dataset.json").unlink()
    os.mkfifo(tmp_path / "dataset.json")
    with pytest.raises(UserError, match=r"dataset\.json is a named pipe, not a regular file; fix it"):
        open_source(str(tmp_path))


def test_h23_json_that_is_too_deep(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "dataset.json").write_text('{"labels": ' + "[" * 100_000)
    with pytest.raises(UserError, match=r"dataset\.json is not"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("depth", [1100, 2100])  # deeper than Python recurses; beyond a path
def test_h23_tree_that_is_too_deep(tmp_path: Path, depth: int) -> None:
    """A path has at most 4,096 bytes: up to there it is read, beyond it is refused by one line."""
    here = Path.cwd()
    (tmp_path / "in").mkdir()
    try:
        os.chdir(tmp_path / "in")
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        Image.new("RGB", (8, 8)).save("a.png")
        os.chdir("..")
    finally:
        os.chdir(here)
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
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(12):
        (folder / f"bad{number:02d}.png").write_bytes(b"")
    Image.new("RGB", (8, 8)).save(folder / "good.png")
    command = [str(folder), str(tmp_path / "x.lmdb"), "--on-error", "skip", "--overwrite"]
    assert run_cli(pack, command) == 0
    shown = capsys.readouterr().out
    assert f"all of them: {tmp_path}/x.skipped.txt" in shown
    lines = (tmp_path / "x.skipped.txt").read_text().splitlines()
    assert lines == [f"{folder}/bad{number:02d}.png is an empty file" for number in range(12)]
    for number in range(2, 12):
        (folder / f"bad{number:02d}.png").unlink()
    assert run_cli(pack, command) == 0
    assert "all of them" not in capsys.readouterr().out
    assert not (tmp_path / "x.skipped.txt").exists()
    assert run_cli(inspect, [str(tmp_path / "x.lmdb"), "--json"]) == 0
