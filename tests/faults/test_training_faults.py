"""What goes wrong inside a step, by number in the project's table of faults (22, 28), and ranks that drift apart."""

import math
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from duetgan.commands import train
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine import health
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.optim.updater import OptimizerConfig, Precision, Updater
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.launch import AGAIN, LAUNCHED, REMEDY
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.runlog.run_folder import RunFolder
from tests.end_to_end.helpers import differing, log_of, state_of, status, write_config
from tests.faults import inject
from tests.faults.conftest import Outcome, own_process, start_python

SHORT = ["--evaluation.every", "0", "--log.samples-every", "0", "--log.every", "1"]


@pytest.fixture
def fail_at(monkeypatch, slim):
    """`fail_at("0:3:nan")`, in this process and in those that it starts. Classifiers are slim here."""

    inject.install(monkeypatch.setattr)

    def ask(text: str) -> None:
        inject.fired.clear()
        monkeypatch.setenv(inject.VARIABLE, text)

    return ask


@pytest.fixture
def train_here(tmp_path, packed, capsys):
    """`train_here(task, ...options)`: how a tiny run in tmp_path/run ends in this process."""

    def begin(task: str, *more: str, run: Path = tmp_path / "run") -> Outcome:
        config = write_config(tmp_path / "recipe.yaml", task, packed)
        capsys.readouterr()
        code = run_cli(train.main, ["--config", str(config), "--run-dir", str(run), "--device", "cpu", *SHORT, *more])
        return Outcome(code, *capsys.readouterr())

    return begin


@pytest.fixture
def by_two(gan_recipe):
    """`by_two(...options)`: how a tiny GAN's run on two processes ends."""
    return lambda *more: own_process(*gan_recipe, "--procs", "2", *SHORT, *more)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in log_of(run) if "images" in row]


@pytest.mark.parametrize("task", ["classifier", "gan"])
def test_fault_22_a_nan_is_skipped_and_written_down(train_here, run, task, fail_at):
    """The step changes neither weights nor averages nor moments; the next ones train on."""
    fail_at("0:4:nan")
    train_here(task, "--checkpoint.every", "1", "--checkpoint.keep", "9").success()
    before, after = state_of(run, 4), state_of(run, 5)
    gan = ["generator", "generator_ema", "generator_optimizer"]
    hit = gan if task == "gan" else ["model", "model_ema", "optimizer"]
    for name in hit:
        found = [key for key in differing(before[name], after[name]) if not key.endswith(("step", "lr", "w_avg"))]
        assert [key for key in found if "num_batches_tracked" not in key] == [], name
    assert differing(after[hit[0]], state_of(run, 6)[hit[0]]) != []
    assert [(row["skipped_updates"], row["nonfinite_updates"]) for row in rows(run)] == [(0, 0)] * 4 + [(1, 1)] * 4
    assert all(torch.isfinite(value).all() for value in state_of(run, 8)[hit[1]].values())


def test_fault_22_on_one_rank_it_is_seen_by_all(by_two, run, fail_at):
    """Rank 1's NaN masks rank 0's update too: the weights stay equal, which is compared after every step."""
    fail_at("1:3:nan")
    by_two("--distributed.check-every", "1").success()
    assert rows(run)[-1]["nonfinite_updates"] == 1
    assert math.isfinite(rows(run)[-1]["loss/generator"])


def test_fault_22_what_the_loss_scaler_skips_is_told_apart(train_here, run, fail_at):
    """In fp16 an overflow lowers the scale, 65536 at first: no fault, and not counted as one."""
    fail_at("0:2:nan")
    train_here("classifier", "--precision", "fp16", "--nonfinite-cap", "0").success()
    last = rows(run)[-1]
    assert last["skipped_updates"] >= 1  # the one that was asked for, and real overflows
    assert last["nonfinite_updates"] == 0
    assert state_of(run, 8)["scaler"]["scale"] == 65536 / 2 ** last["skipped_updates"]


