import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from duetgan.commands import train
from duetgan.data.packing.records import pack_arrays
from duetgan.inference import samples as tables
from duetgan.inference.latents import Latents
from duetgan.inference.samples import (
    Sampler,
    chosen_classes,
    draw_grid,
    draw_mix,
    draw_style_tables,
    draw_truncation,
    parse_layers,
)
from duetgan.inference.settings import sources
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.inference.conftest import sampler_of, styled, without_w
from tests.metrics.conftest import CLASSES


def test_numbers_of_an_unconditional_generator_are_indices():
    plain = sampler_of(styled(classes=0))
    assert plain.labels([4, 7]) is None
    assert plain.indices([4, 7]) == [4, 7]
    last = sampler_of(styled(), seed=2**32 - 1, numpy_latents=True)  # the largest seed of NumPy, and the first
    assert last.numpy_seeds([2, 3]) == [2**32 - 1, 0]


def test_layers_are_read_and_a_cutoff_is_one_of_them(generator):
    assert generator.num_ws == 4
    sampler_of(generator, truncation_cutoff=4)
    for cutoff in (-1, 5):
        with pytest.raises(UserError, match=rf"--truncation-cutoff {cutoff}: give 0 to 4"):
            sampler_of(generator, truncation_cutoff=cutoff)
    assert sampler_of(without_w()).images(range(4)).shape == (4, 1, 8, 8)
    for options in ({"truncation_psi": 0.5}, {"truncation_cutoff": 1}):
        assert_raises(UserError, "works on w, which this generator does not have", sampler_of, without_w(), **options)
    told = {"0-3": [0, 1, 2, 3], " 6, 0 - 1,1": [0, 1, 6], "7": [7]}
    assert {text: parse_layers(text, 8) for text in told} == told
    for text in ("8", "3-8", "3-1", "", "a", "1-", "-1", "1--2", "1,,2"):
        assert_raises(UserError, "--layers", parse_layers, text, 8)


def test_classes_are_chosen_by_name_and_fit_the_generator(generator):
    names = ["dark", "grey", "light"]
    assert chosen_classes("all", names, most=None) == [0, 1, 2]
    assert chosen_classes("all", names, 2) == [0, 1]
    assert chosen_classes("light, dark", names, most=None) == [2, 0]
    assert chosen_classes("all", [], most=None) == []
    assert chosen_classes("x, y", ["x, y", "z"], most=None) == [0]
    for text, classes, message in (
        ("drak", names, "did you mean 'dark'"),
        ("dark,dark", names, "named twice"),
        ("dark", [], "unconditional"),
    ):
        assert_raises(UserError, message, chosen_classes, text, classes, None)
    for model, chosen in ((generator, []), (styled(classes=0), [0])):
        assert_raises(ValueError, "conditional", sampler_of, model, chosen=chosen)


NOWHERE = Path("x.png")  # nothing is written where `table` catches it


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("L"))


@pytest.fixture
def table(monkeypatch):
    """What would be drawn: {"rows", "row_heads", "column_heads"}."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(tables, "save_table", lambda rows, path, **named: seen.update(rows=rows, **named))
    return seen


LEVELS = torch.tensor([60.0, 128.0, 196.0])  # brightness of the images of each class
SMALL = [f"--{network}.channel-{name}={size}" for network in ("generator", "discriminator")
         for name, size in (("base", 64), ("max", 16))]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A generator trained for 200 steps on images of three levels of brightness."""
    folder, rng = tmp_path_factory.mktemp("trained"), np.random.default_rng(0)
    labels = np.arange(240) % 3
    values = LEVELS.numpy()[labels] + rng.normal(0, 10, 240)
    images = (values[:, None, None, None] + rng.normal(0, 15, (240, 1, 8, 8))).clip(0, 255).astype(np.uint8)
    pack_arrays(folder / "data.lmdb", images, labels=labels, classes=CLASSES)
    options = ["--steps=200", "--checkpoint.every=200", "--batch-size=16", "--precision=fp32", "--ema.ema-kimg=0.2"]
    options += ["--log.samples-every=0", "--log.tensorboard=false", "--evaluation.n=8", "--threads=1"]
    options += [*SMALL, "--generator.z-dim=16", "--generator.w-dim=16", "--seed=0"]
    paths = ["--data.path", str(folder / "data.lmdb"), "--run-dir", str(folder / "run")]
    assert run_cli(train.main, ["--config", "gan_32_cpu", *paths, *options]) == 0
    return generator_from(load(resolve(folder / "run")), torch.device("cpu"))


def recognised(generator, psi, mean):
    """Return the share of each class's samples whose brightness is nearest to that class's."""
    sampler = Sampler(generator=generator, chosen=[0, 1, 2], truncation_psi=psi, truncation_mean=mean)
    brightness = sampler.images(range(300)).double().mean((1, 2, 3))
    nearest = (brightness[:, None] - LEVELS).abs().argmin(1)
    return (nearest == torch.arange(300) % 3).double().view(-1, 3).mean(0)


def test_truncated_samples_of_a_trained_gan_keep_their_class(trained):
    """G1: towards the mean of all they were recognised less and less, and still stored under the class asked for."""
    full = recognised(trained, 1.0, "class")
    assert (full > 0.9).all()
    for psi in (0.7, 0.5, 0.3, 0.0):
        assert (recognised(trained, psi, "class") >= 0.95 * full).all(), psi
    assert (recognised(trained, 0.0, "global") == torch.tensor([0, 1, 0])).all()
    assert torch.equal(recognised(trained, 1.0, "global"), full)


