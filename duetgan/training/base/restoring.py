"""The checks before a checkpoint is restored: of its images, and of the states of all objects."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from torch import Tensor, nn

from duetgan.data.lmdb.format import Meta
from duetgan.training.base.task import Stateful
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.checkpoint.state_schema import FAULTS, check_tensors
from duetgan.utils.errors import UserError


def check_images(content: Checkpoint, path: str, meta: Meta, folder: Path) -> None:
    """Raise UserError unless the run in `folder` was trained on the images of `path`."""
    data = content.get("data") or {}
    if data.get("content_hash") != meta.content_hash:
        raise UserError(
            f"{folder}: was trained on other images ({data.get('count', 0)} then, {meta.count} in "
            f"{path} now); set data.path to its images, or choose another --run-dir, with "
            "--init-from and this run to start from its weights"
        )


def load_states(registry: Mapping[str, Stateful], states: Mapping[str, Any], path: str) -> None:
    """Check that the states of a checkpoint fit all objects of `registry`, then load them.

    Objects with the attribute `optional` may have none. Raises UserError that names the file and
    the key.
    """
    parts = {
        name: part
        for name, part in registry.items()
        if name in states or not getattr(part, "optional", False)
    }
    name = ""
    try:
        for name, part in parts.items():
            _check_part(f"state.{name}", part, states[name])
        for name, part in parts.items():
            part.load_state_dict(states[name])
    except UserError:
        raise
    except FAULTS as error:
        # The text of a LookupError is only the key.
        kind = type(error).__name__ if isinstance(error, LookupError) else ""
        problem = shorten(" ".join(f"{kind} {error}".split()), 160)
        raise UserError(
            f"{path}: the state of {name!r} does not fit ({problem}); data.resolution or another "
            "setting of the networks has changed, or the file is damaged: restore the run's settings, "
            "or choose another --run-dir"
        ) from error


def _check_part(name: str, part: Stateful, state: object) -> None:
    """Check a network's saved tensors; other objects check their state as they load it."""
    current = part.state_dict()
    is_network = isinstance(getattr(part, "model", part), nn.Module)
    if is_network and current and all(isinstance(value, Tensor) for value in current.values()):
        check_tensors(name, state, current)
