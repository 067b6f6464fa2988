"""`evaluate.py --robustness`: its results, the picture, the tables and what is refused."""

from itertools import chain
from typing import Any

import numpy as np
import torch

from duetgan.commands import evaluate
from duetgan.extras.robustness.corruptions import CORRUPTIONS
from duetgan.extras.robustness.tables import corruption_table
from tests.metrics.conftest import SIDE, files, runs, slim_classifiers
from tests.metrics.test_document import (
    COUNT,
    SEED,
    N,
    Written,
    assert_document,
    assert_pictures,
    drawn,
    keys,
    logits_of,
    share,
)
from tests.metrics.trained import pictures, trained

__all__ = ["files", "pictures", "runs", "slim_classifiers", "trained"]  # fixtures


def test_corrupted_images(trained, pictures, capsys):
    records = drawn(COUNT)
    result = Written(trained, "classifier", capsys, "--tta flip --fold --robustness")
    images, labels = trained.images["test"][records], trained.labels["test"][records]
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


def test_tables_of_damaged_results():
    strengths = [{"accuracy": 0.625}, {"accuracy": 0.25}]
    whole = {"blur": {"strengths": strengths}, "noise": {"strengths": strengths[:1]}}
    assert corruption_table({"robustness": {"corruptions": whole}, "accuracy": 0.75})[1] == [
        ["blur", "75.0 %", "62.5 %", "25.0 %"],
        ["noise", "75.0 %", "62.5 %", "-"],
    ]
    odd = {"blur": 3, "jpeg": {"strengths": 3}, "x": {"strengths": [3]}}
    assert corruption_table({"robustness": {"corruptions": odd}})[1] == [[name, "-"] for name in odd]
    for value in (3, {"corruptions": 3}):
        assert corruption_table({"robustness": value})[1] == []


def test_a_generator_is_refused(runs, refused):
    argv = ["--checkpoint", runs["gan"], "--extractor", "pixels", "--robustness"]
    assert "--robustness is for a classifier" in refused(evaluate.main, *argv)
