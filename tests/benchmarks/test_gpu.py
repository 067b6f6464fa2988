"""The first minutes on a GPU, in a small form on the CPU: parts that pass, fail, hang and lack something; a bundle."""

import json
import signal
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import book, cifar, command, parts, steps, wheels
from benchmarks.gpu.parts import PARTS
from duetgan.data.packing.sources.base import ArraySource

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
def forked(monkeypatch):
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


# --- the whole command


@pytest.fixture
def carried(tmp_path):
    """A bundle with data and no peers."""
    folder = tmp_path / "bundle"
    (folder / "data").mkdir(parents=True)
    for name, content in cifar.encoded(cifar10(), 95).items():
        (folder / "data" / name).write_bytes(content)
    return folder


@pytest.mark.slow
def test_small_form_on_the_cpu(tmp_path, carried, slim, monkeypatch, capsys):
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


# --- the bundle
