"""generate.py through its command line, on untrained runs; its options: tests/options."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, safe_open

from duetgan.commands import generate
from duetgan.inference.export.weights import write_weights
from duetgan.inference.projection import Projector
from duetgan.models.restore import fingerprint
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.runlog.progress import Bar
from tests.inference.conftest import sampler_of
from tests.inference.test_samples import pixels


def call(*argv):
    return run_cli(generate.main, [str(part) for part in argv])


@pytest.fixture
def sample_image(runs, tmp_path, generator):
    """A file with one of the generator's own samples, of class `light`."""
    own = sampler_of(generator, chosen=[2], noise_mode="const").images([0])[0, 0].numpy()
    Image.fromarray(own).save(tmp_path / "image.png")
    return tmp_path / "image.png"


QUICK = {
    "grid": ("x.png", ["--n", "4"]),
    "truncation": ("x.png", ["--n", "3"]),
    "mix": ("x.png", ["--n", "2", "--layers", "0-1,3"]),
    "interpolate": ("x.gif", ["--n", "2", "--frames", "2"]),
    "dataset": ("x.lmdb", ["--n", "5"]),
}


@pytest.mark.parametrize("command", QUICK)
def test_without_classes_each_command_is_the_same_for_a_seed_and_another_for_another(runs, tmp_path, capsys, command):
    name, options = QUICK[command]
    found = []
    for number, seed in enumerate((3, 3, 4)):
        out = tmp_path / str(number) / name
        assert call(command, "--checkpoint", runs["plain"], "--out", out, "--seed", seed, *options) == 0
        assert str(out) in capsys.readouterr().out
        assert [path.name for path in out.parent.iterdir()] == [name]
        found.append(out.read_bytes())
    assert found[0] == found[1] != found[2]


def test_a_file_of_weights_draws_what_its_run_does(runs, tmp_path):
    write_weights(tmp_path / "w.safetensors", load(resolve(runs["grey"])))
    for out, checkpoint in (("a.png", runs["grey"]), ("b.png", tmp_path / "w.safetensors")):
        assert call("mix", "--checkpoint", checkpoint, "--out", tmp_path / out, "--n", 2) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("space", ["w", "w+", "both"])
def test_projecting_its_own_sample(runs, sample_image, tmp_path, capsys, space):
    out, latents = tmp_path / "x.png", tmp_path / "x.safetensors"
    options = ["--image", sample_image, "--features", "pixels", "--steps", 100, "--space", space, "--save", latents]
    assert call("project", "--checkpoint", runs["grey"], "--out", out, *options) == 0
    lines = capsys.readouterr().out.splitlines()
    shapes = {"w": [8], "w+": [4, 8]} if space == "both" else {space: [8] if space == "w" else [4, 8]}
    assert [line.partition(":")[0].partition(" (")[0] for line in lines[:-1]] == ["start", *shapes]
    errors = [float(line.rpartition(" ")[2]) for line in lines[:-1]]
    assert errors[-1] < 0.6 * errors[0]
    assert {name: list(tensor.shape) for name, tensor in load_file(latents).items()} == shapes
    with safe_open(latents, "pt") as file:
        about = json.loads(file.metadata()["projection"])
    assert about["class"] in ("dark", "grey", "light")
    found = pixels(out)
    assert found.shape[1] == pytest.approx((1 + len(shapes)) * (192 + 4) + 8, abs=4)
    wanted = pixels(sample_image)
    drawn = [found[-4 - 192 : -4 : 24, left : left + 192 : 24] for left in range(8, 8 + 196 * (1 + len(shapes)), 196)]
    np.testing.assert_array_equal(drawn[0], wanted)
    rmse = [float(np.sqrt(np.square(image / 255 - wanted / 255).mean())) for image in drawn[1:]]
    assert about["rmse"] == pytest.approx(dict(zip(shapes, rmse, strict=True)), abs=1e-6)
    assert errors[1:] == pytest.approx(rmse, abs=6e-4)


def test_w_plus_refines_what_w_has_found(runs, sample_image, tmp_path, monkeypatch):
    calls, plain = [], Projector.search

    def watched(self, space, start, *, refine, tick):
        calls.append((space, refine, start, plain(self, space, start, refine=refine, tick=tick)))
        return calls[-1][-1]

    monkeypatch.setattr(Projector, "search", watched)
    options = ["--image", sample_image, "--features", "pixels", "--steps", 2]
    assert call("project", "--checkpoint", runs["grey"], "--out", tmp_path / "x.png", *options) == 0
    assert [named[:2] for named in calls] == [("w", False), ("w+", True)]
    assert calls[1][2] is calls[0][3]


