"""The first minutes on a GPU, in a small form on the CPU: parts that pass, fail, hang and lack something; a bundle."""

import json
import os
import signal
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import book, bundle, cifar, command, parts, steps, wheels
from benchmarks.gpu.book import Book, NotThere, Setting
from benchmarks.gpu.parts import PARTS, Part
from duetgan.data.packing.sources.base import ArraySource
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises

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
    """A bundle with data and no peers."""
    folder = tmp_path / "bundle"
    (folder / "data").mkdir(parents=True)
    for name, content in cifar.encoded(cifar10(), 95).items():
        (folder / "data" / name).write_bytes(content)
    return folder


@pytest.mark.slow
def test_small_form_on_the_cpu(
    tmp_path: Path, carried: Path, slim: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part but that of waits, which a CPU does not tell, and of NVIDIA's code, which is not in the bundle."""
    test, out = tmp_path / "test_some.py", tmp_path / "out"
    test.write_text(GPU_TESTS)
    monkeypatch.setattr(parts, "marked", lambda: ["-c", str(wheels.ROOT / "pyproject.toml"), str(test)])
    code = command.main([*CPU, "--out", str(out), "--bundle", str(carried), "--json", "--only", *PARTS])
    found = result_of(out)
    states = {name: (part["state"], part["reason"]) for name, part in found["parts"].items()}
    assert states.keys() == set(PARTS)
    absent = [states.pop(name)[0] for name in ("waits", "stylegan3")]
    assert absent == ["not there", "not there"]
    assert set(states.values()) == {("passed", "")}
    assert code == 0
    rows = {name: part["rows"] for name, part in found["parts"].items()}
    assert rows["tests"]["tests"] == {"passed": 1, "failed": 0, "skipped": 1}
    assert set(rows["presets"]) == set(steps.SMALL)
    assert all(row["images_per_second"] > 0 < row["predicted_peak_gib"] for row in rows["presets"].values())
    for part, name in (("graphs", "quickstart_classifier, graphs"), ("kernels", "quickstart_gan, kernels and graphs")):
        assert rows[part][name]["vs_first_ratio"] > 0
    assert rows["timm"]["cifar10_classifier_gpu, eager"]["vs_peer_ratio"] > 0
    assert 0 <= rows["cifar10"]["2 steps"]["accuracy"] <= 1
    assert rows["cifar10"]["2 steps"]["images"].startswith("JPEG of quality 95")
    assert rows["ranks"]["all-reduce of 1 MB"]["exact"]
    page = (out / "gpu.html").read_text()
    assert all(escape(part.title) in page for part in PARTS.values())
    assert 'src="data:image/png;base64,iVBOR' in page
    assert "vs peer ratio" in page
    assert "http" not in page
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["tests_tests_passed"] == 1
    assert all(isinstance(value, (int, float, str)) for value in last.values())


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


# --- the bundle


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
    peer = tmp_path / "peers" / "stylegan3"
    (peer / ".git").mkdir(parents=True)
    (peer / ".git" / "history").write_bytes(bytes(10**6))
    (peer / "train.py").write_bytes(bytes(20_000))
    room = sum(map(len, cifar.encoded(cifar10(400), 93).values()))
    limit = 30_000 + 20_000 + room + bundle.MB // 10
    about = fill(tmp_path / "some", monkeypatch, wheel=30_000, limit=limit, peers=peer.parent)
    assert about["left_out"] == {}
    assert bundle.size_of(tmp_path / "some") <= limit
    assert about["total_mb"] == pytest.approx(bundle.size_of(tmp_path / "some") / bundle.MB)
    assert not (tmp_path / "some" / "peers" / peer.name / ".git").exists()
    assert json.loads((tmp_path / "some" / "data" / "cifar10.json").read_text())["quality"] == 93
    about = fill(tmp_path / "tight", monkeypatch, wheel=30_000, limit=45_000, peers=peer.parent)
    assert set(about["left_out"]) == {"stylegan3", "cifar10"}
    assert bundle.size_of(tmp_path / "tight") <= 45_000
    assert_raises(UserError, r"HAS=FILE", fill, tmp_path / "over", monkeypatch, wheel=50_000, limit=45_000)
