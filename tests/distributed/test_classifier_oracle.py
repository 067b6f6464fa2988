"""Ranks and micro-batches do not change what a slim classifier's training does, with all settings on, in float64."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from tests.distributed import worker
from tests.distributed.test_oracle import CLASSES, TOLERANCE
from tests.distributed.worker import Records, largest_difference
from tests.metrics.conftest import gan_run

EVERYTHING: dict[str, Any] = {
    "augment": {
        **{"flip": True, "shift": 1, "trivial_augment": True, "erase": 0.3},
        **{"mixup": 0.4, "cutmix": 1.0, "mix_prob": 0.8},
    },
    "loss": {"class_weights": "balanced", "label_smoothing": 0.1},
    "optimizer": worker.TREES["classifier"]["optimizer"] | {"lr": 0.05, "clip_adaptive": 0.02},
    "resizing": {"initial_scale": 0.5, "delay_fraction": 0.0, "finetune_fraction": 0.9},  # a step of 8 px, then 16 px
}
SMALL = worker.TREES["classifier"] | {"model": {"name": "resnet18", "stem": "small-stride2"}}
worker.TREES["classifier-everything"] = SMALL | EVERYTHING
# without BatchNorm's statistics of the batch, micro-batches must not matter either
fixed = SMALL | EVERYTHING | {"finetune": {"freeze_bn": True}}
worker.TREES["classifier-fixed"] = fixed | {"loss": {"kind": "squared-error", "class_weights": {"b": 3.0}}}
worker.TREES["classifier-plain"] = SMALL | {"augment": {"mixup": 0.4}}
average = {"name": "schedulefree-adamw", "lr": 0.01, "schedule": "constant", "weight_decay": 0.1}
worker.TREES["classifier-average"] = SMALL | {"optimizer": average}
mixture = {"path": "synthetic.lmdb", "share": 0.3, "weight": 0.5, "balance": "fill"}
worker.TREES["classifier-mixture"] = SMALL | EVERYTHING | {"data": {"synthetic": mixture}}
worker.TREES["gan-mixture"] = worker.GAN | {"data": {"synthetic": {"path": "synthetic.lmdb", "share": 0.5}}}
fresh = {"checkpoint": "generator", "share": 0.3}
worker.TREES["classifier-fresh"] = SMALL | {"data": {"synthetic": fresh}}
# ranks read parts of the 32 unlabelled images of a step
worker.TREES["classifier-unlabelled"] = SMALL | {"augment": {"flip": True, "shift": 1}, "unlabelled": {}}
worker.TREES["classifier-airbench"] = SMALL | {
    "model": {"name": "airbench"},
    "optimizer": {"name": "muon", "lr": 0.1, "unit_filters": True},
    "augment": {"flip": "alternating"},
    "finetune": {"stage_lr": {"head": 2.0}, "freeze_at": {"stem": 1}},
}
# BatchNorm not synchronised: a rank's statistics are those of its part, as a micro-batch's are in one process
worker.TREES["classifier-local"] = worker.TREES["classifier-everything"] | {"sync_bn": "off"}
LOCAL = ("classifier-local:4", "classifier-local:0")  # in one process, on two ranks
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
BOTH = ("everything", "average", "airbench")
MIXTURES = ["classifier-mixture:0", "classifier-fresh:0", "classifier-unlabelled:0", "gan-mixture:0"]
VARIANTS = {
    1: [f"classifier-{name}:0" for name in (*BOTH, "fixed", "plain")] + ["classifier-fixed:3", LOCAL[0], *MIXTURES],
    2: [f"classifier-{name}:0" for name in BOTH] + ["classifier-fixed:3", LOCAL[1], *MIXTURES],
}
SPLITS = [(1, "classifier-fixed:3"), *((2, variant) for variant in VARIANTS[2] if variant not in LOCAL)]
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tested on Linux"),
    pytest.mark.timeout(900),  # the records of all variants are made at once
]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """What each world size recorded, from 32 random 16 px RGB images of three classes, not equally many, and 10 others
    where they are mixed with synthetic ones.
    """
    folder = tmp_path_factory.mktemp("oracle")
    images = np.random.default_rng(0).integers(0, 256, (32, 3, 16, 16), dtype=np.uint8)
    labels = np.array([0, 0, 1, 2] * 8)
    pack_arrays(folder / "data.lmdb", images, labels=labels, classes=CLASSES, smallest=8)
    others = np.random.default_rng(1).integers(0, 256, (10, 3, 16, 16), dtype=np.uint8)
    pack_arrays(folder / "synthetic.lmdb", others, labels=np.arange(10) % 3, classes=CLASSES, smallest=8)
    gan_run(folder / "generator", classes=CLASSES, channels=3, side=16)
    return Records(folder, "tests.distributed.test_classifier_oracle", VARIANTS)


@pytest.mark.parametrize("part", ["metrics", "gradients", "weights", "average"])
@pytest.mark.parametrize(("processes", "variant"), SPLITS)
def test_every_split_gives_one_process_result(records, processes, variant, part):
    assert records.differ(processes, variant, part) < TOLERANCE


def without_statistics(record: dict[str, Any]) -> dict[str, Any]:
    """Without BatchNorm's running statistics: rank 0's are of its own images only."""
    parts = ("weights", "average")
    kept = {part: {k: v for k, v in record[part].items() if not k.endswith(STATISTICS)} for part in parts}
    return record | kept


@pytest.mark.parametrize("part", ["metrics", "gradients", "weights", "average"])
def test_unsynchronised_statistics_are_those_of_micro_batches(records, part):
    whole, ranks = (
        [without_statistics(record) for record in records[processes][LOCAL[processes - 1]]] for processes in (1, 2)
    )
    assert largest_difference(whole, ranks, part) < TOLERANCE
    assert largest_difference(records[1]["classifier-everything:0"], records[1][LOCAL[0]], "gradients") > 1e-6


def test_the_comparison_is_of_something_and_a_schedule_free_network_its_own(records):
    one = {name.removesuffix(":0"): record for name, record in records[1].items()}
    for name in ("everything", "fixed", "average"):
        record = one[f"classifier-{name}"]
        assert largest_difference(record[:1], record[-1:], "weights") > 1e-4
    everything, plain = one["classifier-everything"], one["classifier-plain"]
    for other in (plain, one["classifier-mixture"]):
        assert largest_difference(everything, other, "gradients") > 1e-4
    told, kept = zip(*map(norms, (everything, plain)), strict=True)
    assert kept[0] < 0.9 * told[0]  # it was clipped
    assert kept[1] == pytest.approx(told[1])
    last = records[2]["classifier-average:0"][-1]
    difference = (last["average"]["network.fc.weight"] - last["weights"]["model.network.fc.weight"]).abs().max()
    assert difference > 1e-7


def norms(record: list[dict[str, Any]]) -> tuple[float, float]:
    """Of the first step's gradients: as it is told, before they are clipped, and as it is."""
    told = record[0]["metrics"]["gradient_norm/classifier"]
    return told, torch.stack([g.norm() for g in record[0]["gradients"].values()]).norm().item()
