"""Every file of the user's is opened within bounds: regular files, no more than a limit, names that can be shown."""

import ast
import gzip
import io
import os
import re
import resource
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from duetgan.commands.inspect import main as inspect
from duetgan.commands.pack import main as pack
from duetgan.data.errors import ImageError
from duetgan.data.packing.sources import open_source, table_files
from duetgan.inference.inputs import Inputs, Transform
from duetgan.models.restore import read_tensors
from duetgan.models.weights import read_state_dict
from duetgan.utils import files
from duetgan.utils.checkpoint import load
from duetgan.utils.checkpoint import save as save_checkpoint
from duetgan.utils.config import plugins
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.text import printable
from tests.conftest import assert_raises
from tests.data.packing.sources.source_files import item_refused, parquet, refused
from tests.utils.checkpoint.files import content as checkpoint_content

PACKAGE = Path(__file__).parents[2] / "duetgan"
OWN = {  # what opens files otherwise, and why
    # a library opens them, after their check
    *("data/lmdb/environment.py", "data/reading/weighted_sampling.py", "data/tar_files.py"),
    "data/packing/sources/files.py",
    *("extras/official/nvidia.py", "models/restore.py", "models/weights.py"),
    "utils/checkpoint/__init__.py",
    # bytes in memory
    *("data/images/__init__.py", "data/packing/records.py", "data/packing/sources/named.py", "reporting/pictures.py"),
    "extras/microscopy/tiff.py",
    "data/packing/sources/table_files.py",  # pyarrow's own files, under a limit of memory
    # what the program itself writes or has just written: locks, logs, profiles, signs of life, films
    *("data/lmdb/writer.py", "data/packing/packed_files.py", "inference/interpolate.py", "metrics/figures.py"),
    *("training/engine/loop.py", "training/engine/run.py", "utils/checkpoint/writer.py", "utils/files.py"),
    "training/engine/rollback.py",  # the run's log
    *("utils/distributed/heartbeat.py", "utils/runlog/run_log.py", "utils/runlog/run_folder.py"),
    *("training/classifier/frozen.py", "utils/images.py"),
    *(
        "inference/export/check.py",
        "inference/export/torch_export.py",
        "inference/predictions.py",
        "reporting/report.py",
    ),
    "utils/config/plugins.py",  # code of one's own, which is run
    # the kernel's figures, the null device, the recipes, the place itself
    *("utils/machine.py", "utils/distributed/process.py", "utils/runlog/versions.py", "utils/config/recipes.py"),
    "training/base/monitors.py",
    "commands/train.py",  # takes the lock
    # the plan and what the runs themselves wrote
    *("commands/planning/steps.py", "extras/studies/runner.py", "extras/studies/subject.py"),
}
OPENERS = {
    *("open", "fdopen", "read_bytes", "read_text", "fromfile", "load_file", "safe_open", "open_memmap", "imread"),
    *("ZipFile", "GzipFile", "ParquetFile", "read_table", "loadtxt", "genfromtxt", "urlopen", "memmap"),
    "memory_map",
}


def _openers(path: Path) -> set[str]:
    """Names of functions that open files, as a module calls them."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
    return names & OPENERS | {text for call in calls if (text := ast.unparse(call)) == "np.load"}


def test_nothing_else_opens_what_the_user_names():
    """Whoever needs a file of the user's takes it from utils/files.py; who does not has a reason in OWN."""
    folders = ("commands", "data", "extras", "inference", "metrics", "models", "reporting", "training", "utils")
    modules = [path for folder in folders for path in (PACKAGE / folder).rglob("*.py")]
    found = {path.relative_to(PACKAGE).as_posix() for path in modules if _openers(path)}
    others = {name for name in found if name not in OWN}
    assert others == set()
    gone = [name for name in OWN if not (PACKAGE / name).is_file() and not name.startswith("extras/")]
    assert gone == [], "drop them from OWN"


@pytest.fixture
def pipe(tmp_path):
    """A folder with an image and a named pipe beside it, which nobody writes into."""
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    os.mkfifo(folder / "b.png")
    return folder


