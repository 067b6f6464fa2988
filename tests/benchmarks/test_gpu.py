"""The first minutes on a GPU, in a small form on the CPU: parts that pass, fail, hang and lack something; a bundle."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import book, bundle, cifar, command, parts, ranks, steps, wheels
from benchmarks.gpu.book import Book, Missed, NotThere, Setting
from benchmarks.gpu.parts import PARTS, Part
from duetgan.data.sources.base import ArraySource
from duetgan.utils.errors import UserError
from duetgan.utils.script import run_cli
from tests.conftest import assert_raises

STYLEGAN = """
import json, pathlib, sys
options = dict(word[2:].split("=") for word in sys.argv[1:])
assert pathlib.Path(options["data"]).is_file() and options["batch"] == "32"
folder = pathlib.Path(options["outdir"]) / "00000-random"
folder.mkdir()
rows = [json.dumps({"Timing/sec_per_kimg": {"mean": mean}}) for mean in (90.0, 20.0)]
(folder / "stats.jsonl").write_text("\\n".join(rows))
"""
GPU_TESTS = """
import pytest
@pytest.mark.gpu
def test_one(): pass
def test_other(): assert False
@pytest.mark.gpu
@pytest.mark.skipif(True, reason="two are needed")
def test_two(): pass
"""
CPU = ["--small", "--device", "cpu"]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts that need not import torch again, and see what is patched; the command's answer to SIGTERM ends with it."""
    monkeypatch.setattr(book, "START", "fork")
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def cifar10(count: int = 40) -> dict[str, ArraySource]:
    """Smooth images, as photographs are."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (count, 8, 8, 3)).repeat(4, 1).repeat(4, 2).astype(np.uint8)
    labels, classes = np.arange(count) % 10, [str(number) for number in range(10)]
    return {split: ArraySource(split, coarse, labels, classes) for split in cifar.SPLITS}


def result_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "gpu.json").read_text())


def fake_parts(monkeypatch: pytest.MonkeyPatch, **works: tuple[Any, float]) -> None:
    monkeypatch.setattr(command, "PARTS", fakes := {n: Part(*work, f"Part {n}") for n, work in works.items()})
    monkeypatch.setattr(parts, "PARTS", fakes)


# --- the whole command


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """A bundle with a peer and data."""
    folder = tmp_path / "bundle"
    (folder / "data").mkdir(parents=True)
    for name, content in cifar.encoded(cifar10(), 95).items():
        (folder / "data" / name).write_bytes(content)
    peer = folder / "peers" / "stylegan2-ada-pytorch"
    peer.mkdir(parents=True)
    (peer / "train.py").write_text(STYLEGAN)
    return folder


@pytest.mark.slow
def test_small_form_on_the_cpu(
    tmp_path: Path, carried: Path, slim: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part but that of waits, which a CPU does not tell."""
    test, out = tmp_path / "test_some.py", tmp_path / "out"
    test.write_text(GPU_TESTS)
    monkeypatch.setattr(parts, "marked", lambda: ["-c", str(wheels.ROOT / "pyproject.toml"), str(test)])
    code = command.main([*CPU, "--out", str(out), "--bundle", str(carried), "--json"])
    found = result_of(out)
    states = {name: (part["state"], part["reason"]) for name, part in found["parts"].items()}
    waits = states.pop("waits")
    assert waits[0] == "not there"
    assert set(states.values()) == {("passed", "")}
    assert set(states) | {"waits"} == set(PARTS)
    assert code == 0
    rows = {name: part["rows"] for name, part in found["parts"].items()}
    assert rows["tests"]["tests"] == {"passed": 1, "failed": 0, "skipped": 1}
    assert set(rows["presets"]) == set(steps.SMALL)
    assert all(row["images_per_second"] > 0 < row["predicted_peak_gib"] for row in rows["presets"].values())
    assert rows["peers"]["stylegan2-ada-pytorch"] == {"their_images_per_second": 50}  # the first tick warms up
    assert rows["peers"]["timm"]["vs_peer_ratio"] > 0
    assert 0 <= rows["cifar10"]["2 steps"]["accuracy"] <= 1
    assert rows["cifar10"]["2 steps"]["images"].startswith("JPEG of quality 95")
    assert rows["ranks"]["all-reduce of 1 MB"]["exact"]
    assert rows["ranks"]["all-reduce of 1 MB"]["processes"] == 2
    page = (out / "gpu.html").read_text()
    assert all(escape(part.title) in page for part in PARTS.values())
    assert 'src="data:image/png;base64,iVBOR' in page
    assert "their images per second" in page
    assert "http" not in page
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["tests_tests_passed"] == 1
    assert all(isinstance(value, (int, float, str)) for value in last.values())


