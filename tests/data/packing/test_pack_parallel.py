"""Packing in several threads gives the same file as packing in one, and no fault leaves anything."""

import hashlib
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from duetgan.commands.inspect import main as inspect
from duetgan.commands.pack import main
from duetgan.data.errors import ImageError
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.record import Layout, Record
from duetgan.data.packing import records
from duetgan.data.packing.pack import pack
from duetgan.data.packing.records import Plan, converted, thread_count
from duetgan.data.packing.sources import open_source
from duetgan.data.packing.sources.base import ArraySource, Source
from duetgan.utils.errors import UserError
from duetgan.utils.files import replace_file
from duetgan.utils.image_spec import ImageSpec
from tests.conftest import assert_raises
from tests.data.conftest import save, source_at, succeed

RNG = np.random.default_rng(0)


def mixed_folder(folder: Path) -> Path:
    """60 images of several kinds and sizes in two classes, and three files that cannot be used."""
    for index in range(60):
        path = folder / ("cat" if index < 25 else "dog") / f"{index:03d}.{('jpg', 'png', 'webp')[index % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = RNG.integers(0, 256, (8 + index % 5, 12, 3), dtype=np.uint8)
        Image.fromarray(noise).convert("L" if index % 7 == 0 else "RGB").save(path)
    (folder / "cat" / "004b.jpg").write_text("no image")
    (folder / "dog" / "059b.png").write_bytes(b"")
    whole = (folder / "dog" / "030.jpg").read_bytes()
    (folder / "dog" / "031b.jpg").write_bytes(whole[: len(whole) // 2])
    return folder


@pytest.mark.parametrize(
    ("options", "counts"), [(["--size", "16", "--pyramid", "4"], (1, 3)), (["--encoding", "source"], (3,))]
)
def test_same_file_for_any_number_of_workers(tmp_path, options, counts, capsys):
    folder = mixed_folder(tmp_path / "photos")
    outcomes = []
    for workers in (0, *counts):
        dest = tmp_path / f"{workers}.lmdb"
        main([str(folder), str(dest), "--on-error", "skip", "--workers", str(workers), *options])
        lines = capsys.readouterr().out.splitlines()
        report = [line for line in lines if line.split()[0] not in ("packed", "time")]
        outcomes.append((dest.read_bytes(), report))
        assert outcomes[-1] == outcomes[0]  # to the byte, so content hash, fingerprint and every record too
    assert len(LMDBReader(tmp_path / "0.lmdb")) == 60
    assert ["skipped", "3"] in [line.split() for line in outcomes[0][1]]


class Numbers(Source):
    """Image i is of shade i % 256; `before` is done first."""

    def __init__(self, count: int, before: Callable[[int], None] = lambda index: None, in_order: bool = False) -> None:
        super().__init__("numbers", [])
        self._labels = np.zeros(count, np.int64)
        self.before, self.in_order = before, in_order  # type: ignore[misc]

    def content(self, index: int) -> np.ndarray:
        self.before(index)
        return np.full((8, 8, 1), index % 256, np.uint8)


PLAN = Plan(layout=Layout.of(ImageSpec(1, 8, 8)), mode="exact")


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (ImageError("is torn"), UserError, "^record 20 is torn: fix it, or pass --on-error skip"),
        (ZeroDivisionError("a fault of ours"), ZeroDivisionError, "^a fault of ours$"),
        (UserError("the source is gone; look for it"), UserError, "^the source is gone; look for it$"),
    ],
)
def test_fault_of_a_worker_ends_packing(tmp_path, error, raised, message):
    def before(index: int) -> None:
        if index == 20:
            raise error

    source = Numbers(1000, before)
    with pytest.raises(raised, match=message):
        pack(source, tmp_path / "x.lmdb", size=8, channels=1, workers=2, duplicates=False)
    assert list(tmp_path.iterdir()) == []


