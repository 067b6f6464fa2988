"""`evaluate.py --robustness --ood`: its results, the picture, the tables and what is refused."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from duetgan.commands import evaluate
from duetgan.data.reading.dataset import Dataset
from duetgan.extras.robustness.corruptions import CORRUPTIONS
from duetgan.extras.robustness.tables import corruption_table, outlier_table
from duetgan.metrics.evaluate_classifier import logits_of as measured_logits
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, resolve
from tests.metrics.conftest import SIDE, files, pack, runs, slim_classifiers
from tests.metrics.test_document import (
    COUNT,
    SEED,
    N,
    Written,
    assert_document,
    assert_pictures,
    drawn,
    jackknife,
    keys,
    logits_of,
    probabilities,
    share,
)
from tests.metrics.test_scripts import evaluated
from tests.metrics.trained import pictures, trained

__all__ = ["files", "pictures", "runs", "slim_classifiers", "trained"]  # fixtures


def test_corrupted_images_and_outliers(trained, pictures, capsys):
    outliers, records = trained["others.lmdb"], drawn(COUNT)
    result = Written(trained, "classifier", capsys, f"--tta flip --fold --robustness --ood {outliers}")
    images, labels = trained.images["test"][records], trained.labels["test"][records]
    logits, outside = (logits_of(trained.network, part) for part in (images, trained.images["others"][drawn(61)]))
    corruptions: dict[str, Any] = {}
    for name, corruption in CORRUPTIONS.items():
        corruptions[name] = {"unit": corruption.unit, "strengths": []}
        for strength in range(1, 6):
            part = zip(images.numpy(), records.tolist(), strict=True)
            spoiled = np.stack([corruption(image, strength, seed=SEED, index=record) for image, record in part])
            hits = logits_of(trained.network, torch.from_numpy(spoiled)).argmax(1) == labels
            amount = {"amount": corruption.amount(strength, SIDE)}
            corruptions[name]["strengths"].append(amount | keys(accuracy=share(hits)))
    mean = np.mean([row["accuracy"] for part in corruptions.values() for row in part["strengths"]])
    assert_document(result.document["robustness"], {"n": N, "accuracy": mean, "corruptions": corruptions})
    expected: dict[str, Any] = {"data": str(outliers), "n": N}
    is_inlier, both = np.arange(2 * N) < N, np.concatenate([logits, outside])
    for name, scores in (("max_probability", probabilities(both).max(1)), ("energy", np.log(np.exp(both).sum(1)))):
        area = jackknife(lambda w, scores=scores: roc_auc_score(is_inlier, scores, sample_weight=w), 2 * N)
        passed = np.mean(scores[N:] >= np.sort(scores[:N])[N // 20])
        expected[name] = keys(auroc=area) | {"fpr95": passed}
    assert_document(result.document["ood"], expected)
    first, strengths = trained.images["test"][0].numpy(), range(1, 6)
    rows = [[first, *(part(first, k, seed=SEED, index=0) for k in strengths)] for part in CORRUPTIONS.values()]
    heads = [*CORRUPTIONS, "as it is", *(f"strength {k}" for k in strengths)]
    assert_pictures({"robustness.png": pictures["robustness.png"]}, {"robustness.png": (chain(*rows), heads)})
    assert result.document["images"][-1] == "robustness.png"

    printed = [" ".join(line.split()) for line in result.printed.splitlines()]
    for name, part in corruptions.items():
        values = [result.document["accuracy"], *(row["accuracy"] for row in part["strengths"])]
        row = [name, *(f"{100 * value:.1f} %" for value in values)]
        assert row in result.rows
        assert " ".join(row) in printed
    for key, title in (("max_probability", "largest probability"), ("energy", "energy")):
        score = expected[key]
        area, (low, high) = score["auroc"], score["auroc_interval"]
        row = [title, f"{area:.3g}", f"{low:.3g} to {high:.3g}", f"{100 * score['fpr95']:.1f} %"]
        assert row in result.rows
        assert " ".join(row) in printed


def test_tables_of_damaged_results():
    strengths = [{"accuracy": 0.625}, {"accuracy": 0.25}]
    whole = {"blur": {"strengths": strengths}, "noise": {"strengths": strengths[:1]}}
    assert corruption_table({"robustness": {"corruptions": whole}, "accuracy": 0.75})[1] == [
        ["blur", "75.0 %", "62.5 %", "25.0 %"],
        ["noise", "75.0 %", "62.5 %", "-"],
    ]
    odd = {"blur": 3, "jpeg": {"strengths": 3}, "x": {"strengths": [3]}}
    assert corruption_table({"robustness": {"corruptions": odd}})[1] == [[name, "-"] for name in odd]
    for value in (3, {"corruptions": 3}, {"energy": 3}):
        assert corruption_table({"robustness": value})[1] == outlier_table({"ood": value})[1] == []
    title, *_ = outlier_table({"ood": {"data": "far/others.lmdb"}})[0]
    assert title == "outliers (others.lmdb) detected by"


def test_outliers_may_be_of_another_size_and_number(runs, files, tmp_path):
    others = pack(tmp_path / "x.lmdb", count=40, classes=["a", "b"], channels=3, side=24, seed=9)
    document = evaluated(runs["classifier"], tmp_path, "--ood", others)
    model = classifier_from(load(resolve(runs["classifier"])))
    with Dataset(files["val_path"]) as own, Dataset(others) as outside:
        both = [measured_logits(model, torch.from_numpy(each.read(np.arange(len(each)))[0])) for each in (own, outside)]
    scores = torch.cat(both).double().softmax(1).amax(1).numpy()
    expected = roc_auc_score(np.arange(100) < 60, scores)
    assert document["ood"]["max_probability"]["auroc"] == pytest.approx(expected, abs=2e-3)  # equal but for rounding
    assert document["ood"]["n"] == 40


def test_what_cannot_be_measured_is_refused(runs, files, tmp_path, refused):
    gan = ["--checkpoint", runs["gan"], "--extractor", "pixels"]
    for argv, message in (
        (["--checkpoint", runs["classifier"], "--ood", files["val_path"]], "these are the test images themselves"),
        ([*gan, "--ood", files["path"]], "--ood is for a classifier"),
        ([*gan, "--robustness"], "--robustness is for a classifier"),
    ):
        assert message in refused(evaluate.main, *argv)
