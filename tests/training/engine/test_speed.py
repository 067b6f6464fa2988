"""What `precision: auto` means and how long a run takes: measured in real steps, with no trace of it in the run."""

import gc
import math
import os
import random
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.compiled import Compiled
from duetgan.training.base.config import RunConfig
from duetgan.training.classifier import replica
from duetgan.training.classifier.resizing import side_at
from duetgan.training.engine import run, speed
from duetgan.training.engine.speed import (
    LONG,
    Trial,
    choose,
    forecast,
    measure_recipe,
    time_precisions,
    times,
)
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan import context
from duetgan.training.optim.updater import Precision
from duetgan.utils.config.recipes import STUDIES
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.machine import native_precision
from tests.conftest import REPOSITORY
from tests.end_to_end.helpers import TASKS, check_same, differing, state_of, train_in_process, write_config
from tests.faults.conftest import run_command

pytestmark = pytest.mark.usefixtures("slim")
CPU = torch.device("cpu")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}  # a laptop's: no units for bf16


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """The other tests fix what auto means."""
    monkeypatch.delenv(speed.FORCED, raising=False)


@pytest.fixture
def reader(packed):
    with Dataset(packed / "train.lmdb") as opened:
        yield opened


@pytest.fixture
def config_of(packed, tmp_path):
    """`config_of(task, ...options)`."""
    return lambda task, *more: recipe_config(write_config(tmp_path / f"{task}.yaml", task, packed), *more)


def recipe_config(file: Path, *overrides: str) -> RunConfig:
    return build_run_config(read_yaml(file), list(overrides), str(file))


@pytest.fixture
def chosen(config_of, reader):
    """`chosen(task, ...options)`: the choice of a run."""
    return lambda task, *options, device=CPU, **how: choose(config_of(task, *options), reader, device, **how)


@pytest.fixture
def faster(monkeypatch):
    """`faster("bf16")`: what is measured says so; `really`: after it was done. Returns what was compared."""
    real = speed.time_precisions

    def force(name: str, by: float = 2.0, *, really: bool = False) -> list[tuple[str, ...]]:
        compared: list[tuple[str, ...]] = []

        def race(config: RunConfig, world: int, reader: Dataset, device: torch.device, names: Any, **how: Any) -> Any:
            compared.append(tuple(names))
            _, seconds, more = real(config, world, reader, device, names, **how) if really else ({}, 0.01, False)
            return {other: 1.0 if other == name else by for other in names}, seconds, more

        monkeypatch.setattr(speed, "time_precisions", race)
        return compared

    return force


# --- the choice


