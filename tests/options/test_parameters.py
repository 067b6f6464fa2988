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
from duetgan import hub as hubconf
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.restore import classifier_from, generator_from, open_checkpoint
from duetgan.models.weights import load_pretrained
from duetgan.utils.image_spec import PixelFormat

HUB: Any = hubconf  # its entry points are made at import

RESULTS = ("Predictions", "Evaluation", "Metric", "Samples", "Transform", "UserError")
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


def pretrained(model: Any, classes: Any = None) -> Any:
    return load_pretrained(model, classes), model


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


@pytest.fixture(scope="module")
def cases(world, slim_module):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duetgan.metrics.features.extractors.PLACES", (world["resnet50"],))
        return [*loaders(world), *networks(world)]


def test_every_parameter_changes_the_result(cases, world, monkeypatch):
    monkeypatch.setattr("duetgan.metrics.features.extractors.PLACES", (world["resnet50"],))
    faults = []
    for case in cases:
        name, first = case.function.__qualname__, result(case, case.base)
        for parameter, value in (case.changes | case.same).items():
            found = result(case, case.base | {parameter: value})
            if (found == first) != (parameter in case.same):
                faults.append(f"{name}, {parameter}: {'as before' if found == first else f'{first} {found}'[:400]}")
    assert not faults, "\n".join(faults)


def test_every_parameter_has_a_case(cases):
    known: dict[Any, set[str]] = {}
    for case in cases:
        known.setdefault(case.function, set()).update(case.changes, case.same)
    for function, names in known.items():
        assert names == set(inspect.signature(function).parameters) - {"self"}, function
    for name in duetgan.__all__:
        value = getattr(duetgan, name)
        assert name in RESULTS or not callable(value) or value in known, name
