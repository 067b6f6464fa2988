"""What `precision: auto` and `threads: auto` mean, and that a resumed run keeps them."""

import pytest
import torch

from duetgan.training.engine import run, speed
from duetgan.training.engine.hardware import FORCED, settle
from duetgan.training.optim.updater import Precision
from duetgan.utils import machine
from duetgan.utils.config.yaml_files import read_yaml, save_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.machine import native_precision
from tests.conftest import assert_raises
from tests.end_to_end.helpers import check_same, differing, state_of, train_in_process, write_config
from tests.training.engine.test_speed import recipe_config

pytestmark = pytest.mark.usefixtures("slim")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def auto(monkeypatch):
    """The other tests fix what auto means; the number of threads is taken back."""
    before = torch.get_num_threads()
    monkeypatch.delenv(FORCED, raising=False)
    monkeypatch.delenv(machine.THREADS_VARIABLE, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(machine, "max_threads", lambda: 2)
    monkeypatch.setattr(machine, "busy_since_start", lambda: 0.0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config_of(packed, tmp_path):
    """`config_of(...options)`."""
    recipe = write_config(tmp_path / "gan.yaml", "gan", packed)
    return lambda *options: recipe_config(recipe, *options)


@pytest.mark.parametrize(
    ("device", "supported", "best"),
    [(CPU, True, "bf16"), (CPU, False, "fp32"), (GPU, True, "bf16"), (GPU, False, "fp16")],
)
def test_auto_is_what_the_device_has_instructions_for(config_of, monkeypatch, device, supported, best):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    assert native_precision(device) == best
    config, text = settle(config_of(), {}, device)
    assert (config.precision, text) == (best, f"{best} (auto: native here)")
    assert config.threads == (2 if device == CPU else "auto")


def test_the_config_then_the_run_then_the_environment_decide(config_of, monkeypatch):
    monkeypatch.setenv(FORCED, "fp16")
    config = config_of("--precision", "bf16", "--threads", "1")
    saved = {"precision": "fp32", "threads": 9}
    assert settle(config, saved, CPU)[1] == "bf16"
    assert torch.get_num_threads() == 1
    kept, text = settle(config_of(), saved, CPU)
    assert (text, kept.threads, torch.get_num_threads()) == ("fp32 (kept: the run began in it)", 2, 2)
    assert settle(config_of(), {}, CPU)[1] == "fp16 (auto: DUET_PRECISION says so)"
    monkeypatch.setenv(FORCED, "int8")
    assert_raises(UserError, "precision 'int8': must be", settle, config_of(), {}, CPU)


def test_other_programs_keep_their_cores_at_the_start_alone(config_of, monkeypatch):
    monkeypatch.setattr(machine, "busy_since_start", lambda: 1.0)
    assert settle(config_of(), {}, CPU)[0].threads == 1
    assert settle(config_of(), {"threads": 2}, CPU)[0].threads == 2
    assert settle(config_of(), {"seed": 0}, CPU)[0].threads == 2  # a run of an earlier version


def test_a_task_without_a_choice_is_in_fp32():
    precision = Precision("auto", CPU)
    assert (precision.name, precision.scaler.is_enabled()) == ("fp32", False)
    precision.switch("fp16")
    assert precision.autocast().fast_dtype == torch.float16
    assert precision.scaler.is_enabled()


def test_a_run_goes_on_as_it_began_on_another_machine(packed, tmp_path, monkeypatch, capsys):
    """The other machine has no instructions for bf16, and is busy."""
    recipe = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(speed, "faster_precision", lambda config, text, *_: (config, text))
    assert train_in_process(recipe, tmp_path / "straight", "--max-steps", "6") == 0
    assert train_in_process(recipe, tmp_path / "resumed", "--max-steps", "2") == 0
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(machine, "busy_since_start", lambda: 1.0)
    file = tmp_path / "resumed" / "config.yaml"
    save_yaml({key: value for key, value in read_yaml(file).items() if key != "spikes"}, file)  # of an older version
    capsys.readouterr()
    assert train_in_process(recipe, tmp_path / "resumed", "--max-steps", "6") == 0
    told = capsys.readouterr().err
    assert "bf16 (kept: the run began in it)" in told
    assert "config changed" not in told
    check_same(tmp_path / "straight", tmp_path / "resumed", 6)
    assert differing(state_of(tmp_path / "straight", 6), state_of(tmp_path / "resumed", 6)) == []
    saved = read_yaml(tmp_path / "resumed" / "config.yaml")
    assert (saved["precision"], saved["threads"]) == ("bf16", 2)
    other = ["--max-steps", "7", "--precision", "fp32", "--threads", "1"]
    assert train_in_process(recipe, tmp_path / "resumed", *other) == 0
    told = capsys.readouterr().err
    assert "precision was 'bf16', is 'fp32'" in told
    assert "threads was 2, is 1; not the same to the bit from here on" in told


@pytest.mark.parametrize("deterministic", [True, False])
def test_accelerators_search_the_fastest_convolutions(deterministic, monkeypatch, config_of):
    """N5: unless the run is to be deterministic."""
    cudnn = torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled())
    monkeypatch.setattr(collectives, "choose_device", lambda *_, **__: torch.device("meta"))
    config = config_of().changed(deterministic=deterministic)
    cudnn.benchmark, cudnn.deterministic = deterministic, False  # as a program before may have left it
    try:
        assert run._start_process(config, None) == torch.device("meta")
        assert cudnn.benchmark == (not deterministic)
        assert cudnn.deterministic == torch.are_deterministic_algorithms_enabled() == deterministic
    finally:
        cudnn.benchmark, cudnn.deterministic = before[:2]
        torch.use_deterministic_algorithms(before[2])
