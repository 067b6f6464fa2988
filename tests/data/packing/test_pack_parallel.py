"""Packing in several processes gives the same file as packing in one, and no fault of a process leaves anything."""

import contextlib
import errno
import hashlib
import multiprocessing
import multiprocessing.context
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import conversion_processes as packing_processes
from data.conversion import Plan, content_digest, convert, pieces
from data.conversion_processes import Conversion, convert_in_processes
from data.errors import ImageError
from data.lmdb.reader import LMDBReader
from data.lmdb.record import Layout
from data.pack import main, pack
from data.reading.dataset import Dataset
from data.sources import open_source
from data.sources.base import ArraySource, Item, Source
from utils.errors import UserError

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
    ("options", "counts"),
    [
        (["--size", "16", "--pyramid", "4"], (1, 3)),
        (["--encoding", "source"], (3,)),
    ],
)
def test_same_file_for_any_number_of_workers(
    tmp_path: Path, options: list[str], counts: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = mixed_folder(tmp_path / "photos")
    files, reports = {}, {}
    for workers in (0, *counts):
        dest = tmp_path / f"{workers}.lmdb"
        main([str(folder), str(dest), "--on-error", "skip", "--no-duplicates", "--workers", str(workers), *options])
        files[workers] = dest.read_bytes()
        lines = capsys.readouterr().out.splitlines()
        assert ["workers", f"{workers}"] == [line.replace(",", "").split()[:2] for line in lines][4]
        reports[workers] = [line for line in lines if line.split()[0] not in ("packed", "time", "workers")]
    assert len(LMDBReader(tmp_path / "0.lmdb")) == 60
    assert ["skipped", "3"] in [line.split() for line in reports[0]]
    for workers in counts:
        assert files[workers] == files[0]  # to the byte, so content hash, fingerprint and every record too
        assert reports[workers] == reports[0]


def photo(folder: Path, name: str, image: Image.Image, **options: object) -> None:
    folder.mkdir(exist_ok=True)
    image.save(folder / name, **options)  # type: ignore[arg-type]


def every_kind(folder: Path) -> None:
    """Images of every odd kind: those that begin with a to h can be used, the others cannot."""
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    halves = Image.new("RGB", (8, 8), "white")
    halves.paste("black", (4, 0, 8, 8))
    quarter_turn = Image.Exif()
    quarter_turn[0x0112] = 6
    wide = Image.new("RGB", (20_000, 4), "red")
    wide.paste("blue", (9_900, 0, 10_100, 4))
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 255)]
    noise = Image.fromarray(RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8))
    photo(folder, "a_grey.png", Image.new("L", (8, 8), 200))
    photo(folder, "b_rgba.png", clear)
    photo(folder, "c_palette.gif", palette)
    photo(folder, "d_16bit.png", Image.fromarray(np.full((8, 8), 0x81FF, np.uint16)))
    photo(folder, "e_cmyk.jpg", Image.new("CMYK", (8, 8), (255, 0, 0, 0)), quality=100)
    photo(folder, "f_turned.jpg", halves, exif=quarter_turn, quality=100)
    photo(folder, "g_wide.png", wide)
    photo(folder, "h_bits.tif", Image.new("1", (8, 8), 1))
    photo(folder, "r_animated.gif", frames[0], save_all=True, append_images=frames[1:])
    photo(folder, "s_one.png", Image.new("RGB", (1, 1)))
    photo(folder, "t_float.tif", Image.new("F", (8, 8)))
    (folder / "u_text.jpg").write_text("<html>")
    for name in ("v_cut.jpg", "w_flipped.png"):
        photo(folder, name, noise)
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content if name == "w_flipped.png" else content[: len(content) // 2])


@pytest.mark.parametrize("workers", [0, 2])
def test_every_kind_of_image_is_converted_by_its_rule_or_refused_by_name(tmp_path: Path, workers: int) -> None:
    every_kind(tmp_path / "photos")
    dest = tmp_path / "x.lmdb"
    summary = pack(
        open_source(str(tmp_path / "photos")), dest, size=8, on_error="skip", workers=workers, duplicates=False
    )
    sample_images, _ = Dataset(dest).read(range(8))
    colours = [[200] * 3, [255] * 3, [255, 0, 0], [0x81] * 3, [0, 255, 255], None, [0, 0, 255], [255] * 3]
    for sample_image, colour in zip(sample_images, colours, strict=True):
        if colour is not None:
            np.testing.assert_allclose(sample_image.reshape(3, -1).T.astype(int), np.tile(colour, (64, 1)), atol=3)
    turned = sample_images[5].astype(int)  # what was on the left is on top
    assert turned[:, :4].min() > 250
    assert turned[:, 4:].max() < 5
    assert summary.enlarged == 1  # the wide one, 4 px high
    reasons = [
        (r"r_animated\.gif", r"is animated or has several pages \(2\)"),
        (r"s_one\.png", "is only 1x1 px"),
        (r"t_float\.tif", "has floating-point pixels"),
        (r"u_text\.jpg", "is not an image"),
        (r"v_cut\.jpg", "is truncated or damaged"),
        (r"w_flipped\.png", "is truncated or damaged"),
    ]
    assert len(summary.problems) == len(reasons)
    for problem, (name, reason) in zip(summary.problems, reasons, strict=True):
        assert problem.name.endswith(name.replace("\\", ""))
        assert reason.replace("\\", "") in problem.reason


class Numbers(Source):
    """Image i is of shade i % 256."""

    def __init__(self, count: int) -> None:
        super().__init__("numbers", [])
        self.count = count

    def __len__(self) -> int:
        return self.count

    def item(self, index: int) -> Item:
        self.before(index)
        return Item(f"number {index}", 0, np.full((8, 8, 1), index % 256, np.uint8))

    def before(self, index: int) -> None:
        """What a subclass does first."""

    def labels(self) -> np.ndarray:
        return np.zeros(self.count, np.int64)


PLAN = Plan(layout=Layout(channels=1, resolutions=(8,)), mode="exact")


class Killed(Numbers):
    def before(self, index: int) -> None:
        if index == 20 and multiprocessing.parent_process():
            os.kill(os.getpid(), signal.SIGKILL)


class KilledSending(Numbers):
    """Its worker dies when half of a result is sent."""

    def before(self, index: int) -> None:
        if index == 20 and multiprocessing.parent_process():
            send = connection.Connection._send  # type: ignore[attr-defined]

            def send_half(pipe: connection.Connection, content: bytes) -> None:
                send(pipe, content[: len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

            connection.Connection._send = send_half  # type: ignore[attr-defined]


class Unreadable(Numbers):
    def before(self, index: int) -> None:
        if index == 20:
            raise ImageError("is torn")


class Left(Numbers):
    def before(self, index: int) -> None:
        if index == 20 and multiprocessing.parent_process():
            os._exit(3)


class Faulty(Numbers):
    def before(self, index: int) -> None:
        if index == 20:
            raise ZeroDivisionError("a fault of ours")


class Refusing(Numbers):
    def before(self, index: int) -> None:
        if index == 20:
            raise UserError("the source is gone; look for it")


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Killed, UserError, "killed by SIGKILL, as the system does when memory runs out: pass fewer --workers, or"),
        (KilledSending, UserError, "killed by SIGKILL, as the system does when memory runs out: pass fewer"),
        (Left, UserError, "a worker process of packing ended with exit code 3: .*--workers 0"),
        (Unreadable, UserError, "^record 20 is torn: fix it, or pass --on-error skip"),
        (Faulty, RuntimeError, "(?s)Traceback.*ZeroDivisionError: a fault of ours"),
        (Refusing, UserError, "^the source is gone; look for it$"),
    ],
)
def test_fault_of_a_worker_ends_packing(
    tmp_path: Path, kind: type[Numbers], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        pack(kind(1000), tmp_path / "new" / "x.lmdb", size=8, channels=1, workers=2, duplicates=False)
    assert multiprocessing.active_children() == [], caught  # while the traceback is held
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("stop", "expected"), [(True, 20), (False, 39)])
def test_nothing_is_converted_in_vain(stop: bool, expected: int) -> None:
    found = convert(Unreadable(40), range(40), PLAN, stop=stop)
    assert len(found.records) == len(found.digests) == expected
    assert found.problems == [(20, "is torn")]


