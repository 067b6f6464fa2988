"""Training beside other programs: `threads: auto` against the best number of threads by hand.

For both of the quickstart's tasks, beside 0, 1 and 2 busy loops: images/s in every number of threads by hand, and as
`auto` chooses (anew in each repeat), in turn, each repeat beginning with another one. Ratios are over the best number
by hand, by the medians of the repeats.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.classifying.images import make
from benchmarks.harness import parser_of, show
from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.config import RunConfig
from duetgan.training.engine.hardware import settle
from duetgan.training.engine.speed import Trial
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils import machine
from duetgan.utils.config.cli import positive
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli

LOOP = "while True: pass"
CPU = torch.device("cpu")
LOADS = (0, 1, 2)  # busy loops


class Task:
    """One task in one process; images/s by threads and `auto`."""

    def __init__(self, config: RunConfig, reader: Dataset, seconds: float) -> None:
        self.config, self.reader, self.seconds = config, reader, seconds
        self.trial = Trial(config, config.batch_size, reader, CPU)
        self.precision: Any = "fp32"
        self.auto: list[str] = []  # what it chose, `bf16 x 1`

    def rate(self, contender: int | str) -> float:
        """Images/s of so many threads, or of `auto`."""
        if contender == "auto":
            config, _ = settle(self.config, {}, CPU)
            self.precision = config.precision
            self.auto.append(f"{config.precision} x {config.threads}")
        else:
            torch.set_num_threads(int(contender))
        self.trial.seconds(self.precision)
        begun, steps = time.perf_counter(), 0
        while time.perf_counter() - begun < self.seconds:
            self.trial.seconds(self.precision)
            steps += 1
        return steps * self.config.batch_size / (time.perf_counter() - begun)


def beside(task: Task, loops: int, repeats: int) -> dict[Any, float]:
    """The medians of all contenders beside so many busy loops."""
    with ExitStack() as stack:
        for _ in range(loops):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", LOOP]))
            stack.callback(process.kill)
        machine.busy_since_start()
        time.sleep(1)  # that it is seen
        names = ["auto", *range(1, machine.max_threads() + 1)]
        rates: dict[Any, list[float]] = defaultdict(list)
        for repeat in range(repeats):
            for place in range(len(names)):
                name = names[(repeat + place) % len(names)]
                rates[name].append(task.rate(name))
    return {name: statistics.median(found) for name, found in rates.items()}


def run(configs: dict[str, RunConfig], packed: Path, *, repeats: int, seconds: float) -> dict[str, Any]:
    """Measure the tasks after one another."""
    result: dict[str, Any] = {}
    for name, config in configs.items():
        with Dataset(packed) as reader:
            task = Task(config, reader, seconds)
            for loops in LOADS:
                task.auto = []
                rates = beside(task, loops, repeats)
                key, best = f"{name}_beside_{loops}", max(rates[count] for count in rates if isinstance(count, int))
                result[f"{key}_auto_over_best_ratio"] = rates["auto"] / best
                result |= {f"{key}_{contender}_images_per_second": rate for contender, rate in rates.items()}
                result[f"{key}_auto_chose"] = ", ".join(task.auto)
                shown = ", ".join(f"{contender} {rate:,.1f}" for contender, rate in rates.items())
                print(f"{name} beside {loops}: {shown} images/s; auto chose {result[f'{key}_auto_chose']}", flush=True)
    return result


def main(argv: list[str]) -> None:
    parser = parser_of("busy", __doc__)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--seconds", type=positive, default=10, help="of training, of each contender in a repeat")
    parser.add_argument("--config", action="append", help="recipes; default: the quickstart's two")
    options = parser.parse_args(argv)
    folder = Path(__file__).parents[1] / "configs"
    files = options.config or [folder / "quickstart_gan.yaml", folder / "quickstart_classifier.yaml"]
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="busy-") as work:
        packed, _ = make(Path(work), 2560)
        settings = ["--data.path", str(packed), "--data.val-path", "null"]
        read = [build_run_config(read_yaml(file), settings, str(file)) for file in files]
        configs = {config.task: config for config in read}
        result = run(configs, packed, repeats=options.repeats, seconds=options.seconds)
    result |= {"repeats": options.repeats, "cores": machine.max_threads(), "load_1min_before": before}
    show(result, as_json=options.json)


if __name__ == "__main__":
    sys.exit(run_cli(main))