def test_few_pieces_are_under_way(monkeypatch):
    """Also while all wait for an earlier one."""
    monkeypatch.setattr(records, "CHUNK_IMAGES", 2)
    taken = []

    def before(index: int) -> None:
        taken.append(index)
        if index == 0:
            time.sleep(0.3)

    for done, record in enumerate(converted(Numbers(120, before), PLAN, 2)):
        assert isinstance(record, Record)
        assert record.payloads[0][0] == done
        assert len(taken) - done <= 2 * records.WINDOW * 2
    assert (done, len(taken)) == (119, 120)


def test_what_is_read_in_order_is_read_by_one_thread():
    def before(index: int) -> None:
        assert threading.current_thread() is threading.main_thread()

    images = converted(Numbers(300, before, in_order=True), PLAN, 3)
    shades = [record.payloads[0][0] for record in images if isinstance(record, Record)]
    assert shades == [row % 256 for row in range(300)]


@pytest.mark.parametrize(
    ("source", "cores", "workers", "expected"),
    [
        (Numbers(9), 2, None, 2),
        (Numbers(9), 1, None, 0),
        (Numbers(9), 1000, None, records.MOST_WORKERS),
        (Numbers(9), 1000, 40, 40),
        (ArraySource("", np.zeros((9, 8, 8, 1), np.uint8), np.zeros(9), []), 4, None, 0),
    ],
)
def test_number_of_threads(monkeypatch, source, cores, workers, expected):
    monkeypatch.setattr(records, "cores", lambda: cores)
    assert thread_count(source, workers) == expected


def test_packing_imports_no_torch():
    code = "import sys, duetgan.data.packing.pack; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SLOW = """
import pathlib, sys, time
from duetgan.data.packing.pack import pack
from tests.data.packing.test_pack_parallel import Numbers
from duetgan.utils.distributed.process import run_cli

def before(index):
    pathlib.Path("working").touch()
    time.sleep(60)

