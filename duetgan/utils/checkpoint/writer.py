"""Copy a checkpoint's state, so that training cannot change it any more, and write it to a file."""

import copy
import errno
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

PLAIN = (int, float, str, bool, type(None))
# bytes that a checkpoint leaves free on the disk for metrics, status and other small files
SPARE = 2**20


class Snapshot:
    """A copy of a checkpoint's content with every tensor in main memory.

    Tensors that share a storage share one in the copy too, and a tensor that occurs twice stays one
    tensor, so that the file does not depend on `copy_cpu`. Raises TypeError for content that could
    not be loaded again, because it is better to fail now than at a resume.

    Args:
        copy_cpu: also copy tensors that are in main memory already, so that training may change
            them.
    """

    def __init__(self, content: dict[str, Any], *, copy_cpu: bool) -> None:
        self._copy_cpu = copy_cpu
        # copied storages by the original's address, by which torch.save identifies storages
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._devices: set[torch.device] = set()  # accelerators with tensors to copy
        self._tensors: dict[int, torch.Tensor] = {}
        self.content: dict[str, Any] = self._copied(content, "checkpoint")
        self.step: int = content["step"]
        # size of all tensors in bytes
        self.size = sum(storage.nbytes() for storage in self._storages.values())
        for device in self._devices:  # the next step would change the source of a copy
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
            # A copy keeps a module's `_metadata`, which is an attribute of its state.
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
            is_shared = source.device.type == "cpu" and not self._copy_cpu
            key = source._cdata
            if key not in self._storages:
                self._storages[key] = source if is_shared else self._copied_storage(source)
            self._tensors[id(value)] = value if is_shared else _view(value, self._storages[key])
        return self._tensors[id(value)]

    def _copied_storage(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        if source.device.type == "cpu":
            return source.clone()
        self._devices.add(source.device)
        pinned = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=True).untyped_storage()
        return pinned.copy_(source, non_blocking=True)


def _view(value: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    same = torch.empty(0, dtype=value.dtype)
    same.set_(storage, value.storage_offset(), value.size(), value.stride())
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(same, value.requires_grad)
    return same.requires_grad_(value.requires_grad)


def write(snapshot: Snapshot, path: Path) -> None:
    """Write a snapshot to `path`.

    Raises OSError if that fails, also where torch's zip writer raises RuntimeError instead. If the
    disk has too little space, nothing is written, because a full disk would make other programs'
    writes fail.
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
