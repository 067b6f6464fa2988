"""What `precision: auto` means: chosen by real steps, kept by the run, and no trace of the measurement in it."""

import dataclasses
import gc
import math
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.reading.dataset import Dataset
from tests.conftest import REPOSITORY
from tests.end_to_end.helpers import TASKS, differing, rows, state_of, train_in_process, write_config
from training.base.config import RunConfig
from training.engine import run, speed
from training.engine.speed import Choice, Trial, choose, convolution_seconds, measure_recipe, native, race, times
from training.engine.tasks import build_run_config
from training.optim.updater import Precision
from utils.config.recipes import STUDIES
from utils.config.yaml_files import read_yaml
from utils.distributed import collectives
from utils.errors import UserError

pytestmark = pytest.mark.usefixtures("slim")
CPU = torch.device("cpu")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}  # a laptop's: no units for bf16


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests fix what auto means."""
    monkeypatch.delenv(speed.FORCED, raising=False)


@pytest.fixture
def reader(packed: Path):
    with Dataset(packed / "train.lmdb") as opened:
        yield opened


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, ...]]]:
    """`faster("bf16")`: the measurement is done, and then says so, whatever it found. Returns what it compared."""
    real = speed.race

    def force(name: str, by: float = 2.0) -> list[tuple[str, ...]]:
        compared: list[tuple[str, ...]] = []

        def race(config: RunConfig, samples: int, reader: Dataset, device: torch.device, names: Any) -> Any:
            compared.append(tuple(names))
            real(config, samples, reader, device, names)
            return {other: 1.0 if other == name else by for other in names}

        monkeypatch.setattr(speed, "race", race)
        return compared

    return force


def config_of(packed: Path, task: str, tmp_path: Path, *overrides: str) -> RunConfig:
    recipe = write_config(tmp_path / f"{task}.yaml", task, packed)
    return build_run_config(read_yaml(recipe), list(overrides), str(recipe))


# --- the choice


def test_auto_is_the_default() -> None:
    assert {RunConfig(task="gan").precision, build_run_config({"task": "classifier"}, [], "").precision} == {"auto"}


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_auto_is_the_faster_on_cpus(packed: Path, tmp_path: Path, reader: Dataset, faster: Any, name: str) -> None:
    compared = faster(name, by=1.25)
    slower = {"fp32": "bf16", "bf16": "fp32"}[name]
    found = choose(config_of(packed, "classifier", tmp_path), reader, CPU)
    assert found == Choice(name, f"{name} (auto: 1.25 times the speed of {slower})", 1.25)  # type: ignore[arg-type]
    assert compared == [("fp32", "bf16")]


@pytest.mark.parametrize("given", ["bf16", "fp16"])
@pytest.mark.parametrize(("by", "warned"), [(8.0, True), (math.inf, True), (1.05, False), (0.5, False)])
def test_a_slower_one_by_hand_is_taken_with_a_warning(
    packed: Path, tmp_path: Path, reader: Dataset, faster: Any, given: str, by: float, warned: bool
) -> None:
    compared = faster("fp32", by=by)
    found = choose(config_of(packed, "gan", tmp_path, "--precision", given), reader, CPU)
    assert (found.precision, found.text, found.ratio) == (given, given, 1 / by)
    assert compared == [("fp32", given)]
    told = f"fp32 trains at {times(by)} the speed of {given} on this CPU; take --precision auto"
    assert found.warning == (told if warned else "")


def test_fp32_by_hand_is_not_measured(packed: Path, tmp_path: Path, reader: Dataset, faster: Any) -> None:
    compared = faster("bf16")
    assert choose(config_of(packed, "gan", tmp_path, "--precision", "fp32"), reader, CPU) == Choice("fp32", "fp32")
    assert compared == []


def test_the_environment_may_say_what_auto_means(
    packed: Path, tmp_path: Path, reader: Dataset, faster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = faster("fp32")
    monkeypatch.setenv(speed.FORCED, "bf16")
    found = choose(config_of(packed, "gan", tmp_path), reader, CPU)
    assert (found.precision, found.text) == ("bf16", "bf16 (auto: DUET_PRECISION says so)")
    found = choose(config_of(packed, "gan", tmp_path, "--precision", "fp16"), reader, CPU)
    assert (found.precision, found.warning, compared) == ("fp16", "", [])
    monkeypatch.setenv(speed.FORCED, "int8")
    with pytest.raises(UserError, match="DUET_PRECISION=int8: must be fp32, bf16 or fp16"):
        choose(config_of(packed, "gan", tmp_path), reader, CPU)


@pytest.mark.parametrize(("supported", "best"), [(True, "bf16"), (False, "fp16")])
def test_accelerators_take_what_is_native(
    packed: Path,
    tmp_path: Path,
    reader: Dataset,
    monkeypatch: pytest.MonkeyPatch,
    faster: Any,
    supported: bool,
    best: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    compared, gpu = faster("fp32"), torch.device("cuda", 0)
    found = choose(config_of(packed, "gan", tmp_path), reader, gpu)
    assert (found.precision, found.text, native(gpu)) == (best, f"{best} (auto: native here)", best)
    found = choose(config_of(packed, "gan", tmp_path, "--precision", "bf16"), reader, gpu)
    assert (found.precision, "emulated" in found.warning) == ("bf16", not supported)
    assert compared == []


def test_a_task_without_a_choice_is_in_fp32() -> None:
    precision = Precision("auto", CPU)
    assert (precision.name, precision.scaler.is_enabled()) == ("fp32", False)
    precision.switch("fp16")
    assert precision.autocast().fast_dtype == torch.float16
    assert precision.scaler.is_enabled()


# --- the measurement


class Clock:
    """Seconds a step that `Trial.seconds` is made to find, by precision and number of samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[str, int], float]) -> None:
        self.asked: list[tuple[str, int]] = []

        def found(trial: Trial, precision: str, step: int | None = None, *, limit: float = math.inf) -> float:
            self.asked.append((precision, trial.samples))
            taken = seconds[precision, trial.samples]
            if taken > limit:
                raise speed.TooSlow
            return taken

        monkeypatch.setattr(Trial, "seconds", found)