@pytest.mark.parametrize(("name", "slower"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_auto_is_the_faster_on_cpus(chosen, faster, name, slower):
    compared = faster(name, by=1.25)
    assert chosen("classifier")[:4] == (name, f"{name} (auto: 1.25 times the speed of {slower})", 1.25, "")
    assert compared == [("fp32", "bf16")]


def test_the_environment_may_say_what_auto_means(chosen, faster, monkeypatch):
    compared = faster("bf16")
    assert chosen("gan", "--precision", "fp32")[:2] == ("fp32", "fp32")  # nothing to compare with
    monkeypatch.setenv(speed.FORCED, "bf16")
    assert chosen("gan")[:2] == ("bf16", "bf16 (auto: DUET_PRECISION says so)")
    assert chosen("gan", "--precision", "fp16")[:2] == ("fp16", "fp16")
    monkeypatch.delenv(speed.FORCED)
    assert chosen("gan", "--precision", "bf16")[:2] == ("bf16", "bf16")
    assert compared == []
    monkeypatch.setenv(speed.FORCED, "int8")
    with pytest.raises(UserError, match="DUET_PRECISION=int8: must be fp32, bf16 or fp16"):
        chosen("gan")


@pytest.mark.parametrize(("supported", "best"), [(True, "bf16"), (False, "fp16")])
def test_accelerators_take_what_is_native(chosen, monkeypatch, faster, supported, best):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    compared, gpu = faster("fp32"), torch.device("cuda", 0)
    assert chosen("gan", device=gpu)[:2] == (best, f"{best} (auto: native here)")
    assert native_precision(gpu) == best
    by_hand = chosen("gan", "--precision", "bf16", device=gpu)
    assert (by_hand.precision, "emulated" in by_hand.warning) == ("bf16", not supported)
    assert compared == []


def test_a_task_without_a_choice_is_in_fp32():
    precision = Precision("auto", CPU)
    assert (precision.name, precision.scaler.is_enabled()) == ("fp32", False)
    precision.switch("fp16")
    assert precision.autocast().fast_dtype == torch.float16
    assert precision.scaler.is_enabled()


# --- the measurement


class Clock:
    """Seconds a step that `Trial.seconds` is made to find, by precision and number of samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[Any, Any]) -> None:
        self.asked: list[tuple[str, int]] = []

        def found(trial: Trial, precision: str, step: int | None = None, *, limit: float = math.inf) -> float:
            self.asked.append((precision, trial.samples))
            taken = seconds[precision, trial.samples]
            if taken > limit:
                raise speed.TooSlow
            return taken

        monkeypatch.setattr(Trial, "seconds", found)


@pytest.mark.parametrize(
    ("task", "counts", "fp32", "bf16", "tries"),  # seconds of a step of few and of many samples; tries of few in bf16
    [
        ("classifier", (2, 20), (0.01, 0.1), (0.012, 0.08), 2),  # with few fp32 is ahead, at the run's 20 bf16
        ("classifier", (2, 8), (0.24, 0.96), (0.2, 0.8), 2),  # one step of 8 may last longer than 0.4 s, others not
        ("classifier", (2, 2), (2.8, 2.8), (2.7, 2.7), 2),  # too slow for a larger one
        ("gan", (4, 16), (0.1, 0.4), (1.0, None), 1),  # what is obviously slower is given up
    ],
    ids=["close", "slow", "slowest", "given-up"],
)
def test_candidates_are_compared_at_the_runs_batch(config_of, reader, monkeypatch, task, counts, fp32, bf16, tries):
    few, many = counts
    found = {("fp32", few): fp32[0], ("fp32", many): fp32[1], ("bf16", few): bf16[0], ("bf16", many): bf16[1]}
    clock = Clock(monkeypatch, found)
    each, image, more = time_precisions(config_of(task), 1, reader, CPU, ("fp32", "bf16"))
    slower = bf16[1] / many if bf16[1] else math.inf
    assert each == {"fp32": pytest.approx(fp32[1] / many), "bf16": pytest.approx(slower)}
    assert image == pytest.approx(min(each.values()))
    assert not more
    tried = [("fp32", few)] * 2 + [("bf16", few)] * tries
    tried += [(name, many) for name in ("fp32", "bf16") if found[name, many]] * speed.ROUNDS
    assert clock.asked[: len(tried)] == tried
    assert {samples for _, samples in clock.asked[len(tried) :]} <= {many}  # the other kinds of steps
    assert times(math.inf) == "more than 3 times"


def test_networks_that_take_too_long_are_not_compared(chosen, monkeypatch):
    Clock(monkeypatch, {("fp32", 4): 60.0})
    found = chosen("gan")
    assert found[:3] == ("fp32", "fp32 (auto: a step is too large to measure)", None)
    assert forecast(found, 3_200_000).startswith("more than 27.8 days here, at most 1.33 images/s; that is long")


def test_a_measurement_without_memory_is_no_failure(chosen, monkeypatch):
    def short(*_: Any, **__: Any) -> Any:
        raise raised

    monkeypatch.setattr(speed, "time_precisions", short)
    raised: Exception = MemoryError()
    found = chosen("gan")
    assert (found.precision in ("fp32", "bf16"), forecast(found, 10**6)) == (True, "")
    raised = RuntimeError("another fault")
    with pytest.raises(RuntimeError, match="another fault"):
        chosen("gan")


def test_a_step_ends_at_its_limit(config_of, reader):
    trial = Trial(config_of("gan"), 4, reader, CPU)
    with pytest.raises(speed.TooSlow):
        trial.seconds("fp32", limit=1e-6)
    assert 0 < trial.seconds("bf16", limit=100) < 100  # and the next is a step like others


def test_typical_steps_are_of_every_kind(config_of, reader):
    """R1 every 16 steps, path lengths every 4: 12 plain steps, 3 with path lengths, 1 with both; of 9, and of 10 from
    the step 8 on.
    """
    config = config_of("gan", "--loss.path_length_weight", "2", "--loss.r1_interval", "16")
    assert Trial(config, 4, reader, CPU).step_fractions == {9: 12 / 16, 8: 3 / 16, 16: 1 / 16}
    assert Trial(config_of("classifier"), 4, reader, CPU).step_fractions == {8: 1.0}


@pytest.mark.parametrize("task", ["gan", "classifier"])
def test_a_trial_is_compiled_where_that_is_asked_for(config_of, reader, monkeypatch, task):
    """Whatever the run's own setting: what is measured as compiled was compiled."""
    made: list[bool] = []

    def spied(function: Any, name: str, *, setting: str, device: torch.device) -> Compiled:
        made.append(setting == "on")
        return Compiled(function, name, setting="off", device=device)

    for user in (context, replica):
        monkeypatch.setattr(user, "Compiled", spied)
    for setting, compiled in (("on", False), ("off", True)):
        made.clear()
        Trial(config_of(task, "--compile", setting), 4, reader, CPU, compiled).seconds("fp32")
        assert set(made) == {compiled}


@pytest.mark.parametrize(
    ("tries", "threads", "seconds"),
    [
        ({2: [0.9, 0.4], 1: [0.9, 0.9]}, 2, 0.4),  # a disturbed first try is repeated
        ({2: [9.0, 8.0]}, 4, 1.0),
    ],
)
def test_threads_are_halved_as_long_as_a_step_is_faster(tries, threads, seconds, monkeypatch):
    counts = [4]
    monkeypatch.setattr("torch.get_num_threads", lambda: counts[-1])
    monkeypatch.setattr("torch.set_num_threads", counts.append)
    trial: Any = SimpleNamespace(seconds=lambda _: tries[counts[-1]].pop(0))
    assert (speed._halve_threads(trial, "fp32", 1.0), counts[-1]) == (seconds, threads)
    assert not any(tries.values())


RECIPES = sorted(path for path in REPOSITORY.glob("configs/*.yaml") if not path.name.startswith(STUDIES))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_tried(recipe):
    """Its smallest batch divides a forward pass's; precision is fixed only where the recipe says why."""
    config = recipe_config(recipe)
    assert config.micro(1) % config.smallest_batch == 0
    trial = config.for_trial(config.smallest_batch)
    assert (trial.batch_size, trial.micro(1), trial.init_from) == (*[config.smallest_batch] * 2, None)
    line = next((line for line in recipe.read_text().splitlines() if line.startswith("precision:")), "precision: auto")
    assert config.precision == "auto" or "#" in line


@pytest.mark.parametrize("task", ["classifier", pytest.param("gan", marks=pytest.mark.slow)])
def test_nothing_is_left_of_it(chosen, task, monkeypatch):
    """No random number is used up, no setting changed, and the networks are gone."""
    made: list[weakref.ref[Any]] = []
    real = Trial.__init__

    def noted(trial: Trial, *arguments: Any) -> None:
        real(trial, *arguments)
        made.extend(weakref.ref(part) for part in trial.task.registry().values() if isinstance(part, torch.nn.Module))

    def settings() -> list[Any]:
        draws = (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate())
        backends = (torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled())
        return [*draws, *backends, torch.get_num_threads(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()]

    monkeypatch.setattr(Trial, "__init__", noted)
    before = settings()
    found = chosen(task)
    assert settings() == before
    assert (found.precision in ("fp32", "bf16"), found.ratio >= 1) == (True, True)
    gc.collect()
    assert made
    assert [part() for part in made if part() is not None] == []


# --- how long a run takes


@pytest.fixture
def takes(chosen, monkeypatch):
    """`takes(task, seconds, images, ...options)`: the plan's time where a step takes `seconds(trial, step)`."""

    def told(task: str, seconds: Any, images: int, *options: str) -> str:
        monkeypatch.setattr(Trial, "seconds", lambda trial, _, step=None, **__: seconds(trial, step))
        return forecast(chosen(task, "--precision", "fp32", *options, always=True), images)

    return told


@pytest.mark.parametrize("task", TASKS)
def test_time_is_images_by_speed(takes, task):
    """U1: a month on a CPU was printed without a comment."""

    def told(images, seconds=0.01):
        return takes(task, lambda trial, _: seconds * trial.samples, images)

    assert told(360_000) == "about 60 min here, 100 images/s"
    text = told(8_640_000, 0.1)
    assert text.startswith("about 10.0 days here, 10 images/s; that is long: recipes named cpu are smaller")
    assert "quickstart.py FOLDER --minutes N" in text
    assert [";" in told(round(LONG / 0.01) + more) for more in (0, 100)] == [False, True]


@pytest.mark.parametrize("task", TASKS)
def test_time_counts_every_step_as_what_it_is(takes, task):
    """A classifier's smaller images, a GAN's lazy penalties: R1 every third step takes twice as long here."""

    def of_a_sample(config: Any, step: int, steps: int) -> float:
        if task == "gan":
            return 0.01 * (1 + config.loss.penalty_due(step))
        return 0.01 * (side_at(config.resizing, step, steps, 16) / 16) ** 2

    def seconds(trial: Any, step: int | None) -> float:
        config, step = trial.task.config, next(iter(trial.step_fractions)) if step is None else step
        configs.append(config)
        return trial.samples * of_a_sample(config, step, config.steps)

    configs: list[Any] = []
    more = ["--resizing.initial_scale", "0.5"] if task == "classifier" else []
    plan = takes(task, seconds, 360_000, "--steps", "900", *more)
    told: Any = re.fullmatch(r"about (\d+) min here, (\d+) images/s", plan)
    expected = sum(of_a_sample(configs[-1], step, 900) for step in range(900)) / 900
    assert int(told[1]) == pytest.approx(360_000 * expected / 60, rel=0.02)
    assert int(told[2]) == pytest.approx(1 / expected, rel=0.02)
    assert not 0.008 < expected < 0.012  # neither is what a step of one kind says


@pytest.mark.parametrize(
    ("once", "micro", "told", "most"),
    [(0.2, "2000", "35 min", 600), (0.2, "10", "35 min", 10), (2.0, "2000", "50 min", 8), (2.6, "2000", "55 min", 2)],
)
def test_what_comes_once_a_step_counts_once(takes, once, micro, told, most):
    """airbench: Muon takes longer than the first small batches, and was counted for each of them. A larger batch might
    take four times as long as the smallest: the plan would be waited for.
    """
    tried = []

    def seconds(trial: Any, _step: int | None) -> float:
        tried.append(trial.samples)
        return once + 0.002 * trial.samples

    text = takes("classifier", seconds, 1_000_000, "--batch-size", "2000", "--micro-batch", micro)
    assert text.startswith(f"about {told} here, ") is (most != 2)
    assert max(tried) <= most


def test_short_trainings_and_accelerators_are_not_measured(chosen, monkeypatch):
    monkeypatch.setattr(speed, "Trial", lambda *_: pytest.fail("measured"))
    for steps, how in ((10, {}), (10**6, {"device": torch.device("cuda")}), (10**6, {"already_chosen": True})):
        assert forecast(chosen("gan", "--precision", "fp32", "--steps", str(steps), **how), 10**6) == ""


@pytest.mark.parametrize("task", ["classifier", pytest.param("gan", marks=pytest.mark.slow)])
def test_plan_has_the_time_and_the_run_no_trace_of_it(packed, tmp_path, monkeypatch, capfd, task):
    recipe = write_config(tmp_path / f"{task}.yaml", task, packed)
    states = []
    for name, least in (("without", 20_000), ("with", 1)):
        monkeypatch.setattr(speed, "MIN_FORECAST_IMAGES", least)
        assert train_in_process(recipe, tmp_path / name, "--max-steps", "4", "--precision", "fp32") == 0
        told = re.search(r"^ *time +about \d+ s here, [\d,.e+]+ images/s$", capfd.readouterr().err, re.MULTILINE)
        assert (told is not None) is (name == "with")
        states.append(state_of(tmp_path / name, 4))
    assert differing(states[0], states[1]) == []


# --- the run


@pytest.mark.parametrize(
    ("task", "name"), [pytest.param("gan", "fp32", marks=pytest.mark.slow), ("classifier", "bf16")]
)
def test_auto_trains_what_the_same_precision_by_hand_does(packed, tmp_path, faster, task, name, capsys):
    config, last = write_config(tmp_path / "recipe.yaml", task, packed), ["--max-steps", "4"]
    compared = faster(name, really=True)
    assert train_in_process(config, tmp_path / "auto", *last) == 0
    assert f"{name} (auto: 2 times the speed of" in capsys.readouterr().err
    assert len(compared) == 1
    os.environ[speed.FORCED] = "fp32"  # the fixture takes it back: by hand nothing is measured
    assert train_in_process(config, tmp_path / "hand", *last, "--precision", name) == 0
    check_same(tmp_path / "auto", tmp_path / "hand", 4)
    assert read_yaml(tmp_path / "auto" / "config.yaml") == read_yaml(tmp_path / "hand" / "config.yaml")
    assert read_yaml(tmp_path / "auto" / "config.yaml")["precision"] == name


@pytest.mark.parametrize("task", ["classifier", pytest.param("gan", marks=pytest.mark.slow)])
def test_a_run_goes_on_in_its_precision_on_another_machine(packed, tmp_path, faster, task, capsys):
    """The other machine's measurement would choose fp32: it is not made, and the run stays in bf16 to the bit."""
    config = write_config(tmp_path / "recipe.yaml", task, packed)
    faster("bf16")
    assert train_in_process(config, tmp_path / "straight", "--max-steps", "6") == 0
    assert train_in_process(config, tmp_path / "resumed", "--max-steps", "2") == 0
    capsys.readouterr()
    compared = faster("fp32", by=8.0)
    assert train_in_process(config, tmp_path / "resumed", "--max-steps", "6") == 0
    told = capsys.readouterr().err
    assert "bf16 (kept: the run began in it)" in told
    assert "config changed" not in told
    assert compared == []
    check_same(tmp_path / "straight", tmp_path / "resumed", 6)
    assert read_yaml(tmp_path / "resumed" / "config.yaml")["precision"] == "bf16"
    assert train_in_process(config, tmp_path / "resumed", "--max-steps", "7", "--precision", "fp32") == 0
    assert "precision was 'bf16', is 'fp32'" in capsys.readouterr().err


def test_rank_0_measures_and_all_agree(packed, tmp_path):
    """The ranks compare their weights after every step."""
    config, run = write_config(tmp_path / "recipe.yaml", "gan", packed), tmp_path / "run"
    options = ["--device", "cpu", "--procs", "2", "--max-steps", "3", "--distributed.check_every", "1"]
    found = run_command("train.py", "--config", config, "--run-dir", run, *options).success()
    name = read_yaml(tmp_path / "run" / "config.yaml")["precision"]
    assert found.err.count(f"{name} (auto: ") == 1


@pytest.mark.parametrize("deterministic", [True, False])
def test_accelerators_search_the_fastest_convolutions(deterministic, monkeypatch, config_of):
    """N5: unless the run is to be deterministic."""
    cudnn = torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled())
    monkeypatch.setattr(collectives, "choose_device", lambda *_, **__: torch.device("meta"))
    config = config_of("gan").changed(deterministic=deterministic)
    try:
        assert run._start_process(config, None) == torch.device("meta")
        assert cudnn.benchmark == (not deterministic)
    finally:
        cudnn.benchmark, cudnn.deterministic = before[:2]
        torch.use_deterministic_algorithms(before[2])


# --- other machines


SLOW_BF16 = """
import sys, torch
from duetgan.training.engine.speed import measure_recipe
found = measure_recipe(sys.argv[1], sys.argv[2:], device="cpu")
print(torch.backends.cpu.get_cpu_capability(), found.precision, found.ratio)
"""


@pytest.mark.slow
def test_without_units_for_bf16_auto_is_fp32(packed):
    """U2: the quickstart's GAN at 16 px on a laptop's instruction set."""
    command = [sys.executable, "-c", SLOW_BF16, "configs/quickstart_gan.yaml", f"--data.path={packed}/train.lmdb"]
    environment = os.environ | AVX2 | {"OMP_NUM_THREADS": "1"}  # set before torch is imported
    found = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    capability, precision, ratio = found.stdout.split()
    if capability != "AVX2":
        pytest.skip(f"this CPU takes no orders: {capability}")
    assert precision == "fp32"
    assert float(ratio) > 1.5


def test_a_recipes_speed(packed, tmp_path, faster):
    faster("bf16", by=1.5, really=True)
    recipe = str(write_config(tmp_path / "gan.yaml", "gan", packed))
    found = measure_recipe(recipe, ["--batch_size", "8"], device="cpu")
    assert (found.precision, found.ratio) == ("bf16", 1.5)
    assert found.images_per_second > 0
    assert measure_recipe(recipe, ["--precision", "fp32"], device="cpu").ratio is None
    with pytest.raises(UserError, match="no such"):
        measure_recipe(recipe, ["--data.path", str(tmp_path / "nothing.lmdb")])
