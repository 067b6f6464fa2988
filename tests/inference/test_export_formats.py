"""Every format, of every network that it takes: written, loaded again, equal for any number of rows."""

import json
import shutil
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from duetgan.data.reading.dataset import Dataset
from duetgan.inference.export.check import open_subject
from duetgan.inference.export.formats import FORMATS
from duetgan.inference.export.subject import SAMPLES, classifier_subject, generator_subject
from duetgan.inference.export.weights import ENTRY, contents, write_weights
from duetgan.inference.inputs import file_input
from duetgan.inference.predictions import predict
from duetgan.metrics.features.extractors import classifier_input
from duetgan.models.gan import draw
from duetgan.models.restore import classifier_from, generator_from, read_weights
from duetgan.utils.checkpoint import SCHEMA, load, resolve
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.inference.conftest import R3, gan_run, styled
from tests.metrics.conftest import CLASSES, pack


@pytest.fixture(scope="module", autouse=True)
def slim_classifiers():
    """None here: the convolutions of the whole network are quantized, and its file is smaller."""


@pytest.fixture(scope="module")
def sample_images(tmp_path_factory):
    """A packed file in the order of classes."""
    return pack(tmp_path_factory.mktemp("images") / "x.lmdb", count=60)


@pytest.fixture(scope="module")
def subjects(runs, sample_images, tmp_path_factory):
    """Networks by name; `growing` is at a smaller stage of its growth, half faded in."""
    names = ("grey", "plain", "r3", "dcgan")
    made = {name: generator_subject(load(resolve(runs[name])), batch_size=24, psi=1.0, mean="class") for name in names}
    grown = load(resolve(gan_run(tmp_path_factory.mktemp("runs") / "growing", styled(side=16))))
    made["truncated"] = generator_subject(load(resolve(runs["grey"])), batch_size=24, psi=0.5, mean="class")
    made["growing"] = generator_subject(grown | {"stage": [8, 0.5]}, batch_size=24, psi=1.0, mean="class")
    with Dataset(sample_images) as reader:
        checkpoint = load(resolve(runs["classifier"]))
        ranges: dict[str, Any] = {"calibration": reader, "calibrated": 20}
        made["classifier"] = classifier_subject(checkpoint, reader, count=30, batch_size=16, **ranges)
    return made


@pytest.fixture(scope="module")
def written(subjects, tmp_path_factory):
    """(network, format) -> its file, written once; skips where packages are missing."""
    folder, files = tmp_path_factory.mktemp("written"), {}

    def file(name, form):
        for package in FORMATS[form].needs:
            pytest.importorskip(package)
        if (name, form) not in files:
            files[name, form] = folder / f"{name}.{form}"
            FORMATS[form].write(subjects[name], files[name, form])
        return files[name, form]

    return file


# a program of StyleGAN2 takes seconds to make
CASES = [
    *(("safetensors", name) for name in ("classifier", "grey", "plain", "r3", "dcgan", "growing")),
    *(("torch-export", name) for name in ("classifier", "plain")),
    *(("onnx", name) for name in ("classifier", "truncated")),
    *(pytest.param("torch-export", name, marks=pytest.mark.slow) for name in ("r3", "dcgan", "growing")),
    *(pytest.param("onnx", name, marks=pytest.mark.slow) for name in ("r3", "dcgan")),
]


@pytest.mark.parametrize(("form", "name"), CASES)
def test_the_file_gives_what_the_network_gives_for_any_number_of_rows(subjects, written, form, name):
    subject = subjects[name]
    run = FORMATS[form].load(subject, written(name, form))
    for rows in (1, 2, 5):
        inputs = subject.rows(rows)
        with torch.no_grad():
            expected, found = subject.network(*inputs), run(inputs)
        assert len(found) == rows
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        if rows > 1:
            assert (expected[0] - expected[1]).abs().max() > 1e-3  # the rows are told apart


