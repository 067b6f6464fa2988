"""Whether a run's weights and batches fit into memory at all, known before any of it is allocated."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from training.base.config import RunConfig
from utils.config.model import Config
from utils.errors import UserError
from utils.memory import local_processes, total_bytes

GIB = 2**30
Outline = Mapping[str, tuple[nn.Module, int]]  # section of the config -> its network, least copies of its weights


def check_room(
    config: RunConfig,
    outline: Callable[[], Outline],  # makes the networks; called where tensors have shapes only
    *,
    channels: int,
    resolution: int,  # px, of the images
    world_size: int,
    device: torch.device,
) -> None:
    """Raise UserError where weights and batches need, at the least, more memory than there is. What a network's passes
    hold comes on top: it is told by `--dry-run`, and where memory runs out.
    """
    spans = config.spans(resolution)
    processes = 1 if device.type == "cuda" else local_processes()
    room = total_bytes(device, several=config.several_devices) // processes
    place = f"{'the GPU' if device.type == 'cuda' else 'this machine'} has {room / GIB:,.1f} GiB for a process"
    try:
        with torch.device("meta"):
            needs = {name: copies * _bytes(network) for name, (network, copies) in outline().items()}
    except NotImplementedError:  # of the meta device: a fault of the network
        raise
    except (RuntimeError, OverflowError) as error:  # torch counts bytes in 64 bits
        sections = [name for name, section in vars(config).items() if isinstance(section, Config)]
        raise UserError(f"no memory holds networks of this size: {_remedy(config, sections)}") from error
    weights = sum(needs.values())
    if weights > room:
        most = max(needs, key=lambda name: needs[name])
        told = f"{most}: its weights and what belongs to each need {weights / GIB:,.1f} GiB or more"
        raise UserError(f"{told}, but {place}: {_remedy(config, [most])}")
    for _, side, batch_size in spans:
        share = max(1, batch_size // world_size)
        a_pass = 1 if config.micro_batch == "auto" else min(config.micro_limit or share, share)
        image = channels * side * side  # bytes; a pass has them as floats
        if weights + (share + 4 * a_pass) * image > room:
            fits = int((room - weights) / ((1 + 4 * a_pass / share) * image)) * world_size
            raise UserError(
                f"batch_size {batch_size}: {share} images of {side} px need {(share + 4 * a_pass) * image / GIB:,.1f} "
                f"GiB or more, but {place}; a --batch-size of {fits} might be held, and training needs room besides"
            )


def _bytes(network: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())


def _remedy(config: RunConfig, sections: Sequence[str]) -> str:
    """The whole number in these sections that is most above its default."""
    found = []
    for name in sections:
        for key, value in getattr(config, name):
            default = type(getattr(config, name)).model_fields[key].default
            if isinstance(value, int) and isinstance(default, int) and default > 0:
                found.append((value / default, f"make {name}.{key} {value} smaller"))
    return max(found, default=(0.0, "make it smaller"))[1]
