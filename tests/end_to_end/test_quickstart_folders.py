"""`quickstart.py --quick` on one's own images, whatever they lie in: a report, or one line with the remedy."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from duetgan.commands import evaluate, pack, quickstart, train
from duetgan.commands.planning import measure, steps
from duetgan.utils.distributed.process import run_cli

SCRIPTS: dict[str, Callable[[list[str]], int | None]] = {
    "pack": pack.main,
    "quickstart-plan": measure.main,
    "train": train.main,
    "evaluate": evaluate.main,
}


def in_process(command: list[str]) -> int:
    """A command without the seconds that a process of its own takes to import everything."""
    name, *options = command
    return run_cli(SCRIPTS[name], options)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(steps, "call", in_process)
    monkeypatch.setenv("DUET_PRECISION", "fp32")
    monkeypatch.setenv("DUET_WEIGHTS", "")
    monkeypatch.setattr("duetgan.metrics.features.extractors.PLACES", ())


def draw(file: Path, seed: int) -> None:
    """A photograph: a bright blot of one of two hues, another place each time."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 60, (24, 32, 3))
    row, column = random.integers(0, 14, 2)
    pixels[row : row + 10, column : column + 10, seed % 2] += random.integers(120, 190)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(file, quality=95)


def class_folders(place: Path, count: int = 48) -> Path:
    folder = place / "my photos"
    for seed in range(count):
        draw(folder / ("cats", "dogs")[seed % 2] / f"{seed}.jpg", seed)
    return folder


def few(place: Path) -> Path:
    return class_folders(place, 40)


def flat(place: Path) -> Path:
    for seed in range(48):
        draw(place / "flat" / f"{seed}.jpg", seed)
    return place / "flat"


@pytest.mark.parametrize(
    "make",
    [class_folders, flat, pytest.param(few, marks=pytest.mark.slow)],
)
def test_images_become_a_report_without_a_question(tmp_path, capfd, make):
    source, out = make(tmp_path), tmp_path / "out"
    assert run_cli(quickstart.main, [str(source), "--quick", "--dir", str(out)]) == 0
    labelled = make is not flat
    summary = json.loads((out / "summary.json").read_text())
    shown = capfd.readouterr()
    assert (summary["classifier"] is not None) is labelled
    document = json.loads((out / "gan" / "eval" / "metrics.json").read_text())
    assert (document["recognised"] is not None) is labelled
    assert summary["gan"]["recognised"] is None or not document["judge"]["is_weak"]
    if labelled:
        low, high = summary["classifier"]["interval"]
        assert 0 <= low <= summary["classifier"]["accuracy"] <= high + 1e-12 <= 1 + 1e-12
        assert summary["classifier"]["n"] == json.loads((out / "classifier/eval/metrics.json").read_text())["n"] >= 2
    else:
        assert "no classifier" in shown.out
        assert "no classifier" in (out / "report.html").read_text()
    assert (out / "report.html").stat().st_size > 30_000
    assert "$ duet pack" in shown.out
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("texts", [None, 0, 20])  # None: there is no such folder
def test_what_holds_no_images_is_one_line_and_leaves_nothing(tmp_path, capfd, texts):
    source, out = tmp_path / "photso", tmp_path / "out"
    if texts is not None:
        source.mkdir()
    for number in range(texts or 0):
        (source / f"{number}.txt").write_text("words")
    assert run_cli(quickstart.main, [str(source), "--dir", str(out)]) == 2
    shown = capfd.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    assert source.name in line
    assert not out.exists()
