"""How often the host waits for the device outside of steps: `python -m tests.accelerator.budgets FOLDER` prints calls
of each kind of work, and the most waits by source line that one of them has had. FOLDER holds train.lmdb and test.lmdb.
"""

import copy
import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from duetgan.metrics import evaluate_classifier
from duetgan.metrics.features import selection
from duetgan.models import layers
from duetgan.training.engine.loop import Loop
from duetgan.utils.checkpoint.writer import Snapshot
from tests.accelerator import device
from tests.end_to_end.helpers import differing, state_of, train_in_process, write_config
from tests.slim import slim_down

WATCHED: dict[str, tuple[Any, str]] = {
    "log tick": (Loop, "_write_row"),
    "checkpoint": (Snapshot, "__init__"),
    "chunk of test images": (evaluate_classifier, "logits_of"),
    "chunk of samples": (selection, "generate"),
}
OFTEN = ["--log.every", "2", "--log.samples-every", "0", "--evaluation.every", "4"]
seen: dict[str, dict[str, Any]] = {}


def watch(name: str, call: Any) -> Any:
    """The call, whose waits are counted."""
    found = seen[name] = {"calls": 0, "waits": {}}

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = device.waits.copy()
        try:
            return call(*args, **kwargs)
        finally:
            found["calls"] += 1
            for line, count in (device.waits - before).items():
                found["waits"][line] = max(count, found["waits"].get(line, 0))

    return counted


def take_tensors_of_the_device() -> None:
    """Checkpoints know torch.Tensor and torch.nn.Parameter, and no other type."""
    copied = Snapshot._copied

    def with_ours(self: Snapshot, value: Any, where: str) -> Any:
        return self._tensor(value) if isinstance(value, device.Sim) else copied(self, value, where)

    Snapshot._copied = with_ours  # type: ignore[method-assign]


def trained(folder: Path, task: str, where: str, name: str, *more: str) -> Any:
    """The state of a run."""
    config, run = write_config(folder / f"{task}.yaml", task, folder), folder / f"{task}-{name}"
    if code := train_in_process(config, run, "--device", where, *OFTEN, *more):
        raise RuntimeError(f"{task} on {where}: exit code {code}")
    return state_of(run, 8)


def main(folder: Path) -> None:
    slim_down()
    device.install()
    take_tensors_of_the_device()
    layers.constant_kernel = functools.cache(layers.constant_kernel)  # as on a real device
    result: dict[str, Any] = {"differing": []}
    with device.Mode():
        at_home = {task: trained(folder, task, "cpu", "cpu") for task in ("gan", "classifier")}
        for name, (owner, attribute) in WATCHED.items():
            setattr(owner, attribute, watch(name, getattr(owner, attribute)))
        for task, state in at_home.items():
            result["differing"] += differing(state, trained(folder, task, "sim:1", "sim"))
        result["seen"] = copy.deepcopy(seen)
        for memory in device.memory:
            memory.peak = memory.allocated
        before = [memory.allocated for memory in device.memory]
        split = trained(folder, "classifier", "sim", "split", "--model.split", "auto")
        result["split"] = differing(at_home["classifier"], split)
        result["on"] = [memory.peak - least for memory, least in zip(device.memory, before, strict=True)]
        with patch.object(device.torch.accelerator, "synchronize", lambda *_: None):
            result["early"] = len(differing(at_home["gan"], trained(folder, "gan", "sim:1", "early")))
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
