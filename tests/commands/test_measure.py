"""This machine: weights that are at hand, speeds on noise, and what is said of a plan."""

import json
import re
import time
from types import SimpleNamespace
from unittest.mock import Mock, call

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
from duetgan.commands.planning.plan import GAN, TUNED, Machine, Plan, choose
from duetgan.data.reading.dataset import Dataset
from duetgan.models.registry import backbone_of
from duetgan.utils.config.cli import Parser
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.machine import cores
from duetgan.utils.text import duration
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
    file.unlink()
    downloads: list[tuple[str, str]] = []

    def download(url, what):
        downloads.append((url, what))
        if len(downloads) > 1:
            write_weights(file, "resnet50")
        return ""

    monkeypatch.setattr("duetgan.models.weights.missing_published", download)
    assert weights_at_hand(None) is None  # a file that is gone again
    assert weights_at_hand(None) == (str(file), "resnet50", False)
    assert downloads == [(urls["IMAGENET1K_V1"], "torchvision's resnet50 IMAGENET1K_V1")] * 2


def test_weights_of_no_known_network_are_refused(tmp_path, nothing_at_hand):
    file = tmp_path / "w.safetensors"
    save_file({"a.weight": torch.zeros(1)}, file)
    refusal = f"^{re.escape(str(file))}: is no ResNet, ConvNeXt or EfficientNet; give another file with --weights$"
    assert_raises(UserError, refusal, weights_at_hand, str(file))
    assert_raises(UserError, "no such file", weights_at_hand, str(tmp_path / "missing.safetensors"))


@pytest.mark.parametrize(("classes", "channels"), [(3, 3), (0, 1)])
def test_speeds_are_measured_on_noise(tmp_path, monkeypatch, classes, channels):
    monkeypatch.setenv("DUET_PRECISION", "fp32")
    options = ["--generator.channel-base", "64", "--discriminator.channel-base", "64", "--batch-size", "8"]
    options += [] if classes else ["--loss.mismatch-weight", "0"]
    images = seen(60, classes, channels=channels)
    speed = ThisMachine(tmp_path, None).speed(GAN, options, 16, images)
    assert (speed.precision, speed.images_per_second > 0) == ("fp32", True)


def test_each_recipe_size_and_choice_of_options_is_measured_once(tmp_path, monkeypatch, capsys):
    calls: list[list[str]] = []

    def measured(config, overrides):
        calls.append([config, *overrides])
        return "bf16", 1000.0 + len(calls)

    monkeypatch.setattr("duetgan.training.engine.speed.measure_recipe", measured)
    machine, images = ThisMachine(tmp_path, WEIGHTS), seen(400, 90, channels=1)
    assert (machine.start, machine.cores, machine.weights) == (9.0, cores(), WEIGHTS)
    tuned = ["--model.weights", "w.pth"]
    recipes = [(GAN, [], 16), (GAN, [], 8), (GAN, ["--steps", "3"], 16), (TUNED, tuned, 16)]
    for _ in range(2):
        speeds = [machine.speed(*recipe, images) for recipe in recipes]
        assert speeds == [("bf16", 1001.0 + number) for number in range(4)]
    data = {side: ["--data.path", str(tmp_path / f"{side}.lmdb"), "--data.val-path", "null"] for side in (8, 16)}
    unread = [*tuned, *data[16], "--model.weights", "null", "--model.normalise", "imagenet"]
    assert calls == [[GAN, *data[16]], [GAN, *data[8]], [GAN, "--steps", "3", *data[16]], [TUNED, *unread]]
    shown = capsys.readouterr().out.splitlines()
    assert (len(shown), shown[1]) == (4, "  quickstart_gan, 8 px: training at 1,002 images/s in bf16")
    for side in data:
        with Dataset(tmp_path / f"{side}.lmdb") as noise:
            assert (len(noise), noise.spec.shape, noise.meta.histogram) == (90, (1, side, side), [1] * 90)


def test_plan_is_told_with_reasons_lengths_and_times():
    machine = Fast()
    machine.weights = WEIGHTS
    plan = choose(seen(300, 5), machine, minutes=20)
    begin = time.time()
    lines = plan_lines(plan)
    expected = list(plan.notes)
    for name, training in (("classifier", plan.classifier), ("gan", plan.gan)):
        passes = training.steps * training.batch_size / plan.training_images
        steps = f"{training.steps:,} steps of {training.batch_size} images, each image seen {passes:,.1f} times"
        expected.append(f"train {name}: {steps}, about {duration(training.seconds)}")
    assert lines[:-1] == expected
    ends = {time.strftime("%H:%M", time.localtime(now + plan.seconds)) for now in (begin, time.time())}
    assert lines[-1] in {f"expected time: 19 min, until about {end}" for end in ends}
    quick = choose(SAMPLE, Machine(), minutes=15, quick=True)
    assert plan_lines(quick) == [*quick.notes, "only a few training steps for each network (--quick)"]


def planned(*words: str) -> Plan:
    parser = Parser(prog="x")
    add_request_options(parser)
    return make_plan(parser.parse_args(words))


def test_command_writes_the_plan(tmp_path, capsys):
    words = ["sample", "--quick", "--seed", "3", "--minutes", "20"]
    assert run_cli(measure.main, [*words, "--out", str(tmp_path / "plan.json")]) == 0
    made = Plan.read(json.loads((tmp_path / "plan.json").read_text()))
    assert capsys.readouterr().out.splitlines() == [made.survey.text(), *plan_lines(made)]
    request = {"seed": 3, "request": ["sample", "--seed", "3", "--quick"]}
    assert made == choose(made.survey, Machine(), minutes=20, quick=True).model_copy(update=request)


@pytest.mark.parametrize(
    ("images", "words", "looked_for"),
    [
        (seen(300, 5), [], True),
        (seen(300, 1), [], False),  # no classifier
        (seen(300, 5), ["--quick"], False),
        (SAMPLE.model_copy(update={"source": "sample"}), [], False),
        (seen(300, 5), ["--weights", "w.pth", "--quick"], True),
    ],
)
def test_measuring_is_part_of_the_plan_and_weights_are_looked_for(monkeypatch, capsys, images, words, looked_for):
    at_hand = Mock(return_value=WEIGHTS)
    monkeypatch.setattr(measure, "survey", lambda source, options: images)
    monkeypatch.setattr(measure, "weights_at_hand", at_hand)
    monkeypatch.setattr(measure, "cores", lambda: Fast.cores)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=iter([100.0, 107.5]).__next__))
    monkeypatch.setattr(ThisMachine, "speed", lambda _, *arguments: Fast().speed(*arguments))
    plan, is_quick = planned(images.source, "--minutes", "31", *words), "--quick" in words
    assert at_hand.call_args_list == ([call(*[*words[1:2], None][:1])] if looked_for else [])
    machine = Machine() if is_quick else Fast()
    machine.weights = WEIGHTS if looked_for else None
    expected = choose(images, machine, minutes=31, quick=is_quick, spent=0.0 if is_quick else 7.5)
    assert plan == expected.model_copy(update={"request": [images.source, *words]})
    assert ("measuring this machine:" in capsys.readouterr().out) is not is_quick


def test_weights_that_are_given_are_taken_for_the_sample_too(tmp_path, nothing_at_hand):
    with pytest.raises(UserError, match="no such file"):
        planned("--weights", str(tmp_path / "missing.safetensors"))
    file = str(write_weights(tmp_path / "w.safetensors", "resnet18"))
    assert planned("--weights", file, "--quick").trainings["classifier"].weights == file
