"""The library: what `duetgan` exports, and what its models take and refuse."""

import json
import sys
import warnings
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import duetgan
import duetgan.training
from duetgan.commands import evaluate
from duetgan.data import open_dataset
from duetgan.inference.inputs import Transform
from duetgan.metrics.evaluate_gan import evaluate_generator, judge_images
from duetgan.metrics.features.extractors import pixel_features
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises
from tests.end_to_end.recipes import image_folders
from tests.inference.conftest import gan_run, styled
from tests.metrics.conftest import CLASSES, classifier_run, pack
from tests.test_package import EXAMPLES

EXPORTED = {  # changed on purpose, with a line in CHANGELOG.md
    "duetgan": "Classifier Evaluation Generator Metric Predictions Samples Transform UserError __version__"
    " compare_images load load_classifier load_generator",
    "duetgan.data": "Augment Batch Dataset GlobalSampler InfiniteLoader open_dataset to_float",
    "duetgan.metrics": "Figure Measured frechet_distance kernel_distance",
    "duetgan.models": "ARCHITECTURES Architecture BACKBONES Backbone ImageDiscriminator ImageGenerator",
    "duetgan.training": "Ada AdaConfig CLASSIFIER_LOSSES ClassifierLoss EMA OBJECTIVES Objective gradient_penalty"
    " half_life_beta path_length_penalty path_lengths squared_gradient_norm",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {"classifier": classifier_run(folder / "classifier"), "gan": gan_run(folder / "gan", styled())}


@pytest.fixture(scope="module")
def classifier(runs):
    return duetgan.load_classifier(runs["classifier"], device="cpu")


@pytest.fixture(scope="module")
def generator(runs):
    return duetgan.load_generator(runs["gan"], device="cpu")


@pytest.fixture(scope="module")
def photo():
    """uint8 [12, 20, 3]."""
    return np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)


def test_exported_names_change_on_purpose():
    for package, names in EXPORTED.items():
        module = sys.modules[package] if package == "duetgan" else __import__(package, fromlist=["x"])
        assert sorted(module.__all__) == names.split()
        assert all(getattr(module, name) is not None for name in module.__all__)
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
            _ = module.nothing


def test_whatever_holds_an_image_is_prepared_as_a_files_is(classifier, runs, photo, tmp_path):
    checkpoint = load(resolve(runs["classifier"]))
    PIL.Image.fromarray(photo).save(tmp_path / "a.png")
    expected = Transform.of(checkpoint).read(tmp_path / "a.png")
    tensor = torch.from_numpy(photo).permute(2, 0, 1)
    for image in (tmp_path / "a.png", str(tmp_path / "a.png"), PIL.Image.fromarray(photo), photo, tensor, tensor / 255):
        assert classifier.transform.pixels(image).equal(expected)
        torch.testing.assert_close(classifier.transform(image), expected / 127.5 - 1)
    light = tensor > 99
    pixels = classifier.transform.pixels(light.bfloat16().requires_grad_())  # NumPy has no such type
    assert pixels.equal(classifier.transform.pixels(255 * light.byte()))
    assert classifier.transform.pixels(photo[:, :, 0]).shape == classifier.image_shape


def test_arrays_for_a_network_with_alpha_are_prepared_as_pillows_images_are(photo):
    transform = Transform(ImageSpec.of(4, 8, {"alpha": True, "depth": "uint8"}), "crop")
    for image in (photo, np.dstack([photo, photo[..., :1]])):
        expected = transform.pixels(PIL.Image.fromarray(image))
        assert transform.pixels(image).equal(expected)
        assert transform.pixels(torch.from_numpy(image).permute(2, 0, 1)).equal(expected)


def test_predictions_are_those_of_the_network(classifier, runs, photo, monkeypatch):
    network = classifier_from(load(resolve(runs["classifier"])))
    images = [np.roll(photo, shift, axis=1) for shift in range(5)]
    expected = judge_images(network, torch.stack([classifier.transform.pixels(image) for image in images]))
    monkeypatch.setattr("duetgan.library.BATCH", 2)
    for many in (images, iter(images), np.stack(images), [np.stack(images[:3]), *images[3:]]):
        answers = classifier.predict(many)
        torch.testing.assert_close(answers.probabilities, expected)
        assert answers.labels == [CLASSES[i] for i in expected.argmax(1).tolist()]
    assert classifier.predict(photo).probabilities.shape == (1, len(CLASSES))
    assert classifier.predict([]).labels == []


