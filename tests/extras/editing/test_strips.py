"""`generate.py edit`, `predict.py --counterfactual` and `benchmarks/edit.py` on untrained runs."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import edit as benchmark
from duetgan.commands import generate, predict
from duetgan.extras.editing import strips
from duetgan.extras.editing.editor import Direction, Editor
from duetgan.extras.editing.predict import text as describe
from duetgan.inference.latents import Latents, write_latents
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, resolve, save
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises
from tests.inference.conftest import DCGAN, gan_run, sampler_of, styled, without_w
from tests.metrics.conftest import CLASSES, SIDE, make_run
from tests.models.helpers import to_uint8


def answering(folder, sampler, seed):
    """A classifier's run whose answers on the sampler's images are of all classes: its head is centred and scaled."""
    shape = {"channels": 1, "classes": 3, "resolution": SIDE}
    with forked(seed, "init", "edit classifier"):
        classifier = Classifier(ModelConfig(stem="small-stride2"), **shape).eval()
    with torch.no_grad():
        logits, head = classifier(sampler.images(range(90)).float() / 127.5 - 1), classifier.network.fc
        scale = 2 / logits.std(0)
        head.bias.copy_((head.bias - logits.mean(0)) * scale)
        head.weight.mul_(scale[:, None])
    config = {"model": {"stem": "small-stride2"}}
    return make_run(folder, task="classifier", config=config, shape=shape, state={"model_ema": classifier.state_dict()})


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """Runs of a generator, a classifier that knows its samples apart, another, and a DCGAN; an image file."""
    folder = tmp_path_factory.mktemp("closed")
    generator = styled()
    sampler = sampler_of(generator)
    Image.fromarray(sampler.images([4])[0, 0].numpy()).save(folder / "image.png")
    return {
        "gan": gan_run(folder / "gan", generator),
        "guide": answering(folder / "guide", sampler, 1),
        "judge": answering(folder / "judge", sampler, 2),
        "dcgan": gan_run(folder / "dcgan", without_w(**DCGAN), **DCGAN),
        "image": folder / "image.png",
    }


def call(script, *argv):
    return run_cli(script.main, [str(part) for part in argv])


def edit(closed, out, *options, gan="gan"):
    pair = ["--from", "dark", "--to", "light", "--samples", 6, "--n", 2]
    return ["edit", "--checkpoint", closed[gan], "--classifier", closed["guide"], "--out", out, *pair, *options]


def test_strips_are_drawn(closed, tmp_path, capsys):
    out, side = tmp_path / "x.png", 112 // SIDE * SIDE
    assert call(generate, *edit(closed, out)) == 0
    assert "dark to light: " in capsys.readouterr().out
    with Image.open(out) as image:
        assert image.size == (7 * (side + 12), 2 * (side + 42))


def test_seeds_and_saved_w_are_edited(closed, tmp_path, capsys):
    generator, file, side = styled(), tmp_path / "saved.safetensors", 112
    ws = torch.randn(generator.num_ws, 8, generator=torch.Generator().manual_seed(0))
    write_latents(file, {"w+": Latents(ws=ws, noise="const", label=None)}, generator, {"noise": "const"})
    command = [part for part in edit(closed, tmp_path / "x.png") if part not in ("--n", 2)]
    assert call(generate, *command, "--seeds", f"{file},7") == 0
    assert "rows: saved, dark seed 7\ndark to light: " in capsys.readouterr().out
    expected = generator.synthesis(ws[None], "const"), sampler_of(generator, chosen=[0], sources=[7]).images([0])
    with Image.open(tmp_path / "x.png") as image:
        for row, first in enumerate((to_uint8(expected[0]), expected[1])):
            top = 6 + row * (side + 42)
            np.testing.assert_array_equal(np.asarray(image)[top : top + side : 14, 6 : 6 + side : 14], first[0, 0])


def test_refusals(closed, tmp_path, refused):
    out = tmp_path / "x.png"
    for options, told in (
        (["--to", "dark"], "name two classes"),
        (["--to", "lihgt"], "did you mean 'light'"),
        (["--samples", 1], "--samples: '1' is not"),
    ):
        assert told in refused(generate.main, *edit(closed, out, *options))
    turned = load(resolve(closed["gan"])) | {"classes": CLASSES[::-1]}  # the same classes in another order
    gan, classifier = save(tmp_path / "turned", turned), classifier_from(load(resolve(closed["guide"])))
    told = "its classes are not those of the classifier"
    assert told in refused(generate.main, *edit(closed | {"turned": gan}, out, gan="turned"))
    draw = partial(strips.Counterfactuals, str(gan), classifier, CLASSES, {}, target=None, steps=1, batch_size=4)
    assert_raises(UserError, told, draw)
    assert not out.exists()


def test_a_strip_reports_the_probability_of_the_step_at_which_it_arrives():
    """Its last image lies a quarter beyond."""

    class Steps:
        """An editor whose images have the value of the step."""

        start_images = torch.zeros(2, 1, 4, 4)

        def reach(self, *_):
            return torch.tensor([0.2, 0.4]), torch.tensor([True, False])

        def images(self, _start, _direction, steps):
            return (self.start_images + 100 * steps[:, None, None, None]).to(torch.uint8)

        def probabilities(self, images):
            share = images.double().mean((1, 2, 3)) / 100
            return torch.stack([1 - share, share], 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strips, "_captions", lambda editor, images, *_: ["x"] * len(images))
        made = strips.make_strips(Steps(), [0, 1], Direction(0, 1, torch.zeros(1)))  # type: ignore[arg-type]
    assert [strip.probability for strip in made] == pytest.approx([0.2, 0.4])
    assert [(strip.arrived, round(strip.step, 6)) for strip in made] == [(True, 0.2), (False, 0.4)]
    for strip, level in zip(made, (20, 40), strict=True):
        assert strip.change == pytest.approx(level / 255)
        found = [int(image.max()) for image in strip.images]
        assert found == pytest.approx([1.25 * level * column / 6 for column in range(7)], abs=1)
    words = strips.summary(made, ["a", "b"], Direction(0, 1, torch.zeros(1)))
    expected = "1 of 2 images arrive, at a mean step of 0.20 and a mean change of pixels of 0.078 (0 to 1)"
    assert words == f"a to b: {expected}"
    told = {"class": "b", "probability": 0.625, "pixel_change": 0.25, "image": "x.png"}
    for arrived, begin in ((True, "; "), (False, "; threshold not reached, at best ")):
        assert describe(told | {"arrived": arrived}) == f"{begin}b 0.625, pixels change by 0.250 (x.png)"


def test_predictions_with_their_counterfactuals(closed, tmp_path, capsys, no_weights, monkeypatch):
    monkeypatch.setattr(Editor.__init__, "__defaults__", (6,))  # samples
    folder, starts, search = tmp_path / "strips", [], strips.find

    def find(sampler, *image, **options):
        starts.append(sampler.chosen)
        return search(sampler, *image, **options)

    monkeypatch.setattr(strips, "find", find)
    base = ["--checkpoint", closed["guide"], closed["image"], tmp_path / "absent.png", "--json", "--steps", 2]
    base += ["--counterfactual", folder]
    assert call(predict, *base, "--generator", closed["gan"]) == 2  # the absent one
    first, second = json.loads(capsys.readouterr().out)
    found = first["counterfactual"]
    order = list(first["probabilities"])
    assert (first["label"], found["class"]) == tuple(order[:2])
    assert starts == [[CLASSES.index(first["label"])]]  # the mean of the image's class
    assert found["image"] == str(folder / "image-counterfactual.png")
    assert 0 < found["pixel_change"] < 1
    assert found["arrived"] == (found["probability"] >= 0.5)
    assert "counterfactual" not in second
    assert [path.name for path in folder.iterdir()] == ["image-counterfactual.png"]
    side = 112 // SIDE * SIDE
    with Image.open(found["image"]) as image, Image.open(closed["image"]) as given:
        assert image.size == (8 * (side + 12), side + 42)
        np.testing.assert_array_equal(np.asarray(image)[6 : 6 + side : 14, 6 : 6 + side : 14], np.asarray(given))
    base.remove(tmp_path / "absent.png")
    Image.fromarray(np.full((SIDE, 2 * SIDE), 255, np.uint8)).save(tmp_path / "wide.png")
    for mode, corner in (("pad", 0), ("crop", 255)):
        words = [tmp_path / "wide.png" if part == closed["image"] else part for part in base]
        assert call(predict, *words, "--generator", closed["gan"], "--resize", mode) == 0
        capsys.readouterr()
        with Image.open(folder / "wide-counterfactual.png") as image:
            assert np.asarray(image)[6, 6] == corner
    other = ["--counterfactual-class", order[2], "--generator", closed["gan"]]
    assert call(predict, *base, *other) == 0
    assert json.loads(capsys.readouterr().out)[0]["counterfactual"]["class"] == order[2]
    base.remove("--json")
    other[1] = order[0]
    assert call(predict, *base, *other) == 2
    told = capsys.readouterr()
    assert f"no counterfactual: is already predicted as {order[0]}" in told.out
    assert "1 of 1 images have no counterfactual" in told.err
    for options, message in (
        ([], "add --generator RUN"),
        (["--generator", closed["dcgan"]], "does not have"),
        (["--generator", closed["gan"], "--counterfactual-class", "x"], "no class"),
    ):
        assert call(predict, *base, *options) == 2
        assert message in capsys.readouterr().err


def test_the_benchmark_measures_the_edit_and_its_controls(closed, capsys):
    argv = ["--checkpoint", closed["gan"], "--classifier", closed["guide"], "--judge", closed["judge"], "--json"]
    argv += ["--pairs", "dark:light,light:dark", "--n", 3]
    benchmark.main([str(part) for part in argv])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    for what in ("edit", "random, equal length", "random, equal change", "class asked"):
        for key in ("asked", "third", "guide", "pixel_change"):
            assert 0 <= result[f"w/{what}/{key}"] <= 1
    assert len(lines) == 3 * 4 + 1
    benchmark.main([])
    assert "nothing to measure" in capsys.readouterr().out
