"""Every parameter of the library's functions, away from its default, changes their result, or is known not to."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor, nn

import duetgan
from duetgan import data, metrics, models, training
from duetgan import hub as hubconf
from duetgan.data.augment.transforms import to_float
from duetgan.data.images.decode import RandomCrop
from duetgan.data.reading.sampler import Position
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.restore import classifier_from, generator_from, open_checkpoint
from duetgan.models.weights import load_pretrained
from duetgan.training.gan.ada import Ada, AdaConfig
from duetgan.training.gan.losses import (
    gradient_penalty,
    path_length_penalty,
    path_lengths,
    squared_gradient_norm,
)
from duetgan.training.optim.ema import EMA, half_life_beta
from duetgan.utils.image_spec import PixelFormat
from tests.data.reading.test_sampler import batches_of

HUB: Any = hubconf  # its entry points are made at import

ELSEWHERE = {  # public names without parameters of their own, and where they are tested
    "Augment": "config keys: tests/oracle/test_keys.py",
    "AdaConfig": "config keys: tests/oracle/test_keys.py",
    "Objective": "a row of losses: tests/training/gan/test_losses.py",
    "ClassifierLoss": "a row of losses: tests/training/classifier/test_loss.py",
    "open_dataset": "tests/data/packing/test_folder_copy.py",
    "Architecture": "a row of the registry: tests/extras/published/test_published.py",
    "Backbone": "a row of the registry: tests/models/test_backbones.py",
    "Figure": "a row of metrics: tests/metrics/test_figures.py",
    "Measured": "a value with its interval: tests/metrics/test_figures.py",
    **dict.fromkeys(("ImageGenerator", "ImageDiscriminator"), "abstract"),
    **dict.fromkeys(("Predictions", "Evaluation", "Metric", "Samples", "Batch", "Transform", "UserError"), "results"),
}
OPERATIONS = {"blit": 1.0, "colour": 1.0, "noise": 1.0}
CUDA = "cuda:99"  # is refused


@dataclass
class Case:
    """A function, arguments, and for each parameter another value that changes the result, or changes nothing."""

    function: Callable[..., Any]
    base: dict[str, Any]
    changes: dict[str, Any]
    same: dict[str, Any] = field(default_factory=dict)
    call: Callable[..., Any] | None = None


def plain(value: Any) -> Any:
    """A comparable form of a result."""
    if isinstance(value, nn.Module):
        return plain(dict(value.state_dict()))
    if isinstance(value, Tensor | np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, PIL.Image.Image):
        return value.size, value.tobytes()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return plain(vars(value)) if is_dataclass(value) else repr(value)


def result(case: Case, arguments: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    arguments = {
        name: copy.deepcopy(value) if isinstance(value, nn.Module) else value for name, value in arguments.items()
    }
    try:
        return plain((case.call or case.function)(**arguments))
    except (ValueError, RuntimeError) as error:
        return type(error), str(error)


def batches(**arguments: Any) -> Any:
    loader = data.InfiniteLoader(**arguments)
    try:
        return [next(loader).images for _ in range(3)], loader.step
    finally:
        loader.close()


def read(dataset: Any = None, indices: Any = (0, 40), **arguments: Any) -> Any:
    with data.Dataset(**arguments) as images:
        keys = data.GlobalSampler(2, batch_size=2, seed=0).batch(Position())[1]
        return images.read(list(indices), keys=keys if images.crop else None), images.path


def damaged(path: Path) -> Path:
    """A copy of a packed file with a wrong pixel in its first image."""
    with data.Dataset(path) as images:
        pixels = images.read([0])[0].tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(pixels)] ^= 1
    copied = path.with_name("wrong.lmdb")
    copied.write_bytes(content)
    return copied


def moved(model: Any, **arguments: Any) -> Any:
    average = EMA(nn.Linear(2, 2), buffers="average")
    average.update(model, **arguments)
    return average.model


def pretrained(model: Any, **options: Any) -> Any:
    return load_pretrained(model, **options), model


def logits_of(images: Tensor) -> Tensor:
    return (images**3).sum((1, 2, 3))


def loaders(world: dict[str, Path]) -> list[Case]:
    gan, classifier, judge = (str(world[name]) for name in ("gan", "classifier", "judge"))
    content, another = (open_checkpoint(gan, which)[1] for which in ("last", "best"))
    content_c, another_c = (open_checkpoint(classifier, which)[1] for which in ("last", "best"))
    both = {"which": "best", "device": CUDA}
    return [
        Case(duetgan.load, {"checkpoint": gan}, {"checkpoint": classifier, **both}),
        Case(duetgan.load_classifier, {"checkpoint": classifier}, {"checkpoint": judge, **both}),
        Case(duetgan.load_generator, {"checkpoint": gan}, {"checkpoint": classifier, **both}),
        Case(duetgan.Classifier, {"checkpoint": content_c}, {"checkpoint": another_c, "device": CUDA}),
        Case(duetgan.Generator, {"checkpoint": content}, {"checkpoint": another, "device": CUDA}),
        Case(classifier_from, {"checkpoint": content_c | {"sets": [[0]]}, "several": True},
             {"checkpoint": another_c, "device": CUDA, "several": False}),
        Case(generator_from, {"checkpoint": content | {"sets": [[0]]}, "several": True},
             {"checkpoint": another, "device": CUDA, "several": False}),
        Case(hubconf.resnet_classifier, {"checkpoint": classifier}, {"checkpoint": judge, **both}),
        Case(HUB.stylegan2, {"checkpoint": gan}, {"checkpoint": judge, **both}),
    ]  # fmt: skip


def networks(world: dict[str, Path]) -> list[Case]:
    generator, classifier = (duetgan.load(world[name], device="cpu") for name in ("gan", "classifier"))
    assert isinstance(generator, duetgan.Generator)
    assert isinstance(classifier, duetgan.Classifier)
    x, z, labels = (
        torch.linspace(-1, 1, 128).view(2, 1, 8, 8),
        torch.linspace(-2, 2, 16).view(2, 8),
        torch.tensor([0, 1]),
    )
    photo, wide = str(world["photo0"]), str(world["wide"])
    train, test, few = (str(world[name]) for name in ("train", "test", "few"))
    drawn = {"classes": ["light", "dark"], "seed": 1}
    torch.manual_seed(0)
    shape: dict[str, Any] = {"classes": 2, "channels": 4, "resolution": 8}
    weights: dict[str, Any] = {"weights": str(world["weights"]), "name": "resnet50", "stem": "imagenet"}
    run: dict[str, Any] = {"weights": str(world["classifier"]), "stem": "small-stride2", "normalise": "symmetric"}
    ours = Classifier(ModelConfig(**run), classes=3, channels=1, resolution=8)
    rgb, rgba = (
        Classifier(ModelConfig(**weights), **shape, pixel_format=kind)
        for kind in (None, PixelFormat(depth="uint8", alpha=True))
    )
    return [
        Case(duetgan.Classifier.forward, {"images": x}, {"images": -x}, call=classifier.forward),
        Case(duetgan.Classifier.predict, {"images": [photo]}, {"images": [wide]}, {"progress": True},
             classifier.predict),
        Case(duetgan.Classifier.evaluate, {"images": test, "n": 30},
             {"images": few, "n": 29, "seed": 1}, {"progress": True}, classifier.evaluate),
        Case(duetgan.Generator.evaluate, {"images": test, "extractors": ["pixels"]},
             {"images": few, "n": 9, "seed": 1, "training": few, "extractors": ["resnet50"], "weights": "x"},
             {"progress": True}, generator.evaluate),
        Case(duetgan.compare_images, {"images": train, "reference": test, "extractors": ["pixels"]},
             {"images": few, "reference": few, "training": few, "extractors": ["resnet50"], "weights": "x", "n": 9,
              "seed": 1, "size": 4, "device": CUDA}, {"batch_size": 128, "progress": True}),
        Case(duetgan.Generator.forward, {"z": z, "labels": labels, "noise": "const"},
             {"z": -z, "labels": labels.flip(0), "options": {"truncation_psi": 0.5}},
             call=lambda options=None, **given: generator.forward(**given, **(options or {}))),
        Case(duetgan.Generator.sample, {"n": 3},
             {"n": 4, **drawn, "seeds": [0, 5, 0], "psi": 0.5, "noise": "const"}, {"progress": True},
             generator.sample),
        Case(duetgan.Generator.sample, {"n": 3, "psi": 0.5}, {"truncation_mean": "global"}, call=generator.sample),
        Case(duetgan.Generator.grid, {"n": 4}, {"n": 5, "columns": 2, "options": {"psi": 0.5}},
             call=lambda options=None, **given: generator.grid(**given, **(options or {}))),
        Case(duetgan.Generator.project, {"image": photo, "steps": 2, "features": "pixels"},
             {"image": wide, "space": "w", "classes": "grey", "seed": 1, "steps": 3, "features": "resnet50"},
             call=generator.project),
        Case(load_pretrained, {"model": rgb}, {"model": rgba}, call=pretrained),
        Case(load_pretrained, {"model": ours}, {"classes": classifier.class_names[::-1]}, call=pretrained),
    ]  # fmt: skip


def parts(world: dict[str, Path]) -> list[Case]:
    train, test = world["train"], world["test"]
    images = data.Dataset(train)
    sampler = {"count": 12, "batch_size": 4, "seed": 0, "world_size": 2, "weights": np.arange(1.0, 13)}
    weights = {
        "weights": np.arange(12.0, 0, -1),
        "groups": np.arange(12) % 5,
        "stream": "another",
    }

    def order(**arguments: Any) -> Any:
        made = data.GlobalSampler(**arguments)
        return list(batches_of(made, 4))

    def loader(**arguments: Any) -> Any:
        return batches(**{"sampler": data.GlobalSampler(75, batch_size=2, seed=0), **arguments})

    x = torch.linspace(-1, 1, 64).view(2, 2, 4, 4).requires_grad_()
    w = torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_()
    drawn = (w.sum((1, 2))[:, None, None, None] ** 2 * torch.ones(2, 1, 2, 2)) + w.pow(3).sum((1, 2))[
        :, None, None, None
    ]
    features = torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(0))
    scaled = {"scale": 2.0}  # unscaled again: of use under fp16 alone
    ada: dict[str, Any] = {
        "config": AdaConfig(mode="scheduled", p=0.9, p_final=0.1, operations=OPERATIONS),
        "seed": 0,
        "channels": 2,
    }
    ada |= {"device": torch.device("cpu"), "schedule_images": 100}

    def augmented(**arguments: Any) -> Any:
        made = Ada(**arguments)
        made.update(lambda _: 50, 4, torch.tensor(1.0), 8)
        return (
            made.apply(x.detach(), made.draw(3, "real", (4, 4), 2), slice(0, 2)),
            made.p,
            made.adjustment_images,
        )

    steps = {"step": 3, "phase": "real", "size": (4, 4), "batch_size": 2}
    draw = Ada(**ada).draw

    def p_after(**arguments: Any) -> Any:
        adaptive = AdaConfig(mode="adaptive", p=0.5, kimg=0.1, interval=2)
        both = Ada(**ada), Ada(**ada | {"config": adaptive})
        for made in both:
            made.update(**arguments)
        return [made.state_dict() for made in both]

    updated = {"images_at": lambda _: 16, "step": 1, "real_sign": torch.tensor(1.0), "batch_size": 8}
    scalar: dict[str, Any] = {"lengths": torch.tensor([1.0, 2.0], requires_grad=True), "mean": torch.tensor(1.0)}
    scalar |= {"batch_mean": torch.tensor(1.5), "decay": 0.1, "batch": 2}

    def penalty(**arguments: Any) -> Any:
        value = path_length_penalty(**arguments)
        return value, torch.autograd.grad(value, arguments["lengths"])

    linear = nn.Linear(2, 2)
    return [
        Case(data.Dataset, {"path": train},
             {"path": test, "resolution": 4, "crop": RandomCrop(), "name": "x"}, {"workers": 2}, read),
        Case(data.GlobalSampler, sampler,
             {"count": 13, "batch_size": 6, "seed": 1, "rank": 1, "world_size": 1} | weights,
             call=order),
        Case(data.GlobalSampler, {"count": 12, "batch_size": 4, "seed": 0}, {"shuffle": False}, call=order),
        Case(data.InfiniteLoader, {"dataset": images, "device": "cpu"},
             {"dataset": data.Dataset(test), "sampler": data.GlobalSampler(75, batch_size=2, seed=1), "device": "meta",
              "alternating": True, "batches_per_step": 2}, {"prefetch": 0}, loader),
        Case(to_float, {"images": torch.arange(8, dtype=torch.uint8).view(1, 2, 2, 2)},
             {"images": torch.zeros(1, 2, 2, 2, dtype=torch.uint8), "channels_last": False},
             call=lambda **given: (to_float(**given), to_float(**given).stride())),
        Case(metrics.frechet_distance, dict(zip(("first", "second"), features, strict=False)),
             {"first": features[2], "second": features[2]}),
        Case(metrics.kernel_distance, {"first": features[0], "second": features[1, :9], "seed": 0},
             {"first": features[2], "second": features[2], "seed": 1}),
        Case(EMA, {"model": nn.BatchNorm1d(2), "buffers": "copy"}, {"model": nn.BatchNorm1d(3), "buffers": "average"},
             call=lambda **given: (EMA(**given).model, EMA(**given).average_buffers)),
        Case(EMA.update, {"model": linear, "beta": 0.5},
             {"model": nn.Linear(2, 2), "beta": 0.6, "skipped": torch.tensor(1.0),
              "average": [torch.ones(2, 2), torch.ones(2)]}, call=moved),
        Case(half_life_beta, {"batch_size": 8, "images_seen": 1000, "half_life_images": 90.0},
             {"batch_size": 9, "images_seen": 90, "half_life_images": 40.0, "ramp": 0.01}),
        *(Case(function, {"images": x}, {"images": x * 2}, scaled | {"logits": None},
               lambda images, logits=None, scale=1.0, function=function: function(logits_of(images), images, scale))
          for function in (squared_gradient_norm, gradient_penalty)),
        Case(path_lengths, {"images": drawn, "ws": w, "noise": torch.ones(2, 1, 2, 2)},
             {"images": drawn * 2, "ws": w * 2, "noise": torch.ones(2, 1, 2, 2) * 2}, scaled | {"create_graph": True}),
        Case(path_length_penalty, scalar,
             {"lengths": torch.tensor([1.0, 3.0], requires_grad=True), "mean": torch.tensor(2.0),
              "batch_mean": torch.tensor(2.0), "decay": 0.2, "batch": 3}, call=penalty),
        Case(Ada, ada, {"config": AdaConfig(mode="fixed", p=0.9), "seed": 1, "alpha": True, "schedule_images": 500,
                        "transfer": True, "channels": 3}, call=augmented),
        Case(Ada, ada, {"device": torch.device("meta")}, call=lambda **given: Ada(**given).p.device),
        Case(Ada.draw, steps, {"step": 4, "phase": "fake", "size": (8, 8), "batch_size": 3},
             call=draw),
        Case(Ada.update, updated,
             {"images_at": lambda _: 1, "step": 2, "real_sign": torch.tensor(-1.0), "batch_size": 9}, call=p_after),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def cases(world: dict[str, Path], slim_module: None) -> list[Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duetgan.metrics.features.extractors.PLACES", (world["resnet50"],))
        return [*loaders(world), *networks(world), *parts(world)]


def test_every_parameter_changes_the_result(cases: list[Case], world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duetgan.metrics.features.extractors.PLACES", (world["resnet50"],))
    faults = []
    for case in cases:
        name, first = case.function.__qualname__, result(case, case.base)
        for parameter, value in (case.changes | case.same).items():
            found = result(case, case.base | {parameter: value})
            if (found == first) != (parameter in case.same):
                faults.append(f"{name}, {parameter}: {'as before' if found == first else f'{first} {found}'[:400]}")
    assert not faults, "\n".join(faults)


def test_every_parameter_has_a_case(cases: list[Case]) -> None:
    known: dict[Any, set[str]] = {}
    for case in cases:
        known.setdefault(case.function, set()).update(case.changes, case.same)
    for function, names in known.items():
        assert names == set(inspect.signature(function).parameters) - {"self"}, function
    for package in (duetgan, data, models, metrics, training):
        for name in package.__all__:
            value = getattr(package, name)
            assert name in ELSEWHERE or not callable(value) or value in known, name
