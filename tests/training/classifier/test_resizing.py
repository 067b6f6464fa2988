"""Progressive resizing: which size at which step, what the network and the evaluation see, and what is refused."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duetgan.data.augment.transforms import to_float
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.preparation import scaled
from duetgan.training.base.data import make_loader
from duetgan.training.classifier.resizing import Resizing, ResizingConfig, side_at
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec

CPU = torch.device("cpu")
TREE: dict[str, Any] = {
    "task": "classifier",
    "steps": 10,
    "batch_size": 12,
    "model": {"stem": "small-stride2"},
    "augment": {"mixup": 0.4, "cutmix": 1.0},
    "resizing": {"initial_scale": 0.5},
    "micro_batch": "auto",
}


def slow_sides(steps: int, full: int, scale: str, delay: str, last: str) -> list[int]:
    """Every step's side: steps are counted out, and of all allowed sides the nearest is taken, the even one of two."""
    part = next(n for n in range(4, full + 4, 4) if 8 * n >= full)
    delayed = sum(1 for n in range(1, steps + 1) if Fraction(n, steps) <= Fraction(delay))
    whole = next(n for n in range(steps + 1) if Fraction(n, steps) >= Fraction(last))
    sides = []
    for step in range(steps):
        if steps - step <= whole:
            sides.append(full)
            continue
        grown = Fraction(step - delayed, steps - whole - delayed) if step > delayed else Fraction(0)
        wanted = full * (Fraction(scale) + (1 - Fraction(scale)) * grown)
        nearest = min(range(0, full + part, part), key=lambda side: (abs(side - wanted), side // part % 2))
        sides.append(min(nearest, full))
    return sides


@pytest.mark.parametrize("steps", [1, 3, 10, 97])
@pytest.mark.parametrize("full", [16, 28, 32, 100, 224])
@pytest.mark.parametrize(
    ("scale", "delay", "last"),
    [("0.5", "0.5", "0.2"), ("0.75", "0", "0.1"), ("0.6", "0.9", "0.1"), ("0.5", "0", "1"), ("0.51", "0.33", "0.3")],
)
def test_sides_are_those_of_a_slow_count(steps, full, scale, delay, last):
    fractions = {"delay_fraction": float(delay), "finetune_fraction": float(last)}
    config = ResizingConfig(initial_scale=float(scale), **fractions)
    expected = slow_sides(steps, full, scale, delay, last)
    assert [side_at(config, step, steps, full) for step in range(steps)] == expected
    assert expected == sorted(expected)
    assert expected[-1] == full
    assert len(set(expected)) <= 8  # as often torch.compile compiles a function
    own = SimpleNamespace(input_size=None)
    sizes: list[tuple[int, str]] = []
    model: Any = SimpleNamespace(config=own, spec=ImageSpec(3, full, full), side=None)
    model.check_side = lambda *side_and_remedy: sizes.append(side_and_remedy)
    resizing = Resizing(config, model, steps)
    assert sizes == [(expected[0], "raise resizing.initial_scale, or leave it out")] * resizing.on
    seen = []
    for step in range(steps):
        changed = resizing.at(step)
        seen.append(model.side or full)
        assert changed == (resizing.on and (step == 0 or seen[-1] != seen[-2]))
    assert seen == expected
    kinds = resizing.typical_steps()
    assert {expected[step]: round(share * steps) for step, share in kinds.items()} == {
        side: expected.count(side) for side in expected
    }
    assert sum(kinds.values()) == pytest.approx(1)
    assert list(kinds.values()) == sorted(kinds.values(), reverse=True)


@pytest.fixture
def reader(packed):
    with Dataset(packed / "train.lmdb") as opened:
        yield opened


def task_of(packed: Path, reader: Dataset, **more: Any) -> ClassifierTask:
    config: Any = build_run_config(TREE | {"data": {"path": str(packed / "train.lmdb")}} | more, [], "x")
    return ClassifierTask(config, reader, reader, CPU)


def test_training_sees_them_and_evaluation_full_size(packed, reader):
    """Data of 16 px: 8, then 12, then 16."""
    task = task_of(packed, reader, steps=3, resizing={"initial_scale": 0.5, "delay_fraction": 0.0})
    assert task.describe()["image size"] == "8 px, 12 px from step 1, 16 px from step 2"
    seen: dict[str, list[int]] = {"training": [], "evaluation": []}
    for name, model in (("training", task.model), ("evaluation", task.ema.model)):
        note: Any = lambda _, inputs, name=name: seen[name].append(inputs[0].shape[-1])  # noqa: E731
        model.network.conv1.register_forward_pre_hook(note)
    loader = make_loader(task.config, reader, CPU)
    for step in range(3):
        found: list[bool] = []
        for act in (task.set_up, lambda step: task.step(loader, step)):
            act(step)
            found.append(task.inputs.micro.is_stale)
        assert found == [True, False]  # larger images: it is tried again how many fit
        if step == 0:
            task.evaluate()
    assert seen["training"] == [8, 8, 12, 12, 16, 16]  # with the tries
    assert set(seen["evaluation"]) == {16}
    assert not any("side" in name for name in task.model.state_dict())


def test_steps_at_full_size_are_those_of_a_run_without(packed, reader):
    """And a smaller step is one with images that were scaled before; mixed ones are scaled once they are mixed."""
    resized, plain = task_of(packed, reader), task_of(packed, reader, resizing={})
    assert not plain.resizing.on
    assert plain.typical_steps(7) == {7: 1.0}
    images = torch.arange(12 * 256).remainder(251).to(torch.uint8).view(12, 1, 16, 16)
    batch = Batch(images, torch.arange(12) % 10)
    original: Any = plain.inputs.rows

    def smaller(prepared: Any, rows: slice) -> Any:
        mixed, targets = original(prepared, rows)
        return scaled(mixed, 8), targets

    for step, part in ((0, smaller), (9, original)):
        setattr(plain.inputs, "rows", part)  # noqa: B010
        found, expected = (task.step(iter([batch]), step) for task in (resized, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for ours, theirs in zip(resized.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_images_are_scaled_once_where_the_network_enlarges_them():
    model = Classifier(ModelConfig(stem="small", input_size=48), channels=1, classes=2, resolution=16)
    images = to_float(torch.arange(256).to(torch.uint8).view(1, 1, 16, 16))
    resizing = Resizing(ResizingConfig(initial_scale=0.5), model, 10)
    resizing.at(0)
    assert torch.equal(model.prepare(images), scaled(images, 24))
    resizing.at(9)
    assert torch.equal(model.prepare(images), scaled(images, 48))


@pytest.mark.parametrize(
    ("name", "side", "scale", "told"),
    [
        ("resnet18", 16, 0.25, r"initial_scale 0\.25: images of 16 px would begin at 4 px, too small; raise"),
        ("airbench", 16, 0.5, r"airbench cannot take images of 8 px: raise resizing\.initial_scale, or leave it out"),
        ("convnext_tiny", 32, 0.5, r"convnext_tiny cannot take images of 16 px: raise resizing\.initial_scale"),
        ("timm:test_vit", 160, 0.5, r"cannot take images of 80 px: raise resizing\.initial_scale, or leave it out"),
    ],
)
def test_sizes_that_a_network_cannot_take_are_refused(name, side, scale, told):
    if name.startswith("timm"):
        pytest.importorskip("timm")
    model = Classifier(ModelConfig(name=name), channels=3, classes=2, resolution=side)
    with pytest.raises(UserError, match=told):
        Resizing(ResizingConfig(initial_scale=scale), model, 10)
