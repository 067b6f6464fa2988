"""A small checkpoint and ways to spoil one."""

import torch


def content(step=5, value=1.0, **more):
    weights = torch.full((300,), value)
    state = {"model": {"w": weights, "n": 3}, "list": {"x": [1, 2.5, "s", None, True, (1, 2)]}}
    base = {"schema": 1, "task": "gan", "step": step, "config": {"lr": 0.1}, "classes": ["a"]}
    base |= {"shape": {"channels": 1, "classes": 1, "resolution": 8}, "state": state}
    return base | more


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def value_of(checkpoint):
    return checkpoint["state"]["model"]["w"][0].item()


def damage(path, *, keep=None, flip=None):
    """Cut a file to a share of its length, or flip a bit at a share of it."""
    data = bytearray(path.read_bytes())
    if keep is not None:
        data = data[: int(len(data) * keep)]
    if flip is not None:
        data[int(len(data) * flip)] ^= 4
    path.write_bytes(bytes(data))


def without_checksum(path):
    path.with_name(path.name + ".sha256").unlink()
    return path
