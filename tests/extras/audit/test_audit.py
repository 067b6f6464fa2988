"""`evaluate.py --audit` on untrained, memorising and overfitted GANs."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu

from duetgan.commands import evaluate
from duetgan.data.augment.transforms import to_float
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.extras.audit.evaluate import Partners, audit_scores, choose_sides
from duetgan.extras.audit.membership_inference import TOPS, attack, audit_table, verdict
from duetgan.metrics.features import selection
from duetgan.models.restore import discriminator_from, generator_from
from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.faults.conftest import run_command
from tests.metrics.conftest import CLASSES, SIDE, classifier_run, gan_run, pack, read_json
from tests.metrics.test_scripts import call, pixels

D_SIZES: dict[str, Any] = {"channel_base": 64, "channel_max": 8}


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
    """A GAN that was never trained, with its discriminator."""
    folder = tmp_path_factory.mktemp("gan")
    shape: dict[str, Any] = {"channels": 1, "classes": 3, "resolution": SIDE}
    with forked(0, "init", "test discriminator"):
        discriminator = Discriminator(DiscriminatorConfig(**D_SIZES), **shape)
    return gan_run(folder / "run", data=sets, discriminator=discriminator, sizes=D_SIZES)


class Growing:
    """Stands for a discriminator that is not read."""

    def state_dict(self):
        return {"from_rgbs.4.weight": torch.zeros(1)}


def audited(run, out, *more):
    options = ["--checkpoint", run, "--audit", "--extractor", "pixels", "--n", 120, "--out", out]
    assert call(evaluate, *options, *more) == 0
    return read_json(out / "audit.json")


def test_a_gan_that_never_saw_an_image_tells_nothing(run, sets, tmp_path, capsys):
    found = audited(run, tmp_path)
    for name in ("generator", "discriminator"):
        attack, control = found["attacks"][name], found["controls"][name]
        assert attack["interval"][0] < 0.5
        assert attack["interval"][0] < attack["auc"] < attack["interval"][1]
        assert attack["p_value"] > 0.01
        assert abs(control["auc"] - 0.5) < 0.2
        assert (attack["members"], attack["held_out"]) == (194, 148)  # in one mix of classes
        assert (control["members"], control["held_out"]) == (74, 74)
    assert [each["share"] for each in found["planted"]] == [0.01, 0.02, 0.05]
    assert "too weak to tell" in found["verdict"]  # six copies of 200 images cannot be seen
    assert found["dropped"] == 2
    assert (found["n"], found["extractor"], found["data"]) == (120, "pixels", sets["val_path"])
    printed = capsys.readouterr().out
    assert found["verdict"] in printed
    assert "differential privacy" in printed
    assert "control" in printed
    assert "copies planted at 5%" in printed
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
    assert len(written) == len(written[0]) == 3
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
    assert found["attacks"]["discriminator"]["p_value"] > 0.01


def test_a_discriminator_that_knows_its_training_images_is_caught(run, train, tmp_path, monkeypatch):
    known, plain = {image.numpy().tobytes() for image in train}, Partners.logits

    def knowing(self, discriminator, images, labels):
        logits = plain(self, discriminator, images, labels)
        return logits + torch.tensor([float(image.numpy().tobytes() in known) for image in images])

    monkeypatch.setattr(Partners, "logits", knowing)
    found = audited(run, tmp_path)
    assert found["attacks"]["discriminator"]["p_value"] < 0.005
    assert found["attacks"]["discriminator"]["interval"][0] > 0.5
    assert "never the checkpoint" in found["verdict"]
    assert "do not hand them on" not in found["verdict"]


@pytest.mark.parametrize("order", ["consecutive", "strided"])
def test_a_logit_depends_on_its_image_alone(run, sets, order):
    checkpoint = load(resolve(run))
    generator, discriminator = generator_from(checkpoint), discriminator_from(checkpoint)
    discriminator.config.minibatch_std_order = order
    assert discriminator.config.group == 4
    partners = Partners(generator, 3, seed=0)
    with Dataset(sets["path"]) as reader:
        images, labels = map(torch.from_numpy, reader.read(np.arange(6)))
    together = partners.logits(discriminator, images, labels)
    backwards = partners.logits(discriminator, images.flip(0), labels.flip(0)).flip(0)
    torch.testing.assert_close(together, backwards, rtol=0, atol=1e-5)
    for i in range(6):
        group = torch.cat([images[i : i + 1], partners.images])
        alone = discriminator(to_float(group), torch.cat([labels[i : i + 1], partners.labels]))[0]
        assert float(together[i]) == pytest.approx(float(alone), abs=1e-5)
    assert together.std() > 0


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
        (judge, [], "is for a GAN"),
        (run, ["--classifier", judge], "--classifier is not for --audit"),
        (run, ["--precision", "bf16"], "is not for --audit"),
        (run, ["--fold"], "is not for --audit"),
        (run, ["--robustness"], "is not for --audit"),
        (run, ["--ood", "x.lmdb"], "is not for --audit"),
    ):
        common = ["--audit", "--extractor", "pixels", "--n", 30, "--out", tmp_path / "out"]
        assert told in refused(evaluate.main, "--checkpoint", checkpoint, *common, *more)


def test_without_a_whole_discriminator_the_samples_alone_are_audited(sets, tmp_path):
    """There is none, or it is that of a smaller stage of growth. What is near is never told by a classifier."""
    options = ["--extractor", f"classifier:{classifier_run(tmp_path / 'judge', data=sets)}", "--n", 60, "--audit"]
    for name, more in (("absent", {}), ("growing", {"discriminator": Growing(), "sizes": D_SIZES, "stage": [4, 1.0]})):
        run = gan_run(tmp_path / name, data=sets, **more)
        assert call(evaluate, "--checkpoint", run, *options) == 0
        found = read_json(run / "eval" / "audit.json")
        assert found["attacks"].keys() == {"generator"}
        assert found["extractor"] == "pixels"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "^neither attack found anything$"),
        ({"generator": True}, "do not hand them on"),
        ({"discriminator": True}, "^the discriminator knows"),
        ({"control": True}, "do not trust this audit"),
        ({"found": 18}, "^too weak to tell: of 20 tries, copies at 5% of the samples"),
        ({"generator": True, "found": 18}, "^(?!.*too weak)"),
    ],
)
def test_verdicts(change, told):
    p = {name: {"p_value": 1e-9 if change.get(name) else 0.4} for name in ("generator", "discriminator", "control")}
    planted = [{"share": 0.05, "found": change.get("found", 20), "repeats": 20}]
    controls = {"generator": p.pop("control")}
    assert re.search(told, verdict({"controls": controls, "attacks": p, "planted": planted}))


def test_the_share_of_planted_copies_is_told_and_halves_are_the_control():
    """Of 127 members no more than 127 copies can be made, however many samples there are."""
    row = {"auc": 0.5, "interval": [0.4, 0.6], "p_value": 0.5, "members": 127, "held_out": 33}
    planted = [{"share": share, "copies": n, "found": 0, "repeats": 20} for share, n in ((0.01, 51), (0.05, 127))]
    document = {"checkpoint": "x", "step": 1, "data": "y", "n": 5000, "extractor": "pixels", "verdict": "none"}
    document |= {"attacks": {"generator": row}, "controls": {"generator": row}, "planted": planted}
    printed = audit_table(document)
    assert "copies planted at 1% (51): found in 0 of 20 tries" in printed
    assert "copies planted at 2.5%, all members there are (127)" in printed
    found = audit_scores({"generator": torch.arange(100.0)}, members=60, seed=0)
    control = found["controls"]["generator"]
    assert found["attacks"]["generator"]["auc"] == 0.0
    assert (control["members"], control["held_out"]) == (20, 20)
    assert 0.2 < control["auc"] < 0.8
