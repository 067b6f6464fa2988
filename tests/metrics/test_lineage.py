"""Who may judge a generator: not who was trained on samples, supplied a loss or has seen the test images."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from duetgan.commands import evaluate
from duetgan.data.lmdb.format import Split
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics import lineage
from duetgan.metrics.lineage import (
    TOLERATED,
    data_of,
    identities,
    lineage_of,
    load_judge,
    provenance_of,
    training_images,
    unfit,
)
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import CorruptCheckpoint, load, resolve
from duetgan.utils.checkpoint.provenance import Lineage, recorded
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.data.packing.test_inspect import PASSPORT, pack_samples
from tests.metrics.conftest import CLASSES, SIDE, classifier_run, gan_run, read_json
from tests.metrics.test_scripts import answers, call, evaluated


def judge_of(folder, *, data=None, **more):
    """The checkpoint of an untrained classifier that says `more` of itself."""
    return load(resolve(classifier_run(folder, data=data, **more)))


def hash_of(path):
    with Dataset(path) as reader:
        return reader.meta.content_hash


def test_real_images_only_and_none_of_the_test_images(tmp_path, files, test_reader):
    """Judges of before are known by the hash of their training file alone."""
    for data in (None, files, files | {"path": "absent.lmdb"}):
        judge = judge_of(tmp_path / "a", data=data, content_hash=hash_of(files["path"]))
        assert unfit(judge, test_reader) == ""
        shutil.rmtree(tmp_path / "a")
    seen = {"trained_on": [hash_of(files["path"])], "synthetic": []}
    assert unfit(judge_of(tmp_path / "b", data=files, lineage=seen), test_reader) == ""


def test_samples_and_the_test_images_are_refused_by_their_content_not_by_their_path(tmp_path, files, test_reader):
    seen = {"trained_on": ["f00d"], "synthetic": [PASSPORT, PASSPORT | {"seed": 1}]}
    told = unfit(judge_of(tmp_path / "samples", lineage=seen), test_reader)
    assert told.startswith("was trained on samples (of sha256:0123456789ab), ")
    assert "give one that has seen real images only" in told
    copy = hash_of(shutil.copy(files["val_path"], tmp_path / "elsewhere.lmdb"))
    for name, more in (
        ("before", {"content_hash": copy}),  # its file is gone
        ("ancestor", {"lineage": {"trained_on": ["f00d", copy], "synthetic": []}}),
    ):
        judge = judge_of(tmp_path / name, **more)
        assert unfit(judge, test_reader).startswith(f"was trained on the test images {files['val_path']}")


def test_a_file_of_several_or_the_whole_that_was_split_counts(tmp_path, files):
    """What is judged on: one of the files that were trained on, or a part that was drawn from them later."""
    with Dataset([files["path"], files["val_path"]]) as both, Dataset(files["val_path"]) as reader:
        assert not identities(both).isdisjoint(lineage_of(reader).trained_on)
        assert not identities(reader).isdisjoint(lineage_of(both).trained_on)
        split = Split(part="val", share=0.1, seed=0, whole="50ce", images=60)
        object.__setattr__(reader.meta, "split", split)
        object.__setattr__(reader.meta, "fingerprint", "feed")  # of the same source, packed in another size
        for name in ("50ce", "feed"):
            told = unfit(judge_of(tmp_path / name, lineage={"trained_on": [name], "synthetic": []}), reader)
            assert "was trained on the test images" in told
        assert lineage_of(reader).trained_on == [hash_of(files["val_path"]), "feed"]


@pytest.mark.parametrize(("shared", "refused"), [(1, False), (2, True), (50, True)])
def test_a_training_file_at_hand_is_searched_for_test_images(tmp_path, shared, refused):
    """Of 100 test images one is tolerated."""
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (300, 1, SIDE, SIDE), dtype=np.uint8)
    labels = np.arange(300) % 3
    train, test = tmp_path / "train.lmdb", tmp_path / "test.lmdb"
    pack_arrays(test, images[:100], labels[:100], CLASSES)
    content = pack_arrays(train, images[100 - shared :], labels[100 - shared :], CLASSES).content_hash
    assert TOLERATED == 0.01
    with Dataset(test) as reader:
        told = unfit(judge_of(tmp_path / "a", data={"path": str(train)}, content_hash=content), reader)
        assert bool(told) == refused
        assert not refused or f"was trained on {shared}.0% of the test images" in told
        other = judge_of(tmp_path / "b", data={"path": str(train)}, content_hash="another file by now")
        assert unfit(other, reader) == ""


def test_a_judge_of_images_in_another_format_or_of_one_label_is_refused(tmp_path, runs, test_reader, monkeypatch):
    pixels = np.arange(18 * SIDE**2, dtype=np.uint16).reshape(18, 1, SIDE, SIDE) * 50
    pack_arrays(tmp_path / "deep.lmdb", pixels, np.arange(18) % 3, CLASSES)
    gan, judge = load(resolve(runs["gan"])), str(runs["classifier"])
    judge_for = partial(load_judge, judge, gan, CLASSES, torch.device("cpu"))
    told = f"--judge {judge} was trained on images of .*, one label each; give a classifier of images like the gen"
    assert list(judge_for(test_reader).class_names) == CLASSES
    with Dataset(tmp_path / "deep.lmdb") as deep:
        assert_raises(UserError, told, judge_for, deep, option="--judge")
        network = judge_for(None)
        network.thresholds = torch.full([3], 0.5)
        monkeypatch.setattr(lineage, "classifier_from", lambda *_, **__: network)
        several = told.replace("one label", "several labels")
        assert_raises(UserError, several, judge_for, deep, option="--judge")
        monkeypatch.undo()
    object.__setattr__(test_reader.meta, "sets", [[0], [0, 1], [2]])
    assert_raises(UserError, told, judge_for, test_reader, option="--judge")


def test_evaluate_refuses_with_exit_code_2(tmp_path, runs, files, refused):
    options = ["--checkpoint", runs["gan"], "--extractor", "pixels", "--n", 20, "--out", tmp_path / "out"]
    synthetic = {"trained_on": [], "synthetic": [PASSPORT]}
    test = {"content_hash": hash_of(files["val_path"])}
    for name, more in (("samples", {"lineage": synthetic}), ("test images", test)):
        judge = classifier_run(tmp_path / name.replace(" ", "-"), data=files, **more)
        told = refused(evaluate.main, *options, "--classifier", judge)
        assert told.startswith(f"error: --classifier {judge} was trained on ")
        assert name in told
    assert not (tmp_path / "out" / "metrics.json").exists()


def test_a_ready_made_classifier_judges_and_names_images(tmp_path, runs, capsys, refused):
    """Row J5: a folder as timm writes it, in place of a run."""
    timm = pytest.importorskip("timm")
    theirs, about = tmp_path / "theirs", {"label_names": CLASSES}
    network = timm.create_model("resnet10t", num_classes=len(CLASSES))
    timm.models.save_for_hf(network, theirs, model_config=about, safe_serialization=True)
    judge = ["--classifier", theirs, "--extractor", "pixels", "--n", 20]
    assert evaluated(runs["gan"], tmp_path / "out", *judge)["judge"]["n"] == 20
    Image.new("RGB", (300, 200), "red").save(tmp_path / "x.png")
    assert set(answers(capsys, theirs, tmp_path / "x.png")[0]["probabilities"]) == set(CLASSES)
    told = refused(evaluate.main, "--checkpoint", "timm:resnet10t", "--data", "x.lmdb")
    assert "a name has no folder for the results; give one with --out DIR" in told


def test_who_saw_samples_or_began_with_a_teachers_weights_is_taken_with_a_word(tmp_path, runs, files):
    """As judge, and for its features: networks that were pretrained on the same images are related."""
    seen = classifier_run(tmp_path / "seen", data=files, lineage={"trained_on": [], "synthetic": [PASSPORT]})
    specs = f"classifier:{seen},classifier:{runs['classifier']}"
    notes = evaluated(runs["gan"], tmp_path / "out", "--n", 20, "--extractor", specs)["notes"]
    assert "trained on samples" in notes[f"classifier:{seen}"]
    assert f"classifier:{runs['classifier']}" not in notes
    began = {"trained_on": [], "synthetic": [], "pretrained": ["sha256:0123456789ab"]}
    gan = gan_run(tmp_path / "gan", data=files, lineage=began | {"teachers": ["sha256:another"]})
    judge = classifier_run(tmp_path / "judge", data=files, lineage=began)
    notes = evaluated(gan, tmp_path / "out", "--n", 20, "--searched", 0, "--classifier", judge)["notes"]
    for name in ("judge", f"classifier:{judge}"):
        assert "began with the same weights" in notes[name]


@pytest.mark.parametrize(
    "lineage", [3, {"trained_on": []}, {"trained_on": [3], "synthetic": []}, {"trained_on": ["a"], "synthetic": [{}]}]
)
def test_a_damaged_lineage_is_refused_in_one_line(tmp_path, lineage):
    with pytest.raises(CorruptCheckpoint, match=r"not a checkpoint of Duet \(lineage"):
        judge_of(tmp_path / "a", lineage=lineage)


def test_the_lineage_of_files(tmp_path, files):
    samples = pack_samples(tmp_path / "samples.lmdb")
    with Dataset(files["path"]) as real, Dataset(samples) as drawn:
        found = lineage_of(real, drawn, samples=[PASSPORT | {"seed": 9}]).document()
        assert found["trained_on"] == [real.meta.content_hash, drawn.meta.content_hash]
        assert found["synthetic"] == [PASSPORT, PASSPORT | {"seed": 9}]
        with Dataset([files["path"], files["val_path"]]) as both:
            parts = [hash_of(files["path"]), hash_of(files["val_path"])]
            assert lineage_of(both).trained_on == [both.meta.content_hash, *parts]
    another = PASSPORT | {"seed": 8}
    with Dataset([samples, pack_samples(tmp_path / "more.lmdb", passport=another)]) as drawn:
        assert another in lineage_of(drawn).document()["synthetic"]


def test_a_restored_classifier_knows_its_lineage_and_two_generators_have_two_fingerprints(tmp_path):
    lineage = {"trained_on": ["f00d"], "synthetic": [PASSPORT]}
    judge = judge_of(tmp_path / "judge", lineage=lineage)
    assert recorded(judge) == classifier_from(judge).lineage == Lineage.read(lineage)
    assert classifier_from(judge_of(tmp_path / "plain")).lineage == Lineage.of()
    one = load(resolve(gan_run(tmp_path / "a", content_hash="f00d")))
    passport = provenance_of(generator_from(one), one, seed=3, truncation_psi=0.5, selection="the best half")
    assert passport | {"generator": ""} == {
        "generator": "", "step": 7, "seed": 3, "truncation_psi": 0.5, "selection": "the best half",
        "trained_on": "f00d", "classes": CLASSES,
    }  # fmt: skip
    other = load(resolve(gan_run(tmp_path / "b", classes=[])))
    assert provenance_of(generator_from(other), other, seed=3)["generator"] != passport["generator"]


def test_relative_paths_of_a_run_are_found_from_another_folder(tmp_path, files, monkeypatch):
    """J25: they were relative to the current folder, whichever that was."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = gan_run(project / "runs" / "a", data={"path": "train.lmdb", "val_path": "gone.lmdb"})
    shutil.copy(files["path"], project / "train.lmdb")
    checkpoint = load(resolve(run))
    monkeypatch.chdir(elsewhere)
    train, why = training_images(checkpoint)
    assert (train is not None, why) == (True, "")
    assert data_of(checkpoint, "path") == str(project / "train.lmdb")
    assert data_of(checkpoint, "val_path") == "gone.lmdb"
    shutil.copy(files["path"], elsewhere / "train.lmdb")
    assert data_of(checkpoint, "path") == "train.lmdb"  # the current folder comes first
    (elsewhere / "train.lmdb").unlink()
    (project / "train.lmdb").rename(project / "train-0.lmdb")
    shard = gan_run(project / "runs" / "b", data={"path": "train-*.lmdb"})
    assert data_of(load(resolve(shard)), "path") == str(project / "train-*.lmdb")
    assert data_of(checkpoint, "path") == "train.lmdb"
    (project / "runs" / "data").mkdir()  # where a quickstart has it
    shutil.copy(files["path"], project / "runs" / "data" / "train.lmdb")
    assert data_of(checkpoint, "path") == str(project / "runs" / "data" / "train.lmdb")