def test_int8_is_of_integers_near_the_original_and_smaller(subjects, written):
    subject, path, exact = subjects["classifier"], written("classifier", "int8"), written("classifier", "onnx")
    (images,) = subject.batches[0]
    found, expected = (FORMATS["int8"].load(subject, file)((images,)) for file in (path, exact))
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < 0.1
    assert path.stat().st_size < 0.3 * exact.stat().st_size
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(str(path)).graph
    scales = {i.name: list(i.dims) for i in graph.initializer if i.name.endswith("weight_scale")}
    by_channel = [dims for dims in scales.values() if dims and dims[0] >= 64]
    assert len(by_channel) >= 20  # a scale for each output channel of every convolution
    quantized = [i for i in graph.initializer if i.name.endswith("weight_quantized")]
    assert len(quantized) >= 20
    assert {i.data_type for i in quantized} == {3}  # int8
    weights = [onnx.numpy_helper.to_array(i) for i in quantized]
    assert max(abs(w.astype(int)).max() for w in weights) <= 64  # seven bits: more overflow where there is no VNNI


@pytest.mark.parametrize(("name", "form"), [("classifier", "onnx"), ("classifier", "int8"), ("truncated", "onnx")])
def test_a_graph_says_what_it_is_and_how_it_is_called(written, name, form):
    """U7: with images in [0, 1] the predictions are plausible and wrong."""
    model = pytest.importorskip("onnx").load(str(written(name, form)))
    told = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(told["classes"]) == json.loads(told["duet"])["classes"] == CLASSES
    images = "images: float32 [N, 1, 8, 8] in [-1, 1], grey: pixels / 127.5 - 1"
    names, outputs = ([part.name for part in parts] for parts in (model.graph.input, model.graph.output))
    if name == "classifier":
        assert (told["input"], names, outputs) == (images, ["images"], ["logits"])
        assert told["output"].startswith("logits: float32 [N, classes]")
        assert not any("BatchNorm" in node.op_type for node in model.graph.node)
    else:
        assert told["input"] == "z: float32 [N, z_dim], normal; labels: int64 [N], indices into `classes`"
        assert (told["output"], names, outputs) == (images, ["z", "labels"], ["images"])
        assert (told["truncation_psi"], told["truncation_mean"]) == ("0.5", "class")


@pytest.mark.parametrize("mean", ["class", "global"])
def test_a_program_is_truncated_as_its_generator(runs, mean):
    checkpoint = load(resolve(runs["grey"]))
    job = Namespace(truncation_psi=0.5, truncation_mean=mean)
    assert open_subject(job, checkpoint).truncation == {"truncation_psi": "0.5", "truncation_mean": mean}
    for sets in (None, [[0], [1, 2], [0, 2]]):
        subject = generator_subject(checkpoint | {"sets": sets}, batch_size=8, psi=0.5, mean=mean)
        z, labels = subject.batches[0]
        truncation = {"truncation_psi": 0.5, "truncation_mean": mean}
        network: Any = subject.network
        expected = network.generator(z, labels, **truncation)
        torch.testing.assert_close(network(z, labels), expected)
        assert (expected - network.generator(z, labels)).abs().max() > 0.01


def test_the_pages_lines_predict_as_predict_does(runs, written, tmp_path, monkeypatch, capsys):
    """U7: the lines of docs/classifier.md, as they stand there, on an image of the network's size."""
    page = (Path(__file__).parents[2] / "docs" / "classifier.md").read_text()
    lines = page.split("```python\n")[1].split("```")[0]
    checkpoint = load(resolve(runs["classifier"]))
    side = checkpoint["shape"]["resolution"]
    shutil.copy(written("classifier", "onnx"), tmp_path / "classifier.onnx")
    monkeypatch.chdir(tmp_path)
    for seed in range(4):
        pixels = np.random.default_rng(seed).integers(0, 64 * (seed + 1), (side, side), dtype=np.uint8)
        Image.fromarray(pixels).save("image.png")
        exec(lines, {})
        how: Any = {"resize": None, "top": 1, "batch_size": 1, "maps": None, "fast": None}
        ((_, expected),) = predict(classifier_from(checkpoint), checkpoint, [file_input("image.png")], **how)
        assert capsys.readouterr().out == f"{expected['label']}\n"