def test_h8_pipe_never_hangs(pipe, tmp_path, capsys):
    for argv in ([str(pipe), str(tmp_path / "x.lmdb")], [str(pipe / "b.png"), str(tmp_path / "x.lmdb")]):
        assert run_cli(pack, argv) == 2
        error = capsys.readouterr().err
        assert "is a named pipe, not a regular file" in error
        assert error.count("\n") == 1 or "packing" in error  # the bar
    assert run_cli(inspect, [str(pipe / "b.png")]) == 2
    assert "is a named pipe, not a regular file" in capsys.readouterr().err
    with pytest.raises(ImageError, match=r"^is a named pipe, not a regular file$"):
        Transform(ImageSpec(3, 8, 8), "crop").read(pipe / "b.png")
    assert not (tmp_path / "x.lmdb").exists()


def test_h8_pipe_in_the_way(pipe, tmp_path, capsys):
    """Also as the hidden file that packing writes into."""
    (pipe / "b.png").unlink()
    os.mkfifo(tmp_path / ".x.lmdb.partial")
    assert run_cli(pack, [str(pipe), str(tmp_path / "x.lmdb")]) == 2
    assert "x.lmdb.partial: is a named pipe, not a regular file; choose" in capsys.readouterr().err


def test_h8_every_other_kind(tmp_path):
    """Also a name with a NUL character, from a JSON or CSV file: os.stat raises a ValueError."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        for path, what in ((tmp_path / "s", "a socket"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
            for reader in (files.read_file, files.read_gzip, files.open_file, files.check):
                assert_raises(files.Refused, f"^is {what}, not a regular file$", reader, path, files.IMAGE)
    assert_raises(files.Refused, "holds a NUL character", files.check, tmp_path / "a\0b.png", files.ARCHIVE)
    with pytest.raises(FileNotFoundError):
        files.read_file(tmp_path / "none", files.IMAGE)


def test_h9_links_to_devices_and_sparse_files(tmp_path):
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(60 << 30)
    source = open_source(str(tmp_path))
    item_refused(source, 1, "is a device")
    told = r"has 64,424,509,440 bytes, more than the 256 MiB for an image file: make it smaller or set DUET_MAX_IMAGE"
    item_refused(source, 0, told)
    with pytest.raises(ImageError, match=told):
        Transform(ImageSpec(3, 8, 8), "crop").read(tmp_path / "sparse.png")


def test_limit_by_the_environment(tmp_path, monkeypatch):
    """The kernel's files are regular, of 0 bytes, and hold text."""
    assert files.read_file("/proc/self/status", files.TABLE).startswith(b"Name:")
    (tmp_path / "x").write_bytes(bytes((1 << 20) + 1))
    assert len(files.read_file(tmp_path / "x", files.IMAGE)) == (1 << 20) + 1
    monkeypatch.setenv("DUET_MAX_IMAGE_MIB", "1")
    with pytest.raises(files.Refused, match="1,048,577 bytes, more than the 1 MiB"):
        files.read_file(tmp_path / "x", files.IMAGE)
    monkeypatch.setenv("DUET_MAX_IMAGE_MIB", "none")  # no number: the limit stays
    assert files.IMAGE.limit == 256 << 20


def _opened_list(path: Path) -> None:
    with ExitStack() as stack:
        assert len(Inputs([str(path)], stack)) == 1


def _as_png(path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)).save(path)


def _as_checkpoint(path: Path) -> None:
    save_checkpoint(
        path.parent, checkpoint_content(int(path.stem.removeprefix("step-")), state={"x": {"w": torch.ones(300_000)}})
    )


read_weights_file = partial(read_tensors, remedy="")
LINES = "\n" * (1 << 20)
LIMITS: list[tuple[str, str, str | Callable[[Path], Any], Callable[[Path], Any]]] = [
    ("WEIGHTS", "step-00000005.pt", _as_checkpoint, load),
    ("WEIGHTS", "step-00000006.pt", _as_checkpoint, partial(load, verify=False)),
    ("WEIGHTS", "w.pt", lambda path: torch.save({"a.weight": torch.ones(300_000)}, path), read_state_dict),
    ("WEIGHTS", "w.safetensors", lambda path: save_file({"w": torch.ones(300_000)}, path), read_weights_file),
    ("CONFIG", "x.yaml", f"a: 1 # {'é' * 600_000}\n", read_yaml),
    ("CONFIG", "own.py", f"A = 1\n{LINES}", lambda path: plugins.load([str(path)])),
    ("TABLE", "list.txt", f"a.png\n{LINES}", _opened_list),
    ("TABLE", "t.csv", f"path,label\na.png,x\n{LINES}", lambda path: len(open_source(str(path)))),
    ("IMAGE", "noise.png", _as_png, Transform(ImageSpec(3, 8, 8), "crop").read),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "made", "reader"), LIMITS, ids=[f"{row[0]}-{row[1]}" for row in LIMITS])
