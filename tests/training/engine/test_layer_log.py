"""What a training logs: statistics of layers, windows of figures, and the row of a part."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from duetgan.models.hooks import LayerStatistics
from duetgan.training.base.config import LogConfig
from duetgan.training.base.monitors import MetricWindow
from duetgan.training.engine import outputs
from duetgan.training.engine import run as training
from duetgan.training.optim.updater import Precision
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_folder import RunFolder
from tests.end_to_end.helpers import differing, log_of, state_of, train_in_process, write_config
from tests.utils.runlog.test_run_log import no_file_larger_than

pytestmark = pytest.mark.usefixtures("slim")


def scalars(run):
    """Tag -> [(step, value)] of the layers' events."""
    events = EventAccumulator(str(run / "tensorboard" / "layers"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_classifiers_layers_are_written_at_the_cadence_and_training_is_the_same(tmp_path, packed, monkeypatch):
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed, tensorboard=True)
    straight, watched = tmp_path / "straight", tmp_path / "watched"
    short = ["--steps", "5", "--micro-batch", "10"]
    assert train_in_process(config, straight, *short) == 0
    assert not (straight / "tensorboard" / "layers").exists()
    more = ["--log.layers", "[layer*.0.conv1, fc]", "--log.layers_every", "2"]
    # files of one second are read in the order of their names
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(10))
    assert train_in_process(config, watched, *short, *more, "--max-steps", "3") == 0
    assert train_in_process(config, watched, *short, *more) == 0
    assert differing(state_of(straight, 5), state_of(watched, 5)) == []
    found = scalars(watched)
    layers = [f"model.network.{name}" for name in ("layer1.0.conv1", "layer2.0.conv1", "layer3.0.conv1", "fc")]
    for layer in layers:
        for kind in ("activation", "gradient"):
            for what in ("mean", "std", "max_abs", "zeros", "nonfinite"):
                assert [step for step, _ in found[f"{layer}/{kind}_{what}"]] == [2, 4]
            assert all(value > 0 for _, value in found[f"{layer}/{kind}_std"])
    # cross entropy's gradient at the logits is (p - y) / batch: at most 1 / 20, and each row adds up to 0
    assert all(0 < value <= 1 / 20 for _, value in found["model.network.fc/gradient_max_abs"])
    assert all(abs(value) < 1e-8 for _, value in found["model.network.fc/gradient_mean"])


def test_both_networks_of_a_gan(tmp_path, packed):
    config, run = write_config(tmp_path / "recipe.yaml", "gan", packed, tensorboard=True), tmp_path / "run"
    more = ["--log.layers", "[generator.mapping, discriminator.*conv*]", "--log.layers_every", "3"]
    assert train_in_process(config, run, "--steps", "3", *more) == 0
    found = scalars(run)
    assert {tag.partition(".")[0] for tag in found} == {"generator", "discriminator"}
    assert any(tag.endswith("/gradient_std") for tag in found if tag.startswith("discriminator"))


def test_a_full_disk_costs_the_statistics_and_not_the_training(tmp_path, capsys):
    network = torch.nn.Linear(2, 2)
    config = LogConfig(layers=["*"], layers_every=1)
    layers = outputs.LayerLog(config, {"network": network}, RunFolder(tmp_path))

    def step(number: int) -> None:
        loop: Any = SimpleNamespace(step=number - 1)
        layers.before_step(loop)
        network(torch.ones(1, 2)).sum().backward()
        loop.step = number
        layers.after_step(loop, {})

    with no_file_larger_than(200):
        for number in (1, 2, 3):
            step(number)
    step(4)
    layers.close()
    folder = tmp_path / "tensorboard" / "layers"
    assert capsys.readouterr().err == (
        f"warning: {folder}: cannot be written (File too large); training continues without TensorBoard\n"
    )
    assert len(list(folder.iterdir())) == 1


def test_a_full_disk_costs_the_status_and_the_grid_of_samples(tmp_path, capsys, monkeypatch):
    cause, shown = OSError(28, "No space left on device"), []

    def refuse(*_: Any) -> None:
        raise cause

    folder = RunFolder(tmp_path)
    monkeypatch.setattr(folder, "write_status", refuse)
    monkeypatch.setattr(outputs, "save_png", refuse)
    log = SimpleNamespace(image=lambda *given: shown.append(given), refused=lambda *given: shown.append(given))
    task, config = SimpleNamespace(sample_grid=lambda step: f"grid {step}"), SimpleNamespace(log=LogConfig())
    loop: Any = SimpleNamespace(step=7, task=task, config=config, folder=folder, log=log)
    outputs.StatusFile(folder).before_save(loop)
    warning = f"warning: {tmp_path}/status.json: cannot be written (No space left on device)\n"
    assert capsys.readouterr().err == warning
    cause = UserError("full")  # type: ignore[assignment]
    outputs.SampleGrids().begin(loop)
    path = tmp_path / "samples" / "step-00000007.png"
    assert shown == [(path, cause, "sample grids"), (7, "samples", "grid 7")]
    monkeypatch.setattr("duetgan.reporting.report.write_report", refuse)
    training._report(tmp_path)
    warning = f"warning: {tmp_path}/report.html: cannot be written (full); training continues without the report\n"
    assert capsys.readouterr().err == warning


