"""A classifier over several devices: where its blocks go, that its activations follow, that nothing else changes."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from duetgan.extras.model_parallel import placement as split
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.models import test_backbones as backbones
from tests.models.helpers import draw, kept_bytes

CPU = torch.device("cpu")
# Devices whose tensors are faked. A build for CUDA refuses a backward pass on faked GPUs where there is none, so these
# are of another type; torch refuses operations that mix two of them all the same.
FAKE = [torch.device("meta", index) for index in range(4)]


def build(side: int = 32, **config: Any) -> Classifier:
    with forked(0, "init", "test split"):
        return Classifier(ModelConfig(**config), channels=3, classes=4, resolution=side).train()


def cut_at_layer3(monkeypatch: pytest.MonkeyPatch, model: Classifier) -> None:
    """The second device begins with layer3.0, whatever the memory."""
    first = list(split.modules_of(model)).index("layer3.0")
    monkeypatch.setattr(split, "balanced", lambda count, devices, cost: [first, count])


@contextmanager
def faked() -> Iterator[None]:
    """Tensors that are made or moved in here have a device and a shape, but no values."""
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # a copy asks for it
        yield


def watched(model: Classifier) -> tuple[dict[str, torch.device], dict[str, torch.device]]:
    """Module -> device of its output, and of the gradient that reaches it, filled by what is run later."""
    forward: dict[str, torch.device] = {}
    backward: dict[str, torch.device] = {}

    def note(name: str, output: Tensor) -> None:
        forward[name] = output.device
        if output.requires_grad:
            output.register_hook(lambda grad: backward.update({name: grad.device}))

    for name, module in model.network.named_modules():
        if not any(True for _ in module.children()) and not isinstance(module, nn.ReLU):  # a block's is used thrice
            module.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
    return forward, backward


def part_of(module: str) -> str:
    """The block that a module of the network belongs to."""
    if module.startswith("layer"):
        return ".".join(module.split(".")[:2])
    return "head" if module.startswith("fc") else "layer4.1" if module == "avgpool" else "stem"


@pytest.mark.parametrize(
    ("devices", "config"),
    [
        (2, {"split": "auto"}),
        (3, {"split": "auto", "stem": "small", "normalise": "imagenet", "input_size": 48}),
        (3, {"split": "auto", "head": "hidden", "activation_checkpointing": True, "inplace": False}),
        (2, {"split": "auto", "activation_checkpointing": True}),
    ],
)
def test_every_activation_and_gradient_is_where_its_part_is(devices, config):
    model = build(**config)
    names = list(model.state_dict())
    with faked():
        shares = split.place(model, FAKE[:devices], samples=4)
        where = {block: share.device for share in shares for block in share.blocks}
        assert set(where.values()) == set(FAKE[:devices])
        average = copy.deepcopy(model).eval()
        forward, backward = watched(model)
        images = torch.empty(4, 3, 32, 32, device=FAKE[0], requires_grad=True)
        logits = model(images)
        assert logits.device == FAKE[0]
        logits.sum().backward()
        for network in (model, average):
            for name, tensor in [*network.named_parameters(), *network.network.named_buffers(prefix="network")]:
                assert tensor.device == where[part_of(name.removeprefix("network."))], name
        with torch.no_grad():
            assert average(images).device == FAKE[0]
    assert list(model.state_dict()) == names
    leaves = {name for name in forward if not name.endswith("relu")}
    assert len(leaves) > 40
    assert backward.keys() == forward.keys()
    for name in leaves:
        assert forward[name] == backward[name] == where[part_of(name)], name
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.device == parameter.device, name
    assert images.grad.device == FAKE[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_reduced_precision_crosses_the_cut_as_it_is(dtype, monkeypatch):
    """cpu:1 and cpu:2 are devices to a faked tensor, and autocast knows their type."""
    model = build(split="auto").to(memory_format=torch.channels_last)
    cut_at_layer3(monkeypatch, model)
    seen: list[Tensor] = []
    with faked():
        split.place(model, [torch.device("cpu", 1), torch.device("cpu", 2)], samples=4)
        model.network.layer3[0].conv1.register_forward_pre_hook(lambda _module, inputs: seen.extend(inputs))
        images = torch.empty(4, 3, 64, 64, device="cpu:1").to(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=dtype):
            logits = model(images)
        logits.float().sum().backward()
    assert (str(seen[0].device), seen[0].dtype) == ("cpu:2", dtype)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert model.network.layer3[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert {str(p.grad.device) for p in model.parameters() if p.grad is not None} == {"cpu:1", "cpu:2"}


def test_where_each_device_begins_and_moved_as_a_whole_it_works_there():
    model = build(split="auto")
    split.place(model, [CPU, CPU], samples=4)
    copied = copy.deepcopy(model)
    with faked():
        assert copied.to(FAKE[2])(torch.empty(4, 3, 32, 32, device=FAKE[2])).device == FAKE[2]
    assert not model(draw(4, 3, 32, 32).float()).is_meta
    model = build(split="auto")
    split.place(model, [CPU, CPU, CPU], samples=2)
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == 2
    assert str(split.DevicePart(FAKE[1], ("head",), 3 * 2**30)) == "meta:1: head, about 3.00 GiB"
    assert len(split.place(build(split="auto"), [CPU] * 12, samples=2)) == 10  # more devices than parts


@pytest.mark.parametrize(
    ("name", "checkpointing", "samples"),
    [("resnet18", False, 1), ("resnet50", False, 64), ("resnet50", True, 8), ("resnet101", True, 64)],
)
def test_the_largest_share_is_the_smallest_possible(name, checkpointing, samples):
    with torch.device("meta"):
        config = ModelConfig(name=name, activation_checkpointing=checkpointing)
        model = Classifier(config, channels=3, classes=1000, resolution=224)
    blocks = split.measure(model, samples)
    cost = split._cost(blocks, checkpointing=checkpointing)
    whole = cost(0, len(blocks))
    for devices in (2, 3):
        ends = split.balanced(len(blocks), devices, cost)
        assert len(ends) == devices
        assert ends[-1] == len(blocks)
        found = max(cost(start, end) for start, end in pairwise([0, *ends]))
        possible = (
            max(cost(start, end) for start, end in pairwise([0, *cuts, len(blocks)]))
            for cuts in combinations(range(1, len(blocks)), devices - 1)
        )
        assert found == min(possible)
        assert found < 0.8 * whole  # and it is of use
    assert len(split.balanced(len(blocks), len(blocks), cost)) == len(blocks)


@pytest.mark.parametrize(
    "config", [{}, {"stem": "small"}, {"name": "resnet50"}, {"inplace": False, "head": "hidden", "input_size": 48}]
)
def test_what_is_measured_is_what_a_real_pass_keeps(config):
    state = torch.get_rng_state()
    model = build(**config)
    blocks = split.measure(model, 2)
    side = model.config.input_size or 32
    real = kept_bytes(copy.deepcopy(model), draw(2, 3, side, side).float())
    assert sum(block.saved for block in blocks) == real
    blocks = split.measure(model, 6)
    assert sum(block.saved for block in blocks) == 3 * real
    assert sum(block.weights for block in blocks) == sum(4 * p.numel() for p in model.parameters())
    assert blocks[0].entering == 6 * 3 * side * side * 4
    assert blocks[1].entering == 6 * 64 * 4 * (side if model.config.stem == "small" else side // 4) ** 2
    halved = split.measure(model, 6, reduced=True)
    assert [2 * block.saved for block in halved] == pytest.approx([block.saved for block in blocks], abs=1)
    assert [block.weights for block in halved] == [block.weights for block in blocks]
    assert torch.equal(state, torch.get_rng_state())


def test_recomputation_keeps_stage_inputs_and_one_stage():
    def block(name: str, kept: int, entering: int) -> split.Block:
        return split.Block(name, weights=1, entering=entering, saved=kept)

    blocks = [block("stem", 100, 1), block("layer1.0", 40, 2), block("layer1.1", 20, 4), block("layer2.0", 30, 8)]
    blocks += [block("layer2.1", 10, 16), block("head", 5, 32)]
    plain, again = (split._cost(blocks, checkpointing=checkpointing) for checkpointing in (False, True))
    assert plain(0, 6) == 5 * 6 + 205
    assert again(0, 6) == 5 * 6 + 100 + (1 + 2 + 8) + 5
    assert plain(2, 4) == 5 * 2 + 50 + 4  # what comes from the other device is a copy
    assert again(2, 4) == 5 * 2 + 30 + (4 + 8)
    assert again(0, 3) == 5 * 3 + 100 + (1 + 2 + 8)  # the next stage's input stays where it was made


def test_one_device_is_refused():
    with pytest.raises(UserError, match=r"auto: needs two devices or more, but this process has one \(cpu\)"):
        split.place(build(split="auto"), [CPU], samples=2)


@pytest.mark.parametrize("name", backbones.OURS)
def test_a_split_changes_no_gradient_of_any_backbone(name, slim):
    found = []
    for config in ({}, {"split": "auto"}):
        model = backbones.build(name, stem="small", **config).train()
        if config:
            parts = split.place(model, [CPU, CPU], samples=4)
            assert [block for part in parts for block in part.blocks] == list(dict.fromkeys(model.block_of.values()))
        model(backbones.images(16)).square().sum().backward()
        found.append([p.grad for p in model.parameters()] + list(model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
