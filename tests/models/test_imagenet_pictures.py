"""ImageNet's weights on 20 of its pictures, which foolbox ships: at least 18 right, wherever they are asked."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import export
import predict
from duetgan.library import Transform, load_classifier
from duetgan.utils.script import run_cli
from tests.conftest import REPOSITORY
from tests.models.test_weights import WEIGHTS

FOUND = importlib.util.find_spec("foolbox")
PICTURES = sorted(Path(FOUND.origin or "").parent.glob("data/imagenet_*.jpg")) if FOUND else []
LABELS = [int(re.findall(r"_(\d+)\.jpg", path.name)[0]) for path in PICTURES]

pytestmark = [
    pytest.mark.skipif(not WEIGHTS.exists(), reason=f"{WEIGHTS.name} is not there"),
    pytest.mark.skipif(len(PICTURES) != 20, reason="foolbox's pictures are not there"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("pictures")
    for path in PICTURES:
        shutil.copy(path, place)
    return place


def images():
    classifier = load_classifier(WEIGHTS, device="cpu")
    assert isinstance(classifier.transform, Transform)
    return torch.stack([classifier.transform(path) for path in PICTURES])


def right(labels):
    return sum(int(label) == wanted for label, wanted in zip(labels, LABELS, strict=True))


def test_predict(folder, capsys):
    assert run_cli(predict.main, ["--checkpoint", str(WEIGHTS), "--device", "cpu", "--json", str(folder)]) == 0
    names = load_classifier(WEIGHTS, device="cpu").class_names
    answers = json.loads(capsys.readouterr().out)
    assert [Path(answer["file"]).name for answer in answers] == [path.name for path in PICTURES]
    assert right([names.index(answer["label"]) for answer in answers]) >= 18


def test_the_library_and_torch_hub():
    classifier = load_classifier(WEIGHTS, device="cpu")
    assert right([classifier.class_names.index(name) for name in classifier.predict(PICTURES).labels]) >= 18
    model = torch.hub.load(str(REPOSITORY), "resnet_classifier", source="local", checkpoint=str(WEIGHTS))
    with torch.no_grad():
        assert right(model(images()).argmax(1)) >= 18


def test_onnx(folder, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    file = tmp_path / "x.onnx"
    options = ["--checkpoint", str(WEIGHTS), "--format", "onnx", "--out", str(file), "--data", str(folder)]
    assert run_cli(export.main, [*options, "--n", "4", "--repeats", "1", "--batch-size", "4"]) == 0
    session = onnxruntime.InferenceSession(str(file))
    (logits,) = session.run(None, {session.get_inputs()[0].name: images().numpy().astype(np.float32)})
    assert right(logits.argmax(1)) >= 18