def test_gradients_are_logged_without_the_loss_scale(tmp_path, monkeypatch):
    network, mixed = torch.nn.Linear(2, 1), Precision("fp16", torch.device("cpu"))
    written: list[Any] = []

    def open_events(folder: Any, *, purge_step: int) -> Any:
        written.append((folder, purge_step))
        return SimpleNamespace(scalars=lambda *given: written.append(given), close=lambda: written.append("closed"))

    def of_two_ranks(packed: torch.Tensor, *, patient: bool) -> list[torch.Tensor]:
        gathered.append(packed)
        return [packed, packed]

    gathered: list[torch.Tensor] = []
    monkeypatch.setattr(outputs.collectives, "gather_objects", of_two_ranks)
    monkeypatch.setattr(outputs, "Events", open_events)
    config = LogConfig(layers=["network"], layers_every=2)
    layers = outputs.LayerLog(config, {"network": network, "scaler": mixed}, RunFolder(tmp_path))
    for steps in (range(4), range(2, 4)):  # after a roll-back to step 2, what follows it is removed
        layers.load_state_dict({})
        for step in steps:
            loop: Any = SimpleNamespace(step=step)
            layers.before_step(loop)
            mixed.backward(network(torch.ones(3, 2)).sum())
            loop.step += 1
            layers.after_step(loop, {})
    folder = tmp_path / "tensorboard" / "layers"
    assert (written.pop(0), written.pop(2), written.pop(2)) == ((folder, 2), "closed", (folder, 4))
    assert [(step, values["network/gradient_mean"]) for step, values in written] == [(2, 1.0), (4, 1.0), (4, 1.0)]
    assert len(gathered) == 3


def test_a_row_has_the_memory_of_the_largest_process_in_mib(monkeypatch):
    device = torch.device("meta")
    peaks: dict[torch.device, int] = {}
    monkeypatch.setattr(outputs, "peak_bytes", peaks.__getitem__)
    monkeypatch.setattr(outputs.collectives, "all_reduce_max", lambda value: max(value, 7))
    task: Any = SimpleNamespace(registry=dict)
    for mebibytes, expected in ((5, 7), (9, 9)):
        peaks[device] = mebibytes * 2**20 + 2**19
        assert outputs.Columns(task, device).columns(MetricWindow(watched=None)) == {"memory_mib": expected}


def test_an_unknown_layer_is_refused_before_anything_is_written(tmp_path, packed, capsys):
    config, run = write_config(tmp_path / "recipe.yaml", "classifier", packed, tensorboard=True), tmp_path / "run"
    assert train_in_process(config, run, "--log.layers", "[layer9.0]") == 2
    assert "log.layers: no layer fits 'layer9.0' (did you mean 'layer" in capsys.readouterr().err
    assert not run.exists()


def test_moments_of_all_ranks_are_those_of_all_values(monkeypatch):
    layer = torch.nn.Identity()
    values = [torch.randn(n, dtype=torch.float64) * n + n for n in (3, 50, 7)]
    parts = []
    for value in values:
        statistics = LayerStatistics({"layer": layer})
        with statistics.watching(scale=1.0):
            layer(value)
        parts.append(statistics.packed())

    def everyone(mine, *, patient):
        assert torch.equal(mine, parts[1])
        return parts

    monkeypatch.setattr(outputs.collectives, "gather_objects", everyone)
    found = LayerStatistics({"layer": layer}).collect(outputs.over_ranks(parts[1]))
    whole = torch.cat(values).numpy()
    assert found["layer/activation_mean"] == pytest.approx(whole.mean(), rel=1e-12)
    assert found["layer/activation_std"] == pytest.approx(whole.std(), rel=1e-12)
    assert found["layer/activation_max_abs"] == np.abs(whole).max()


VALUES = [0.1, 0.7, 1e-9, 3.3, 1e8, 0.2, 5.5]


def filled(folds: list[int]) -> MetricWindow:
    window = MetricWindow(watched=None)
    for step, value in enumerate(VALUES):
        metrics = {"loss": torch.tensor(value)} | ({"lazy": torch.tensor(2 * value)} if step % 3 == 0 else {})
        window.add(metrics)
        if step in folds:
            window.fold()
    return window


def test_means_are_of_the_steps_that_had_the_metric_whenever_they_are_folded():
    means = filled([]).take().means()
    expected = [float(torch.tensor(value)) for value in VALUES]
    assert means["loss"] == pytest.approx(math.fsum(expected) / 7, rel=1e-12)
    assert means["lazy"] == pytest.approx(2 * math.fsum(expected[::3]) / 3, rel=1e-6)
    one, two = filled([]), filled([0, 3, 4])
    assert one.take().means() == two.take().means()


def test_a_windows_state_goes_on():
    one, two = filled([3]), MetricWindow(watched=None)
    assert one.total("lo") == 0
    one.fold()
    two.load_state_dict(one.state_dict())
    one.add({"loss": torch.tensor(4.0)})
    two.add({"loss": torch.tensor(4.0)})
    assert one.take().means() == two.take().means()


QUIET = ["--device", "cpu", "--precision", "fp32", "--evaluation.every", "0", "--log.samples_every", "0"]


@pytest.mark.parametrize(("last", "partial"), [("2", True), ("3", False)])
def test_an_end_has_one_row(tmp_path, packed, last, partial, capsys):
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    run = tmp_path / "run"
    for _ in range(2):  # the second time there is nothing left to do
        assert train_in_process(config, run, *QUIET, "--max-steps", last) == 0
        assert [(row["step"], "partial" in row) for row in log_of(run)] == [(int(last), partial)]
    assert train_in_process(config, run, *QUIET, "--steps", "1") == 2
    assert f"--steps 1: the run has done {last} already; give {last} or more" in capsys.readouterr().err
    assert train_in_process(config, run, *QUIET, "--steps", last) == 0
