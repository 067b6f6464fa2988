"""One classifier over several devices: consecutive stages of it lie on one each, for networks that
one cannot hold.

The devices take turns, so nothing gets faster. Names in state dicts stay, checkpoints fit every
placement; images go in, and logits come out, on the first device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from duetgan.models.classifier import Classifier
from duetgan.utils.errors import UserError
from duetgan.utils.text import did_you_mean

COPIES = 5  # of the weights, in training: they, their gradients, two moments, their average
SAMPLES = 2  # that the memory is estimated with: BatchNorm refuses one alone
GIB = 2**30


@dataclass(frozen=True)
class Block:
    """A stretch of the network that lies on one device, with the bytes that training keeps there."""

    name: str  # stem, a residual block (layer3.4), head
    weights: int  # parameters, once
    entering: int  # its input
    # what its backward pass needs besides, its input only where no earlier block keeps that too
    kept: int


@dataclass(frozen=True)
class Share:
    """What lies on one device; as text `cuda:0: stem to layer3.1, about 1.25 GiB`."""

    device: torch.device
    blocks: tuple[str, ...]  # consecutive
    bytes: int  # estimated, of a training step

    def __str__(self) -> str:
        ends = " to ".join(dict.fromkeys((self.blocks[0], self.blocks[-1])))
        return f"{self.device}: {ends}, about {self.bytes / GIB:.2f} GiB"


def place(
    classifier: Classifier, devices: Sequence[torch.device], *, samples: int, reduced: bool = False
) -> list[Share]:
    """Move the classifier's blocks to `devices` as `config.split` says, and its activations with
    every call. Returns what lies where, from the images to the logits.

    `samples` are those of a forward pass; `reduced`: activations are kept in 16 bits. `auto`: the
    device that holds most memory in training holds as little as it can. A copy of the classifier
    (`copy.deepcopy`) lies and works the same way; moved to one device as a whole, it works there.

    Raises UserError for fewer than two devices, and for a split that does not fit the network or
    the devices.
    """
    split = classifier.config.split
    assert split != "off"
    if len(devices) < 2:
        text = (
            split
            if split == "auto"
            else ", ".join(f"{block}: {number}" for block, number in split.items())
        )
        raise UserError(
            f"model.split {text}: needs two devices or more, but this process has one ({devices[0]}); leave it out, "
            "or give each process several: fewer processes, or more GPUs"
        )
    blocks = measure(classifier, samples, reduced=reduced)
    names = [block.name for block in blocks]
    cost = _cost(blocks, checkpointing=classifier.config.activation_checkpointing)
    if split == "auto":
        ends = balanced(len(blocks), min(len(devices), len(blocks)), cost)
    else:
        ends = given(split, names, len(devices))
    spans = zip(devices, pairwise([0, *ends]), strict=False)
    shares = [Share(device, tuple(names[a:b]), cost(a, b)) for device, (a, b) in spans]

    modules = modules_of(classifier)
    for share in shares:
        for name in share.blocks:
            nn.ModuleList(modules[name]).to(share.device)
    # of ImageNet's normalisation
    for name, buffer in list(classifier.named_buffers(recurse=False)):
        setattr(classifier, name, buffer.to(shares[0].device))
    for share in shares[1:]:  # gradients go back by themselves
        modules[share.blocks[0]][0].register_forward_pre_hook(
            lambda module, inputs: tuple(x.to(next(module.parameters()).device) for x in inputs)
        )
    # whoever gives the images has the labels there, too
    classifier.register_forward_hook(lambda _module, inputs, logits: logits.to(inputs[0].device))
    return shares


def modules_of(classifier: Classifier) -> dict[str, list[nn.Module]]:
    """Block -> its modules, from the images to the logits; the first of them takes the block's
    input.
    """
    network = classifier.network
    return {
        block: [network.get_submodule(name.removesuffix(".*")) for name in names]
        for block, names in classifier.backbone.blocks(network).items()
    }


# --- how much memory the blocks take


def measure(classifier: Classifier, samples: int, *, reduced: bool = False) -> list[Block]:
    """Every block's bytes in training with `samples` samples a forward pass, found on torch's meta
    device: nothing is computed or allocated. A tensor counts where it is kept first. `reduced`:
    activations take half.
    """
    config = classifier.config.changed(activation_checkpointing=False)
    channels, classes = classifier.channels, classifier.classes
    with torch.device("meta"):
        ghost = Classifier(
            config, channels=channels, classes=classes, resolution=classifier.resolution
        ).train()
        images = ghost.prepare(torch.empty(SAMPLES, *classifier.spec.shape))
    modules = modules_of(ghost)
    entering, kept = dict.fromkeys(modules, 0), dict.fromkeys(modules, 0)
    current = next(iter(modules))
    # what has been seen is held, so that no address comes twice
    seen = {p.untyped_storage()._cdata: p.detach() for p in ghost.parameters()}

    def enter(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal current
        current = name
        entering[name] = inputs[0].nbytes

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = tensor
            kept[current] += storage.nbytes()
        return tensor

    for name, own in modules.items():
        own[0].register_forward_pre_hook(partial(enter, name))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ghost(images)
    part = SAMPLES * (2 if reduced else 1)
    return [
        Block(
            name,
            weights=sum(p.nbytes for module in own for p in module.parameters()),
            entering=entering[name] * samples // part,
            kept=kept[name] * samples // part,
        )
        for name, own in modules.items()
    ]


def _cost(blocks: Sequence[Block], *, checkpointing: bool) -> Callable[[int, int], int]:
    """(start, end) -> bytes on a device that holds blocks[start:end]."""

    def cost(start: int, end: int) -> int:
        own = blocks[start:end]
        total = sum(COPIES * block.weights for block in own) + (own[0].entering if start else 0)
        if not checkpointing:
            return total + sum(block.kept for block in own)
        # a stage's input stays where the stage before it ended; a stage at a time is computed again
        total += sum(
            block.entering for block in blocks[start + 1 : end + 1] if block.name.endswith(".0")
        )
        stages: dict[str, int] = {}
        for block in own:
            stage = block.name.partition(".")[0]
            stages[stage] = stages.get(stage, 0) + block.kept
        total += stages.pop("head", 0) + (0 if start else blocks[0].entering)
        return total + max(stages.values(), default=0)

    return cost


# --- where the network is cut


def balanced(count: int, devices: int, cost: Callable[[int, int], int]) -> list[int]:
    """Ends of `devices` consecutive spans of range(count), none empty, whose largest `cost(start,
    end)` is smallest.
    """
    best = {end: (cost(0, end), [end]) for end in range(1, count + 1)}  # of the spans up to `end`
    for taken in range(1, devices):
        best = {
            end: min(
                (max(best[cut][0], cost(cut, end)), [*best[cut][1], end])
                for cut in range(taken, end)
            )
            for end in range(taken + 1, count + 1)
        }
    return best[count][1]


def given(split: Mapping[str, int], names: Sequence[str], devices: int) -> list[int]:
    """Ends of the spans on devices 0, 1, ... where `split` says at which stage, or block, each
    further one begins.

    Raises UserError for a part that the network has not, and unless the numbers go up one by one
    from 0.
    """
    begins: dict[int, int] = {}
    for part, number in split.items():
        first = next(
            (
                place
                for place, name in enumerate(names)
                if name == part or name.startswith(f"{part}.")
            ),
            None,
        )
        if first is None:
            near = did_you_mean(
                part, [*dict.fromkeys(name.partition(".")[0] for name in names), *names]
            )
            raise UserError(
                f"model.split: the network has no part {part!r}{near}; parts are {', '.join(names)}"
            )
        if number >= devices:
            raise UserError(
                f"model.split {part}: {number}: this process has {devices} devices, numbers 0 to {devices - 1}"
            )
        begins[first] = number
    order = [begins.get(0, 0), *(begins[first] for first in sorted(begins) if first)]
    if (
        order[0] != 0
        or any(after - before not in (0, 1) for before, after in pairwise(order))
        or order[-1] == 0
    ):
        raise UserError(
            f"model.split: devices {', '.join(map(str, order))} from the stem to the head; the stem lies on 0, and "
            "each further device takes over where the one before ends, e.g. {layer3: 1}"
        )
    firsts = [
        min(place for place, number in begins.items() if number == n)
        for n in range(1, order[-1] + 1)
    ]
    return [*firsts, len(names)]