def raced(config: RunConfig, reader: Dataset) -> dict[Any, float]:
    return race(config, config.micro(1), reader, CPU, ("fp32", "bf16"))


def test_close_candidates_are_compared_at_the_runs_batch(
    packed: Path, tmp_path: Path, reader: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few samples fp32 is ahead, at the run's 20 bf16."""
    seconds = {("fp32", 2): 0.01, ("bf16", 2): 0.012, ("fp32", 20): 0.1, ("bf16", 20): 0.08}
    clock = Clock(monkeypatch, seconds)
    assert raced(config_of(packed, "classifier", tmp_path), reader) == {"fp32": 0.005, "bf16": 0.004}
    alternating = [("fp32", 20), ("bf16", 20)] * (1 + speed.ROUNDS)
    assert clock.asked == [("fp32", 2)] * 4 + [("bf16", 2)] * 4 + alternating


def test_slow_steps_are_of_fewer_samples(
    packed: Path, tmp_path: Path, reader: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.06 s an image: a step of 6 lasts at most 0.4 s."""
    seconds = {("fp32", 2): 0.12, ("bf16", 2): 0.13, ("fp32", 6): 0.36, ("bf16", 6): 0.3}
    Clock(monkeypatch, seconds)
    assert raced(config_of(packed, "classifier", tmp_path), reader) == pytest.approx({"fp32": 0.06, "bf16": 0.05})


def test_what_is_obviously_slower_is_given_up(
    packed: Path, tmp_path: Path, reader: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, {("fp32", 4): 0.1, ("bf16", 4): 1.0})
    assert raced(config_of(packed, "gan", tmp_path), reader) == {"fp32": 0.025, "bf16": math.inf}
    assert clock.asked == [("fp32", 4)] * 4 + [("bf16", 4)]
    clock = Clock(monkeypatch, {("fp32", 4): 0.01, ("bf16", 4): 0.12})
    assert raced(config_of(packed, "gan", tmp_path), reader) == {"fp32": 0.0025, "bf16": 0.03}
    assert {samples for _, samples in clock.asked} == {4}
    assert times(math.inf) == "more than 3 times"


def test_networks_that_take_too_long_are_judged_by_a_convolution(
    packed: Path, tmp_path: Path, reader: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, {("fp32", 4): 60.0})
    convolution = {"fp32": 0.02, "bf16": 0.01, "fp16": 0.1}
    monkeypatch.setattr(speed, "convolution_seconds", lambda name, _: convolution[name])
    found = choose(config_of(packed, "gan", tmp_path), reader, CPU)
    assert found == Choice("bf16", "bf16 (auto: 2 times the speed of fp32, by a convolution)", 2.0)
    found = choose(config_of(packed, "gan", tmp_path, "--precision", "fp16"), reader, CPU)
    assert found.warning.startswith("fp32 trains at 5 times the speed of fp16 on this CPU, by a convolution; take")
    assert 0 < convolution_seconds("fp16", CPU) < 60


def test_a_measurement_without_memory_is_no_failure(
    packed: Path, tmp_path: Path, reader: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any) -> Any:
        raise raised

    monkeypatch.setattr(speed, "race", short)
    config = config_of(packed, "gan", tmp_path)
    raised: Exception = MemoryError()
    assert choose(config, reader, CPU).precision in ("fp32", "bf16")
    raised = RuntimeError("another fault")
    with pytest.raises(RuntimeError, match="another fault"):
        choose(config, reader, CPU)


def test_a_step_ends_at_its_limit(packed: Path, tmp_path: Path, reader: Dataset) -> None:
    trial = Trial(config_of(packed, "gan", tmp_path), 4, reader, CPU)
    with pytest.raises(speed.TooSlow):
        trial.seconds("fp32", limit=1e-6)
    assert 0 < trial.seconds("bf16", limit=100) < 100  # and the next is a step like others


def test_typical_steps_are_of_every_kind(packed: Path, tmp_path: Path, reader: Dataset) -> None:
    """R1 every 16 steps, path lengths every 4: 12 plain steps, 3 with path lengths, 1 with both; of 9, and of 10 from
    the step 8 on.
    """
    options = ["--loss.path_length_weight", "2", "--loss.r1_interval", "16"]
    trial = Trial(config_of(packed, "gan", tmp_path, *options), 4, reader, CPU)
    assert trial.shares == {9: 12 / 16, 8: 3 / 16, 16: 1 / 16}
    assert Trial(config_of(packed, "classifier", tmp_path), 4, reader, CPU).shares == {8: 1.0}
    assert trial.mean_seconds("fp32") > 0


RECIPES = sorted(path for path in REPOSITORY.glob("configs/*.yaml") if not path.name.startswith(STUDIES))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_tried(recipe: Path) -> None:
    """Its smallest batch divides a forward pass's; precision is fixed only where the recipe says why."""
    config = build_run_config(read_yaml(recipe), [], str(recipe))
    assert config.micro(1) % config.smallest_batch == 0
    trial = config.for_trial(config.smallest_batch)
    assert (trial.batch_size, trial.micro_batch, trial.init_from) == (config.smallest_batch, None, None)
    line = next((line for line in recipe.read_text().splitlines() if line.startswith("precision:")), "precision: auto")
    assert config.precision == "auto" or "#" in line


@pytest.mark.parametrize("task", TASKS)
def test_nothing_is_left_of_it(
    packed: Path, tmp_path: Path, reader: Dataset, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No random number is used up, no setting changed, and the networks are gone."""
    made: list[weakref.ref[Any]] = []
    real = Trial.__init__

    def noted(trial: Trial, *arguments: Any) -> None:
        real(trial, *arguments)
        made.extend(weakref.ref(part) for part in trial.task.registry().values() if isinstance(part, torch.nn.Module))

    def settings() -> list[Any]:
        backends = (torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled())
        return [*backends, torch.get_num_threads(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()]

    monkeypatch.setattr(Trial, "__init__", noted)
    config = config_of(packed, task, tmp_path)
    before = (torch.get_rng_state(), str(np.random.get_state()), random.getstate(), settings())
    found = choose(config, reader, CPU)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (str(np.random.get_state()), random.getstate(), settings()) == before[1:]
    assert found.precision in ("fp32", "bf16")
    assert found.ratio is not None
    assert found.ratio >= 1
    gc.collect()
    assert made
    assert [part() for part in made if part() is not None] == []


# --- the run


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("task", TASKS)
def test_auto_trains_what_the_same_precision_by_hand_does(
    packed: Path, tmp_path: Path, faster: Any, task: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, last = write_config(tmp_path / "recipe.yaml", task, packed), ["--max-steps", "4"]
    compared = faster(name)
    assert train_in_process(config, tmp_path / "auto", *last) == 0
    assert f"{name} (auto: 2 times the speed of" in capsys.readouterr().err
    assert len(compared) == 1
    os.environ[speed.FORCED] = "fp32"  # the fixture takes it back: by hand nothing is measured
    assert train_in_process(config, tmp_path / "hand", *last, "--precision", name) == 0
    assert differing(state_of(tmp_path / "auto", 4), state_of(tmp_path / "hand", 4)) == []
    assert rows(tmp_path / "auto") == rows(tmp_path / "hand")
    assert read_yaml(tmp_path / "auto" / "config.yaml") == read_yaml(tmp_path / "hand" / "config.yaml")
    assert read_yaml(tmp_path / "auto" / "config.yaml")["precision"] == name


@pytest.mark.parametrize("task", TASKS)
def test_a_run_goes_on_in_its_precision_on_another_machine(
    packed: Path, tmp_path: Path, faster: Any, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other machine's measurement would choose fp32: the run stays in bf16 to the bit, and says what that costs."""
    config = write_config(tmp_path / "recipe.yaml", task, packed)
    faster("bf16")
    assert train_in_process(config, tmp_path / "straight", "--max-steps", "6") == 0
    assert train_in_process(config, tmp_path / "resumed", "--max-steps", "2") == 0
    capsys.readouterr()
    faster("fp32", by=8.0)
    assert train_in_process(config, tmp_path / "resumed", "--max-steps", "6") == 0
    told = capsys.readouterr().err
    assert "bf16 (kept: the run began in it)" in told
    assert told.count("warning: fp32 trains at 8 times the speed of bf16") == 1
    assert "--precision fp32 goes on in it, but no longer bit for bit" in told
    assert "config changed" not in told
    assert differing(state_of(tmp_path / "straight", 6), state_of(tmp_path / "resumed", 6)) == []
    assert rows(tmp_path / "straight") == rows(tmp_path / "resumed")
    assert read_yaml(tmp_path / "resumed" / "config.yaml")["precision"] == "bf16"
    assert train_in_process(config, tmp_path / "resumed", "--max-steps", "7", "--precision", "fp32") == 0
    assert "precision was 'bf16', is 'fp32'" in capsys.readouterr().err


def test_rank_0_measures_and_all_agree(packed: Path, tmp_path: Path) -> None:
    """The ranks compare their weights after every step."""
    config = write_config(tmp_path / "recipe.yaml", "gan", packed)
    environment = {key: value for key, value in os.environ.items() if key != speed.FORCED}
    options = ["--procs", "2", "--max-steps", "3", "--distributed.check_every", "1"]
    command = [sys.executable, "train.py", "--config", str(config), "--run-dir", str(tmp_path / "run"), *options]
    found = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    name = read_yaml(tmp_path / "run" / "config.yaml")["precision"]
    assert found.stderr.count(f"{name} (auto: ") == 1


def test_alone_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with collectives.alone():
        assert (collectives.rank(), collectives.world_size(), collectives.is_main()) == (0, 1, True)
        assert torch.equal(collectives.all_reduce_sum_(torch.ones(2)), torch.ones(2))
    assert (collectives.rank(), collectives.world_size()) == (1, 4)


@pytest.mark.parametrize("deterministic", [True, False])
def test_accelerators_search_the_fastest_convolutions(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch, packed: Path, tmp_path: Path
) -> None:
    """N5: unless the run is to be deterministic."""
    cudnn = torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled())
    monkeypatch.setattr(collectives, "choose_device", lambda *_, **__: torch.device("meta"))
    config = dataclasses.replace(config_of(packed, "gan", tmp_path), deterministic=deterministic)
    try:
        assert run._start_process(config, None) == torch.device("meta")
        assert cudnn.benchmark == (not deterministic)
    finally:
        cudnn.benchmark, cudnn.deterministic = before[:2]
        torch.use_deterministic_algorithms(before[2])


# --- other machines


SLOW_BF16 = """
import sys, torch
from training.engine.speed import measure_recipe
print(torch.backends.cpu.get_cpu_capability(), *measure_recipe(sys.argv[1], sys.argv[2:], device="cpu"))
"""


def test_without_units_for_bf16_auto_is_fp32(packed: Path, tmp_path: Path) -> None:
    """U2: the quickstart's GAN at 16 px on a laptop's instruction set."""
    environment = {**os.environ, **AVX2, "OMP_NUM_THREADS": "1"}
    environment.pop(speed.FORCED, None)
    images = str(packed / "train.lmdb")
    command = [sys.executable, "-c", SLOW_BF16, "configs/quickstart_gan.yaml", "--data.path", images]
    found = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    capability, precision, rate, ratio = found.stdout.split()
    if capability != "AVX2":
        pytest.skip(f"this CPU takes no orders: {capability}")
    assert precision == "fp32"
    assert float(ratio) > 1.5
    assert float(rate) > 0


def test_a_recipes_speed(packed: Path, tmp_path: Path, faster: Any) -> None:
    faster("bf16", by=1.5)
    recipe = str(write_config(tmp_path / "gan.yaml", "gan", packed))
    found = measure_recipe(recipe, ["--batch_size", "8"], device="cpu")
    assert (found.precision, found.ratio) == ("bf16", 1.5)
    assert found.images_per_second > 0
    assert measure_recipe(recipe, ["--precision", "fp32"], device="cpu").ratio is None
    with pytest.raises(UserError, match="no such"):
        measure_recipe(recipe, ["--data.path", str(tmp_path / "nothing.lmdb")])
