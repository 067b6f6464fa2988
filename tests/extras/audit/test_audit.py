"""`evaluate.py --audit` on untrained, memorising and overfitted GANs."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu

from duetgan.commands import evaluate
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.extras.audit import evaluate as audit
from duetgan.extras.audit.evaluate import audit_score, choose_sides
from duetgan.extras.audit.membership_inference import TOPS, attack, verdict
from duetgan.metrics.features import selection
from duetgan.utils.errors import UserError
from tests.faults.conftest import run_command
from tests.metrics.conftest import CLASSES, SIDE, classifier_run, gan_run, pack, read_json
from tests.metrics.test_scripts import call, pixels


def test_an_attack_is_scipys_test_where_members_score_higher_throughout():
    draws = torch.Generator().manual_seed(0)
    members, held_out = (torch.randn(300, generator=draws) + shift for shift in (0.25, 0.0))
    expected = mannwhitneyu(members, held_out, alternative="greater", use_continuity=False).pvalue
    tests = 1 + len({max(1, int(share * 300)) for share in TOPS})
    assert attack(members, held_out)["p_value"] == pytest.approx(tests * expected, rel=1e-6)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Random images: 200 for training, 150 held out, of which two are training images too."""
    folder = tmp_path_factory.mktemp("audit")
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (348, 1, SIDE, SIDE), dtype=np.uint8)
    labels = np.arange(348) % 3
    pack_arrays(folder / "train.lmdb", images[:200], labels[:200], CLASSES)
    held_out = np.r_[200:348, 4, 9]
    pack_arrays(folder / "test.lmdb", images[held_out], labels[held_out], CLASSES)
    return {"path": str(folder / "train.lmdb"), "val_path": str(folder / "test.lmdb")}


@pytest.fixture(scope="module")
def run(tmp_path_factory, sets):
    """A GAN that was never trained."""
    return gan_run(tmp_path_factory.mktemp("gan") / "run", data=sets)


def audited(run, out, *more):
    options = ["--checkpoint", run, "--audit", "--extractor", "pixels", "--n", 120, "--out", out]
    assert call(evaluate, *options, *more) == 0
    return read_json(out / "audit.json")


def test_a_gan_that_never_saw_an_image_tells_nothing(run, sets, tmp_path, capsys, monkeypatch):
    searches: list[Any] = []
    copies: dict[str, Any] = {}
    nearest, draw = audit.nearest, audit.neighbour_images

    def search(*sides):
        searches.append(nearest(*sides))
        return searches[-1]

    def drawn(generator, train, shown, *, seed):
        images, captions = draw(generator, train, shown, seed=seed)
        copies.update(shown, pictures=images)
        return images, captions

    monkeypatch.setattr(audit, "nearest", search)
    monkeypatch.setattr(audit, "neighbour_images", drawn)
    found = audited(run, tmp_path)
    assert copies["usual_distance"] == float(searches[0].distances[194:].median())  # of held-out images
    with Dataset(sets["path"]) as reader:
        for pair, picture in zip(copies["closest"], copies["pictures"], strict=True):
            image = torch.from_numpy(reader.read([pair["train"]])[0][0])
            assert torch.equal(picture[..., -SIDE:], image)
            distance = float((picture[..., :SIDE].double() - image).norm() / 255)
            assert pair["distance"] == pytest.approx(distance, abs=0.02)
    attack, control = found["attacks"]["generator"], found["controls"]["generator"]
    assert attack["interval"][0] < 0.5
    assert attack["interval"][0] < attack["auc"] < attack["interval"][1]
    assert attack["p_value"] > 0.01
    assert abs(control["auc"] - 0.5) < 0.2
    assert (attack["members"], attack["held_out"]) == (194, 148)  # in one mix of classes
    assert (control["members"], control["held_out"]) == (74, 74)
    assert "found nothing" in found["verdict"]
    assert found["dropped"] == 2
    assert (found["n"], found["extractor"], found["data"]) == (120, "pixels", sets["val_path"])
    printed = capsys.readouterr().out
    assert found["verdict"] in printed
    assert "differential privacy" in printed
    assert "194 training images against 148 held-out ones" in printed
    row = [f"{attack['auc']:.3f}", "{:.3f} to {:.3f}".format(*attack["interval"]), f"{attack['p_value']:.2g}"]
    row += [f"{control['auc']:.3f}", "{:.3f} to {:.3f}".format(*control["interval"])]
    assert " ".join(row) in " ".join(printed.split())
    for name in found["images"]:
        assert pixels(tmp_path / name).size
    assert {file.name for file in tmp_path.iterdir()} == {"audit.json", *found["images"]}  # and no command.txt


def test_the_same_seed_gives_the_same_document(run, tmp_path, capsys):
    """And the same images, with any batch size and on two processes."""
    for size in (16, 500):
        audited(run, tmp_path / str(size), "--batch-size", size)
    options = ["--extractor", "pixels", "--n", 120, "--out", tmp_path / "two", "--procs", 2, "--device", "cpu"]
    run_command("evaluate.py", "--checkpoint", run, "--audit", *options).success()
    written = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in tmp_path.iterdir()]
    assert (len(written), len(written[0])) == (3, 2)
    assert written[0] == written[1] == written[2]