def test_each_reader_has_the_limit_of_its_own_kind(tmp_path, monkeypatch, kind, name, made, reader):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    path = tmp_path / name
    path.write_text(made) if isinstance(made, str) else made(path)
    assert path.stat().st_size > 1 << 20
    kinds = ("IMAGE", "UPLOAD", "ARRAY", "TABLE", "CONFIG", "WEIGHTS")
    with monkeypatch.context() as patch:
        patch.setenv(f"DUET_MAX_{kind}_MIB", "1")
        with pytest.raises((UserError, ImageError), match=f"more than the 1 MiB for .*DUET_MAX_{kind}_MIB"):
            reader(path)
    for other in set(kinds) - {kind}:
        monkeypatch.setenv(f"DUET_MAX_{other}_MIB", "1")
    reader(path)


class Endless(io.BufferedIOBase):
    """Zeros without an end; counts them."""

    given = 0

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        self.given += size
        return bytes(size)


def test_h10_streams_stop_at_the_limit():
    stream = Endless()
    with pytest.raises(files.Refused, match="has more than the 4 MiB for a configuration"):
        files.read_stream(stream, files.CONFIG)
    assert stream.given == (4 << 20) + 1
    assert files.read_stream(io.BytesIO(b"abc"), files.CONFIG) == b"abc"


