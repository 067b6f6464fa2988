"""A GAN that is asked for several labels an image, from the file to what is made of it, and what refuses it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import duetgan
from duetgan.commands import evaluate, export, generate, train
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.records import pack_arrays
from duetgan.metrics.features.selection import select
from duetgan.metrics.samples.frechet import frechet_distance
from duetgan.metrics.samples.intra_class import intra_class_frechet
from duetgan.metrics.samples.judged import diversity_by_class, diversity_ratio, recognised
from duetgan.models.restore import read
from duetgan.utils.distributed.process import run_cli

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


def test_figures_tell_what_was_recognised(folder, run, tmp_path, capsys):
    judge = trained(folder, "classifier", CLASSIFIER, once=True)
    held_out = ["--data", str(folder / "val.lmdb"), "--n", "20", "--extractor", "pixels,classifier", "--json"]
    options = ["--checkpoint", str(run), *held_out, "--classifier", str(judge)]
    capsys.readouterr()
    assert run_cli(evaluate.main, [*options, "--out", str(tmp_path / "eval")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures["recognised_by_class"]) == CLASSES == list(figures["diversity_by_class"])
    assert 0 <= figures["recognised"] <= 1
    assert figures["judge"]["n"] == 20
    assert {"samples.png", "real.png"} <= set(figures["images"])
    capsys.readouterr()
    assert run_cli(evaluate.main, ["--compare", str(tmp_path / "eval"), str(tmp_path / "eval"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["comparisons"][0]["figures"]
    assert next(row for row in compared if row["figure"] == "recognised")["difference"] == 0


def test_what_is_drawn_keeps_the_sets(run, tmp_path):
    given = ["--checkpoint", str(run)]
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


# --- the figures, by hand


def test_figures_of_sets_are_those_of_each_label():
    numbers = torch.Generator().manual_seed(0)
    fake, real = torch.randn(40, 3, generator=numbers), torch.randn(40, 3, generator=numbers)
    hot = torch.rand(40, 3, generator=numbers) < 0.5
    thresholds, answers = torch.tensor([0.3, 0.5, 0.7]), torch.rand(40, 3, generator=numbers, dtype=torch.float64)
    found: Any = recognised(answers, hot, thresholds)
    named = [[p >= t for p, t in zip(row, thresholds.tolist(), strict=True)] for row in answers.tolist()]
    assert found.value == sum(a == b for a, b in zip(named, hot.tolist(), strict=True)) / 40
    for label in range(3):
        members = [i for i in range(40) if hot[i, label]]
        assert found.by_class[label] == sum(named[i][label] for i in members) / len(members)
        within = intra_class_frechet(fake, real, hot, 3).by_class[label]
        assert within == frechet_distance(fake[members], real[members])[0]
        ratio = diversity_by_class(fake, hot, real, hot, classes=3, images=9).by_class[label]
        assert ratio == diversity_ratio(fake[members[:9]], real[members[:9]]).value


def test_a_draw_is_filled_up_by_class_not_by_set():
    labels = np.array([0, 1, 1, 2, 2, 2] * 10)
    hot = np.array([[1, 0], [1, 1], [0, 0]], bool)
    drawn = select(labels, n=4, seed=0, role="test", per_class=12, multi_hot=hot)
    assert (hot[drawn.labels].sum(0) >= 12).all()
    alone = select(labels, n=4, seed=0, role="test")
    assert np.array_equal(drawn.indices[:4], alone.indices)
    assert len(drawn.indices) < 4 + 24
