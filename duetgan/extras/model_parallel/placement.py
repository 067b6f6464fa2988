"""A classifier split over several devices, for networks that do not fit on one.

Each device holds consecutive blocks of the network. The devices compute one after another, so
training gets no faster. Images enter and logits leave on the first device. The names in state dicts
do not change, so a checkpoint fits any split.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from duetgan.models.classifier import Classifier
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.network import PLACEMENTS
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError

COPIES = 5  # tensors per weight in training: weight, gradient, two Adam moments, average
SAMPLES = 2  # batch size of the memory estimate: BatchNorm refuses a single sample
GIB = 2**30


@dataclass(frozen=True)
class Block:
    """A part of the network that is never divided, and the bytes that it needs in training."""

    name: str  # stem, a residual block (layer3.4), head
    weights: int  # its parameters
    entering: int  # its input
    # tensors saved for the block's backward pass, except those that an earlier block saves too
    saved: int


@dataclass(frozen=True)
class DevicePart:
    """The consecutive blocks on one device.

    `str` returns, for example, `cuda:0: stem to layer3.1, about 1.25 GiB`.
    """

    device: torch.device
    blocks: tuple[str, ...]  # names of consecutive blocks
    bytes: int  # estimated memory of a training step

    def __str__(self) -> str:
        ends = " to ".join(dict.fromkeys((self.blocks[0], self.blocks[-1])))
        return f"{self.device}: {ends}, about {self.bytes / GIB:.2f} GiB"


def place(
    classifier: Classifier, devices: Sequence[torch.device], *, samples: int, reduced: bool = False
) -> list[DevicePart]:
    """Move the classifier's blocks to `devices`, so that the largest memory of a device is minimal.

    Hooks move the activations in each forward pass. A copy of the classifier (`copy.deepcopy`) is
    split in the same way. A split classifier can also be moved to a single device as a whole, and
    works on this device.

    Args:
        classifier: The classifier, with all weights on one device.
        devices: Devices of this process; the first one gets the images.
        samples: Batch size of a forward pass.
        reduced: True if activations have 16 bits.

    Returns:
        The blocks of each device, in the order of the forward pass.

    Raises:
        UserError: There are fewer than two devices.
    """
    if len(devices) < 2:
        raise UserError(
            "model.split auto: needs two devices or more, but this process has one "
            f"({devices[0]}); leave it out, or give each process several: fewer processes, or more "
            "GPUs"
        )
    blocks = measure(classifier, samples, reduced=reduced)
    names = [block.name for block in blocks]
    cost = _cost(blocks, checkpointing=classifier.config.activation_checkpointing)
    ends = balanced(len(blocks), min(len(devices), len(blocks)), cost)
    spans = zip(devices, pairwise([0, *ends]), strict=False)
    parts = [
        DevicePart(device, tuple(names[start:end]), cost(start, end))
        for device, (start, end) in spans
    ]

    modules = modules_of(classifier)
    for part in parts:
        for name in part.blocks:
            nn.ModuleList(modules[name]).to(part.device)
    # buffers that normalise images
    for name, buffer in list(classifier.named_buffers(recurse=False)):
        setattr(classifier, name, buffer.to(parts[0].device))
    for part in parts[1:]:  # autograd moves the gradients back
        modules[part.blocks[0]][0].register_forward_pre_hook(
            lambda module, inputs: tuple(x.to(next(module.parameters()).device) for x in inputs)
        )
    # The labels are on the device of the images.
    classifier.register_forward_hook(lambda _module, inputs, logits: logits.to(inputs[0].device))
    return parts


def modules_of(classifier: Classifier) -> dict[str, list[nn.Module]]:
    """Return a dict from the name of each block to its modules, in the order of the forward pass.

    The first module of a block takes the block's input.
    """
    network = classifier.network
    return {
        block: [network.get_submodule(name.removesuffix(".*")) for name in names]
        for block, names in classifier.backbone.blocks(network).items()
    }


# --- how much memory the blocks take


def measure(classifier: Classifier, samples: int, *, reduced: bool = False) -> list[Block]:
    """Return the blocks with the memory that each needs in training with `samples` images.

    The memory is measured in a pass on torch's meta device, which neither computes nor allocates.
    If several blocks save the same tensor, it counts only for the first of them. If `reduced` is
    True, activations have 16 bits instead of 32.
    """
    with torch.device("meta"):
        network = Classifier(
            classifier.config.changed(activation_checkpointing=False),
            channels=classifier.channels,
            classes=classifier.classes,
            resolution=classifier.resolution,
        ).train()
        images = network.prepare(torch.empty(SAMPLES, *classifier.spec.shape))
    modules = modules_of(network)
    entering = dict.fromkeys(modules, 0)
    saved = dict.fromkeys(modules, 0)
    current = next(iter(modules))
    # A reference to each counted tensor prevents that its address is used again.
    counted = {p.untyped_storage()._cdata: p.detach() for p in network.parameters()}

    def enter(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal current
        current = name
        entering[name] = inputs[0].nbytes

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in counted:
            counted[storage._cdata] = tensor
            saved[current] += storage.nbytes()
        return tensor

    for name, block_modules in modules.items():
        block_modules[0].register_forward_pre_hook(partial(enter, name))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        network(images)
    divisor = SAMPLES * (2 if reduced else 1)
    return [
        Block(
            name,
            weights=sum(p.nbytes for module in block_modules for p in module.parameters()),
            entering=entering[name] * samples // divisor,
            saved=saved[name] * samples // divisor,
        )
        for name, block_modules in modules.items()
    ]


def _cost(blocks: Sequence[Block], *, checkpointing: bool) -> Callable[[int, int], int]:
    """Return a function of `start` and `end` that estimates the memory of one device.

    The function returns the bytes that a device needs in training if it holds blocks[start:end].
    `checkpointing` is True if activation checkpointing is on.
    """

    def cost(start: int, end: int) -> int:
        span = blocks[start:end]
        total = sum(COPIES * block.weights for block in span) + (span[0].entering if start else 0)
        if not checkpointing:
            return total + sum(block.saved for block in span)
        # The input of a stage stays on the device of the previous stage. One stage at a time is
        # recomputed.
        total += sum(
            block.entering for block in blocks[start + 1 : end + 1] if block.name.endswith(".0")
        )
        stages: dict[str, int] = {}
        for block in span:
            stage = block.name.partition(".")[0]
            stages[stage] = stages.get(stage, 0) + block.saved
        total += stages.pop("head", 0) + (0 if start else blocks[0].entering)
        return total + max(stages.values(), default=0)

    return cost


# --- where the network is cut


def balanced(count: int, devices: int, cost: Callable[[int, int], int]) -> list[int]:
    """Divide range(count) into consecutive spans, so that the largest cost of a span is minimal.

    Args:
        count: Number of blocks.
        devices: Number of spans, none of which is empty.
        cost: Function of the start and the end of a span that returns its cost.

    Returns:
        The ends of the spans.
    """
    # end -> (largest cost, ends) of the best division of range(end)
    best = {end: (cost(0, end), [end]) for end in range(1, count + 1)}
    for spans in range(1, devices):  # number of spans in the previous `best`
        previous = best
        best = {}
        for end in range(spans + 1, count + 1):
            best[end] = min(
                (max(previous[cut][0], cost(cut, end)), [*previous[cut][1], end])
                for cut in range(spans, end)
            )
    return best[count][1]


def place_parts(model: Classifier, config: ClassifierConfig, device: torch.device) -> None:
    """Split the model over the devices of this process, and set `model.parts` (see `place`)."""
    model.parts = place(
        model,
        collectives.own_devices(device),
        samples=config.micro(collectives.world_size()),
        reduced=config.precision not in ("auto", "fp32"),
    )


PLACEMENTS["split"] = place_parts
