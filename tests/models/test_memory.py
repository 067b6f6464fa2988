"""No tensor hides outside parameters and buffers, and steps leave nothing behind."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from duetgan.utils.seeding import forked
from tests.models.helpers import draw

PAGE = 4096


def build(name, recompute=False):
    sizes: dict[str, Any] = {"channel_base": 64, "channel_max": 8, "activation_checkpointing": recompute}
    shape: dict[str, int] = {"resolution": 8, "channels": 1, "classes": 2}
    with forked(0, "init", "memory"):
        if name == "generator":
            return Generator(GeneratorConfig(z_dim=4, w_dim=4, mapping_layers=2, **sizes), **shape)
        return Discriminator(DiscriminatorConfig(mapping_layers=1, **sizes), **shape, progressive=True)


def inputs(name, count=4):
    size = (4,) if name == "generator" else (1, 8, 8)
    return draw(count, *size).float(), torch.arange(count) % 2


def tensors_in(value, depth=0):
    """Every tensor that can be reached through containers and plain objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item, depth)]
    if isinstance(value, (list, tuple, set)):
        return [tensor for item in value for tensor in tensors_in(item, depth)]
    plain = hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module))
    return tensors_in(vars(value), depth + 1) if plain and depth < 3 else []


def held_by(network):
    return [tensor for module in network.modules() for tensor in tensors_in(vars(module))]


@pytest.mark.parametrize("name", ["generator", "discriminator"])
def test_a_network_moved_to_meta_leaves_no_tensor_behind(name):
    network = build(name)
    network(*inputs(name)).sum().backward()  # whatever a module may keep of a pass
    network.zero_grad()
    before = [weakref.ref(tensor) for tensor in network.state_dict(keep_vars=True).values()]
    network = network.to("meta")
    held = held_by(network)
    assert len(held) == len(network.state_dict()) + sum(p.grad is not None for p in network.parameters())
    assert {tensor.device.type for tensor in held} == {"meta"}
    del held
    gc.collect()
    # parameters keep their identity and change their data; buffers are new objects and the old ones must be gone
    alive = [ref() for ref in before]
    assert all(tensor is None or tensor.device.type == "meta" for tensor in alive)


def test_a_network_built_on_meta_holds_no_other_tensor():
    with torch.device("meta"):
        for name in ("generator", "discriminator"):
            assert {tensor.device.type for tensor in held_by(build(name))} == {"meta"}


def test_statistics_are_buffers_without_graphs():
    generator = build("generator")
    names = dict(generator.named_buffers())
    assert set(names) == {"w_avg", *(n for n in generator.state_dict() if n.endswith("noise_const"))}
    z, labels = inputs("generator")
    w = generator.mapping(z, labels)
    generator.update_w_avg(w.mean(dim=0))  # not detached by the caller
    generator(z, labels, noise="const", truncation_psi=0.5).sum().backward()
    assert all(buffer.grad_fn is None and not buffer.requires_grad for buffer in names.values())
    assert generator.w_avg.ne(0).all()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc on this system")
def test_200_steps_leave_memory_flat():
    generator, network = build("generator"), build("discriminator", recompute=True)
    z, labels = inputs("generator", 8)
    marks = []
    for step in range(201):
        w = generator.mapping(z, labels)
        images = generator.synthesis(w[:, None].expand(-1, generator.num_ws, -1), "const")
        network(images, labels).sum().backward()
        generator.update_w_avg(w.mean(dim=0))
        generator.zero_grad()
        network.zero_grad()
        if step in (20, 110, 200):  # by the first one the allocator's pools have their size
            del w, images
            marks.append((live_tensors(), resident_bytes()))
    assert marks[0][0] == marks[1][0] == marks[2][0]
    # a step keeps about 0.5 MB of activations: 180 kept graphs would be 90 MB
    assert marks[2][1] - marks[0][1] < 8e6
