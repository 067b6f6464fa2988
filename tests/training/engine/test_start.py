"""What a start imports: each of these packages would cost every command its time. And what it hands on."""

import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from duetgan.training.engine import run
from duetgan.training.engine.lr_find import Sweep
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import StoppedBySignal, TrainingHalted, UserError
from duetgan.utils.runlog.run_folder import RunFolder
from tests.conftest import REPOSITORY
from tests.end_to_end.helpers import write_config


def imported(code: str) -> set[str]:
    """The packages that `code` imports."""
    told = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", told], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_help_and_training_import_only_what_they_use():
    assert not {"torch", "numpy", "cv2"} & imported("from duetgan.commands import train\ntrain.parser()")
    heavy = {"torchvision", "scipy", "matplotlib", "tensorboard", "torchmetrics", "pandas", "pyarrow"}
    heavy.add("sympy")  # which torch.compile brings along
    assert not heavy & imported("import duetgan.training.engine.run")


@pytest.mark.parametrize("split", ["off", "auto"])
def test_a_process_starts_with_the_devices_and_the_timeout_of_its_config(packed, tmp_path, monkeypatch, split):
    recipe = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    overrides = ["--model.split", split, "--distributed.start_timeout", "77"]
    calls: list[Any] = []

    def choose_device(*arguments: Any, **options: Any) -> torch.device:
        calls.append((arguments, options))
        return torch.device("meta")

    monkeypatch.setattr(collectives, "choose_device", choose_device)
    monkeypatch.setattr(collectives, "start", lambda *arguments, **options: calls.append((arguments, options)))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # it is put back
    assert run._start_process(build_run_config(read_yaml(recipe), overrides, "x"), "cuda:1") == torch.device("meta")
    several = {"several": split == "auto"}
    assert calls == [(("cuda:1",), several), ((torch.device("meta"), 77.0), several)]


def test_a_start_hands_its_options_on(packed, tmp_path, monkeypatch):
    """Other ranks are not waited for if an error is of this rank alone."""
    recipe, device = write_config(tmp_path / "recipe.yaml", "classifier", packed), torch.device("cpu")
    loop = SimpleNamespace(step=3, manager=SimpleNamespace(images=SimpleNamespace()))
    calls: dict[str, Any] = {}
    error: Exception | None = None

    def prepare(_config: Any, folder: RunFolder, *arguments: Any, **options: Any) -> Any:
        calls["prepare"] = (folder.path, *arguments, options)
        if error is not None:
            raise error
        return loop

    def observe(owner: Any, name: str, code: int) -> None:
        def call(*arguments: Any, **options: Any) -> int:
            calls[name] = (*arguments, options) if options else arguments
            return code

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(run, "prepare", prepare)
    for code, name in enumerate(("_print_plan", "_find_rate", "_run")):
        observe(run, name, code)
    observe(collectives, "stop", 0)
    start = partial(run.train, str(recipe), run_dir=str(tmp_path / "run"), device="cpu")
    rates = {"steps": 12, "last": 0.5}
    for overrides, options, code, expected in (
        (["--model.weights=null"], {"dry_run": "", "layers": True}, 0, {"_print_plan": (loop, True, "")}),
        (["--steps=9"], {"sweep": rates, "new_data": True}, 1, {"_find_rate": (loop, Sweep(**rates))}),  # type: ignore[arg-type]
        ([], {"max_steps": 4, "profile_steps": 2}, 2, {"_run": (loop, 4, 2)}),
    ):
        calls.clear()
        assert start(overrides, **options) == code
        weights = {"optional_weights": overrides != ["--model.weights=null"]}
        prepared = {"prepare": (tmp_path / "run", device, weights)}
        assert calls == expected | prepared | {"stop": ({"lost": False},)}
        assert loop.manager.images.new_data == ("new_data" in options)
    of_all = UserError("of rank 1")
    of_all.of_rank = 1
    for error, is_lost in ((UserError("own"), True), (of_all, False), (StoppedBySignal("a signal"), False)):
        with pytest.raises(type(error)):
            start([])
        assert calls["stop"] == ({"lost": is_lost},)


@pytest.mark.parametrize(
    ("error", "last", "left", "is_reported"),
    [
        (None, ("stopped", "max_steps", 0), (None, False), True),
        (ValueError("x\ny"), ("failed", "ValueError: x", 1), ("ValueError: x", False), False),
        (TrainingHalted("x"), ("failed", "x", 4), ("TrainingHalted: x", False), True),
        (TrainingHalted("x", rank_specific=True), ("failed", "x", 4), ("TrainingHalted: x", False), False),
        (ConnectionError("x"), ("running",), ("ConnectionError: x", True), False),
        (StoppedBySignal("x"), ("running",), (None, False), True),
    ],
)
def test_how_a_run_ends(monkeypatch, tmp_path, error, last, left, is_reported):
    """In the status, in the heartbeat that the other ranks read, and in the report."""
    statuses: list[tuple[Any, ...]] = []
    reports: list[Path] = []
    heartbeat = MagicMock()
    monkeypatch.setattr(run, "_resume", lambda *_: None)
    monkeypatch.setattr(run, "_report", reports.append)
    monkeypatch.setattr(run, "_start_heartbeat", lambda _folder: heartbeat)
    monkeypatch.setattr(run, "to_tree", lambda config: f"tree of {config}")
    monkeypatch.setattr(run.data, "facts", lambda *datasets: {"of": datasets})
    monkeypatch.setattr(run.health, "explaining", nullcontext)
    monkeypatch.setattr(collectives, "is_peer_error", lambda error: isinstance(error, ConnectionError))
    status = SimpleNamespace(write=lambda _loop, *words: statuses.append(words))
    monkeypatch.setattr(run, "StatusFile", lambda _folder: status)
    folder = SimpleNamespace(path=tmp_path, save_config=MagicMock())
    periods = [SimpleNamespace(step=step, path=f"images of step {step}") for step in (0, 7)]
    trained: list[int | None] = []

    def train(max_steps: int | None) -> None:
        trained.append(max_steps)
        if error is not None:
            raise error

    loop: Any = SimpleNamespace(
        folder=folder,
        config=SimpleNamespace(steps=9),
        loader=SimpleNamespace(dataset="training"),
        task=SimpleNamespace(val_dataset="held-out"),
        manager=SimpleNamespace(images=SimpleNamespace(periods=periods)),
        callbacks=[],
        run=train,
        step=3,
        finished=False,
    )
    with nullcontext() if error is None else pytest.raises(type(error)):
        assert run._run(loop, 3, None) == 0
    assert (trained, statuses[0], statuses[-1]) == ([3], ("running",), last)
    heartbeat.stop.assert_called_once_with(left[0], lost_peer=left[1])
    assert reports == [tmp_path] * is_reported
    facts = {"of": ("training", "held-out"), "history": {f"step {step}": f"images of step {step}" for step in (0, 7)}}
    folder.save_config.assert_called_once_with(f"tree of {loop.config}", facts)


def test_gpus_are_chosen_before_torch_is_imported(tmp_path, monkeypatch):
    """Once CUDA is initialised CUDA_VISIBLE_DEVICES has no effect."""
    monkeypatch.setenv("DUET_RUNS", str(tmp_path))
    code = (
        "import os, sys\nfrom duetgan.commands import train\n"
        "train.train_here = lambda *_: print('torch' in sys.modules, os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "train.main(['--config', 'configs/quickstart_gan.yaml', '--gpus', '3'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "3"], done.stderr