def test_single_images_say_what_they_are(generator, tmp_path, monkeypatch):
    bars = []

    def bar(batches, *words, **_):
        bars.append((*words, len(batches)))
        return batches

    monkeypatch.setattr(tables, "Bar", bar)
    sampler = sampler_of(generator, chosen=[1, 2], seed=4, batch_size=2)
    assert draw_grid(sampler, tmp_path / "all", count=3, names=CLASSES) == 3
    draw_grid(sampler_of(generator, chosen=[1]), tmp_path / "slash", count=1, names=["", "a/b", ""])
    assert [path.name for path in (tmp_path / "slash").iterdir()] == ["seed0000-a_b.png"]
    assert bars[0] == ("samples", 2)  # J29: no word in 150 s
    found = {path.name: path for path in (tmp_path / "all").iterdir()}
    assert sorted(found) == ["seed0004-grey.png", "seed0004-light.png", "seed0005-grey.png"]
    for name, path in found.items():
        with Image.open(path) as file:
            assert file.info == {"seed": name[7], "class": name[9:-4]}
    twice = sampler_of(generator, chosen=[0], sources=[4, 4])
    assert_raises(
        UserError, "two images would have one name", draw_grid, twice, tmp_path / "twice", count=None, names=CLASSES
    )


def test_how_many_are_shown_and_which_generators_have_no_w(generator, table):
    assert draw_truncation(sampler_of(generator), CLASSES, NOWHERE, psis=[1.0], count=None) == 8
    assert table["spec"] == generator.spec
    many = styled(classes=20)
    names = [str(label) for label in range(20)]
    assert draw_truncation(sampler_of(many), names, NOWHERE, psis=[1.0], count=None) == 16
    assert draw_mix(sampler_of(many), names, NOWHERE, layers=[0], count=None) == "8 x 8"
    assert table["column_heads"][:2] == ["", "B 0\nseed 1"]
    colours = styled(classes=0, channels=3)
    draw_mix(sampler_of(colours), [], NOWHERE, layers=[0], count=2)
    assert (table["spec"], table["margin"]) == (colours.spec, 3 * tables.PADDING)
    assert table["row_heads"] == ["", "A seed 0", "A seed 2"]
    assert table["column_heads"] == ["", "B seed 1", "B seed 3"]


def test_a_generator_without_w_has_no_tables_of_styles(runs, tmp_path):
    options: dict[str, Any] = {"seed": 0, "device": torch.device("cpu"), "mean": "class"}
    assert draw_style_tables(load(resolve(runs["r3"])), tmp_path, **options) == []
    assert list(tmp_path.iterdir()) == []


def test_a_grid_of_classes_is_a_table_and_others_have_captions(generator, table, monkeypatch):
    """Rows are classes and columns seeds; the images of one class, or of none, have captions."""
    captioned: dict[str, Any] = {}
    keep = lambda images, heads, path, **named: captioned.update(images=images, heads=heads, **named)  # noqa: E731
    monkeypatch.setattr(tables, "save_captioned", keep)
    assert draw_grid(sampler_of(generator, chosen=[1, 2], seed=3), NOWHERE, count=5, names=CLASSES) == 5
    assert (table["row_heads"], table["column_heads"]) == (CLASSES[1:], ["seed\n3", "seed\n4", "seed\n5"])
    assert list(map(len, table["rows"])) == [3, 2]
    assert (table["cell"], table["gap"], table["spec"]) == (64, 0, generator.spec)
    for column, seed in enumerate((3, 4)):
        expected = sampler_of(generator, chosen=[1, 2], seed=seed).images([0, 1])
        assert torch.equal(torch.stack([row[column] for row in table["rows"]]), expected)
    assert draw_grid(sampler_of(generator), NOWHERE, names=CLASSES, count=None) == 24
    assert draw_grid(sampler_of(generator, chosen=[2], sources=[9, 2]), NOWHERE, names=CLASSES, count=None) == 2
    assert (captioned["heads"], captioned["columns"]) == (["light\nseed 9", "light\nseed 2"], 8)
    saved = Latents(ws=torch.zeros(4, 8), noise="const", label=None, name="found")
    for classes, columns in ((3, 6), (20, 16)):
        sampler = sampler_of(styled(classes=classes), sources=[saved, 9, saved])
        draw_grid(sampler, NOWHERE, names=[f"c{label}" for label in range(classes)], count=None)
        assert (captioned["heads"], captioned["columns"]) == (["found", "c1\nseed 9", "found"], columns)
    plain = sampler_of(styled(classes=0, channels=3))
    assert draw_grid(plain, NOWHERE, count=None, names=()) == 64
    assert (captioned["heads"][-1], captioned["columns"], captioned["spec"]) == ("seed 63", 8, plain.generator.spec)


def test_seeds_and_files_are_parsed(generator):
    assert sources("2, 3,10-12 ,a.safetensors,b/c.safetensors:w+") == [
        *(2, 3, 10, 11, 12),
        *("a.safetensors", "b/c.safetensors:w+"),
    ]
    assert sources(str(2**32 - 1)) == [2**32 - 1]
    for text in ("", "1,", "5-2", "a", "-1", "1-", "1.5", "x.pt", "4294967296", "0-100000", "1" * 5000, "1--2"):
        assert_raises(argparse.ArgumentTypeError, "is not a seed, a range of seeds or a .safetensors", sources, text)
    # as in NVIDIA's programs: seed j of the option is their seed j
    found = sampler_of(generator, chosen=[1], sources=[7], numpy_latents=True).latents([0]).code[0].numpy()
    np.testing.assert_array_equal(found, np.random.RandomState(7).randn(generator.z_dim).astype(np.float32))
