"""N ranks equal one process on the same global batch: losses, gradients, weights and averages, in float64."""

import sys
from pathlib import Path

import numpy as np
import pytest

from duetgan.data.packing.records import pack_arrays
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.utils.checkpoint import point, save
from duetgan.utils.seeding import forked
from tests.distributed.worker import CLASSIFIER, Records, largest_difference

TOLERANCE = 1e-9
CLASSES = ["a", "b", "c"]
KINDS = [  # see worker.TREES
    *("gan", "gan-losses", "gan-apart", "gan-pairs", "gan-wasserstein", "gan-ada", "gan-r3gan"),
    *("gan-dcgan", "gan-growing"),
]
VARIANTS = {
    1: [f"{kind}:0" for kind in KINDS]
    + ["gan:2", "gan-losses:2", "gan-wasserstein:2", "gan-r3gan:2", "gan-dcgan:2", "gan-growing:2", "classifier:0"],
    2: [f"{kind}:0" for kind in KINDS] + ["gan:2", "gan-losses:2", "classifier:0", "classifier-unsynced:0"],
    4: ["gan-losses:0", "gan-apart:0", "gan-growing:0", "classifier:0"],
}
SLOW: dict[int, list[pytest.MarkDecorator]] = {1: [], 2: [], 4: [pytest.mark.slow]}  # as long as all else, on two cores
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tested on Linux"),
    pytest.mark.timeout(900),  # the records of all variants are made at once
]


@pytest.fixture(scope="module")
def records(tmp_path_factory, slim_module):
    """Of 32 random 16 px grey images of three classes."""
    folder = tmp_path_factory.mktemp("oracle")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (32, 1, 16, 16), dtype=np.uint8)
    pack_arrays(folder / "data.lmdb", images, labels=np.arange(32) % 3, classes=CLASSES, smallest=8)
    untrained_classifier(folder / CLASSIFIER)
    return Records(folder, "tests.distributed.worker", VARIANTS)


def untrained_classifier(run: Path, *, several: bool = False) -> None:
    """A run of a random classifier, which gives the generator a loss."""
    shape = {"channels": 1, "classes": len(CLASSES), "resolution": 16}
    with forked(0, "init", "test classifier"):
        classifier = Classifier(ModelConfig(stem="small-stride2"), **shape)
    if several:
        classifier.add_thresholds()
    content = {"schema": 1, "task": "classifier", "step": 1, "config": {"model": {"stem": "small-stride2"}}}
    path = save(
        run / "checkpoints",
        content | {"classes": CLASSES, "shape": shape, "data": {}, "state": {"model_ema": classifier.state_dict()}},
    )
    point(run / "checkpoints", "last", path)


@pytest.mark.parametrize("part", ["metrics", "gradients", "weights", "average"])
@pytest.mark.parametrize(
    ("processes", "variant"),
    [
        pytest.param(processes, variant, marks=SLOW[processes])
        for processes, variants in VARIANTS.items()
        for variant in variants
        if (processes > 1 or variant.endswith(":2")) and variant != "classifier-unsynced:0"
    ],
)
def test_every_split_gives_one_process_result(records, processes, variant, part):
    assert records.differ(processes, variant, part) < TOLERANCE


@pytest.mark.parametrize("variant", ["gan:0", "classifier:0"])
def test_the_comparison_is_of_something(records, variant):
    whole = records[1][variant]
    assert all(float(g.abs().max()) > 0 for name, g in whole[0]["gradients"].items() if g.ndim > 1)
    assert largest_difference(whole[:1], whole[-1:], "weights") > 1e-3
    if variant == "gan:0":
        assert whole[0]["metrics"]["loss/r1"] > 0


def test_the_oracle_can_fail_and_the_variants_do_what_they_are_for(records):
    """The oracle can fail: plain BatchNorm on two ranks is not one process's."""
    whole, split = records[1]["classifier:0"], records[2]["classifier-unsynced:0"]
    assert largest_difference(whole, split, "gradients") > 1e-6
    one = records[1]
    assert all(row["metrics"]["loss/r1"] > 0 and row["metrics"]["loss/r2"] > 0 for row in one["gan-pairs:0"])
    strengths = [row["metrics"]["ada/p"] for row in one["gan-ada:0"]]
    assert len(set(strengths)) > 1  # it adapts
    assert largest_difference(one["gan:0"][:1], one["gan-ada:0"][:1], "weights") > 1e-6
