"""Twenty steps on 2 and 4 ranks, and over micro-batches, give the losses and weights of one process, in float64. The
classifiers are slim ones.
"""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from tests.distributed import test_classifier_oracle as classifiers
from tests.distributed import worker
from tests.distributed.test_oracle import CLASSES, TOLERANCE, untrained_classifier
from tests.distributed.worker import largest_difference
from tests.end_to_end.ranks import together

Records = dict[int, dict[str, list[dict[str, Any]]]]

STEPS = 20
# every regulariser, ADA, and the losses' gradients taken one by one
ALL = worker.GAN | {"ada": worker.ADA, "loss": worker.LOSSES | {"r2_gamma": 0.5, "gradients_every": 1}}
worker.TREES["gan-all"] = ALL
# BatchNorm not synchronised: a rank's statistics are those of its share, as a micro-batch's are in one process
LOCAL = "classifier-local"
worker.TREES[LOCAL] = classifiers.worker.TREES["classifier-everything"] | {"sync_bn": "off"}
BATCH = 8
assert worker.COMMON["batch_size"] == BATCH
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
NAMES = ["gan-all", "gan-pairs", "gan-r3gan", "gan-growing", "classifier-everything", "classifier-fixed"]
assert all(name in classifiers.worker.TREES for name in NAMES)  # BatchNorm synchronised, and frozen
SPLITS = {
    1: ["gan-all:2", "classifier-fixed:3"],
    2: [*(f"{name}:0" for name in NAMES), "gan-all:2", "classifier-fixed:3"],
    4: ["gan-all:0", "gan-growing:0", "classifier-everything:0", "classifier-fixed:0"],
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tested on Linux"),
    pytest.mark.timeout(1800),  # the records of all variants are made at once
]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, slim_module: None) -> Records:
    """What each world size recorded, from 32 random 16 px images of three classes: grey ones for the GANs."""
    folder = tmp_path_factory.mktemp("oracle")
    rng = np.random.default_rng(0)
    for kind, channels in (("gan", 1), ("classifier", 3)):
        images = rng.integers(0, 256, (32, channels, 16, 16), dtype=np.uint8)
        (folder / kind).mkdir()
        pack_arrays(folder / kind / "data.lmdb", images, labels=[0, 0, 1, 2] * 8, classes=CLASSES, smallest=8)
    untrained_classifier(folder / "gan" / worker.CLASSIFIER)
    found: Records = {}
    wholes = [*(f"{name}:0" for name in NAMES), *(f"{LOCAL}:{BATCH // other}" for other in (2, 4))]
    for processes, split in SPLITS.items():
        found[processes] = {}
        variants = split + (wholes if processes == 1 else [f"{LOCAL}:0"])
        for kind in ("gan", "classifier"):
            out = folder / kind / f"{processes}.pt"
            chosen = [variant for variant in variants if variant.startswith(kind)]
            data = str(folder / kind / "data.lmdb")
            together(worker.record, __name__, out, data, chosen, STEPS, world=processes, output=out.with_suffix(".txt"))
            found[processes] |= torch.load(out, weights_only=True)
    return found


@pytest.mark.parametrize("part", ["metrics", "gradients", "weights", "average"])
@pytest.mark.parametrize(
    ("processes", "variant"), [(processes, variant) for processes, variants in SPLITS.items() for variant in variants]
)
def test_twenty_steps_of_every_split_give_one_process_result(
    records: Records, processes: int, variant: str, part: str
) -> None:
    whole = records[1][f"{variant.partition(':')[0]}:0"]
    assert len(whole) == STEPS
    assert largest_difference(whole, records[processes][variant], part) < TOLERANCE


def without_statistics(record: dict[str, Any]) -> dict[str, Any]:
    """Without BatchNorm's running statistics: rank 0's are of its own images only."""
    parts = ("weights", "average")
    kept = {part: {k: v for k, v in record[part].items() if not k.endswith(STATISTICS)} for part in parts}
    return record | kept


@pytest.mark.parametrize("part", ["metrics", "gradients", "weights", "average"])
@pytest.mark.parametrize("processes", [2, 4])
def test_unsynchronised_statistics_are_those_of_micro_batches(records: Records, processes: int, part: str) -> None:
    whole = [without_statistics(record) for record in records[1][f"{LOCAL}:{BATCH // processes}"]]
    ranks = [without_statistics(record) for record in records[processes][f"{LOCAL}:0"]]
    assert len(whole) == STEPS
    assert largest_difference(whole, ranks, part) < TOLERANCE
    everything = records[1]["classifier-everything:0"]
    assert largest_difference(everything, records[1][f"{LOCAL}:{BATCH // processes}"], "gradients") > 1e-6