def test_a_program_says_what_it_is_and_has_no_batchnorm_left(written):
    path, extra = written("classifier", "torch-export"), {"duet.json": ""}
    with open(path, "rb") as file:
        program = torch.export.load(file, extra_files=extra)
    assert json.loads(extra["duet.json"])["classes"] == CLASSES
    assert "batch_norm" not in program.graph_module.code
    assert zipfile.is_zipfile(path)


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        UserError, match=r"needs onnx.*import of onnxruntime.*`pip install onnx onnxruntime onnxscript`"
    ):
        FORMATS["onnx"].check_packages()


def test_a_generator_is_checked_on_the_samples_of_evaluation(subjects):
    subject = subjects["grey"]
    z = torch.cat([batch[0] for batch in subject.batches])
    labels = torch.cat([batch[1] for batch in subject.batches])
    assert len(z) == len(labels) == SAMPLES
    assert z.equal(draw(subject.network.generator, range(SAMPLES), 0)[0])
    assert labels[:4].tolist() == [0, 1, 2, 0]
    assert subjects["plain"].names == ("z",)


def test_images_are_drawn_from_all_classes_and_calibration_sees_others(subjects, sample_images):
    subject = subjects["classifier"]
    images = torch.cat([batch[0] for batch in subject.batches])
    ranges = torch.cat([batch[0] for batch in subject.calibration])
    assert (len(images), len(ranges)) == (30, 20)
    assert set(subject.labels.tolist()) == {0, 1, 2}
    with Dataset(sample_images) as reader:
        stored, labels = reader.read(range(60))
    everything = classifier_input(subject.network, torch.from_numpy(stored))
    place = [[i for i in range(60) if everything[i].equal(image)] for image in (*images, *ranges)]
    assert all(len(found) == 1 for found in place)
    assert len({found[0] for found in place}) == 50
    assert [labels[found[0]] for found in place[:30]] == subject.labels.tolist()


def test_few_images_are_shared_other_classes_refused_and_unlabelled_ones_not_scored(runs, tmp_path):
    how: Any = {"count": 50, "batch_size": 4, "calibrated": 50}
    few, more = pack(tmp_path / "few.lmdb", count=9), pack(tmp_path / "other.lmdb", seed=4)
    copy = Path(shutil.copy(few, tmp_path / "copy.lmdb"))  # the same images under another name
    for ranges, sizes in ((few, [5, 4]), (copy, [5, 4]), (more, [9, 50])):
        with Dataset(few) as reader, Dataset(ranges) as other:
            calibration = reader if ranges == few else other
            subject = classifier_subject(load(resolve(runs["classifier"])), reader, calibration=calibration, **how)
        assert [sum(len(b[0]) for b in part) for part in (subject.batches, subject.calibration)] == sizes
    checkpoint = load(resolve(runs["classifier"]))
    with Dataset(pack(tmp_path / "one.lmdb", count=1)) as reader:
        subject = classifier_subject(checkpoint, reader, count=10, batch_size=4, calibration=None, calibrated=0)
        assert subject.labels.tolist() == [0]
        message = "one.lmdb: too few images to check an export with; give another file with --data"
        assert_raises(UserError, message, classifier_subject, checkpoint, reader, calibration=reader, **how)
    with (
        Dataset(pack(tmp_path / "two.lmdb", classes=["a", "b"])) as reader,
        pytest.raises(UserError, match=r"its classes are not those of the classifier: .* missing here; .*with --data"),
    ):
        classifier_subject(checkpoint, reader, count=10, batch_size=4, calibration=None, calibrated=0)
    with Dataset(pack(tmp_path / "none.lmdb", classes=[])) as reader:
        assert (
            classifier_subject(checkpoint, reader, count=10, batch_size=4, calibration=None, calibrated=0).labels
            is None
        )


