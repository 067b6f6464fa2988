"""evaluate.py --robustness and --ood on an untrained classifier."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score

import evaluate
from data.reading.dataset import Dataset
from metrics.classification.corruptions import CORRUPTIONS, STRENGTHS
from metrics.classification.passes import corrupted_hits, logits_of, outlier_logits
from models.restore import classifier_from
from tests.metrics.conftest import pack, read_json
from tests.metrics.test_evaluate_classifier import ByBrightness
from tests.metrics.test_scripts import call, refused
from utils.checkpoint import load, resolve


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Images of other classes, size and channels."""
    return pack(tmp_path_factory.mktemp("others") / "x.lmdb", count=40, classes=["a", "b"], channels=3, side=24, seed=9)


def test_corrupted_images_are_counted_one_by_one(test_reader):
    """Against a slow loop over images, corruptions and strengths."""
    model = ByBrightness()
    found = corrupted_hits(model, test_reader, seed=3, limit=20, batch_size=64)
    images, labels = test_reader.read(np.arange(20))
    for row, corruption in enumerate(CORRUPTIONS.values()):
        for strength in range(1, STRENGTHS + 1):
            hits = 0
            for index, (image, label) in enumerate(zip(images, labels, strict=True)):
                spoiled = corruption(image, strength, seed=3, index=index)
                hits += int(logits_of(model, torch.from_numpy(spoiled[None])).argmax()) == label
            assert int(found[row, strength - 1]) == hits
    brightness = found[list(CORRUPTIONS).index("brightness")]
    assert int(brightness[-1]) < int(brightness[0])  # dark images are named by their brightness


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_batches_do_not_change_the_counts(test_reader, batch_size):
    whole = corrupted_hits(ByBrightness(), test_reader, seed=0, limit=None, batch_size=256)
    assert torch.equal(corrupted_hits(ByBrightness(), test_reader, seed=0, limit=None, batch_size=batch_size), whole)


def test_both_options_by_the_command_line(runs, files, others, tmp_path, capsys):
    plain = ["--checkpoint", runs["classifier"]]
    asked = ["--robustness", "--ood", others, "--out", tmp_path, "--json"]
    assert call(evaluate, *plain, *asked) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == read_json(tmp_path / "metrics.json")
    rows = document["robustness"]["corruptions"]
    assert list(rows) == list(CORRUPTIONS)
    shares = [each["accuracy"] for row in rows.values() for each in row["strengths"]]
    assert len(shares) == 25
    assert document["robustness"]["accuracy"] == pytest.approx(np.mean(shares))
    with Image.open(tmp_path / "robustness.png") as image:
        assert image.height > 5 * 96
    assert "robustness.png" in document["images"]

    model = classifier_from(load(resolve(runs["classifier"])))
    with Dataset(files["val_path"]) as own, Dataset(others) as outside:
        both = [logits_of(model, torch.from_numpy(each.read(np.arange(len(each)))[0])) for each in (own, outside)]
        assert torch.allclose(outlier_logits(model, outside, limit=None, batch_size=7), both[1], atol=1e-5)
    scores = torch.cat(both).double().softmax(1).amax(1).numpy()
    expected = roc_auc_score(np.arange(100) < 60, scores)
    assert document["ood"]["max_probability"]["auroc"] == pytest.approx(expected, abs=2e-3)  # equal but for rounding
    assert (document["ood"]["data"], document["ood"]["n"]) == (str(others), 40)

    assert call(evaluate, *plain, "--out", tmp_path / "plain") == 0
    bare = read_json(tmp_path / "plain" / "metrics.json")
    assert "robustness" not in bare
    assert "ood" not in bare
    assert {key: document[key] for key in bare if key != "images"} == {k: v for k, v in bare.items() if k != "images"}


def test_refusals(runs, files, others, tmp_path, capsys):
    classifier, gan = ["--checkpoint", runs["classifier"]], ["--checkpoint", runs["gan"], "--extractor", "pixels"]
    for argv, told in (
        ([*classifier, "--ood", files["val_path"]], "these are the test images themselves"),
        ([*classifier, "--ood", tmp_path / "absent.lmdb"], "absent.lmdb"),
        ([*gan, "--ood", others], "--ood is for a classifier"),
        ([*gan, "--robustness"], "--robustness is for a classifier"),
    ):
        assert told in refused(capsys, evaluate, *argv)