def _idx_bomb(folder: Path, size: int) -> None:
    header = bytes([0, 0, 8, 3]) + np.array([size // 784, 28, 28], ">u4").tobytes()
    with gzip.open(folder / "train-images-idx3-ubyte.gz", "wb", compresslevel=9) as file:
        file.write(header)
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    with gzip.open(folder / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(bytes([0, 0, 8, 1, 0, 0, 0, 1, 0]))


def test_h10_gzip_bomb(tmp_path, monkeypatch):
    _idx_bomb(tmp_path, 64 << 20)
    monkeypatch.setenv("DUET_MAX_ARRAY_MIB", "8")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(tmp_path, r"has more than the 8 MiB for a file of many images.*DUET_MAX_ARRAY_MIB")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 << 10  # KiB


def test_h10_parquet_bomb(tmp_path, monkeypatch):
    cells = [bytes(3 << 20), b"x"]
    packed: dict[str, Any] = {"compression": "zstd", "use_dictionary": False}
    parquet(tmp_path / "x.parquet", {"image": cells}, **packed)
    assert (tmp_path / "x.parquet").stat().st_size < 10_000
    assert open_source(str(tmp_path / "x.parquet")).content(0) == cells[0]
    monkeypatch.setenv("DUET_MAX_IMAGE_MIB", "1")
    with (
        open_source(str(tmp_path / "x.parquet")) as source,
        pytest.raises(ImageError, match=r"has .* bytes, more than the 1 MiB for an image"),
    ):
        source.content(0)
    monkeypatch.setenv("DUET_MAX_TABLE_MIB", "1")
    parquet(tmp_path / "y.parquet", {"image": [b"a"], "label": ["x" * (2 << 20)]}, **packed)
    refused(tmp_path / "y.parquet", r"has .* more than the 1 MiB for a list")


@pytest.mark.parametrize("column", ["image", "label"])
def test_h10_parquet_pages_that_hold_more_than_the_files_end_says(tmp_path, column):
    """pyarrow makes room for what each page says, up to 2 GiB: the process that reads has less."""
    path, size = tmp_path / "x.parquet", 250 << 20
    value = bytes(size) if column == "image" else "a" * size
    parquet(path, {"image": [b"x"], "label": ["a"]} | {column: [value]}, compression="zstd")
    metadata = pytest.importorskip("pyarrow.parquet").read_metadata(path).row_group(0)
    said = _varint(metadata.column(["image", "label"].index(column)).total_uncompressed_size)
    content = path.read_bytes()
    end = len(content) - int.from_bytes(content[-8:-4], "little") - 8
    footer = content[end:]
    assert footer.count(said) == 1
    path.write_bytes(content[:end] + footer.replace(said, _varint(1000, len(said))))
    reading = (
        "import sys\n"
        "from duetgan.data.packing.sources import open_source, table_files\n"
        "table_files.available_bytes = lambda: 300 << 20\n"
        "open_source(sys.argv[1]).content(0)\n"
    )
    # A new process: this one may have freed so much that the file fits without new memory.
    done = subprocess.run([sys.executable, "-c", reading, path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"(UserError|ImageError): .*cannot be read.*(failed|too much memory)", done.stderr)


def test_memory_error_of_python_is_named():
    with pytest.raises(OSError, match="too much memory"), table_files.limited():
        raise MemoryError


def _varint(number: int, length: int = 0) -> bytes:
    """Thrift's zigzag, in so many bytes."""
    found: list[int] = []
    number *= 2
    while number or len(found) < length:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found[:-1], found[-1] & 127])


def test_h10_parquet_that_claims_too_many_rows(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet(tmp_path / "x.parquet", {"image": arrow.nulls(200_000, arrow.binary())}, rows=1 << 20)
    refused(tmp_path / "x.parquet", r"says that it holds 200,000 rows in [0-9,]+ bytes; get it again")


def test_h10_zip_member_and_weights(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(2 << 20))
    monkeypatch.setenv("DUET_MAX_IMAGE_MIB", "1")
    with open_source(str(tmp_path / "x.zip")) as source, pytest.raises(ImageError, match="more than the 1 MiB"):
        source.content(0)
    (tmp_path / "w.pth").write_bytes(bytes(2 << 20))
    monkeypatch.setenv("DUET_MAX_WEIGHTS_MIB", "1")
    with pytest.raises(UserError, match=r"w\.pth cannot be read \(has 2,097,152 bytes, more than the 1 MiB for a"):
        read_state_dict(tmp_path / "w.pth")


def test_h1_backslashes_in_zips(tmp_path):
    names = ["cat\\0.png", "dog\\0.png", "dog\\deep\\1.png", "..\\evil.png"]
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in names:
            archive.writestr(name, name.encode())
    with open_source(str(tmp_path / "x.zip")) as source:
        assert source.classes == ["cat", "dog"]
        assert [source.content(index) for index in range(3)] == [name.encode() for name in names[:3]]
        assert source.ignored == ["../evil.png"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain name-1.png", "plain name-1.png"),
        ("Katze 猫 é 👩‍🚀.png", "Katze 猫 é 👩‍🚀.png"),
        ("a\nb\r\t\x1b[31m\x7f\x85", "a\\nb\\r\\t\\x1b[31m\\x7f\\x85"),
        ("a\u2028b\u2029\u202egnp.exe", "a\\u2028b\\u2029\\u202egnp.exe"),
        (os.fsdecode(b"caf\xe9"), "caf\\xe9"),
        ("\ud800", "\\ud800"),
    ],
)
def test_printable(name, shown):
    assert printable(name) == shown
    shown.encode()
    assert printable(shown) == shown


def test_h14_names_that_are_no_utf8(tmp_path, capsys):
    """Of a class folder, an image, a file that is no image, and a broken one: packed, listed, shown and searched."""
    folder = os.fsencode(tmp_path) + b"/in\xff"
    rng = np.random.default_rng(0)
    for place in (b"caf\xe9", b"dog"):
        os.makedirs(folder + b"/" + place)
        for name in (b"a\xe9.png", b"b\x1b[31m.png"):
            buffer = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(buffer, "PNG")
            Path(os.fsdecode(folder + b"/" + place + b"/" + name)).write_bytes(buffer.getvalue())
    Path(os.fsdecode(folder + b"/dog/\xe9.txt")).write_bytes(b"")
    Path(os.fsdecode(folder + b"/dog/x\xe9.png")).write_bytes(b"")
    out = tmp_path / "x.lmdb"
    assert run_cli(pack, [os.fsdecode(folder), str(out), "--on-error", "skip", "--workers", "0"]) == 0
    shown = capsys.readouterr().out
    assert "caf\\xe9" in shown
    assert "x\\xe9.png is an empty file" in shown
    shown.encode()
    assert run_cli(inspect, [str(out), "--out", str(tmp_path / "x.png")]) == 0
    assert "in\\xff" in capsys.readouterr().out
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError(2, "No such file", "x"), "x cannot be read (No such file); copy it"),
        (KeyError("label"), "x cannot be read ('label'); copy it"),
        (UserError("y is damaged; get it again"), "y is damaged; get it again"),
        (ZeroDivisionError("ours"), "ours"),
    ],
)
def test_reading_names_the_file_and_the_remedy_and_lets_other_faults_pass(error, told):
    kind = ZeroDivisionError if isinstance(error, ZeroDivisionError) else UserError
    with pytest.raises(kind) as refused, files.reading("x", "copy it", LookupError, ValueError):
        raise error
    assert str(refused.value) == told
