"""What the parts share: where they work, what they write down, and how they say that something is not there."""

import contextlib
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duetgan.utils.files import as_json, replace_file

START = "spawn"  # of processes: each has its own context on the device
Value = float | int | str | bool


class NotThere(Exception):
    """The part needs something that this machine or the bundle lacks."""


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


class Missed(Exception):
    """The part ran, and something did not come out as it must."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a part works."""

    out: Path
    bundle: Path
    device: str
    small: bool = False
    maker: str | None = None  # a module that makes the device, as tests/accelerator/maker.py
    seconds: float = 0.0  # that the part may take
    data: Path | None = None  # with cifar10-train.lmdb and cifar10-test.lmdb
    nvidia: Path | None = None  # NVIDIA's StyleGAN3 code

    @contextlib.contextmanager
    def device_made(self) -> Iterator[None]:
        """Around a process's work: in it the device is there."""
        if self.maker is None:
            yield
            return
        module = importlib.import_module(self.maker)
        module.install()
        with module.Mode():
            yield

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def synchronize(self) -> None:
        if self.torch_device.type != "cpu":
            torch.accelerator.synchronize(self.torch_device)


class Book:
    """A part's figures, by row and column: on the disk after each of them, for the part may be stopped at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Value]] = {}
        self.reason = ""

    def row(self, name: str, **cells: Value) -> None:
        """Write these figures down."""
        self.rows.setdefault(name, {}).update(cells)
        self._save()

    def end(self, reason: str) -> None:
        """Why the part did not pass."""
        self.reason = reason
        self._save()

    def _save(self) -> None:
        replace_file(self.path, as_json({"rows": self.rows, "reason": self.reason}))

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """What a part has written, however far it came."""
        return json.loads(path.read_text()) if path.is_file() else {"rows": {}, "reason": ""}
