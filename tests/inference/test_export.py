"""export.py: the check, what it prints, and that a file which fails it is not left behind."""

import importlib
import json
import math
from argparse import Namespace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import duetgan
from duetgan.commands import evaluate
from duetgan.commands import export as script
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.inference.export import check
from duetgan.inference.export.check import CheckFailed, Row, compare, judge
from duetgan.inference.export.formats import FORMATS
from duetgan.inference.export.weights import interface
from duetgan.metrics.classification.answers import fit_temperature
from duetgan.metrics.evaluate_classifier import calibrate, classify
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.fast import faster
from duetgan.models.restore import fingerprint, read_tensors
from duetgan.models.weights import load_pretrained
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import EXIT_HALTED, UserError
from tests.conftest import assert_raises
from tests.metrics.conftest import CLASSES, classifier_run, pack


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A classifier's run whose config names its images."""
    folder = tmp_path_factory.mktemp("export")
    places = {"path": str(pack(folder / "train.lmdb", seed=1)), "val_path": str(pack(folder / "test.lmdb", seed=2))}
    return classifier_run(folder / "run", data=places)


def command(run, out, *more, form="safetensors"):
    quick = ["--n", "20", "--calibrated", "10"]
    return ["--checkpoint", str(run), "--format", form, "--out", str(out), *quick, *more]


def of_logits(found, original, labels=None):
    found, original = torch.tensor(found), torch.tensor(original)
    return compare("x", 1, found, original, None if labels is None else torch.tensor(labels), classes=True)


def row_of(name, **figures):
    return Row(name=name, bytes=1, **({"largest_difference": 0.0} | figures))


def test_a_row_has_difference_agreement_and_accuracy():
    original = [[1.0, 0.0], [0.0, 1.0], [3.0, 2.0], [0.0, 5.0]]
    found = [[1.0, 0.0], [0.5, 0.25], [3.0, 2.0], [0.0, 4.0]]
    for labels, accuracy, change in (([0, 1, 1, 1], 0.5, -0.25), (None, None, None)):
        row = of_logits(found, original, labels)
        assert (row.largest_difference, row.agreement) == (1.0, 0.75)
        assert (row.accuracy, row.accuracy_change) == (accuracy, change)
    images = compare("x", 1, torch.zeros(2, 1, 2, 2), torch.ones(2, 1, 2, 2), None, classes=False)
    assert (images.largest_difference, images.agreement) == (1.0, None)
    assert compare("x", 1, torch.zeros(2, 3), torch.zeros(1, 3), None, classes=False).largest_difference == math.inf


@pytest.mark.parametrize(
    ("form", "difference", "agreement", "change", "largest", "wrong"),
    [  # the limit grows with large outputs
        ("onnx", 0.9e-4, 1.0, None, 0.5, None),
        ("onnx", 1.1e-4, 1.0, None, 0.5, "differ from the original's by up to 0.00011, more than 0.0001"),
        ("onnx", 19e-4, 1.0, None, 20.0, None),
        ("onnx", 21e-4, 1.0, None, 20.0, "differ"),
        ("onnx", math.nan, 1.0, None, 0.5, "differ from the original's by up to nan"),
        ("safetensors", 0.0, 1.0, None, 0.5, None),
        ("safetensors", 1e-9, 1.0, None, 0.5, "differ"),
        # one point of accuracy may be lost, or of agreement where there are no labels
        ("int8", 3.0, 0.5, -0.01, 1.0, None),
        ("int8", 3.0, 0.5, 0.02, 1.0, None),
        ("int8", 3.0, 0.99, -0.011, 1.0, "accuracy falls by 1.10 points"),
        ("int8", 3.0, 0.99, None, 1.0, None),
        ("int8", 3.0, 0.985, None, 1.0, "agreement with the original's classes falls by 1.50 points"),
        ("int8", math.nan, 1.0, 0.0, 1.0, "its outputs are not finite"),
    ],
)
def test_what_a_file_is_judged_by(form, difference, agreement, change, largest, wrong):
    row = row_of("x", largest_difference=difference, agreement=agreement, accuracy_change=change)
    found = judge(row, FORMATS[form], torch.tensor([0.1, -largest]))
    assert found is None if wrong is None else wrong in (found or "")


