"""Images with a classifier's confident predictions as labels, against the definition."""

import json

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.extras.pseudo_labels import command
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from tests.metrics.conftest import CLASSES, SIDE, classifier_run, pack

pytestmark = pytest.mark.usefixtures("slim_module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A classifier's run, rest.lmdb without labels, the same with them (known.lmdb), and few.lmdb with labels."""
    path = tmp_path_factory.mktemp("pseudo")
    classifier_run(path / "run")
    pack(path / "few.lmdb", count=9)
    with Dataset(pack(path / "known.lmdb", count=60, seed=3)) as known:
        pack_arrays(path / "rest.lmdb", known.read(range(60))[0])
    return path


@pytest.fixture(scope="module")
def probabilities(folder):
    """Of the 60 images, float64 [60, 3]."""
    model = classifier_from(load(resolve(folder / "run")))
    with Dataset(folder / "rest.lmdb") as reader:
        return judge_images(model, torch.from_numpy(reader.read(range(60))[0])).numpy()


def label(folder, out, *more, data="rest.lmdb"):
    options = ["--checkpoint", folder / "run", "--data", folder / data, "--out", out, *more]
    return run_cli(command.main, [str(option) for option in options])


def test_sure_images_come_with_their_class_behind_the_labelled_ones(folder, probabilities, tmp_path, capsys):
    threshold = float(np.median(probabilities.max(1)))
    more = ["--labelled", folder / "few.lmdb", "--threshold", repr(threshold), "--batch-size", 7, "--json"]
    assert label(folder, tmp_path / "out.lmdb", *more) == 0
    told = json.loads(capsys.readouterr().out)
    kept = np.flatnonzero(probabilities.max(1) >= threshold)
    assert 0 < len(kept) < 60
    assert (told["kept"], told["labelled"], told["count"]) == (len(kept), 9, 9 + len(kept))
    assert (told["images"], told["threshold"], told["right"]) == (60, threshold, None)
    counts = np.bincount(probabilities.argmax(1)[kept], minlength=len(CLASSES)).tolist()
    assert told["by_class"] == dict(zip(CLASSES, counts, strict=True))
    with (
        Dataset(tmp_path / "out.lmdb") as out,
        Dataset(folder / "few.lmdb") as few,
        Dataset(folder / "rest.lmdb") as rest,
    ):
        images, labels = out.read(range(len(out)))
        assert list(out.classes) == CLASSES
        assert (images[:9] == few.read(range(9))[0]).all()
        assert (labels[:9] == few.labels()).all()
        assert (images[9:] == rest.read(kept)[0]).all()
        assert (labels[9:] == probabilities.argmax(1)[kept]).all()
        assert "labelled by" in out.meta.source


def test_known_labels_are_only_compared_with_and_encoded_images_are_kept(folder, probabilities, tmp_path, capsys):
    shares = set()
    for least in (0.0, float(np.sort(probabilities.max(1))[-3:-1].mean())):  # all images; two of them
        out = tmp_path / "known.lmdb"
        assert label(folder, out, "--threshold", repr(least), "--overwrite", data="known.lmdb") == 0
        kept = probabilities.max(1) >= least
        with Dataset(out) as reader, Dataset(folder / "known.lmdb") as known:
            assert (reader.labels() == probabilities.argmax(1)[kept]).all()
            right = (reader.labels() == known.labels()[kept]).mean()
        assert f"{right:.1%} of these labels agree with those of the file" in capsys.readouterr().out
        shares.add(right)
    assert len(shares) == 2
    with Dataset(folder / "rest.lmdb") as rest:
        pack_arrays(tmp_path / "jpeg.lmdb", rest.read(range(60))[0], encoding="jpeg")
    assert label(folder, tmp_path / "out.lmdb", "--threshold", 0, "--data", tmp_path / "jpeg.lmdb") == 0
    with Dataset(tmp_path / "out.lmdb") as out, Dataset(tmp_path / "jpeg.lmdb") as jpeg:
        assert out.meta.encoding == "png"
        assert (out.read(range(60))[0] == jpeg.read(range(60))[0]).all()


def test_what_cannot_be_is_refused(folder, tmp_path, capsys):
    out = tmp_path / "out.lmdb"
    other, wide = pack(tmp_path / "other.lmdb", classes=["dark", "grey", "x"]), pack(tmp_path / "w.lmdb", side=2 * SIDE)
    for place, told, *more in (
        (out, "from 0 to 1", "--threshold", 2),
        (out, "no image of", "--threshold", 1),
        (out, "its classes are not those of the classifier", "--labelled", other, "--threshold", 0),
        (out, "pack both alike", "--labelled", wide, "--threshold", 0),
        (folder / "few.lmdb", "exists", "--threshold", 0),
    ):
        assert label(folder, place, *more) == 2
        assert told in capsys.readouterr().err
        assert not out.exists()
