"""Seeds and saved latents as inputs of every command that draws samples."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, safe_open, save_file

import duetgan
from duetgan.commands import generate
from duetgan.inference.latents import read_latents
from duetgan.inference.samples import truncated_styles
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.inference.conftest import sampler_of, styled
from tests.inference.test_samples import pixels
from tests.metrics.conftest import CLASSES
from tests.models.helpers import to_uint8


def call(*argv):
    return run_cli(generate.main, [str(part) for part in argv])


@pytest.fixture(scope="module")
def found(runs, tmp_path_factory):
    """Files of project --save, with stored and with optimised noise, of one grey image."""
    folder = tmp_path_factory.mktemp("found")
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4).save(folder / "image.png")
    for mode in ("const", "none", "optimise"):
        options = ["--image", folder / "image.png", "--features", "pixels", "--steps", 5, "--noise-mode", mode]
        options += ["--out", folder / f"{mode}.png", "--save", folder / f"{mode}.safetensors"]
        assert call("project", "--checkpoint", runs["grey"], *options) == 0
    return folder


def test_a_seed_of_a_grid_gives_the_same_picture_alone(runs, tmp_path):
    """Equal bits on a CPU, with a truncation and noise, from a table and from a folder."""
    base = ["grid", "--checkpoint", runs["grey"], "--truncation-psi", ".7", "--batch-size", 4]
    assert call(*base, "--seeds", "2,3,10-12", "--out", tmp_path / "grid.png") == 0
    assert call(*base, "--seeds", "2,3,10-12", "--out", tmp_path / "all") == 0
    assert call(*base, "--seeds", "11", "--classes", "light", "--out", tmp_path / "one") == 0
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["seed0011-light.png"]
    assert len(list((tmp_path / "all").iterdir())) == 15
    one = tmp_path / "one" / "seed0011-light.png"
    assert one.read_bytes() == (tmp_path / "all" / one.name).read_bytes()
    table = pixels(tmp_path / "grid.png")  # five columns and three rows of 64 px, below and right of the heads
    np.testing.assert_array_equal(table[-64::8, -128:-64:8], pixels(one))


@pytest.mark.parametrize("mode", ["const", "none", "optimise"])
def test_a_saved_w_gives_the_picture_of_its_projection(runs, found, tmp_path, mode):
    """Whatever --noise-mode says of the seeds beside it, and in either space."""
    file = found / f"{mode}.safetensors"
    options = ["--seeds", f"{file}:w,{file},5", "--classes", "grey", "--out", tmp_path / "x"]
    assert call("grid", "--checkpoint", runs["grey"], *options) == 0
    drawn = pixels(found / f"{mode}.png")[-4 - 192 : -4 : 24]
    for number, name in enumerate((f"{mode}-w", mode)):
        left = 8 + (number + 1) * 196
        np.testing.assert_array_equal(pixels(tmp_path / "x" / f"{name}.png"), drawn[:, left : left + 192 : 24])
    with Image.open(tmp_path / "x" / f"{mode}.png") as image:
        assert image.info == {"latents": mode}


def test_saved_w_are_truncated_mixed_interpolated_and_edited(runs, found, tmp_path, generator):
    file = found / "optimise.safetensors"
    tensors = load_file(file)
    maps = [tensors[f"w+.noise.{layer}"] for layer in range(3)]
    ws = tensors["w+"][None]
    own = sampler_of(generator, chosen=[1], sources=[5])
    other, noise = truncated_styles(own, [0]).code, own.latents([0]).noise
    base = ["--checkpoint", runs["grey"], "--classes", "grey"]

    options = ["--rows", file, "--cols", "5,6", "--layers", "2-3", "--out", tmp_path / "mix.png"]
    assert call("mix", *base, *options) == 0
    mixture = torch.cat([ws[:, :2], other[:, 2:]], dim=1)
    expected = to_uint8(generator.synthesis(mixture, [*maps[:2], noise[2]]))[0, 0]
    cells = pixels(tmp_path / "mix.png")[-4 - 96 : -4 : 12]
    np.testing.assert_array_equal(cells[:, -4 - 196 : -4 - 100 : 12], expected)

    with safe_open(file, "pt") as content:
        projection = json.loads(content.metadata()["projection"])
    label = 0
    assert CLASSES[label] not in (projection["class"], "grey")  # nor the class of the seeds
    file = tmp_path / "labelled.safetensors"
    save_file(tensors, file, {"projection": json.dumps(projection | {"class": CLASSES[label]})})
    centre = generator.truncation_centre(torch.tensor([label]), "class")[:, None]
    for saved, mean, middle in (
        (file, "class", centre),
        (file, "global", generator.w_avg),
        (tmp_path / "unlabelled.safetensors", "class", generator.w_avg),
    ):
        save_file(tensors, tmp_path / "unlabelled.safetensors", {"projection": json.dumps(projection | {"class": ""})})
        options = ["--seeds", f"5,{saved}", "--psis", ".5", "--truncation-cutoff", 3, "--truncation-mean", mean]
        assert call("truncation", *base, *options, "--out", tmp_path / "psi.png") == 0
        styles = torch.cat([torch.lerp(middle, ws[:, :3], 0.5), ws[:, 3:]], dim=1)
        expected = to_uint8(generator.synthesis(styles, maps))[0, 0]
        np.testing.assert_array_equal(pixels(tmp_path / "psi.png")[-4 - 96 : -4 : 12, -4 - 96 : -4 : 12], expected)

    samples = duetgan.load_generator(runs["grey"], device="cpu").sample(seeds=[str(file), 5], classes=["grey"])
    assert samples.labels == [CLASSES[label], "grey"]

    options = ["--seeds", f"{file},5", "--frames", 2, "--scale", 1, "--out", tmp_path / "x.gif"]
    assert call("interpolate", *base, *options) == 0
    with Image.open(tmp_path / "x.gif") as film:
        assert getattr(film, "n_frames", 0) == 4
        for number, styles in enumerate((ws, torch.lerp(ws, other, 0.5), other)):
            film.seek(number)
            expected = to_uint8(generator.synthesis(styles, maps))[0, 0]
            difference = np.asarray(film.convert("L")).astype(int) - expected.numpy()
            assert np.abs(difference).max() <= 1


def test_files_that_do_not_fit_are_refused_with_one_line(runs, found, generator, tmp_path, refused):
    file = tmp_path / "x.safetensors"

    def written(change, **about):
        with safe_open(found / "optimise.safetensors", "pt") as content:
            entry = json.loads(content.metadata()["projection"]) | about
        tensors = load_file(found / "optimise.safetensors")
        change(tensors)
        save_file(tensors, file, metadata={"projection": json.dumps(entry)})

    for change, about, told in (
        (lambda t: t["w+"].fill_(torch.nan), {}, "values that are not finite"),
        (lambda t: t["w+.noise.1"].fill_(torch.inf), {}, "values that are not finite"),
        (lambda t: t.update({"w+": t["w"].clone()}), {}, r"has .*: \[8\].* this generator takes .*: \[4, 8\]"),
        (lambda t: t.pop("w+.noise.2"), {}, "this generator takes"),
        (lambda t: t.clear(), {}, r"has \[\], this generator takes"),
        (lambda t: None, {"network": "sha256:0"}, "is of another network .sha256:0, not sha256:"),
    ):
        written(change, **about)
        assert_raises(UserError, told, read_latents, str(file), generator, CLASSES)
    saved = found / "const.safetensors"
    assert_raises(UserError, "is of another network", read_latents, str(saved), styled(seed=1), CLASSES)
    for metadata in (None, {"projection": "{"}, {"projection": "[1]"}, {"projection": "null"}):
        save_file({"w": torch.zeros(8)}, file, metadata=metadata)
        assert_raises(UserError, "contains no saved latents; write it with", read_latents, str(file), generator, [])
    file.write_bytes(b"x" * 100)
    assert_raises(UserError, "x.safetensors cannot be read", read_latents, str(file), generator, [])
    save_file({"w": torch.zeros(8)}, file, metadata={"projection": "{}"})  # as written before it had more entries
    assert read_latents(str(file), generator, []).noise == "const"

    for command, run, options, told in (
        ("interpolate", "grey", ["--seeds", f"1,{saved}", "--space", "z"], "const: is a saved w, which has no seed"),
        ("interpolate", "grey", ["--seeds", "1"], "give two or more"),
        ("grid", "grey", ["--seeds", "5-2"], "argument --seeds: '5-2' is not a seed, a range"),
        ("dataset", "grey", ["--seeds", f"1,{saved}"], "no seed and no z; give seeds"),
        ("grid", "grey", ["--seeds", "5", "--n", "2"], "--seeds names the samples: leave out --seed and --n"),
        ("grid", "grey", ["--seeds", "5", "--seed", "0"], "--seeds names the samples: leave out --seed and --n"),
        ("grid", "r3", ["--seeds", saved], "const.safetensors works on w, which this generator does not have"),
    ):
        suffix = {"interpolate": ".gif", "dataset": ".lmdb"}.get(command, ".png")
        out = ["--out", tmp_path / "out" / f"x{suffix}"]
        assert told in refused(generate.main, command, "--checkpoint", runs[run], *out, *options)
    assert not (tmp_path / "out").exists()


def test_a_program_draws_by_seeds_files_and_projections(runs, found, tmp_path):
    generator = duetgan.load_generator(runs["grey"], device="cpu")
    projection = generator.project(np.zeros((8, 8), np.uint8), steps=2, features="pixels")
    sources = [found / "const.safetensors", np.int64(11), projection]
    samples = generator.sample(seeds=sources, classes=["grey", "light"], psi=0.7)
    assert call("grid", "--checkpoint", runs["grey"], "--seeds", 11, "--truncation-psi", ".7", "--out", tmp_path) == 0
    for image, label in zip(samples.images[:2], ("grey", "light"), strict=True):
        np.testing.assert_array_equal(pixels(tmp_path / f"seed0011-{label}.png"), image[0])
    assert generator.sample(seeds=[projection]).images[0].equal(projection.image)
    cut = replace(projection, ws=projection.ws[:2])
    assert_raises(UserError, r"w is \[2, 8\], not \[4, 8\]", generator.sample, seeds=[cut])
    assert_raises(UserError, "seeds: 1.5 is not a whole number", generator.sample, seeds=[1.5])
    another = duetgan.load_generator(runs["r3"], device="cpu")
    assert_raises(UserError, "works on w", another.sample, seeds=[projection])
    assert samples.labels[:2] == ["grey", "light"]
    assert set(samples.labels[2:]) <= set(CLASSES)
    pytest.importorskip("pandas")
    table = samples.to_pandas()
    assert table.columns.tolist() == ["label", "seed", "index"]
    assert table["seed"].tolist() == [11, 11, 0, 0]