def test_projection_in_detail(runs, sample_image, tmp_path, generator, capsys):
    """The saved w is what was drawn; noise is saved where it was searched for; a class is where it starts."""
    out, latents = tmp_path / "x.png", tmp_path / "x.safetensors"
    options = ["--features", "pixels", "--steps", 5, "--noise-mode", "optimise", "--classes", "grey"]
    base = ["project", "--checkpoint", runs["grey"], "--image", sample_image, "--out", out, *options]
    assert call(*base, "--save", latents) == 0
    assert "start (grey): rmse " in capsys.readouterr().out
    tensors = load_file(latents)
    noise = [tensors[f"w+.noise.{layer}"] for layer in range(3)]
    image = generator.synthesis(tensors["w+"][None], noise)[0, 0]
    drawn = (image * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
    np.testing.assert_array_equal(pixels(out)[-4 - 192 : -4 : 24, -4 - 192 : -4 : 24], drawn)
    with safe_open(latents, "pt") as file:
        entry = json.loads(file.metadata()["projection"])
    assert entry.pop("rmse").keys() == {"w", "w+"}
    network = fingerprint(generator)
    assert entry == {"class": "grey", "noise": "optimise", "seed": 0, "steps": 5, "network": network}
    first = latents.read_bytes()
    for seed in (0, 1):
        assert call(*base, "--save", latents, "--seed", seed) == 0
        assert (latents.read_bytes() == first) == (seed == 0)
    with safe_open(latents, "pt") as file:
        assert json.loads(file.metadata()["projection"])["seed"] == 1


def test_a_image_is_brought_to_size_as_in_training(runs, tmp_path):
    """The run's images were padded: a wide one has black above and below, unless it is to be cropped."""
    Image.fromarray(np.full((8, 16), 255, np.uint8)).save(tmp_path / "wide.png")
    shown = {}
    for mode in ("", "pad", "crop"):
        out = tmp_path / f"x{mode}.png"
        options = ["--image", tmp_path / "wide.png", "--features", "pixels", "--steps", 1, "--space", "w"]
        options += ["--resize", mode] if mode else []
        assert call("project", "--checkpoint", runs["grey"], "--out", out, *options) == 0
        shown[mode] = pixels(out)[-4 - 192 : -4 : 24, 8 : 8 + 192 : 24]
    np.testing.assert_array_equal(shown[""], shown["pad"])
    assert (shown["crop"] == 255).all()
    assert (shown["pad"][0] == 0).all()


@pytest.mark.parametrize("name", ["r3", "dcgan"])
def test_a_generator_without_w_does_what_needs_none(runs, tmp_path, refused, name):
    base = ["--checkpoint", runs[name], "--classes", "dark,light"]
    for command in ("grid", "interpolate", "dataset"):
        file, options = QUICK[command]
        assert call(command, *base, "--out", tmp_path / file, *options) == 0
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "p.png")
    for command, out, *options in (
        ("truncation", "y.png"),
        ("mix", "y.png"),
        ("project", "y.png", "--image", tmp_path / "p.png", "--features", "pixels"),
        ("grid", "y.png", "--truncation-psi", "0.5"),
        ("interpolate", "y.gif", "--space", "w"),
    ):
        told = refused(generate.main, command, *base, "--out", tmp_path / out, *options)
        assert "works on w, which this generator does not have" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.png", "x.gif", "x.lmdb", "x.png"]


def test_refusals(runs, sample_image, tmp_path, refused, no_weights):
    out = tmp_path / "out"

    def with_out(command, name, *options, run="grey"):
        return [command, "--checkpoint", runs[run], "--out", out / name, *options]

    project = ["--image", sample_image, "--features", "pixels"]
    for argv, told in (
        *((with_out(command, "x.jpg"), "end in .png") for command in ("grid", "truncation", "mix")),
        (with_out("project", "x.jpg", *project), "end in .png"),
        (with_out("dataset", "x.png"), "end in .lmdb"),
        (with_out("interpolate", "x.gif", "--n", 1), "at least 2"),
        (with_out("interpolate", "x.gif", "--frames", 0), "at least 1"),
        (with_out("truncation", "x.png", "--psis", "0,a"), "--psis: 'a' is not"),
        (with_out("truncation", "x.png", "--truncation-psi", "1"), "unknown argument --truncation-psi"),
        (with_out("mix", "x.png", run="classifier"), "'gan' checkpoint is needed"),
        (with_out("project", "x.png"), "--image"),
        (with_out("project", "x.png", "--image", sample_image, "--features", "resnet50"), "--features pixels"),
        (with_out("project", "x.png", "--image", sample_image, "--weights", out / "no"), "no"),
        (with_out("project", "x.png", "--image", tmp_path / "absent.png"), "absent.png: cannot be read (No such file"),
        (with_out("project", "x.png", "--image", runs["grey"]), "is a folder, not a regular file"),
        (with_out("project", "x.png", "--image", runs["grey"] / "checkpoints/last.json"), "is not an image"),
        (with_out("project", "x.png", *project, "--save", out / "x.pt"), "--save"),
        (with_out("project", "x.png", *project, "--weights", "x"), "--weights is for"),
        (["frid"], "invalid choice"),
        ([], "COMMAND"),
        (with_out("grid", "x.png", "--noise-mode", "some"), "--noise-mode: invalid choice: 'some'"),
        (with_out("grid", "x.png", "--sed", "1"), "unknown argument --sed"),
    ):
        assert told in refused(generate.main, *argv)
    assert not out.exists()


def test_progress_comes_to_its_end(runs, tmp_path, monkeypatch):
    seen, close = {}, Bar.close

    def closed(bar):
        seen[bar.desc.removesuffix(": ")] = bar.total, bar.n
        close(bar)

    monkeypatch.setattr(Bar, "close", closed)
    for command in ("interpolate", "dataset"):
        name, options = QUICK[command]
        assert call(command, "--checkpoint", runs["grey"], "--out", tmp_path / name, *options) == 0
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "p.png")
    search = ["--image", tmp_path / "p.png", "--features", "pixels", "--steps", 3]
    assert call("project", "--checkpoint", runs["grey"], "--out", tmp_path / "x.png", *search) == 0
    assert seen == {"frames": (4, 4), "samples": (5, 5), "projecting": (6, 6)}


def test_a_projection_without_weights_compares_pixels_and_says_so(runs, sample_image, tmp_path, capsys, no_weights):
    base = ["project", "--checkpoint", runs["grey"], "--image", sample_image, "--steps", 2, "--space", "w", "--out"]
    assert call(*base, tmp_path / "a.png") == 0
    told = capsys.readouterr()
    assert "no ResNet-50 weights found: comparing pixels only" in told.err
    assert "torchvision.models.ResNet50_Weights" in told.err
    assert call(*base, tmp_path / "b.png", "--features", "pixels") == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert "ResNet" not in capsys.readouterr().err
