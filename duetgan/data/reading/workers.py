"""The number of decoding threads that reads a data set fastest (`data.workers: auto`)."""

import time

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.sampler import SampleKeys
from duetgan.utils.machine import cores

MEASURED_IMAGES = 64  # at most, in one measurement
REPEATS = 3
GAIN = 1.1  # a larger number of threads is chosen if it is faster by this factor


def choose_workers(dataset: Dataset, batch_size: int) -> tuple[int, dict[int, float]]:
    """Measure which number of decoding threads reads batches fastest.

    0, 2, 4, ... threads, up to the cores of this process, read the same few images, as long as more
    threads are faster by GAIN. Raw images need no threads: nothing is measured.

    Returns:
        The best number, and images per second by number of threads. `dataset.workers` is unchanged.
    """
    if dataset.gathers or len(dataset) == 0:
        return 0, {}
    count = min(len(dataset), batch_size, MEASURED_IMAGES)
    records = np.linspace(0, len(dataset) - 1, count).astype(np.int64)
    previous = dataset.workers
    rates: dict[int, float] = {}
    best = 0
    try:
        for workers in thread_counts(cores()):
            dataset.workers = workers
            rates[workers] = count / _seconds(dataset, records)
            if rates[workers] > GAIN * rates[best]:
                best = workers
            elif workers:
                break
    finally:
        dataset.workers = previous
    return best, rates


def thread_counts(limit: int) -> list[int]:
    """Return 0, the powers of two from 2 to below `limit`, and `limit` unless it is 1."""
    counts = [0]
    threads = 2
    while threads < limit:
        counts.append(threads)
        threads *= 2
    if limit > 1:
        counts.append(limit)
    return counts


def _seconds(dataset: Dataset, records: np.ndarray) -> float:
    """Return the median seconds to read the records, after one read that starts the threads."""
    zeros = np.zeros(len(records), np.int64)
    keys = SampleKeys(0, zeros, zeros)
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        dataset.read(records, keys=keys)
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))
