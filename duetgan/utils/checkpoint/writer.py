"""How a checkpoint gets to the disk: a copy of the state that training cannot change any more, and
a file of it.
"""

import copy
import errno
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

PLAIN = (int, float, str, bool, type(None))
# bytes that a checkpoint leaves on the disk, for the metrics, the status and what else is small
SPARE = 2**20


class Snapshot:
    """A checkpoint's content as it is now, every tensor in main memory.

    `own`: with copies of tensors that are in main memory already, so that training may go on
    changing them. Views of one storage stay views of one, a tensor that stands in two places stays
    one: the file is the same either way.
    Raises TypeError for anything that restricted loading would refuse: better now than when it is
    needed.
    """

    def __init__(self, content: dict[str, Any], *, own: bool) -> None:
        self._own = own
        # by address, as torch.save tells them apart
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._devices: set[torch.device] = set()  # accelerators that are copied from
        self._tensors: dict[int, torch.Tensor] = {}
        self.content: dict[str, Any] = self._copied(content, "checkpoint")
        self.step: int = content["step"]
        # bytes of its tensors
        self.size = sum(storage.nbytes() for storage in self._storages.values())
        for device in self._devices:  # or a step would change the source
            torch.accelerator.synchronize(device)

    def _copied(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value)
        if kind in (list, tuple):
            return kind(self._copied(item, f"{where}[{index}]") for index, item in enumerate(value))
        if kind in (dict, OrderedDict):
            # with a module's `_metadata`, which is an attribute of its state
            same = copy.copy(value)
            for key, item in value.items():
                self._copied(key, f"key of {where}")
                same[key] = self._copied(item, f"{where}[{key!r}]")
            return same
        raise TypeError(
            f"{where} is a {kind.__name__}; checkpoints hold tensors, numbers, strings, lists and dicts only"
        )

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) not in self._tensors:
            source = value.untyped_storage()
            stays = source.device.type == "cpu" and not self._own
            key = source._cdata
            if key not in self._storages:
                self._storages[key] = source if stays else self._copied_storage(source)
            self._tensors[id(value)] = value if stays else _view(value, self._storages[key])
        return self._tensors[id(value)]

    def _copied_storage(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        if source.device.type == "cpu":
            return source.clone()
        self._devices.add(source.device)
        pinned = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=True).untyped_storage()
        return pinned.copy_(source, non_blocking=True)


def _view(value: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """`value` as it would be on another copy of its storage."""
    same = torch.empty(0, dtype=value.dtype)
    same.set_(storage, value.storage_offset(), value.size(), value.stride())
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(same, value.requires_grad)
    return same.requires_grad_(value.requires_grad)


def write(snapshot: Snapshot, path: Path) -> None:
    """Write a snapshot to `path`. Raises OSError, also that which torch's zip writer hides behind a
    RuntimeError.

    Where it would not fit nothing is written: a disk that is full for a moment fails others' small
    writes.
    """
    if shutil.disk_usage(path.parent).free < snapshot.size + SPARE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    with open(path, "wb") as file:
        try:
            torch.save(snapshot.content, file)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise cause from error
