"""How many threads decode images here (`data.workers: auto`), by a measurement."""

import time

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.sampler import SampleKeys
from duetgan.utils.memory import cores

MEASURED_IMAGES = 64  # read for one at most
REPEATS = 3
GAIN = 1.1  # another thread count must be so much faster to be taken


def choose_workers(dataset: Dataset, batch_size: int) -> tuple[int, dict[int, float]]:
    """The number of decoding threads that reads batches fastest, and the images per second of each number tried.

    Raw images need none: nothing is measured. Otherwise 0, 2, 4, ... threads up to the cores of this process read
    the same few images; the count grows as long as it pays. The dataset's own number stays as it was.
    """
    if dataset.gathers or len(dataset) == 0:
        return 0, {}
    count = min(len(dataset), batch_size, MEASURED_IMAGES)
    records = np.linspace(0, len(dataset) - 1, count).astype(np.int64)
    before = dataset.workers
    rates: dict[int, float] = {}
    best = 0
    try:
        dataset.read(records)  # opens the file, warms the page cache
        for workers in candidates(cores()):
            dataset.workers = workers
            rates[workers] = count / _seconds(dataset, records)
            if rates[workers] > GAIN * rates[best]:
                best = workers
            elif workers:
                break
    finally:
        dataset.workers = before
    return best, rates


def candidates(limit: int) -> list[int]:
    """0 and the powers of two from 2 up to the number of cores, which itself is the last."""
    powers = [2**power for power in range(1, limit.bit_length()) if 2**power < limit]
    return [0, *powers, *([limit] if limit > 1 else [])]


def _seconds(dataset: Dataset, records: np.ndarray) -> float:
    """The median time of reading the records; once before, to start the threads."""
    zeros = np.zeros(len(records), np.int64)
    keys = SampleKeys(0, zeros, zeros)
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        dataset.read(records, keys=keys)
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))