@pytest.mark.parametrize("task", ["classifier", "gan"])
def test_fault_28_out_of_memory(train_here, run, task, fail_at):
    """The message names batch, resolution and three settings; the last checkpoint is intact, the command goes on."""
    fail_at("0:5:oom")
    found = train_here(task)
    assert found.code == 4
    size = {"classifier": 20, "gan": 16}[task]
    found.error(
        f"memory ran out at step 5: batch_size {size} over 1 process, at most {size} samples of 16 px",
        "--micro-batch",
        "--precision bf16",
        "activation_checkpointing",
        "the same command resumes from the last checkpoint",
    )
    assert status(run, "state", "exit_code", "step") == ("failed", 4, 5)
    assert status(run)["reason"].startswith("memory ran out at step 5")
    fail_at("")
    assert "resumed at step 4 of 8" in train_here(task).success().err


def test_a_fault_of_ours_is_in_the_status(train_here, run, monkeypatch, slim):
    def step(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(ClassifierTask, "step", step)
    with pytest.raises(KeyError, match="ours"):
        train_here("classifier")
    assert status(run, "state", "exit_code", "step", "reason") == ("failed", 1, 0, "KeyError: 'ours'")


def test_fault_28_on_one_rank(by_two, run, fail_at):
    """The rank at fault tells it; the others leave, and the file of the run's state has its reason."""
    fail_at("1:5:oom")
    found = by_two()
    assert found.code == 4
    assert [line[:23] for line in found.err.splitlines() if "error" in line] == ["error on rank 1: memory"]
    assert "Traceback" not in found.err
    assert "rank 1 has left in step 5: TrainingHalted: memory ran out" in status(run)["reason"]


def test_ranks_that_drift_apart_are_found(by_two, fail_at):
    fail_at("1:4:unequal")
    found = by_two("--distributed.check-every", "2")
    assert found.code == 4
    found.error("no longer hold the same numbers after step 4", "generator on rank 1")


def test_what_is_compared(tmp_path):
    """Weights, averages, statistics, moments and numbers."""
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    network.register_buffer("w_avg", torch.zeros(3))
    updater = Updater(network, OptimizerConfig(name="adam"), Precision("fp32", torch.device("cpu")), 10)
    network(torch.ones(1, 1, 2, 2)).sum().backward()
    updater.step(0)
    parts = health.shared_tensors({"network": network, "optimizer": updater, "precision": updater.precision})
    assert {name: len(tensors) for name, tensors in parts.items() if name != "optimizer"} == {"network": 8}
    assert len(parts["optimizer"]) > 8  # two moments and a step of four parameters, and the rates
    assert torch.tensor(0.001, dtype=torch.float64) in [x for x in parts["optimizer"] if x.dtype == torch.float64]
    prints = collectives.fingerprints(parts, torch.device("cpu"))
    with torch.no_grad():
        next(network.parameters()).view(-1)[0] += 1e-7
    changed = collectives.fingerprints(parts, torch.device("cpu"))
    assert (prints != changed).tolist() == [True, False]


def test_what_ranks_do_beside_their_steps(monkeypatch):
    """The timeout of the start is in force until the first step has ended."""
    calls: list[Any] = []
    monkeypatch.setattr(collectives, "set_timeout", calls.append)
    monkeypatch.setattr(health, "check_equal", lambda *arguments: calls.append(arguments))
    config = SimpleNamespace(distributed=SimpleNamespace(timeout=7.0, start_timeout=99.0))
    task, heartbeat = SimpleNamespace(registry=lambda: "the task's"), SimpleNamespace(step=-1)
    loop: Any = SimpleNamespace(
        step=0, config=config, task=task, registry=lambda: "all", loader=SimpleNamespace(device="meta")
    )
    beat: Any = health.Beat(heartbeat)  # type: ignore[arg-type]
    callbacks = [health.FirstStep(), health.EqualWeights(3), beat]
    for step in range(7):
        for callback in callbacks:
            callback.before_step(loop)
        assert heartbeat.step == step
        loop.step += 1
        for callback in callbacks:
            callback.after_step(loop, {})
    assert calls == [7.0, ("the task's", 3, "meta"), ("the task's", 6, "meta")]


GONE, SILENT = (SimpleNamespace(rank=rank, reason=f"rank {rank} left", gone=rank != 3) for rank in (0, 3))


@pytest.mark.parametrize(
    ("rank", "missing", "launched", "reason", "reports", "quiet"),
    [
        (0, [], False, "the ranks lost touch with each other", True, False),
        (1, [], False, "the ranks lost touch with each other", False, True),
        (1, [GONE], False, "rank 0 left", True, False),
        (2, [GONE, SILENT], False, "rank 0 left; rank 3 left", False, True),
        (1, [GONE], True, "rank 0 left", True, True),  # the launcher tells of the processes that are gone
        (1, [GONE, SILENT], True, "rank 0 left; rank 3 left", True, False),
    ],
)
def test_the_lowest_rank_that_is_left_reports(tmp_path, monkeypatch, rank, missing, launched, reason, reports, quiet):
    monkeypatch.setattr(health.collectives, "rank", lambda: rank)
    monkeypatch.setattr(health.collectives, "world_size", lambda: 4)
    looked: list[Any] = []

    def silent(*given: Any, own_rank: int) -> Any:
        looked.append((*given, own_rank))
        return missing

    monkeypatch.setattr(health, "silent_ranks", silent)
    handled: list[Any] = []
    monkeypatch.setattr(health, "under_launcher", lambda: launched)
    monkeypatch.setattr(signal, "signal", lambda *given: handled.append(given))
    monkeypatch.delenv(LAUNCHED, raising=False)
    if launched:
        monkeypatch.setenv(LAUNCHED, "1")
    (tmp_path / "config.yaml").touch()
    error = RuntimeError("[/src/pair.cc:545] Connection closed\nmore")
    halted = health.lost_rank(RunFolder(tmp_path), 7, error)
    assert str(halted) == f"{reason} (Connection closed); {REMEDY}"
    assert (halted.rank_specific, halted.quiet, looked) == (reports, quiet, [(tmp_path, 4, rank)])
    assert handled == [(signal.SIGTERM, signal.SIG_IGN)] * launched  # torchrun would end this rank before it reports
    assert (tmp_path / "status.json").exists() == reports
    if reports:
        expected = ("failed", 7, str(halted), 4)
        assert status(tmp_path, "state", "step", "reason", "exit_code") == expected


@pytest.mark.parametrize("task", ["classifier", "gan"])
def test_deterministic_training_runs_on_this_device(train_here, run, tmp_path, task, fail_at):
    """With deterministic algorithms only the numbers are, on a CPU, those without."""
    try:
        train_here(task, "--deterministic", "true").success()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    train_here(task, run=tmp_path / "other").success()
    assert differing(state_of(run, 8), state_of(tmp_path / "other", 8)) == []


def test_an_operation_without_a_deterministic_form_is_explained(packed):
    config = build_run_config({"task": "gan", "data": {"path": str(packed / "train.lmdb")}}, [], "x")
    error = RuntimeError(
        "grid_sampler_2d_backward_cuda does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'."
    )
    told: Any = health.explain(error, config, 3, 16)
    assert "grid_sampler_2d_backward_cuda has no deterministic form" in told
    assert health.explain(RuntimeError("something else"), config, 3, 16) is None


def test_one_sample_at_a_batchnorm_is_explained(train_here):
    outcome = train_here("classifier", "--model.stem", "imagenet", "--micro-batch", "1")
    outcome.error("BatchNorm needs more than one value a channel; give a larger micro_batch")


def lines(errors: str) -> list[str]:
    """What is told of faults."""
    assert "Traceback" not in errors, errors
    return [line for line in errors.splitlines() if line.startswith(("error", "stopped"))]


def test_a_rank_killed_in_the_evaluation_of_a_training(gan_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv(inject.VARIABLE, "0:0:kill-in-pass")
    outcome = own_process(*gan_recipe, "--procs", "2")
    assert outcome.code == 4, outcome.err
    (line,) = lines(outcome.err)
    assert "rank 0 was ended by SIGKILL; the same command resumes" in line
    assert status(tmp_path / "run", "state", "exit_code", "step") == ("failed", 4, 4)
    monkeypatch.delenv(inject.VARIABLE)
    own_process(*gan_recipe, "--procs", "2", "--max-steps", "4").success()


def test_a_signal_ends_all_processes_of_evaluate(trained, tmp_path):
    process = start_python("evaluate.py", "--checkpoint", trained, "--out", tmp_path / "eval", "--procs", "2")
    status = Path(f"/proc/{process.pid}/status")
    while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) >> signal.SIGTERM - 1 & 1:
        time.sleep(0.02)  # until it obeys, which is before torch is imported
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert lines(errors) == [f"stopped: SIGTERM; {AGAIN}"]
