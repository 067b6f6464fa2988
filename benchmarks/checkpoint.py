"""What saving costs a training: the quickstart's GAN, a checkpoint every 500 steps, against the same without.

`python benchmarks/checkpoint.py [--json] [--every N] [--repeats N]`. In one run, segments of some steps alternate:
without a save, with one written by a thread, with one written before training continues. A segment ends when its
checkpoint is on the disk, so what a save costs is by how much the segment is longer, however that came about. The cost
ratio is the median of that over the time of `--every` steps. Checkpoints go to a folder of their own in `--folder`.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import duetgan.commands.pack
from benchmarks.harness import parser_of, show
from duetgan.data.reading.loader import Batch
from duetgan.training.engine.loop import Loop
from duetgan.training.engine.run import prepare
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.machine import tune_malloc
from duetgan.utils.runlog.run_folder import RunFolder, runs_folder

SIZE = 32  # px of the quickstart's images
MODES = ("plain", "asynchronous", "synchronous")
Result = dict[str, float | int | str]


class Timed:
    """A training, and what its segments took: seconds in all, and before its steps went on."""

    def __init__(self, loop: Loop, device: torch.device) -> None:
        self.loop, self.device = loop, device
        self.seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        self.blocked: dict[str, list[float]] = {mode: [] for mode in MODES}

    def segment(self, mode: str, steps: int) -> None:
        """Save as `mode` says, then train `steps` steps."""
        loop, batches = self.loop, self._batches()
        loop.config.checkpoint.asynchronous = mode == "asynchronous"
        self._wait()
        started = time.perf_counter()
        if mode != "plain":
            loop.save()
        blocked = time.perf_counter() - started
        for _ in range(steps):
            loop.window.add(loop.task.step(batches, loop.step))
            loop.step += 1
        loop.manager.wait()
        self._wait()
        self.seconds[mode].append(time.perf_counter() - started)
        self.blocked[mode].append(blocked)
        loop.window.take()
        if mode != "plain" and loop.manager.saved_step != loop.step - steps:
            raise UserError(f"{loop.folder.path}: the checkpoint could not be written; give another --folder")

    def result(self, steps: int, every: int) -> Result:
        """Medians, in names of the flat result."""
        step = statistics.median(self.seconds["plain"]) / steps
        found: Result = {"step_ms": 1000 * step}
        for mode in MODES[1:]:
            extra = [a - b for a, b in zip(self.seconds[mode], self.seconds["plain"], strict=True)]
            found[f"{mode}_extra_ms"] = 1000 * statistics.median(extra)
            found[f"{mode}_extra_min_ms"], found[f"{mode}_extra_max_ms"] = 1000 * min(extra), 1000 * max(extra)
            found[f"{mode}_blocked_ms"] = 1000 * statistics.median(self.blocked[mode])
            found[f"{mode}_cost_ratio"] = statistics.median(extra) / (every * step)
        return found

    def _batches(self) -> Iterator[Batch]:
        while True:
            yield next(self.loop.loader)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def measure(config_file: str, folder: Path, device: torch.device, *, every: int, repeats: int, steps: int) -> Result:
    """Train from `config_file` in `folder`; a repeat is a segment of `steps` steps in every mode."""
    tree = read_yaml(config_file)
    images = Path(build_run_config(tree, [], config_file).data.path)
    if not images.exists():
        images = folder / "train.lmdb"
        duetgan.commands.pack.main(["sample", str(images), "--size", str(SIZE), "--split", "train"])
    config = build_run_config(tree, ["--data.path", str(images), "--data.val_path=null"], config_file)
    usual = config.checkpoint.asynchronous
    loop = prepare(config, RunFolder(folder / "run"), device)
    with closing(loop.loader):
        timed = Timed(loop, device)
        for mode in MODES:
            timed.segment(mode, steps)  # warm up
        timed = Timed(loop, device)
        for repeat in range(repeats):
            for place in range(len(MODES)):
                timed.segment(MODES[(repeat + place) % len(MODES)], steps)
    found = timed.result(steps, every)
    usual_mode = "asynchronous" if usual else "synchronous"
    return found | {
        "checkpoint_cost_ratio": found[f"{usual_mode}_cost_ratio"],
        "checkpoint_mode": usual_mode,
        "checkpoint_mib": checkpoints.newest_first(loop.folder.checkpoints)[0].stat().st_size / 2**20,
        "hash_ms": _hash_ms(checkpoints.newest_first(loop.folder.checkpoints)[0]),
    }


def _hash_ms(path: Path) -> float:
    """What reading a checkpoint again for its SHA-256 would cost."""
    started = time.perf_counter()
    checkpoints.file_sha256(path)
    return 1000 * (time.perf_counter() - started)


def main(argv: list[str]) -> None:
    parser = parser_of("checkpoint", __doc__)
    parser.add_argument("--config", default="configs/quickstart_gan.yaml")
    parser.add_argument("--every", type=int, default=500, help="steps from one checkpoint to the next")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=32, help="a segment; a multiple of the penalties' intervals")
    where = "where a run would be: checkpoints are written to its disk"
    parser.add_argument("--folder", default=str(runs_folder()), help=where)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    if min(options.every, options.repeats, options.steps) < 1:
        raise UserError("--every, --repeats and --steps must be 1 or more")
    device = torch.device(options.device)
    if device.type == "cpu":
        tune_malloc()  # as training does
    load = os.getloadavg()[0]  # before: the training itself is no load beside it
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    counts = {"every": options.every, "repeats": options.repeats, "steps": options.steps}
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.folder) as folder:
        result = measure(options.config, Path(folder), device, **counts)
    result |= counts | {
        "device": options.device,
        "threads": torch.get_num_threads(),
        "load_1min_before": load,
        "load_1min": os.getloadavg()[0],
    }
    show(result, as_json=options.json)


if __name__ == "__main__":
    sys.exit(run_cli(main))