@pytest.mark.parametrize("name", ["grey", "plain", "r3", "dcgan", "classifier"])
def test_a_network_comes_back_to_the_bit_from_the_file_alone(runs, tmp_path, name):
    checkpoint = load(resolve(runs[name]))
    write_weights(tmp_path / "x.safetensors", checkpoint)
    found = read_weights(tmp_path / "x.safetensors")
    restore = classifier_from if name == "classifier" else generator_from
    expected, rebuilt = restore(checkpoint), restore(found)
    assert type(rebuilt) is type(expected)
    state = rebuilt.state_dict()
    assert all(value.equal(state[key]) for key, value in expected.state_dict().items())
    for key in ("schema", "task", "step", "classes", "shape"):
        assert found[key] == checkpoint[key]
    if name == "r3":
        assert found["config"]["generator"] == R3


def test_a_stage_and_teachers_are_kept_and_paths_are_not(checkpoint, tmp_path):
    config = {"data": {"path": "/home/me/x.lmdb", "resolution": 8}, "loss": {"classifier": "runs/c"}}
    more = {"stage": [4, 0.5], "teachers": ["sha256:1"], "origin": {"file": "/home/me/runs/a"}}
    images = [{"step": step, "content_hash": f"hash{step}", "count": 9, "path": "/home/me/x"} for step in (0, 5)]
    more["data"] = checkpoint["data"] | {"history": images}
    changed = checkpoint | {"config": checkpoint["config"] | config} | more
    write_weights(tmp_path / "x.safetensors", changed)
    found = read_weights(tmp_path / "x.safetensors")
    assert (found["stage"], found["teachers"]) == ([4, 0.5], ["sha256:1"])
    assert found["config"]["data"] == {"resolution": 8}
    assert found["data"]["resize_filter"] == "zero-pad"
    told = [{key: value for key, value in each.items() if key != "path"} for each in images]
    assert found["data"]["history"] == told
    text = json.dumps(contents(changed))
    assert "/home" not in text
    assert "runs/c" not in text
    generator = generator_from(found)
    z, labels = torch.ones(2, generator.z_dim), torch.tensor([0, 1])
    assert generator(z, labels).equal(generator_from(changed)(z, labels))


def test_channels_last_weights_are_written_in_order(checkpoint, tmp_path):
    state = checkpoint["state"]["generator_ema"]
    last = {k: v.contiguous(memory_format=torch.channels_last) if v.ndim == 4 else v for k, v in state.items()}
    write_weights(tmp_path / "x.safetensors", checkpoint | {"state": {"generator_ema": last}})
    found = read_weights(tmp_path / "x.safetensors")["state"]["generator_ema"]
    assert all(value.equal(found[key]) for key, value in state.items())


def test_files_that_do_not_say_what_they_are_or_are_damaged_are_refused(checkpoint, tmp_path):
    path = tmp_path / "x.safetensors"
    assert_raises(UserError, "no such file", read_weights, path)
    for metadata in (None, {ENTRY: "[]"}, {ENTRY: '{"task": "gan"}'}):
        save_file({"a": torch.zeros(1)}, str(path), metadata)
        assert_raises(UserError, r"does not say what its weights are; write it with export\.py", read_weights, path)
    save_file({"a": torch.zeros(1)}, str(path), {ENTRY: "{"})
    assert_raises(UserError, "cannot be read", read_weights, path)
    save_file({"a": torch.zeros(1)}, str(path), {ENTRY: json.dumps(contents(checkpoint) | {"schema": SCHEMA + 1})})
    assert_raises(UserError, "is newer than this program", read_weights, path)
    path = tmp_path / "x.safetensors"
    write_weights(path, checkpoint)
    path.write_bytes(path.read_bytes()[:-50])
    assert_raises(UserError, "cannot be read", read_weights, path)
