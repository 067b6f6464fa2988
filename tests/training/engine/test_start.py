"""What a start imports: each of these packages would cost every command its time. And what it hands on."""

import os
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
from duetgan.training.engine.health import EqualWeights
from duetgan.training.engine.lr_find import Sweep
from duetgan.training.engine.rollback import SkippedUpdates, SpikeRollback
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.heartbeat import Silent
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


def test_callbacks_have_the_settings_of_the_config(packed, tmp_path, monkeypatch):
    recipe = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    task: Any = SimpleNamespace(registry=dict)
    loader: Any = SimpleNamespace(device=torch.device("cpu"))
    for ranks, every, interval in ((1, 7, None), (2, 0, None), (2, 7, 7)):
        overrides = [f"--distributed.check_every={every}", "--nonfinite_cap=3"]
        config = build_run_config(read_yaml(recipe), overrides, "x")
        monkeypatch.setattr(collectives, "world_size", lambda ranks=ranks: ranks)
        found: Any = {type(each): each for each in run.callbacks(config, task, loader, RunFolder(tmp_path))}
        assert getattr(found.get(EqualWeights), "interval", None) == interval
        assert (found[SkippedUpdates].cap, found[SpikeRollback].config) == (3, config.spikes)


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_rank_that_waits_leaves_if_another_is_gone_or_rank_0_is_silent(tmp_path, monkeypatch, is_launched):
    """Only a process with a launcher ends when its parent does."""
    heartbeat = MagicMock()
    looks: list[Any] = []
    found: list[Silent] = []

    def silent(*place: Any, own_rank: int) -> list[Silent]:
        assert (*place, own_rank) == (tmp_path, 3, 1)
        return found

    monkeypatch.setattr(run, "Heartbeat", heartbeat)
    monkeypatch.setattr(run, "silent_ranks", silent)
    monkeypatch.setattr(run, "under_launcher", lambda: is_launched)
    for name, value in (("rank", lambda: 1), ("world_size", lambda: 3), ("barrier", lambda: None)):
        monkeypatch.setattr(collectives, name, value)
    monkeypatch.setattr(collectives, "watch_while_waiting", looks.append)
    run._start_heartbeat(tmp_path)
    heartbeat.assert_called_once_with(tmp_path, 1, parent=os.getppid() if is_launched else None)
    (look,) = looks
    for ranks, is_lost in (
        ([], False),
        ([Silent(2, False, "it is silent")], False),
        ([Silent(2, True, "it is gone")], True),
        ([Silent(0, False, "it is stopped")], True),
    ):
        found[:] = ranks
        with pytest.raises(collectives.PeerLost, match=r"^it is") if is_lost else nullcontext():
            look()


@pytest.mark.parametrize("is_main", [True, False])
def test_all_ranks_end_with_the_profile_and_rank_0_measures(monkeypatch, tmp_path, is_main):
    profiler = SimpleNamespace(last=5)
    trained: list[int] = []
    for name in ("_resume", "_report", "_start_heartbeat", "StatusFile", "StopSignals", "to_tree"):
        monkeypatch.setattr(run, name, MagicMock())
    monkeypatch.setattr(run.data, "facts", lambda *_: {})
    monkeypatch.setattr(run.health, "explaining", nullcontext)
    monkeypatch.setattr(run, "Profiler", lambda _loop, count: profiler if count == 2 else None)
    monkeypatch.setattr(collectives, "is_main", lambda: is_main)
    loop = MagicMock(callbacks=[], run=trained.append, finished=False)
    assert run._run(loop, None, 2) == 0
    assert (trained, profiler in loop.callbacks) == ([5], is_main)


@pytest.mark.parametrize(("conditional", "classes"), [("true", 10), ("false", 0)])
def test_a_transfer_gets_the_classes_of_the_networks(packed, tmp_path, monkeypatch, conditional, classes):
    """Images of an unconditional GAN may have classes."""
    recipe = write_config(tmp_path / "recipe.yaml", "gan", packed)
    given: dict[str, Any] = {}

    def transfer(file: str, _registry: Any, **options: Any) -> tuple[str, Lineage]:
        given.update(options, file=file)
        return "a text", Lineage.of(trained_on=["f00d"])

    donor = {"file": "donor.pt", "step": 7, "sha256": "ab"}
    monkeypatch.setattr(run.transfer, "find_donor", lambda *_: donor)
    monkeypatch.setattr(run.transfer, "transfer", transfer)
    config = build_run_config(read_yaml(recipe), [f"--conditional={conditional}"], "x")
    loop = run.prepare(config, RunFolder(tmp_path / "run"), torch.device("cpu"))
    names = loop.loader.dataset.classes[:classes]
    assert given == {"file": "donor.pt", "resolution": 16, "classes": names}
    assert (len(names), loop.manager.origin) == (classes, donor)
    assert loop.manager.lineage.trained_on == [loop.loader.dataset.meta.content_hash, "f00d"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_dry_run_measures_one_process_and_predicts_all(monkeypatch, capsys, ranks):
    monkeypatch.setattr(collectives, "world_size", lambda: ranks)
    monkeypatch.setattr(run.speed, "seconds_per_image", lambda *_: 0.5)
    predictor = SimpleNamespace(predictions=lambda *given: f"prediction for {given}")
    monkeypatch.setitem(sys.modules, "predictor", predictor)
    loader = SimpleNamespace(device=torch.device("cpu"), dataset="images")
    config, task = SimpleNamespace(steps=4), SimpleNamespace(images_at=lambda step: 10 * step)
    loop: Any = SimpleNamespace(config=config, task=task, loader=loader)
    run._print_plan(loop, False, "predictor")
    measured = ["time: about 20 s here, 2 images/s"] * (ranks == 1)
    assert capsys.readouterr().out.splitlines()[:-2] == [*measured, f"prediction for {(config, 'images', ranks)}"]


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