@pytest.mark.parametrize("form", ["safetensors", "torch-export"])
def test_a_good_export_is_left_behind_and_told_of(run, tmp_path, capsys, form):
    out = tmp_path / "new" / "model.bin"
    assert script.main([*command(run, out, form=form), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["passed"], told["format"], told["checked"], told["reason"]) == (True, form, 20, None)
    rows = {row["name"]: row for row in told["rows"]}
    assert list(rows) == ["fp32 eager", form]
    assert rows[form]["bytes"] == out.stat().st_size
    assert rows[form]["accuracy_change"] == 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["model.bin"]


def test_the_table_names_each_value_and_the_end_names_the_size_of_the_file(run, tmp_path, capsys):
    rows = [
        row_of("fp32 eager", agreement=1.0, accuracy=0.75, accuracy_change=0.0),
        row_of("int8", largest_difference=0.01234, agreement=0.9, accuracy=0.5, accuracy_change=-0.25),
        row_of("g", largest_difference=math.inf),
    ]
    for row, mib in zip(rows, (3, 1.5, 0.25), strict=True):
        row.bytes = int(mib * 2**20)
    head, *lines = [line.split() for line in check.table(rows).splitlines()]
    assert head == ["MiB", "largest", "difference", "accuracy", "change"]
    assert lines == [
        ["fp32", "eager", "3.00", "0", "0.7500", "+0.0000"],
        ["int8", "1.50", "0.0123", "0.5000", "-0.2500"],
        ["g", "0.25", "inf"],
    ]
    out = tmp_path / "x.safetensors"
    assert script.main(command(run, out, "--n", "21")) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == "checked on 21 inputs"
    sizes = {line.split("  ")[0]: line.split()[-4] for line in printed.out.splitlines()[-2:]}
    assert sizes["safetensors"] == f"{out.stat().st_size / 2**20:.2f}" != sizes["fp32 eager"]
    assert printed.err.splitlines() == ["writing safetensors", f"wrote {out}, {sizes['safetensors']} MiB"]


@pytest.mark.parametrize(
    ("places", "options", "checked", "calibrated"),
    [
        ({"path": "train", "val_path": "test"}, {}, 21, 40),
        ({"path": "train"}, {}, 20, 20),  # halves of one file
        ({"val_path": "test"}, {}, 11, 10),
        ({"path": "train", "val_path": "test"}, {"data": "other"}, 9, 40),
        ({"path": "train", "val_path": "test"}, {"calibration": "other"}, 21, 9),
        ({}, {"data": "other"}, 5, 4),
    ],
)
def test_images_are_held_out_ones_and_those_of_a_calibration_training_ones(
    tmp_path, places, options, checked, calibrated
):
    files = {name: str(pack(tmp_path / f"{name}.lmdb", count=count, seed=count))
             for name, count in (("train", 40), ("test", 21), ("other", 9))}  # fmt: skip
    run = classifier_run(tmp_path / "run", data={key: files[name] for key, name in places.items()})
    given: dict[str, Any] = {"data": None, "calibration": None} | {key: files[name] for key, name in options.items()}
    job = Namespace(format="int8", fit_temperature=False, n=1000, calibrated=40, **given)
    subject = check.open_subject(job, load(resolve(run)))
    parts = (subject.batches, subject.calibration)
    assert [sum(len(batch[0]) for batch in part) for part in parts] == [checked, calibrated]
    job.n, job.calibrated = 3, 2
    parts = attrgetter("batches", "calibration")(check.open_subject(job, load(resolve(run))))
    assert [sum(len(batch[0]) for batch in part) for part in parts] == [3, 2]


def test_the_file_of_weights_can_be_exported_on_and_generators_without_images(run, tmp_path, capsys, runs):
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    data = str(run.parent / "test.lmdb")
    assert script.main(command(run, first, "--data", data)) == 0
    assert "largest difference" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no images to check.*its config names none.*with --data X\.lmdb"):
        script.main(command(first, second))
    assert script.main(command(first, second, "--data", data)) == 0
    assert second.stat().st_size == first.stat().st_size
    capsys.readouterr()
    assert script.main([*command(runs["grey"], tmp_path / "g.safetensors"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["rows"]] == ["fp32 eager", "safetensors"]
    assert told["rows"][1]["accuracy"] is None
    assert told["checked"] == 64


def spoilt(form, monkeypatch, *, by=0.01):
    """That format, whose file gives other outputs than it should."""
    load = importlib.import_module(FORMATS[form].module).load

    def load_spoilt(subject, path):
        run = load(subject, path)
        return lambda inputs: run(inputs) + by

    monkeypatch.setattr(f"{FORMATS[form].module}.load", load_spoilt)


@pytest.mark.parametrize("by", [0.01, math.nan])
def test_a_file_that_fails_its_check_is_not_left_behind(run, tmp_path, monkeypatch, capsys, by):
    spoilt("torch-export", monkeypatch, by=by)
    out = tmp_path / "model.pt2"
    assert run_cli(script.main, [*command(run, out, form="torch-export"), "--json"]) == EXIT_HALTED
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["passed"] is False
    assert "outputs differ" in told["reason"]
    error = captured.err.splitlines()[-1]
    assert error.startswith(f"error: {out}: not written, its outputs differ from the original's by up to")
    assert "choose another --format" in error
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_stays_where_the_new_one_fails_and_goes_where_it_passes(run, tmp_path, monkeypatch):
    out = tmp_path / "model.safetensors"
    out.write_bytes(b"older")
    assert_raises(UserError, "exists; give --overwrite, or another name", script.main, command(run, out))
    with monkeypatch.context() as patch:
        spoilt("safetensors", patch)
        assert_raises(CheckFailed, "not written", script.main, command(run, out, "--overwrite"))
    assert out.read_bytes() == b"older"
    assert script.main(command(run, out, "--overwrite")) == 0
    assert out.stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_exporter_that_breaks_or_a_network_without_finite_outputs_leaves_nothing(run, tmp_path, monkeypatch):
    def write(subject, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("duetgan.inference.export.weights.write", write)
    with pytest.raises(UserError, match=r"cannot write .*No space left on device; choose another place"):
        script.main(command(run, tmp_path / "x"))
    monkeypatch.setattr(check, "outputs", lambda *_: torch.full((2, len(CLASSES)), math.nan))
    with pytest.raises(UserError, match="the checkpoint's own outputs are not finite"):
        script.main(command(run, tmp_path / "x", form="torch-export"))
    assert list(tmp_path.iterdir()) == []


GREY = "images: float32 [N, 1, 8, 8] in [-1, 1], grey: pixels / 127.5 - 1"
WARM = {"temperature": torch.tensor(2.5)}
LOGITS = "logits: float32 [N, classes], in the order of `classes`; "
SEVERAL = "; labels: float32 [N, classes], 1 for each label that the image has, else 0"


@pytest.mark.parametrize(
    ("task", "more", "expected"),
    [
        ("classifier", {}, {"input": GREY, "output": f"{LOGITS}softmax gives probabilities"}),
        (
            "classifier",
            {"state": {"model_ema": WARM | {"thresholds": torch.tensor([0.25, 0.75])}}},
            {
                "output": f"{LOGITS}divided by the temperature 2.5; sigmoid gives each label's probability",
                "thresholds": "[0.25, 0.75]",
            },
        ),
        ("classifier", {"config": {"data": {"resolution": "10x6"}}}, {"input": GREY.replace("8, 8", "6, 10")}),
        ("gan", {"classes": []}, {"input": "z: float32 [N, z_dim], normal", "output": GREY, "classes": "[]"}),
        ("gan", {}, {"input": "z: float32 [N, z_dim], normal; labels: int64 [N], indices into `classes`"}),
        ("gan", {"sets": [[0], [0, 1]]}, {"input": f"z: float32 [N, z_dim], normal{SEVERAL}", "output": GREY}),
    ],
)
def test_an_interface_names_inputs_and_outputs(task, more, expected):
    shape = {"channels": 1, "classes": 2, "resolution": 8}
    state: dict[str, Any] = {"model_ema": {}, "generator_ema": {}}
    content = {"task": task, "classes": ["b", "a"], "config": {"data": {}}, "shape": shape, "state": state} | more
    found = interface(content)
    assert found | {"classes": '["b", "a"]'} | expected == found
    assert ("thresholds" in found) == ("thresholds" in expected)


def test_values_of_16_bits_are_brought_into_the_range_by_their_own_and_colours_by_alpha():
    shape = {"channels": 1, "resolution": 8, "pixel_format": {"depth": "uint16"}}
    generator = {"task": "gan", "classes": [], "config": {}, "shape": shape, "state": {}}
    assert "(values - 0) / 32767.5 - 1" in " ".join(interface(generator).values())
    shape = {"channels": 4, "resolution": 8, "pixel_format": {"depth": "uint8", "alpha": True}}
    assert "; then x becomes a (x + 1) - 1 in the colours" in interface(generator | {"shape": shape})["output"]


HALF = ("--truncation-psi", "0.5")


def test_bad_input_is_one_line_with_the_remedy(run, runs, tmp_path, refused):
    cases = {
        "is a folder; name a file": command(run, tmp_path),
        "int8 is for checkpoints of task classifier": command(runs["grey"], tmp_path / "x", form="int8"),
        "--truncation-psi is for a GAN's torch-export, onnx": command(runs["grey"], tmp_path / "x.safetensors", *HALF),
        "-psi is for a GAN's": command(runs["classifier"], tmp_path / "x.onnx", *HALF, form="onnx"),
        "no images to check the export with": command(runs["classifier"], tmp_path / "x"),
        "nowhere.lmdb": command(run, tmp_path / "x", "--data", "nowhere.lmdb"),
        "no such run folder or checkpoint": command(tmp_path / "none", tmp_path / "x"),
    }
    for expected, arguments in cases.items():
        assert expected in refused(script.main, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_temperature_stays_in_every_export_and_changes_no_predicted_class(run, tmp_path, capsys):
    """It is fitted on the held-out images, the exports' logits are the network's divided by it, and all programs use
    it; checkpoints without it are unchanged."""
    out = tmp_path / "warm.safetensors"
    assert script.main([*command(run, out, "--fit-temperature"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    temperature = told["temperature"]["value"]
    assert (told["temperature"]["n"], told["rows"][1]["largest_difference"]) == (60, 0)
    assert evaluate.main(["--checkpoint", str(run), "--out", str(tmp_path / "eval"), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)["temperature"]
    assert evaluated.keys() == told["temperature"].keys() > {"nll_before", "ece_before", "nll_after", "ece_after"}
    for key, value in evaluated.items():
        assert told["temperature"][key] == pytest.approx(value, rel=1e-6), key
    cold, warm = (duetgan.load_classifier(path, device="cpu") for path in (run, out))
    assert cold.network.temperature is None
    with Dataset(run.parent / "test.lmdb") as images:
        logits, labels = classify(cold.network, images), torch.tensor(images.labels())
        scaled = classify(warm.network, images)
        assert temperature == pytest.approx(fit_temperature(logits, labels), rel=1e-9)
        assert abs(temperature - 1) > 0.1
        torch.testing.assert_close(scaled, logits / temperature)
        assert scaled.argmax(1).equal(logits.argmax(1))
        pixels = torch.from_numpy(images.read(range(4))[0])
    expected = (logits[:4].double() / temperature).softmax(1)
    torch.testing.assert_close(warm.predict(pixels).probabilities, expected, rtol=1e-5, atol=1e-7)
    faster_network = faster(warm.network, torch.device("cpu"), precision="fp32", fold=True)
    torch.testing.assert_close(judge_images(faster_network, pixels), expected, rtol=1e-4, atol=1e-6)
    assert fingerprint(warm.network) == fingerprint(cold.network)
    program = tmp_path / "warm.pt2"
    data = ["--data", str(run.parent / "test.lmdb")]
    assert script.main(command(out, program, *data, form="torch-export")) == 0
    result = torch.export.load(program).module()(warm.transform.spec.to_float(pixels))
    torch.testing.assert_close(result, scaled[:4], rtol=1e-4, atol=1e-5)
    checkpoint = load(resolve(run))
    with Dataset(run.parent / "test.lmdb") as images:
        fits = [calibrate(checkpoint, images, batch_size=64) for _ in range(2)]
    assert fits[0] == fits[1]
    again = tmp_path / "again.safetensors"  # a fitted temperature is replaced, not multiplied
    assert script.main([*command(out, again, "--fit-temperature", *data)]) == 0
    assert f"{temperature:.3g}"[:4] in capsys.readouterr().out
    state, metadata = read_tensors(again, "")
    assert float(state["temperature"]) == pytest.approx(temperature, rel=1e-6)
    assert f"divided by the temperature {temperature:.4g}; softmax" in metadata["output"]
    config = ModelConfig(stem="small-stride2", weights=str(out), normalise="symmetric")
    start = Classifier(config, channels=1, classes=3, resolution=8)
    assert "head taken" in load_pretrained(start, CLASSES)  # to train on: without the temperature
    assert start.temperature is None
    save_file(state | {"temperature": torch.tensor(-2.0)}, again, metadata)
    assert_raises(UserError, "its temperature is -2, not a positive number", duetgan.load, again)


def test_a_temperature_needs_held_out_images_of_one_label(run, runs, tmp_path):
    """One of a hundred may be a training image, as between public training and test sets."""
    out = tmp_path / "x.safetensors"
    with Dataset(run.parent / "train.lmdb") as train, Dataset(pack(tmp_path / "own.lmdb", count=99, seed=5)) as own:
        for shared in (1, 2):
            pixels = np.concatenate([train.read(range(shared))[0], own.read(range(100 - shared))[0]])
            pack_arrays(tmp_path / f"{shared}.lmdb", pixels, np.arange(100) % 3, CLASSES)
    with Dataset(tmp_path / "1.lmdb") as images:
        assert calibrate(load(resolve(run)), images, batch_size=64)["n"] == 100
    for checkpoint, more, told in (
        (run, ["--data", str(run.parent / "train.lmdb")], "60 of 60 images were trained on; a temperature needs held"),
        (run, ["--data", str(tmp_path / "2.lmdb")], "2 of 100 images were trained on; a temperature needs held-out"),
        (run, ["--data", str(pack(tmp_path / "few.lmdb", count=3, seed=5))], "a temperature needs at least 4 images"),
        (classifier_run(tmp_path / "run"), [], r"no images to check.*with --data X\.lmdb"),
        (runs["grey"], [], "--fit-temperature is for a classifier of one label an image"),
    ):
        assert_raises(UserError, told, script.main, command(checkpoint, out, "--fit-temperature", *more))
    assert not out.exists()
