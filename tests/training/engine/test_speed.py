"""The speed of a recipe, by real steps of a task of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.compiled import Compiled
from duetgan.training.base.config import EvaluationConfig, RunConfig
from duetgan.training.classifier import replica
from duetgan.training.engine import speed
from duetgan.training.engine.hardware import NATIVE
from duetgan.training.engine.speed import Trial, measure_recipe, seconds_per_image
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan import context
from duetgan.training.gan.config import GanConfig
from duetgan.utils.config.recipes import STUDIES
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from tests.conftest import REPOSITORY, assert_raises
from tests.end_to_end.helpers import write_config

pytestmark = pytest.mark.usefixtures("slim")
CPU = torch.device("cpu")


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


def test_typical_steps_are_of_every_kind(config_of, reader):
    """R1 every 16 steps, path lengths every 4: 12 plain steps, 3 with path lengths, 1 with both; of 9, and of 10 from
    the step 8 on.
    """
    config = config_of("gan", "--loss.path_length_weight", "2", "--loss.r1_interval", "16")
    assert Trial(config, 4, reader, CPU).step_fractions == {9: 12 / 16, 8: 3 / 16, 16: 1 / 16}
    assert Trial(config_of("classifier"), 4, reader, CPU).step_fractions == {8: 1.0}
    split = config_of("classifier", "--model.split", "auto")
    assert (split.several_devices, split.for_trial(4).several_devices) == (True, False)


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


RECIPES = sorted(path for path in REPOSITORY.glob("configs/*.yaml") if not path.name.startswith(STUDIES))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_tried(recipe):
    """Its smallest batch divides a forward pass's; precision is fixed only where the recipe says why."""
    config = recipe_config(recipe)
    assert config.micro(1) % config.smallest_batch == 0
    trial = config.for_trial(config.smallest_batch)
    assert (trial.batch_size, trial.micro(1), trial.init_from) == (*[config.smallest_batch] * 2, None)
    assert not isinstance(trial, GanConfig) or trial.progressive.start is None
    assert (trial.steps, trial.evaluation) == (config.steps + 1000, EvaluationConfig())
    assert getattr(vars(trial).get("model"), "weights", None) is None
    line = next((line for line in recipe.read_text().splitlines() if line.startswith("precision:")), "precision: auto")
    assert config.precision == "auto" or "#" in line


def test_time_counts_every_step_as_what_it_is(config_of, reader, monkeypatch):
    """A GAN's lazy penalties: R1 every third step takes twice as long here."""
    config = config_of("gan", "--loss.r1_interval", "3", "--steps", "900")

    def seconds(trial: Any, _precision: str, step: int | None = None) -> float:
        step = next(iter(trial.step_fractions)) if step is None else step
        return 0.01 * trial.samples * (1 + trial.task.config.loss.penalty_due(step))

    monkeypatch.setattr(Trial, "seconds", seconds)
    assert seconds_per_image(config, reader, CPU) == pytest.approx(0.04 / 3, rel=0.02)


@pytest.mark.parametrize(
    ("once", "micro", "most"), [(0.2, "2000", 8), (0.01, "2000", 56), (0.01, "10", 10), (2.0, "2000", 8), (2.6, "9", 2)]
)
def test_what_comes_once_a_step_counts_once(config_of, reader, monkeypatch, once, micro, most):
    """airbench: Muon takes longer than the first small batches, and was counted for each of them. A larger batch might
    take four times as long as the smallest: the plan would be waited for.
    """
    tried, precisions = [], set[str]()

    def seconds(trial: Any, precision: str, _step: int | None = None) -> float:
        tried.append(trial.samples)
        precisions.add(precision)
        return once + 0.002 * trial.samples

    monkeypatch.setattr(Trial, "seconds", seconds)
    config = config_of("classifier", "--batch-size", "2000", "--micro-batch", micro, "--precision", "bf16")
    found = seconds_per_image(config, reader, CPU)
    if most > 2:
        assert found == pytest.approx((once + 0.002 * 2000) / 2000)
    assert tried == [2] * 2 + [most] * 3
    assert precisions == {"bf16"}


def test_a_recipes_speed(packed, tmp_path, monkeypatch):
    recipe = str(write_config(tmp_path / "gan.yaml", "gan", packed))
    precision, rate = measure_recipe(recipe, ["--batch_size", "8", "--precision", "bf16"], device="cpu")
    assert (precision, rate > 0) == ("bf16", True)
    assert_raises(UserError, "no such", measure_recipe, recipe, ["--data.path", str(tmp_path / "nothing.lmdb")])

    def short(*_: Any) -> float:
        raise raised

    monkeypatch.setattr(speed, "seconds_per_image", lambda config, *_: {"fp32": 0.125, "bf16": 0.25}[config.precision])
    assert measure_recipe(recipe, ["--precision", "fp32"], device="cpu") == ("fp32", 8.0)
    monkeypatch.setattr(speed, "faster_precision", lambda config, *_: (config.changed(precision="bf16"), ""))
    assert measure_recipe(recipe, ["--precision", "fp32"], device="cpu") == ("bf16", 4.0)
    monkeypatch.setattr(speed, "seconds_per_image", short)
    raised: Exception = MemoryError()
    assert_raises(UserError, "memory runs out in a step", measure_recipe, recipe, [], device="cpu")
    raised = RuntimeError("another fault")
    assert_raises(RuntimeError, "another fault", measure_recipe, recipe, [], device="cpu")


@pytest.mark.parametrize(
    ("seconds", "chosen"), [({"fp32": 1.0, "bf16": 0.4}, "bf16"), ({"fp32": 0.5, "bf16": 1}, "fp32")]
)
def test_a_cpus_bf16_is_taken_if_it_is_faster(config_of, reader, monkeypatch, seconds, chosen):
    tried: list[tuple[int, str]] = []

    def of_precision(trial: Any, name: str, step: int | None = None) -> float:
        assert speed.collectives.world_size() == 1  # rank 0 measures for both
        tried.append((trial.samples, name))
        return seconds[name]

    for function, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 2)):
        monkeypatch.setattr(speed.collectives.dist, function, lambda value=value: value)
    monkeypatch.setattr(speed.collectives, "from_main_process", lambda action: action())

    monkeypatch.setattr(speed.Trial, "seconds", of_precision)
    config = config_of("gan", "--precision", "bf16", "--micro-batch", "10")
    slower = "fp32" if chosen == "bf16" else "bf16"
    ratio = "2.5" if chosen == "bf16" else "2"
    found, text = speed.faster_precision(config, f"bf16{NATIVE}", reader, CPU)
    assert (found.precision, text) == (chosen, f"{chosen} (auto: {ratio} times as fast as {slower})")
    small = config.smallest_batch
    sizes = [small] + [10 // small * small] * 3  # as a forward pass of the run
    assert tried == [(size, name) for size in sizes for name in ("fp32", "bf16")]
    for text in ("bf16", "bf16 (kept: the run began in it)", f"fp32{NATIVE}"):
        assert speed.faster_precision(config, text, reader, CPU) == (config, text)
    raised: Exception = MemoryError()

    def short(*_: Any) -> float:
        raise raised

    monkeypatch.setattr(speed.Trial, "seconds", short)
    assert speed.faster_precision(config, f"bf16{NATIVE}", reader, CPU) == (config, f"bf16{NATIVE}")
    raised = RuntimeError("another fault")
    assert_raises(RuntimeError, "another fault", speed.faster_precision, config, f"bf16{NATIVE}", reader, CPU)