def test_a_judge_whose_images_are_gone_is_taken_with_a_warning(tmp_path, runs, files, capsys):
    judge = classifier_run(tmp_path / "judge", data={"path": "gone.lmdb"}, content_hash="f00d")
    evaluated(runs["gan"], tmp_path / "out", "--n", 20, "--extractor", "pixels", "--classifier", judge)
    assert "warning: whether the judge saw test images, pixel for pixel, is not known: " in capsys.readouterr().err
    assert call(evaluate, "--checkpoint", judge, "--data", files["val_path"], "--out", tmp_path / "alone") == 0
    assert "gone.lmdb: no such file" in read_json(tmp_path / "alone" / "metrics.json")["notes"]["leaks"]


def test_files_that_hold_other_images_by_now_are_told(tmp_path, files, capsys):
    """Training images are those of the checkpoint's hash, held-out ones of the run's data.json, or --data's."""
    run = gan_run(tmp_path / "run", data=files, content_hash="another")
    (run / "data.json").write_text('{"held-out": {"content_hash": "another"}}')
    found = evaluated(run, tmp_path / "out", "--n", 20, "--extractor", "pixels")
    assert (found["memorisation"], found["notes"]["floor"]) == (None, f"{files['path']} holds other images by now")
    warning = f"warning: {files['val_path']} holds other images than when the run began"
    assert warning in capsys.readouterr().err
    evaluated(run, tmp_path / "out", "--n", 20, "--extractor", "pixels", "--data", files["val_path"])
    assert "warning" not in capsys.readouterr().err


def test_a_judge_that_began_as_the_guide_is_refused_and_its_features_told(tmp_path, files, refused):
    began = {"trained_on": [], "synthetic": [], "teachers": ["sha256:0123456789ab"]}
    gan, judge = gan_run(tmp_path / "gan", data=files, lineage=began), classifier_run(tmp_path / "judge", lineage=began)
    told = refused(evaluate.main, "--checkpoint", gan, "--classifier", judge, "--extractor", "pixels")
    assert "began as one, that supplied a loss to this generator" in told
    found = evaluated(gan, tmp_path / "out", "--n", 20, "--extractor", f"classifier:{judge}")
    assert "or one that taught it, supplied a loss" in found["notes"][f"classifier:{judge}"]
