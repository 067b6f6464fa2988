"""A GAN that is asked for several labels an image, from the file to what is made of it, and what refuses it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import duetgan
from duetgan.commands import evaluate, export, generate, train
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.selection import select
from duetgan.metrics.intervals import wilson
from duetgan.metrics.samples.frechet import frechet_distance
from duetgan.models.restore import classifier_from, discriminator_from, generator_from, read
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from tests.end_to_end.helpers import rows
from tests.metrics.trained import assert_pixels, pictures, samples_of, to_float

__all__ = ["pictures"]  # a fixture

CLASSES = ["bar", "dot", "ring"]
SETS = {  # of each file its own, in other orders: a number alone means nothing
    "train": [[], [0], [0, 1], [0, 1, 2], [2]],
    "val": [[0], [0, 1], [1, 2], [2]],
}
GAN = """task: gan
generator: {z_dim: 8, w_dim: 8, mapping_layers: 2, channel_base: 64, channel_max: 8}
discriminator: {channel_base: 64, channel_max: 8, minibatch_std_group: 2}
loss: {r1_interval: 2, style_mixing: 0.9, mismatch_weight: 0.5, auxiliary_weight: 0.2}
"""
CLASSIFIER = "task: classifier\nloss: {kind: bce}\nmodel: {stem: small}\noptimizer: {lr: 0.02, warmup_steps: 1}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, slim_module):
    """A channel a class: bright where the image is of it."""
    path = tmp_path_factory.mktemp("sets")
    numbers = np.random.default_rng(0)
    for part, count in (("train", 60), ("val", 24)):
        labels = np.minimum(numbers.integers(0, 6, count), len(SETS[part]) - 1)
        images = numbers.integers(0, 60, (count, 3, 16, 16), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[SETS[part][label]] += 150
        pack_arrays(path / f"{part}.lmdb", images, labels, CLASSES, label_sets=SETS[part], source=part)
    return path


def trained(folder: Path, name: str, recipe: str, *more: str, once: bool = False) -> Path:
    run, file = folder / name, folder / f"{name}.yaml"
    data = f"data: {{path: {folder}/train.lmdb, val_path: {folder}/val.lmdb}}\n"
    rest = "steps: 6\nbatch_size: 8\nlog: {every: 2, samples_every: 3, tensorboard: false}\ncheckpoint: {every: 3}\n"
    file.write_text(recipe + rest + data + "evaluation: {every: 6, n: 12}\n")
    options = ["--config", str(file), "--run-dir", str(run), *more]
    if not run.is_dir():
        assert once or run_cli(train.main, [*options, "--max-steps", "3"]) == 0
        assert run_cli(train.main, options) == 0
    return run


PIXELS = ("--evaluation.extractor", "pixels")


@pytest.fixture(scope="module")
def run(folder):
    return trained(folder, "gan", GAN, *PIXELS)


def test_every_combination_is_drawn_from_its_own_vector(run):
    model = duetgan.load_generator(run, device="cpu")
    names = model.label_names
    assert set(names) == {"(no label)", "bar", "bar; dot", "bar; dot; ring", "ring"}
    samples = model.sample(4, classes=["dot;bar", "ring"], seed=3, noise="const")
    assert samples.labels == ["bar; dot", "ring"] * 2
    again = model.sample(1, classes="bar; dot", seed=3, noise="const")
    assert torch.equal(again.images[0], samples.images[0])
    z = torch.randn(2, model.z_dim)
    hot = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    images = model(z, hot, noise="const")
    alone = model(z, torch.tensor([0, 2]), noise="const")  # a number is that class alone
    assert torch.equal(images[1], alone[1])
    assert not torch.equal(images[0], alone[0])
    with pytest.raises(duetgan.UserError, match="no class 'dot; ring'"):
        model.sample(1, classes="dot; ring")


def test_held_out_images_are_judged_with_their_own_files_sets(folder, run):
    checkpoint = load(resolve(run))
    discriminator = discriminator_from(checkpoint, torch.device("cpu"))
    with Dataset(folder / "val.lmdb") as data, torch.no_grad():
        images, labels = data.read(range(24))
        hot = torch.tensor([[float(place in SETS["val"][label]) for place in range(3)] for label in labels])
        expected = discriminator(to_float(torch.from_numpy(images)), hot).mean()
    found = [row["val/logits/held_out"] for row in rows(run) if "val/logits/held_out" in row]
    assert found[-1] == pytest.approx(float(expected), rel=1e-4)


def of_labels(values: Any) -> dict[str, Any]:
    return dict(zip(CLASSES, (value and pytest.approx(value, rel=1e-4) for value in values), strict=True))


def test_figures_tell_what_was_recognised(folder, run, pictures, tmp_path, capsys):
    """All that depends on the labels, from the networks alone: a label counts in all sets that have it."""
    judge, n, seed = trained(folder, "classifier", CLASSIFIER, once=True), 9, 4
    held_out = ["--data", str(folder / "val.lmdb"), "--n", str(n), "--extractor", "pixels,classifier", "--json"]
    options = ["--checkpoint", str(run), *held_out, "--classifier", str(judge), "--seed", str(seed), "--per-class", "8"]
    capsys.readouterr()
    assert run_cli(evaluate.main, [*options, "--out", str(tmp_path / "eval")]) == 0
    figures = json.loads(capsys.readouterr().out)
    with LMDBReader(folder / "val.lmdb") as reader, Dataset(folder / "val.lmdb") as data:
        numbers, sets, names = data.label_numbers(), reader.meta.sets, reader.meta.label_names
        every = torch.from_numpy(data.read(range(24))[0])
    hot = np.array([np.isin(range(3), part) for part in sets or ()])
    drawn = select(numbers, n=n, seed=seed, role="test", per_class=8, multi_hot=hot)
    judged = select(numbers, n=n, seed=seed, role="judge")
    asked, indices = torch.from_numpy(hot[drawn.labels]), list(range(len(drawn.labels)))
    assert len(indices) > n
    generator, network = (
        restore(read(resolve(path)), several=True)
        for restore, path in ((generator_from, run), (classifier_from, judge))
    )
    samples = samples_of(generator, asked.float().tolist(), indices, seed)
    with torch.no_grad():
        p, q = (network(to_float(images)).double().sigmoid() for images in (samples[:n], every[judged.indices]))
    named, right = p >= network.thresholds, ((q >= network.thresholds).numpy() == hot[judged.labels]).all(1)
    assert figures["recognised"] == (named == asked[:n]).all(1).double().mean()
    of_label = [asked[:n, label] for label in range(3)]
    shares = [float(named[rows, label].double().mean()) for label, rows in enumerate(of_label)]
    assert figures["recognised_by_class"] == of_labels(shares)
    majority, interval = np.bincount(judged.labels).max() / n, wilson(int(right.sum()), n) or [0, 1]
    is_weak = interval[0] <= majority or right.mean() < 0.4 + 0.6 * majority
    assert figures["judge"] == {
        "accuracy": right.mean(), "accuracy_interval": interval, "majority_class_rate": majority, "is_weak": is_weak,
        "n": n,
    }  # fmt: skip
    fake, real = (F.avg_pool2d(part / 255, 2).flatten(1).double() for part in (samples, every[drawn.indices]))
    members = [asked[:, label].nonzero()[:8, 0] for label in range(3)]
    ratios = [float(torch.pdist(fake[rows]).mean() / torch.pdist(real[rows]).mean()) for rows in members]
    assert figures["diversity_by_class"] == of_labels(ratios)
    within = [frechet_distance(fake[:n][rows], real[:n][rows])[0] for rows in of_label]
    assert figures["intra_class_frechet_by_class"] == of_labels(within)

    assert not [name for name in figures["images"] if "recognised" in name or "by_class" in name]
    order = np.argsort(-np.bincount(numbers), kind="stable")  # the most frequent sets come first
    for name, images, labels in (("samples", samples, drawn.labels), ("real", every, numbers)):
        rows = np.concatenate([np.flatnonzero(labels == label)[:10] for label in order])
        assert pictures[f"{name}.png"][1] == [names[label] for label in order]
        assert_pixels(pictures[f"{name}.png"][0], images[rows])
    pairs = [*figures["memorisation"]["closest"], *figures["memorisation"]["first"]]
    left = [image[..., :16] for image in pictures["neighbours.png"][0]]
    assert_pixels(left, samples[[pair["sample"] for pair in pairs]])
    capsys.readouterr()
    assert run_cli(evaluate.main, ["--compare", str(tmp_path / "eval"), str(tmp_path / "eval"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["comparisons"][0]["figures"]
    assert next(row for row in compared if row["figure"] == "recognised")["difference"] == 0


def test_what_is_drawn_keeps_the_sets(run, tmp_path, monkeypatch):
    given = ["--checkpoint", str(run)]
    with monkeypatch.context() as patch:  # not all of what may be hundreds of sets
        patch.setattr("duetgan.inference.settings.LABEL_SETS", 2)
        assert run_cli(generate.main, ["grid", *given, "--out", str(tmp_path / "most")]) == 0
    shown = {file.stem.split("-", 1)[1] for file in (tmp_path / "most").iterdir()}
    assert shown == set(duetgan.load_generator(run, device="cpu").label_names[:2])
    assert run_cli(generate.main, ["grid", *given, "--out", str(tmp_path / "some"), "--classes", "ring, dot;bar"]) == 0
    names = sorted(file.name for file in (tmp_path / "some").iterdir())
    assert len(names) == 16
    assert {name.split("-", 1)[1] for name in names} == {"ring.png", "bar; dot.png"}
    out = tmp_path / "samples.lmdb"
    assert run_cli(generate.main, ["dataset", *given, "--out", str(out), "--n", "10"]) == 0
    with LMDBReader(out) as reader:
        assert (reader.meta.sets, reader.meta.histogram) == (
            read(run / "checkpoints/step-00000006.pt")["sets"],
            [2] * 5,
        )
    weights = tmp_path / "w.safetensors"
    assert run_cli(export.main, [*given, "--format", "safetensors", "--out", str(weights)]) == 0
    one, other = (duetgan.load_generator(place, device="cpu") for place in (run, weights))
    assert one.label_names == other.label_names
    assert torch.equal(one.sample(5).images, other.sample(5).images)


def test_what_needs_one_label_says_so(folder, run, tmp_path, refused):
    one = tmp_path / "one.lmdb"
    pack_arrays(one, np.zeros((8, 3, 16, 16), np.uint8), np.arange(8) % 3, CLASSES)
    cases: list[tuple[Any, list[str], str]] = [
        (
            generate.main,
            ["edit", "--classifier", str(run), "--from", "a", "--to", "b"],
            "is of several labels an image; a network of one",
        ),
        (evaluate.main, ["--data", str(one), "--extractor", "pixels"], "images and generator differ in whether"),
        (
            evaluate.main,
            ["--data", str(folder / "val.lmdb"), "--audit"],
            "is of several labels an image; a network of one",
        ),
    ]
    for main, options, words in cases:
        assert words in refused(main, *options, "--checkpoint", run, "--out", tmp_path / "x.png")
    content = torch.load(run / "checkpoints/step-00000006.pt", weights_only=True)
    for sets in ([[3]], [["bar"]], "all"):
        torch.save(content | {"sets": sets}, tmp_path / "forged.pt")
        told = refused(generate.main, "grid", "--checkpoint", tmp_path / "forged.pt", "--out", tmp_path / "x.png")
        assert "sets" in told


def test_a_draw_is_filled_up_by_class_not_by_set():
    labels = np.array([0, 1, 1, 2, 2, 2] * 10)
    hot = np.array([[1, 0], [1, 1], [0, 0]], bool)
    drawn = select(labels, n=4, seed=0, role="test", per_class=12, multi_hot=hot)
    assert (hot[drawn.labels].sum(0) >= 12).all()
    alone = select(labels, n=4, seed=0, role="test")
    assert np.array_equal(drawn.indices[:4], alone.indices)
    assert len(drawn.indices) < 4 + 24
