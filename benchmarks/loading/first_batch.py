"""From opening a packed file to its first shuffled batch, and what reading on takes in memory.

Measured in a process of its own: `python -m benchmarks.loading.first_batch FILE STARTED BATCHES` prints one line of
JSON. STARTED is `time.monotonic()` of the one who started it.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.loading import ours
from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.records import make_record
from duetgan.utils.image_spec import ImageSpec

ROOT = Path(__file__).resolve().parents[2]
STATUS = Path("/proc/self/status")
SIDE = 4  # px
DISTINCT = 4096  # different images; the file repeats them
BATCH_SIZE = 256


def write_tiny_records(path: Path, count: int, encoding: str) -> float:
    """A packed file of `count` grey images of SIDE px; returns the seconds it took.

    Only DISTINCT records are made; the writer is given them again and again, and writes each in full.
    """
    started = time.perf_counter()
    layout = Layout.of(ImageSpec(1, SIDE, SIDE), encoding)
    images = np.random.default_rng(0).integers(0, 256, (min(count, DISTINCT), SIDE, SIDE, 1), dtype=np.uint8)
    records = [make_record(image, index % 10, layout, payload=None) for index, image in enumerate(images)]
    with LMDBWriter(path, layout, classes=[str(label) for label in range(10)], overwrite=True) as writer:
        for index in range(count):
            writer.add_record(records[index % len(records)])
        writer.finish()
    return time.perf_counter() - started


def measure(path: Path, batches: int) -> dict[str, float]:
    """Start a fresh process that reads `batches` batches; what it reports.

    `seconds`: from opening the file to the first batch; `with_imports_seconds`: from the start of the process;
    `rss_mib`: growth of the peak of resident memory from before opening the file to the last batch, the file's own
    mapped pages included; `later_rss_mib`: the part of it after the first batch. Raises RuntimeError if it fails.
    """
    command = [sys.executable, "-m", "benchmarks.loading.first_batch", str(path), str(time.monotonic()), str(batches)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_mib(field: str = "VmHWM") -> float:
    """This process's peak (VmHWM) or present (VmRSS) resident memory in MiB.

    Not getrusage's ru_maxrss: a new process inherits the peak of the one that started it.
    """
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def main(path: str, started: str, batches: str) -> None:
    """Read and report."""
    before = peak_mib("VmRSS")
    opened = time.monotonic()
    stream = ours.stream(path, BATCH_SIZE)
    next(stream)
    first = time.monotonic()
    at_first = peak_mib()
    for _ in range(int(batches) - 1):
        next(stream)
    result = {
        "seconds": first - opened,
        "with_imports_seconds": first - float(started),
        "rss_mib": peak_mib() - before,
        "later_rss_mib": peak_mib() - at_first,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
