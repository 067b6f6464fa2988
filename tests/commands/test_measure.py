"""This machine: weights that are at hand, speeds on noise, and what is said of a plan."""

import json

import pytest
import torch
from safetensors.torch import save_file

from duetgan.commands.planning import measure
from duetgan.commands.planning.measure import (
    ThisMachine,
    add_request_options,
    make_plan,
    plan_lines,
    weights_at_hand,
)
from duetgan.commands.planning.plan import GAN, Machine, Plan, choose
from duetgan.models.registry import backbone_of
from duetgan.utils.config.cli import Parser
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from tests.commands.machines import SAMPLE, WEIGHTS, Fast, seen
from tests.conftest import assert_raises


@pytest.fixture
def nothing_at_hand(monkeypatch, tmp_path):
    monkeypatch.delenv("DUET_WEIGHTS", raising=False)
    monkeypatch.setattr("duetgan.metrics.features.extractors.PLACES", ())
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))


def write_weights(file, name, **about):
    """A file of the network's names; numbers do not matter here."""
    with torch.device("meta"):
        network = backbone_of(name).build(name, channels=3, stem="imagenet", he_strides=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    state = {key: torch.zeros(value.shape, dtype=torch.float16) for key, value in network.state_dict().items()}
    if file.suffix == ".safetensors":
        save_file(state, file, metadata=about)
    else:
        torch.save(state, file)
    return file


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d", "convnext_tiny", "efficientnet_b0"])
def test_given_weights_tell_their_network_and_its_strides(tmp_path, nothing_at_hand, name):
    about = {"stride": "conv1 (He)"} if name == "resnet50" else {}
    file = write_weights(tmp_path / "w.safetensors", name, **about)
    assert weights_at_hand(str(file)) == (str(file), name, bool(about))  # resnet50, resnext50 differ in shapes alone


def test_torchvisions_cached_file_is_found_and_nothing_is_downloaded(tmp_path, nothing_at_hand, monkeypatch, capsys):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("a download"))
    assert weights_at_hand(None) is None
    said = capsys.readouterr().out
    assert said.startswith("training the classifier from scratch, because torchvision's resnet50 IMAGENET1K_V1: is not")
    assert said.count("\n") == 1
    urls = backbone_of("resnet50").published("resnet50")
    name = urls["IMAGENET1K_V1"].rpartition("/")[2]
    file = write_weights(tmp_path / "hub" / "checkpoints" / name, "resnet50")
    assert weights_at_hand(None) == (str(file), "resnet50", False)


def test_weights_of_no_known_network_are_refused(tmp_path, nothing_at_hand):
    save_file({"a.weight": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="is no ResNet, ConvNeXt or EfficientNet"):
        weights_at_hand(str(tmp_path / "w.safetensors"))
    assert_raises(UserError, "no such file", weights_at_hand, str(tmp_path / "missing.safetensors"))


def test_speeds_are_measured_once_on_noise_of_the_images_shape(tmp_path, nothing_at_hand, monkeypatch, capsys):
    monkeypatch.setenv("DUET_PRECISION", "fp32")
    machine = ThisMachine(tmp_path, None)
    options = ["--generator.channel-base", "64", "--discriminator.channel-base", "64", "--batch-size", "8"]
    first = machine.speed(GAN, options, 16, seen(60, 3))
    assert first.images_per_second > 0
    assert "images/s" in capsys.readouterr().out
    assert machine.speed(GAN, options, 16, seen(60, 3)) is first
    assert capsys.readouterr().out == ""
    assert [file.name for file in tmp_path.glob("*.lmdb")] == ["16.lmdb"]


def test_speeds_are_measured_without_labels(tmp_path, nothing_at_hand, monkeypatch):
    monkeypatch.setenv("DUET_PRECISION", "fp32")
    options = ["--generator.channel-base", "64", "--discriminator.channel-base", "64", "--batch-size", "8"]
    options += ["--loss.mismatch-weight", "0"]
    assert ThisMachine(tmp_path, None).speed(GAN, options, 16, seen(60, 0, channels=1)).images_per_second > 0


def test_plan_is_told_with_reasons_lengths_and_times():
    machine = Fast()
    machine.weights = WEIGHTS
    plan = choose(seen(300, 5), machine, minutes=20)
    text = "\n".join(plan_lines(plan))
    for training in (plan.classifier, plan.gan):
        passes = training.steps * training.batch_size / plan.training_images
        assert f"{training.steps:,} steps of {training.batch_size} images, each image seen {passes:,.1f} times" in text
    told = ["fine-tuned from resnet50's ImageNet weights", "with ADA, because there are fewer than 10,000"]
    told += ["GAN: ", "classifier: ", "train classifier: ", "expected time: ", ", until about"]
    assert [words for words in told if words not in text] == []
    assert "images:" not in text  # told before anything is measured
    quick = "\n".join(plan_lines(choose(SAMPLE, Machine(), minutes=15, quick=True)))
    assert "--quick" in quick
    assert "images/s" not in quick


def planned(*words: str) -> Plan:
    parser = Parser(prog="x")
    add_request_options(parser)
    return make_plan(parser.parse_args(words))


def test_command_writes_the_plan(tmp_path, capsys):
    assert run_cli(measure.main, ["sample", "--quick", "--seed", "3", "--out", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out.count("images: 10,000 images") == 1
    made, tree = planned("--quick", "--seed=3"), json.loads((tmp_path / "plan.json").read_text())
    ignored = {"survey": None, "seconds": None}
    assert tree | ignored == made.model_dump() | ignored
    assert (made.seed, made.request) == (3, ["sample", "--seed", "3", "--quick"])


def test_measuring_is_part_of_the_plan_and_the_sample_needs_no_weights(tmp_path, nothing_at_hand, monkeypatch):
    monkeypatch.setattr(measure, "survey", lambda *_: SAMPLE.model_copy(update={"source": "sample"}))
    monkeypatch.setattr(ThisMachine, "speed", Fast().speed)
    plan = planned()
    assert plan.seconds > plan.spent >= 0
    assert not any("ImageNet" in note for note in plan.notes)


def test_weights_that_are_given_are_taken_for_the_sample_too(tmp_path, nothing_at_hand):
    with pytest.raises(UserError, match="no such file"):
        planned("--weights", str(tmp_path / "missing.safetensors"))
    file = str(write_weights(tmp_path / "w.safetensors", "resnet18"))
    assert planned("--weights", file, "--quick").trainings["classifier"].weights == file