def test_predictions_show_their_progress_and_become_a_table(classifier, photo, tmp_path, monkeypatch):
    bars: list[Any] = []

    class Recorded(Bar):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            bars.append((self, options["desc"], self.disable))  # tqdm sets it at the end

    monkeypatch.setattr("duetgan.library.Bar", Recorded)
    PIL.Image.fromarray(photo).save(tmp_path / "a.png")
    images = [tmp_path / "a.png", photo, str(tmp_path / "a.png")]
    answers = classifier.predict(images, progress=True)
    classifier.predict(iter(images))
    shown = [(words, bar.total, bar.n, is_hidden) for bar, words, is_hidden in bars]
    assert shown == [("predicting", 3, 3, False), ("predicting", None, 0, True)]
    frame = answers.to_pandas()
    assert list(frame) == ["file", "label", "probability", *CLASSES]
    assert frame["file"].tolist() == [str(tmp_path / "a.png"), "", str(tmp_path / "a.png")]
    assert frame["label"].tolist() == answers.labels
    np.testing.assert_array_equal(frame[CLASSES].to_numpy(), answers.probabilities.numpy())
    assert frame["probability"].tolist() == answers.probabilities.amax(1).tolist()
    answers.class_names[0] = "label"  # a class with the name of a column
    assert list(answers.to_pandas()) == ["file", "label", "probability", "class label", *CLASSES[1:]]


def test_evaluations_are_those_of_the_command(classifier, generator, runs, tmp_path, monkeypatch, capsys):
    train, test = (str(pack(tmp_path / f"{name}.lmdb", seed=seed)) for seed, name in enumerate(("train", "test")))
    arguments = ["--checkpoint", str(runs["classifier"]), "--data", test, "--n", "40", "--seed", "2"]
    assert run_cli(evaluate.main, [*arguments, "--out", str(tmp_path / "out")]) == 0
    expected = json.loads((tmp_path / "out" / "metrics.json").read_text())
    monkeypatch.setattr("duetgan.utils.runlog.progress.SECONDS_BETWEEN_LINES", -1.0)
    capsys.readouterr()
    result = classifier.evaluate(test, n=40, seed=2)
    assert capsys.readouterr().err == ""
    assert result.document["temperature"] == expected["temperature"]
    classifier.evaluate(test, n=3, progress=True)
    assert "images: 3 of 3" in capsys.readouterr().err
    assert len(generator.sample(progress=True).images) == 1
    assert " samples: 1 of 1, " in capsys.readouterr().err
    for metric in result.metrics:
        low, high = expected[f"{metric.name}_interval"] or (None, None)
        assert (metric.value, metric.low, metric.high) == (expected[metric.name], low, high)
    assert {metric.name for metric in result.metrics} >= {"accuracy", "ece", "nll", "auroc"}
    assert result.to_pandas()["value"].tolist() == [metric.value for metric in result.metrics]
    extractors = [pixel_features(ImageSpec(1, 8, 8))]
    shown: list[Any] = []

    def noted(**named):
        shown.append((named["desc"], named["total"], named["disable"]))
        return Bar(**named | {"disable": True})

    monkeypatch.setattr("duetgan.metrics.features.extractors.Bar", noted)
    with open_dataset(test) as images, open_dataset(train) as others:
        options: dict[str, Any] = {"extractors": extractors, "train_dataset": others}
        document = evaluate_generator(generator.network, images, n=50, seed=1, **options)
    assert shown == [("", 60, True)] * 3
    result = generator.evaluate(test, training=train, extractors=["pixels"], n=50, seed=1, progress=True)
    assert result.document == document
    passes = ("real test images", "real train images", "samples")
    assert shown[3:] == [(words, 60, False) for words in passes]  # more than 50: of each class 200, if there are
    floors = {metric.name: metric.floor for metric in result.metrics if metric.floor is not None}
    expected = document["distances"][0]
    assert floors == {"frechet": expected["floor"], "kernel": expected["kernel_floor"]}
    assert result["density"].extractor == "pixels"
    assert [metric.name for metric in result.metrics].count("precision") == 1  # not that of `document` again


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("nowhere.png", r"nowhere\.png cannot be read \(No such file"),
        (np.zeros((8, 8, 4), np.uint8), r"the image is of shape \[8, 8, 4\]; give an array \[H, W\] or \[H, W, C\]"),
        (torch.zeros(2, 8, 8), r"the image is of shape \[2, 8, 8\]; give a tensor \[C, H, W\] with 1 or 3"),
        (np.full((8, 8), 2.0), r"the image has values from 2 to 2; floats are taken as \[0, 1\]"),
        (np.full((8, 8), np.nan), r"the image has values from nan to nan"),
        (np.linspace(-0.5, 1, 64).reshape(8, 8), r"the image has values from -0\.5 to 1; floats"),
        (np.zeros((8, 8), np.int64), "the image is of type int64; give uint8, or floats"),
        (np.zeros((0, 0, 3), np.float32), "the image is only 0x0 px"),
    ],
)
def test_what_is_no_image_is_one_line(classifier, image, message):
    assert_raises(duetgan.UserError, message, classifier.predict, [image])