@pytest.fixture
def train(sets):
    with Dataset(sets["path"]) as reader:
        return torch.from_numpy(reader.read(np.arange(200))[0])


def test_a_generator_that_returns_training_images_is_caught(run, train, tmp_path, monkeypatch):
    """One sample in ten is a training image."""
    plain = selection.generate

    def memorising(*arguments, indices, **options):
        images = plain(*arguments, indices=indices, **options)
        for row, index in enumerate(indices):
            if index % 10 == 0:
                images[row] = train[index % 200]
        return images

    monkeypatch.setattr(selection, "generate", memorising)
    found = audited(run, tmp_path)
    assert found["attacks"]["generator"]["p_value"] < 0.005
    assert "do not hand them on" in found["verdict"]


def test_sides_have_one_mix_of_classes(tmp_path):
    labels = np.array([0] * 90 + [1] * 60 + [2] * 50)
    images = np.random.default_rng(1).integers(0, 256, (200, 1, SIDE, SIDE), dtype=np.uint8)
    pack_arrays(tmp_path / "train.lmdb", images, labels, CLASSES)
    other = np.random.default_rng(2).integers(0, 256, (60, 1, SIDE, SIDE), dtype=np.uint8)
    pack_arrays(tmp_path / "test.lmdb", other, np.array([0] * 20 + [1] * 40), CLASSES)
    with Dataset(tmp_path / "train.lmdb") as train, Dataset(tmp_path / "test.lmdb") as reader:
        members, held_out, _ = choose_sides(train, reader, conditional=True, searched=1000, seed=0)
        assert np.bincount(members.labels).tolist() == [30, 60]  # all of class 1, half as many of class 0
        assert np.bincount(held_out.labels).tolist() == [20, 40]
        np.testing.assert_array_equal(train.labels()[members.indices], members.labels)
        np.testing.assert_array_equal(reader.labels()[held_out.indices], held_out.labels)
        assert len(set(members.indices.tolist())) == 90
        fewer = choose_sides(train, reader, conditional=True, searched=45, seed=0)
        assert np.bincount(fewer[0].labels).tolist() == [15, 30]
        every = choose_sides(train, reader, conditional=False, searched=1000, seed=0)
        assert (len(every[0].indices), len(every[1].indices)) == (200, 60)
        turned = choose_sides(reader, train, conditional=True, searched=1000, seed=0)  # no member of class 2
        assert np.bincount(turned[0].labels).tolist() == [20, 13]
        assert np.bincount(turned[1].labels).tolist() == [90, 60]
        with pytest.raises(UserError, match="not 0 and 0"):
            choose_sides(train, train, conditional=True, searched=1000, seed=0)  # every test image is a member


def test_what_cannot_be_audited_is_refused(run, sets, tmp_path, refused):
    with Dataset(sets["val_path"]) as reader:  # of one that was trained on the held-out images
        seen = {"trained_on": [reader.meta.content_hash], "synthetic": []}
    judge = classifier_run(tmp_path / "judge", data=sets)
    absent = {"path": "absent.lmdb", "val_path": sets["val_path"]}
    for checkpoint, more, told in (
        (gan_run(tmp_path / "absent", data=absent), [], "needs the images"),
        (gan_run(tmp_path / "other", data=sets, content_hash="another"), [], "holds other images"),
        (gan_run(tmp_path / "seen", data=sets, lineage=seen), [], "was trained on"),
        (run, ["--data", pack(tmp_path / "few.lmdb", count=15)], "needs 20 training images"),
        (
            run,
            ["--data", pack(tmp_path / "other.lmdb", classes=["a", "b", "c"])],
            "its classes are not those of the images",
        ),
        (judge, [], "is for a GAN"),
        (run, ["--classifier", judge], "--classifier is not for --audit"),
        (run, ["--precision", "bf16"], "is not for --audit"),
        (run, ["--fold"], "is not for --audit"),
        (run, ["--robustness"], "is not for --audit"),
    ):
        common = ["--audit", "--extractor", "pixels", "--n", 30, "--out", tmp_path / "out"]
        assert told in refused(evaluate.main, "--checkpoint", checkpoint, *common, *more)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "^the attack found nothing"),
        ({"generator": True}, "do not hand them on"),
        ({"control": True}, "do not trust this audit"),
    ],
)
def test_verdicts(change, told):
    p = {name: {"p_value": 1e-9 if change.get(name) else 0.4} for name in ("generator", "control")}
    controls = {"generator": p.pop("control")}
    assert re.search(told, verdict({"controls": controls, "attacks": p}))


def test_halves_are_the_control():
    found = audit_score(torch.arange(100.0), members=60, seed=0)
    control = found["controls"]["generator"]
    assert found["attacks"]["generator"]["auc"] == 0.0
    assert (control["members"], control["held_out"]) == (20, 20)
    assert 0.2 < control["auc"] < 0.8