class Warns(Numbers):
    def before(self, index: int) -> None:
        if index % 5 == 0:
            warnings.warn("odd but usable", UserWarning, stacklevel=1)
            warnings.warn("not for users", DeprecationWarning, stacklevel=1)


def test_warnings_of_workers_arrive_once(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warnings.simplefilter("ignore", DeprecationWarning)
        found = list(Conversion(Warns(60), PLAN, workers=2, stop=True))
    assert sum(len(part.records) for part in found) == 60
    assert [str(item.message) for item in caught] == ["odd but usable"]
    assert caught[0].filename == __file__


class SlowStart(Numbers):
    def before(self, index: int) -> None:
        if index == 0:
            time.sleep(0.3)


def test_few_pieces_are_under_way() -> None:
    """Also while all wait for an earlier one."""
    taken = 0

    def counted(rows: Iterator[range]) -> Iterator[range]:
        nonlocal taken
        for piece in rows:
            taken += 1
            yield piece

    rows = counted(pieces(range(120), 2))
    for done, part in enumerate(convert_in_processes(SlowStart(120), PLAN, 2, rows, stop=True)):
        assert [record.payloads[0][0] for record in part.records] == [2 * done, 2 * done + 1]
        assert taken - done <= packing_processes.WINDOW * 2
    assert (done, taken) == (59, 60)


def test_images_in_memory_travel_with_their_pieces(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (200, 8, 8, 3), dtype=np.uint8)
    source = ArraySource("arrays", images, np.arange(200) % 3, ["a", "b", "c"])
    here = pack(source, tmp_path / "0.lmdb", size=16, workers=0, duplicates=False).meta
    there = pack(source, tmp_path / "2.lmdb", size=16, workers=2, duplicates=False).meta
    assert there == here
    assert there.histogram == [67, 67, 66]


@pytest.mark.parametrize(
    ("cores", "worth", "expected"),
    [(2, 0.0, 2), (2, 1e9, 0), (1, 0.0, 0), (64, 1e9, 0)],
)
def test_workers_are_started_where_they_are_worth_it(
    monkeypatch: pytest.MonkeyPatch, cores: int, worth: float, expected: int
) -> None:
    monkeypatch.setattr(packing_processes, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(packing_processes, "WORTH_SECONDS", worth)
    monkeypatch.setattr(packing_processes, "cores", lambda: cores)
    conversion = Conversion(Numbers(100), PLAN, workers=None, stop=True)
    found = [record.payloads[0][0] for part in conversion for record in part.records]
    assert found == list(range(100))
    assert conversion.workers == expected


def test_how_many_workers_are_started_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_processes, "cores", lambda: 1000)
    assert packing_processes.allowed_workers() == packing_processes.MOST_WORKERS
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert packing_processes.allowed_workers() == 0


def test_processes_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    start = multiprocessing.context.SpawnProcess.start

    def fail_second(process: multiprocessing.context.SpawnProcess) -> None:
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(process)
        start(process)

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", fail_second)
    with pytest.raises(UserError, match=r"cannot start 2 worker processes \(Resource .*\): pass --workers 0"):
        pack(Numbers(40), tmp_path / "x.lmdb", size=8, channels=1, workers=2, duplicates=False)
    assert multiprocessing.active_children() == []
    assert list(tmp_path.iterdir()) == []


def test_workers_import_no_torch() -> None:
    code = "import sys, data.pack, data.conversion_processes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_full_disk_with_workers(tmp_path: Path) -> None:
    mixed_folder(tmp_path / "photos")
    command = f"{sys.executable} -m data.pack {tmp_path / 'photos'} {tmp_path / 'x.lmdb'} --size 128 --workers 2"
    limit = f"ulimit -f 64; exec {command} --on-error skip"
    done = subprocess.run(["bash", "-c", limit], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "x.lmdb: cannot write" in done.stderr
    assert sorted(item.name for item in tmp_path.iterdir()) == ["photos"]


SLOW = """
import pathlib, sys, time
import numpy as np
from data.pack import pack
from data.sources.base import Item, Source
from utils.errors import run_cli

class Slow(Source):
    def __init__(self, count):
        super().__init__("slow", [])
        self.count = count
    def __len__(self):
        return self.count
    def item(self, index):
        pathlib.Path("working").touch()
        time.sleep(float(sys.argv[2]))
        return Item("", 0, np.full((64, 64, 3), index % 256, np.uint8))
    def labels(self):
        return np.zeros(self.count, int)

def main(argv):
    pack(Slow(int(argv[0])), "x.lmdb", size=64, workers=2, duplicates=False)

if __name__ == "__main__":
    sys.exit(run_cli(main))
"""


Start = Callable[[int, float], subprocess.Popen[str]]


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Start]:
    """Starts packing of so many images, so many seconds each, in `tmp_path` as the leader of a process group."""
    (tmp_path / "slow.py").write_text(SLOW)
    started = []

    def start(count: int, seconds: float) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "slow.py", str(count), str(seconds)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def children(pid: int) -> list[int]:
    """The living children of a process, its workers and multiprocessing's tracker."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_killed_parent_takes_its_workers_along_and_can_be_run_again(tmp_path: Path, slow: Start) -> None:
    process = slow(1000, 60.0)
    wait_for((tmp_path / "working").exists)
    family = children(process.pid)
    assert len(family) >= 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, family)))
    assert sorted(item.name for item in tmp_path.iterdir()) == [".x.lmdb.partial", "slow.py", "working"]
    again = slow(4, 0.0)
    assert again.wait(20) == 0
    assert len(LMDBReader(tmp_path / "x.lmdb")) == 4
    assert not (tmp_path / ".x.lmdb.partial").exists()


@pytest.mark.parametrize("moment", ["starting", "working"])
def test_ctrl_c_is_quick_and_quiet(tmp_path: Path, slow: Start, moment: str) -> None:
    process = slow(1000, 60.0)
    wait_for((tmp_path / "working").exists if moment == "working" else lambda: len(children(process.pid)) > 2)
    family = children(process.pid)
    for child in family:
        os.kill(child, signal.SIGINT)
    time.sleep(0.3)
    assert all(map(alive, family))  # they leave it to their parent
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - started < 4
    assert process.returncode == 130
    assert errors == "stopped: interrupted from the keyboard\n"
    wait_for(lambda: not any(map(alive, family)))
    assert {item.name for item in tmp_path.iterdir()} <= {"slow.py", "working"}


def test_fingerprint_is_of_the_source_alone(tmp_path: Path) -> None:
    folder = mixed_folder(tmp_path / "photos")
    for bad in ("cat/004b.jpg", "dog/059b.png", "dog/031b.jpg"):
        (folder / bad).unlink()
    expected = hashlib.sha256()
    for label, name in enumerate(("cat", "dog")):
        for path in sorted((folder / name).iterdir()):
            expected.update(label.to_bytes(8, "little") + hashlib.sha256(path.read_bytes()).digest())
    for workers, encoding, size in ((0, "source", None), (2, "jpeg", 16), (0, "raw", 8)):
        summary = pack(
            open_source(str(folder)),
            tmp_path / "x.lmdb",
            size=size,
            encoding=encoding,
            workers=workers,
            overwrite=True,
            duplicates=False,
        )
        assert summary.meta.fingerprint == expected.hexdigest()
    os.rename(folder / "cat" / "000.jpg", folder / "dog" / "000.jpg")
    moved = pack(open_source(str(folder)), tmp_path / "y.lmdb", size=8, duplicates=False)
    assert moved.meta.fingerprint != expected.hexdigest()


def test_fingerprint_of_images_in_memory(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (3, 8, 8, 1), dtype=np.uint8)
    source = ArraySource("arrays", images, np.array([1, 0, 1]), ["a", "b"])
    expected = hashlib.sha256()
    for label, sample_image in zip((1, 0, 1), images, strict=True):
        expected.update(label.to_bytes(8, "little") + hashlib.sha256(b"8x8x1" + sample_image.tobytes()).digest())
    assert pack(source, tmp_path / "x.lmdb", size=16, duplicates=False).meta.fingerprint == expected.hexdigest()
    assert content_digest(images[0].reshape(4, 16, 1)) != content_digest(images[0])