def test_a_classifier_is_its_network(classifier):
    x = torch.linspace(-1, 1, 128).view(2, 1, 8, 8)
    with torch.no_grad():
        assert classifier(x).equal(classifier.network(x))
    (slope,) = torch.autograd.grad(classifier(x.requires_grad_()).sum(), x)  # as an attack needs it
    assert slope.abs().max() > 0


def test_the_model_that_is_loaded_is_of_its_kind_and_its_network(generator, runs):
    network, z = generator_from(load(resolve(runs["gan"]))), torch.linspace(-1, 1, 16).view(2, 8)
    assert generator(z, torch.tensor([0, 2])).equal(network(z, torch.tensor([0, 2])))
    table = generator.sample(4, classes=["light", "dark"], seed=5).to_pandas()
    columns = {"label": ["light", "dark"] * 2, "seed": [5] * 4, "index": [2, 0, 5, 3]}
    assert table.to_dict("list") == columns
    assert isinstance(duetgan.load(runs["classifier"]), duetgan.Classifier)
    assert isinstance(duetgan.load(runs["gan"]), duetgan.Generator)
    for wrong, told in (
        (lambda: duetgan.load(runs["gan"], which="Best"), "which: 'Best' is neither last nor best"),  # type: ignore[arg-type]
        (lambda: generator.sample(0), "sample: 0 images with noise 'random'; give 1 or more, random, const, none"),
        (lambda: generator.sample(noise="foo"), "noise 'foo'"),
        (lambda: generator.sample(classes="ligth"), "classes: no class 'ligth'"),
        (lambda: generator.sample(classes=[]), "classes: none is named"),
        (lambda: generator.project("x.png", space="z"), "project: space 'z' is w or w+"),
    ):
        assert_raises(duetgan.UserError, told.replace("+", r"\+"), wrong)
    with pytest.raises(duetgan.UserError, match="is of task 'gan', but a 'classifier' checkpoint is needed"):
        duetgan.load_classifier(runs["gan"])


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own
    from examples import lightning_gan


@pytest.mark.filterwarnings("ignore")  # Lightning's hints on workers and accelerators
def test_lightning_trains_the_same_gan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DUET_CACHE", str(tmp_path / "cache"))
    image_folders(tmp_path / "folder", 12, 0)
    (loop,) = (text for text in EXAMPLES if "for step in range(STEPS)" in text)
    names: dict[str, Any] = {}
    with forked(0):
        exec(loop, names)
    with forked(0), open_dataset("folder", resolution=16) as images:
        same = {"gamma": names["GAMMA"], "r1_every": names["R1_EVERY"], "channel_base": 512}
        gan = lightning_gan.train(images, names["STEPS"], names["BATCH"], **same)
    for ours, theirs in ((names["g"], gan.g), (names["d"], gan.d), (names["average"].model, gan.average.model)):
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(theirs.state_dict()[name], value, rtol=0, atol=1e-7, msg=name)


def test_completion_offers_what_is_imported_late():
    """K5."""
    assert {"load", "Classifier", "UserError"} <= set(dir(duetgan))
    assert {"CLASSIFIER_LOSSES", "OBJECTIVES", "EMA"} <= set(dir(duetgan.training))
