"""A training's checkpoints say what its weights have seen: through resumes, transfers and files of weights."""

from pathlib import Path
from typing import Any

import pytest

from duetgan.commands import export
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import fingerprint
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from tests.data.packing.test_inspect import PASSPORT
from tests.end_to_end.helpers import train_in_process, write_config

pytestmark = pytest.mark.usefixtures("slim_module")
AS_IT_WAS = ["--model.normalise", "symmetric"]  # what normalise auto has chosen


def hash_of(folder: Path) -> str:
    with Dataset(folder / "train.lmdb") as reader:
        return reader.meta.content_hash


def lineage_at(run: Path) -> dict[str, Any]:
    return load(resolve(run))["lineage"]


@pytest.fixture(scope="module")
def samples(tmp_path_factory, packed):
    """The same test images beside training images that say that they are samples."""
    folder = tmp_path_factory.mktemp("samples")
    with Dataset(packed / "train.lmdb") as reader:
        images, labels = reader.read(range(len(reader)))
        passport = PASSPORT | {"classes": list(reader.classes)}
        pack_arrays(folder / "train.lmdb", 255 - images, labels, reader.classes, passport=passport)
    (folder / "test.lmdb").symlink_to(packed / "test.lmdb")
    return folder


@pytest.fixture(scope="module")
def seen(samples, tmp_path_factory, slim_module):
    """A classifier that was trained on samples, and resumed once."""
    folder = tmp_path_factory.mktemp("seen")
    config = write_config(folder / "recipe.yaml", "classifier", samples)
    assert train_in_process(config, folder / "run", "--max-steps", "2") == 0
    assert train_in_process(config, folder / "run", "--max-steps", "4") == 0
    return folder / "run"


def test_who_starts_from_such_weights_has_seen_them_too(tmp_path, seen, samples, packed):
    """By --init-from, by model.weights of a checkpoint or an export, and a resume forgets nothing."""
    weights = tmp_path / "seen.safetensors"
    exported = ["--checkpoint", str(seen), "--format", "safetensors", "--out", str(weights)]
    assert run_cli(export.main, exported) == 0
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    expected = {"trained_on": [hash_of(packed), hash_of(samples)], "synthetic": lineage_at(seen)["synthetic"]}
    expected["teachers"] = [fingerprint(classifier_from(load(resolve(seen))))]  # whom `seen` guides they may not judge
    for name, more in (
        ("init", ["--init-from", str(seen)]),
        ("checkpoint", ["--model.weights", str(seen)]),  # J24: normalise auto is as they say
        ("export", ["--model.weights", str(weights)]),
    ):
        run = tmp_path / name
        assert train_in_process(config, run, "--max-steps", "1", *more) == 0
        assert lineage_at(run) == expected, name
        weights_later = [] if name == "init" else ["--model.weights", "null", *AS_IT_WAS]
        assert train_in_process(config, run, "--max-steps", "2", *weights_later) == 0
        assert load(resolve(run))["step"] == 2
        assert lineage_at(run) == expected, name
    grandchild = tmp_path / "grandchild"
    assert train_in_process(config, grandchild, "--max-steps", "1", "--init-from", str(tmp_path / "init")) == 0
    parent = fingerprint(classifier_from(load(resolve(tmp_path / "init"))))
    assert lineage_at(grandchild) == expected | {"teachers": [*expected["teachers"], parent]}
