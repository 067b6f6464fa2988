"""Checkpoints whose types or tensors do not fit, with a right checksum: one line, or they load (H16).

Each mutation of a small real checkpoint goes through what predict.py, evaluate.py, a resume and `--init-from` do to
load it. The property: UserError of one line that names the file, or success; nothing else.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from duetgan.commands import train
from duetgan.data.opening import dataset_for_model
from duetgan.inference.inputs import Transform
from duetgan.models import weights
from duetgan.models.restore import classifier_from, generator_from
from duetgan.training.engine.loop import Loop
from duetgan.training.engine.run import prepare
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.engine.transfer import find_donor, transfer
from duetgan.utils.checkpoint import file_name, load
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_folder import RunFolder
from tests.end_to_end.helpers import write_config

Content = dict[str, Any]
JUNK: list[Any] = [None, 3, -1, "x", [], {}, 2.5, float("nan"), 10**30, True, torch.zeros(2), [[]], {"a": {}}, {1: 2}]
MISSING = object()
CPU = torch.device("cpu")


def paths(content: Any, prefix: tuple[Any, ...] = (), depth: int = 4) -> Iterator[tuple[Any, ...]]:
    """The places of a checkpoint; of many alike the first and the last."""
    if not depth or not isinstance(content, (dict, list)):
        return
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    if len(keys) > 3 and len(prefix) > 1 and prefix[:2] != ("state", "loop"):
        keys = [keys[0], keys[-1]]
    if prefix == ("config",):
        keys = [key for key in ("model", "generator", "data", "loss", "architecture") if key in content]
    for key in keys:
        yield (*prefix, key)
        yield from paths(content[key], (*prefix, key), depth - 1)


def changed(content: Content, path: tuple[Any, ...], value: Any) -> Content:
    """A copy with another value at one place; containers on the way are copied, tensors are shared."""
    whole = copy.copy(content)
    inner: Any = whole
    for key in path[:-1]:
        inner[key] = copy.copy(inner[key])
        inner = inner[key]
    if value is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return whole


def tensors_instead(tensor: torch.Tensor) -> list[Any]:
    """Of another shape, type, kind, or of more than is stored."""
    return [
        tensor.reshape(-1, 1, 1),
        tensor.double(),
        tensor.to(torch.complex64),
        tensor.to(torch.int8),
        torch.zeros(2**40, device="meta"),
        torch.zeros(1).expand(2**40),
        torch.zeros(1).expand(tensor.shape) if tensor.numel() > 1 else tensor.float().reshape(1, 1).to_sparse(),
    ]


def mutations(content: Content) -> Iterator[tuple[str, Content]]:
    """What is changed, and the checkpoint with the change."""
    for number, path in enumerate(paths(content)):
        value: Any = content
        for key in path:
            value = value[key]
        some = [JUNK[(2 * number + place) % len(JUNK)] for place in range(2)]
        others = JUNK if len(path) == 1 else some
        for other in [MISSING, *others, *(tensors_instead(value) if isinstance(value, torch.Tensor) else [])]:
            if other is not MISSING or isinstance(path[-1], str):
                yield f"{path}: {type(other).__name__} {str(other)[:30]!r}", changed(content, path, other)
        if isinstance(value, dict):
            yield f"{path}: more", changed(content, (*path, "more"), torch.zeros(2))


class Made:
    """A run of one step and a loop that can resume it."""

    def __init__(self, folder: Path, packed: Path, task: str) -> None:
        self.recipe = write_config(folder / "recipe.yaml", task, packed)
        run = folder / "run"
        done = run_cli(train.main, ["--config", str(self.recipe), "--run-dir", str(run), "--max-steps", "1"])
        assert done == 0
        self.file = run / "checkpoints" / file_name(1)
        self.content: Content = torch.load(self.file, weights_only=True)
        self.config: Any = build_run_config(read_yaml(run / "config.yaml"), [], "config.yaml")
        self.loop: Loop = prepare(self.config, RunFolder(folder / "resumed"), CPU)
        self.loop.manager.folder.checkpoints.mkdir(parents=True)
        self.place = self.loop.manager.folder.checkpoints / file_name(1)
        self.task, self.packed = task, packed

    def resume(self, path: Path) -> None:
        assert self.loop.resume()
        self.loop.registry()

    def init(self, path: Path) -> None:
        self.config.init_from = str(path)
        donor = find_donor(self.config, RunFolder(path.parent / "fresh"))
        assert donor is not None
        transfer(donor, self.loop.task.registry(), resolution=16, classes=self.content["classes"])

    def use(self, path: Path) -> None:
        """As predict.py, generate.py and evaluate.py do."""
        checkpoint = load(path)
        dataset_for_model(self.packed / "test.lmdb", checkpoint).close()
        if self.task == "gan":
            generator = generator_from(checkpoint)
            generator(torch.zeros(1, generator.z_dim), torch.zeros(1, dtype=torch.int64))
            return
        classifier_from(checkpoint)
        with pytest.raises(ValueError, match="cannot be read"):
            Transform.of(checkpoint).read(path.parent / "none.png")
        weights.read_state_dict(path)


def outcome(load_it: Callable[[Path], None], path: Path) -> str:
    """What a user is told; empty for success."""
    try:
        load_it(path)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("every", [31, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", ["classifier", "gan"])
@pytest.mark.usefixtures("slim")
def test_whatever_a_checkpoint_holds(tmp_path, packed, task, every):
    made = Made(tmp_path, packed, task)
    faults, refused, tried = [], 0, 0
    for what, content in itertools.islice(mutations(made.content), 1, None, every):
        torch.save(content, made.place)
        made.place.with_name(f"{made.place.name}.sha256").unlink(missing_ok=True)  # of a resume before
        for how in (made.use, made.resume, made.init):
            tried += 1
            try:
                told = outcome(how, made.place)
            except Exception as error:
                faults.append(f"{how.__name__} {what}: {error!r}"[:250])
                continue
            refused += bool(told)
            if told and ("\n" in told or len(told) > 900):
                faults.append(f"{how.__name__} {what}: {told}")
    assert faults[:20] == []
    assert refused > tried / 4