@pytest.mark.slow
def test_small_form_on_a_pretend_device(tmp_path: Path) -> None:
    """Where waits are told: none in a step, one in a tick; and nothing of it is the CPU's."""
    arguments = ["--small", "--maker", "tests.accelerator.maker", "--only", "waits", "presets", "samples", "peers"]
    started = [sys.executable, "-m", "benchmarks.gpu", *arguments, "--out", str(tmp_path), "--bundle", str(tmp_path)]
    done = subprocess.run(started, cwd=wheels.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = result_of(tmp_path)
    assert (found["machine"]["device"], found["machine"]["pretend"]) == ("sim", "tests.accelerator.maker")
    assert {part["state"] for part in found["parts"].values()} == {"passed"}
    for row in found["parts"]["waits"]["rows"].values():
        assert (row["waits_in_steps"], row["waits_in_a_tick"]) == (0, 1)
    assert all(row["peak_gib"] > 0 for row in found["parts"]["presets"]["rows"].values())


@pytest.mark.slow  # torch is imported by five processes
def test_command_line_starts_parts_afresh(tmp_path: Path) -> None:
    arguments = [*CPU, "--only", "waits", "ranks", "--out", str(tmp_path), "--bundle", str(tmp_path)]
    started = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    done = subprocess.run(started, cwd=wheels.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {name: part["state"] for name, part in result_of(tmp_path)["parts"].items()} == {
        "waits": "not there",
        "ranks": "passed",
    }


def test_all_parts_together_take_under_25_minutes() -> None:
    assert sum(part.seconds for part in PARTS.values()) <= 60 * command.MINUTES - 30


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "finds no accelerator"),
        (["--device", "cpu"], "--device cpu goes with --small"),
        ([*CPU, "--only", "wait"], "--only wait: choose from waits"),
    ],
)
def test_without_a_device_one_line_says_so(
    refused: Any, arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert told in refused(command.main, *arguments, "--out", tmp_path / "out", alone=True)
    assert not (tmp_path / "out").exists()


# --- parts that do not pass


def hangs(setting: Setting, note: Book) -> None:
    if child := os.fork():
        note.row("before", child=child)
    time.sleep(600)


def fails(_: Setting, note: Book) -> None:
    note.row("before", figure=1.5)
    raise ValueError("a <fault>\nof ours")


def dies(_: Setting, note: Book) -> None:
    note.row("before", figure=2)
    os.kill(os.getpid(), signal.SIGKILL)


def lacks(_: Setting, __: Book) -> None:
    raise NotThere("a peer")


def passes(_: Setting, note: Book) -> None:
    note.row("after", figure=3)


def test_one_parts_fault_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before the fault stays, too, and what a part has started ends with it."""
    fake_parts(monkeypatch, hangs=(hangs, 1.0), fails=(fails, 9), dies=(dies, 9), lacks=(lacks, 9), passes=(passes, 9))
    assert command.main([*CPU, "--out", str(tmp_path), "--only", "hangs", "fails", "dies", "lacks", "passes"]) == 1
    found = result_of(tmp_path)["parts"]
    assert {name: part["state"] for name, part in found.items()} == {
        "hangs": "stopped",
        "fails": "failed",
        "dies": "failed",
        "lacks": "not there",
        "passes": "passed",
    }
    assert [found[name]["reason"] for name in ("hangs", "fails", "dies", "lacks")] == [
        "took longer than its 1 s",
        "ValueError: a <fault>",
        "ended with -9; parts/dies.log",
        "not there: a peer",
    ]
    assert [found[name]["rows"]["before"] for name in ("fails", "dies")] == [{"figure": 1.5}, {"figure": 2}]
    page = (tmp_path / "gpu.html").read_text()
    assert "ValueError: a &lt;fault&gt;" in page
    assert "took longer than its 1 s" in page
    child = found["hangs"]["rows"]["before"]["child"]
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or ") Z" in Path(f"/proc/{child}/stat").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of the part that was stopped is alive")
    assert command.main([*CPU, "--out", str(tmp_path), "--only", "lacks", "passes"]) == 0  # nothing of it failed


def test_ctrl_c_writes_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Setting, note: Book) -> None:
        note.row("before", figure=1)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)

    fake_parts(monkeypatch, passes=(passes, 9), late=(interrupted, 60), never=(passes, 9))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process's handlers stay
    arguments = [*CPU, "--out", str(tmp_path), "--only", "passes", "late", "never"]
    assert run_cli(command.main, arguments) == 130
    found = result_of(tmp_path)["parts"]
    assert {name: part["state"] for name, part in found.items()} == {"passes": "passed", "late": "interrupted"}
    assert found["late"]["rows"] == {"before": {"figure": 1}}
    assert "interrupted" in (tmp_path / "gpu.html").read_text()


def test_parts_that_are_not_asked_for_stay_and_the_time_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_parts(monkeypatch, one=(passes, 9), two=(passes, 9))
    out = ["--out", str(tmp_path)]
    assert command.main([*CPU, *out, "--only", "one"]) == 0
    assert command.main([*CPU, *out, "--only", "two", "--minutes", "0.05"]) == 1
    found = result_of(tmp_path)["parts"]
    assert {name: part["state"] for name, part in found.items()} == {"one": "passed", "two": "left out"}
    assert command.earlier(tmp_path / "gpu.json", result_of(tmp_path)["machine"] | {"device_name": "another"}) == {}


# --- waits


def setting_at(out: Path, **more: Any) -> Setting:
    return Setting(out=out, bundle=out, device="cpu", small=True, **more)


def test_waits_are_counted_by_the_line_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    module = SimpleNamespace(set_sync_debug_mode=modes.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    with steps.waits(setting_at(tmp_path)) as found:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        line = sys._getframe().f_lineno - 2
    assert [(name.rpartition(":")[0], count) for name, count in found.items()] == [("tests/benchmarks/test_gpu.py", 2)]
    assert int(next(iter(found)).rpartition(":")[2]) == line
    assert modes == ["warn", "default"]


@pytest.mark.parametrize(("place", "told"), [("step", "2 in 2 steps"), ("take", "2 in a tick"), (None, None)])
def test_a_wait_in_a_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slim: None, place: str | None, told: str | None
) -> None:
    """`take` may wait once: it is a log tick."""
    counter: Counter[str] = Counter()
    maker = SimpleNamespace(waits=counter, install=lambda: None, Mode=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "pretended", maker)
    monkeypatch.setattr(steps, "WATCHED", ("quickstart_classifier",))

    class Window(steps.MetricWindow):
        def add(self, metrics: dict[str, torch.Tensor]) -> None:
            counter.update(["training/a.py:1"] if place == "step" else [])
            super().add(metrics)

        def take(self) -> dict[str, float]:
            counter["training/b.py:2"] += 2 if place == "take" else 1
            return super().take()

    monkeypatch.setattr(steps, "MetricWindow", Window)
    note = Book(tmp_path / "waits.json")
    setting = setting_at(tmp_path, maker="pretended")
    with setting.device_made(), pytest.raises(Missed, match=told) if told else contextlib.nullcontext():
        steps.budget(setting, note)
    row = note.rows["quickstart_classifier"]
    assert row["where"] == ("training/a.py:1 x 2" if place == "step" else "")
    assert row["waits_in_a_tick"] == (2 if place == "take" else 1)


def test_a_wrong_sum_and_a_dead_process_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note, setting = Book(tmp_path / "ranks.json"), setting_at(tmp_path)

    def wrong(_: Setting, rank: int, __: int, ___: int, answers: Any) -> None:
        if rank == 0:
            answers.put((1, "gloo", False, 0.001))
            answers.put(None)

    monkeypatch.setattr(ranks, "add_up", wrong)
    assert_raises(Missed, "sums that are wrong: 1 MB", ranks.group, setting, note)
    assert note.rows["all-reduce of 1 MB"]["bus_gb_per_second"] == pytest.approx(1.0)
    monkeypatch.setattr(ranks, "add_up", lambda *_: os._exit(3))
    assert_raises(Missed, "a process of the group died", ranks.group, setting, note)


# --- the bundle


def test_tiles_hold_nothing_of_their_neighbours() -> None:
    """An image that is black among white ones stays black; labels and numbers are those that went in."""
    sets = cifar10(403)
    images = np.full_like(np.asarray(sets["train"].images), 255)
    images[201] = 0
    files = cifar.encoded({"train": ArraySource("x", images, np.arange(403) % 10, list("0123456789"))}, 90)
    picture = cifar.cv2.imdecode(np.frombuffer(files["cifar10-train.jpg"], np.uint8), cifar.cv2.IMREAD_COLOR)
    assert picture is not None
    found = cifar.untiled(picture, 403)
    assert found.shape == images.shape
    assert np.abs(found.astype(int) - images).max() <= 1
    assert json.loads(files["cifar10.json"])["train"] == "0123456789" * 40 + "012"


def fill(out: Path, monkeypatch: pytest.MonkeyPatch, *, wheel: int, limit: int, peers: Path | None = None) -> Any:
    """A bundle with one wheel of so many bytes."""

    def fetch(pins: list[str], python: str, folder: Path) -> None:
        assert "numpy" not in " ".join(pins)
        (folder / "lmdb-3.0.0-cp312-none-any.whl").write_bytes(bytes(wheel))

    monkeypatch.setattr(wheels, "fetch", fetch)
    monkeypatch.setattr(cifar, "load", lambda _: cifar10(400))
    return bundle.fill(out, {"numpy"}, "3.12", None, peers, limit)


def test_bundle_keeps_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data get the room that is left, at less quality where it is little; what does not fit is named."""
    peer = tmp_path / "peers" / "stylegan2-ada-pytorch"
    (peer / ".git").mkdir(parents=True)
    (peer / ".git" / "history").write_bytes(bytes(10**6))
    (peer / "train.py").write_bytes(bytes(20_000))
    best, least = (sum(map(len, cifar.encoded(cifar10(400), quality).values())) for quality in (cifar.QUALITIES[0], 93))
    assert least < best
    limits = {limit: 30_000 + 20_000 + room + bundle.MB // 10 for limit, room in (("best", best), ("93", least))}
    qualities = {}
    for name, limit in limits.items():
        about = fill(tmp_path / name, monkeypatch, wheel=30_000, limit=limit, peers=peer.parent)
        assert about["left_out"] == {}
        assert bundle.size_of(tmp_path / name) <= limit
        assert about["total_mb"] == pytest.approx(bundle.size_of(tmp_path / name) / bundle.MB)
        assert not (tmp_path / name / "peers" / peer.name / ".git").exists()
        qualities[name] = json.loads((tmp_path / name / "data" / "cifar10.json").read_text())["quality"]
    assert qualities == {"best": 98, "93": 93}
    about = fill(tmp_path / "tight", monkeypatch, wheel=30_000, limit=45_000, peers=peer.parent)
    assert set(about["left_out"]) == {"stylegan2-ada-pytorch", "cifar10"}
    assert bundle.size_of(tmp_path / "tight") <= 45_000
    for name in ("peers", "data"):
        assert list((tmp_path / "tight" / name).iterdir()) == []
    assert_raises(UserError, r"HAS=FILE", fill, tmp_path / "over", monkeypatch, wheel=50_000, limit=45_000)


def test_bundle_refuses_a_folder_that_is_none(tmp_path: Path, refused: Any) -> None:
    (tmp_path / "mine").write_text("kept")
    assert "is no bundle and not empty" in refused(bundle.main, "--out", tmp_path)
    assert "there is no such file" in refused(bundle.main, "--has", tmp_path / "none")
    assert (tmp_path / "mine").read_text() == "kept"


def test_wheels_are_those_that_the_machine_lacks() -> None:
    listed = wheels.names_in("Package    Version\n---------- ------\nOpenCV_Python.headless 5.0\ntorch==2.11.0\n")
    assert listed == {"opencv-python-headless", "torch"}
    assert wheels.names_in("numpy\nPillow") == {"numpy", "pillow"}
    bare, usual = wheels.wanted({"torch"}, "3.11"), wheels.wanted(set(wheels.IMAGE), "3.12")
    names = {pin.partition("==")[0] for pin in bare}
    assert names >= {"lmdb", "pydantic-core", "numpy", "opencv-python-headless", "pytest", "torchvision"}
    assert names & {"torch", "triton", "av", "hypothesis", "colorama"} == set()
    assert not any(name.startswith(("nvidia", "cuda")) for name in names)
    assert {pin.partition("==")[0] for pin in usual} >= {"lmdb", "pydantic", "simplejpeg", "torchinfo"}
    assert len(usual) < len(bare)
    numpy = {version: [pin for pin in wheels.wanted(set(), version) if "numpy" in pin] for version in ("3.11", "3.12")}
    assert numpy["3.11"] != numpy["3.12"]


def test_bundles_wheels_are_installed_where_they_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    folder, site = tmp_path / "wheels", tmp_path / "site"
    folder.mkdir()
    for name in ("lmdb-1.0", "duet_test_package-1.0"):  # the first is there
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
            package, _, version = name.partition("-")
            archive.writestr(f"{package}.py", "value = 7")
            about = f"{name}.dist-info"
            archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{about}/RECORD", "")
    wheels.install(folder, site)
    assert sorted(path.name for path in site.glob("*.py")) == ["duet_test_package.py"]
    assert sys.path[0] == str(site) == os.environ["PYTHONPATH"]
    (folder / "another-1.0-cp27-cp27m-any.whl").write_bytes(b"")
    told = r"pip cannot install it here .*fill the bundle with PY=3"
    assert_raises(wheels.Unusable, told, wheels.install, folder, site)