sys.exit(run_cli(lambda argv: pack(Numbers(1000, before), "x.lmdb", size=8, channels=1, workers=2)))
"""


def test_ctrl_c_is_quick_and_quiet(tmp_path):
    how: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {**os.environ, "PYTHONPATH": str(ROOT)},
        "stderr": -1,
        "text": True,
    }
    with subprocess.Popen([sys.executable, "-c", SLOW], start_new_session=True, **how) as process:
        try:
            end = time.monotonic() + 20
            while not (tmp_path / "working").exists():
                assert time.monotonic() < end
                time.sleep(0.01)
            started = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert time.monotonic() - started < 4
    assert (process.returncode, errors) == (130, "stopped: interrupted from the keyboard\n")
    assert [item.name for item in tmp_path.iterdir()] == ["working"]


def fingerprint_of(images: Iterable[tuple[int, bytes]]) -> str:
    parts = (label.to_bytes(8, "little") + hashlib.sha256(content).digest() for label, content in images)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_fingerprint_is_of_the_source_alone_or_of_images_in_memory(tmp_path):
    images = RNG.integers(0, 256, (3, 8, 8, 1), dtype=np.uint8)
    source = ArraySource("arrays", images, np.array([1, 0, 1]), ["a", "b"])
    expected = fingerprint_of(zip((1, 0, 1), (b"8x8x1" + one.tobytes() for one in images), strict=True))
    assert pack(source, tmp_path / "x.lmdb", size=16, duplicates=False).meta.fingerprint == expected
    folder = mixed_folder(tmp_path / "photos")
    for bad in ("cat/004b.jpg", "dog/059b.png", "dog/031b.jpg"):
        (folder / bad).unlink()
    files = [(label, path) for label, name in enumerate(("cat", "dog")) for path in sorted((folder / name).iterdir())]
    expected = fingerprint_of((label, path.read_bytes()) for label, path in files)
    ways: list[dict[str, Any]] = [{"encoding": "source"}, {"workers": 2, "encoding": "jpeg", "size": 16}, {"size": 8}]
    for way in ways:
        summary = pack(source_at(folder), tmp_path / "x.lmdb", overwrite=True, duplicates=False, **way)
        assert summary.meta.fingerprint == expected
    os.rename(folder / "cat" / "000.jpg", folder / "dog" / "000.jpg")
    moved = pack(source_at(folder), tmp_path / "y.lmdb", size=8, duplicates=False)
    assert moved.meta.fingerprint != expected


ROOT = Path(__file__).parents[3]


def test_h4_overwrite_replaces_regular_files_only(photos, tmp_path, refused):
    os.mkfifo(tmp_path / "pipe.lmdb")
    (tmp_path / "null.lmdb").symlink_to("/dev/null")
    for name, what in (("pipe.lmdb", "a named pipe"), ("null.lmdb", "a device")):
        error = refused(main, photos, tmp_path / name, "--size", "8", "--overwrite", alone=True)
        assert f"{name} is {what}, not a regular file: choose another name" in error
    assert stat.S_ISFIFO((tmp_path / "pipe.lmdb").stat().st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert_raises(OSError, "is a named pipe, not a regular file", replace_file, tmp_path / "pipe.lmdb", b"")


def test_h4_a_link_stays_and_its_file_is_replaced(photos, tmp_path, refused):
    """Also one that points to nothing yet, and other files than data sets."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real.lmdb").write_bytes(b"stale")
    for name, target in (("a.lmdb", "real.lmdb"), ("b.lmdb", "new.lmdb")):
        (tmp_path / name).symlink_to(f"disk/{target}")
        if target == "real.lmdb":
            error = refused(main, photos, tmp_path / name, "--size", "8")
            assert "exists: choose another name or add --overwrite" in error
        succeed(main, photos, tmp_path / name, "--size", "8", "--overwrite")
        assert (tmp_path / name).is_symlink()
        with LMDBReader(tmp_path / "disk" / target) as reader:
            assert len(reader) == len(source_at(photos))
    (tmp_path / "x.json").symlink_to("disk/x.json")
    replace_file(tmp_path / "x.json", b"{}")
    assert (tmp_path / "x.json").is_symlink()
    assert (tmp_path / "disk" / "x.json").read_bytes() == b"{}"
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["new.lmdb", "real.lmdb", "x.json"]


@pytest.mark.parametrize("module", ["data.pack", "data.inspect"])
def test_h18_no_room_at_all(photos, tmp_path, module):
    """Not even for the first page; what is seen of a full disk before packing begins, and of a grid that fails."""
    succeed(main, photos, tmp_path / "x.lmdb", "--size", "64")
    before = sorted(tmp_path.iterdir())
    arguments = {
        "data.pack": [str(photos), str(tmp_path / "y.lmdb"), "--size", "8", "--workers", "0"],
        "data.inspect": [str(tmp_path / "x.lmdb"), "--out", str(tmp_path / "grid.png")],
    }[module]
    command = [sys.executable, "-B", "-m", module, *arguments]  # -B: Python would leave torn bytecode files
    limits = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1024, 1024))
    done = subprocess.run(command, cwd=ROOT, stderr=-1, text=True, preexec_fn=limits)
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
def test_h19_h23_dataset_json_that_is_none(tmp_path, make, message):
    save(tmp_path / "a.png")
    make(tmp_path / "dataset.json")
    assert_raises(UserError, rf"dataset\.json {message}", open_source, str(tmp_path))


def test_h25_all_skipped_files_are_listed(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    bad = [tmp_path / "in" / f"bad{number:02d}.png" for number in range(12)]
    for path in bad:
        path.touch()
    save(tmp_path / "in" / "good.png")
    succeed(main, tmp_path / "in", tmp_path / "x.lmdb", "--on-error", "skip")
    printed = capsys.readouterr().out
    assert all(f"{path} is an empty file\n" in printed for path in bad)
    succeed(inspect, tmp_path / "x.lmdb", "--json")
