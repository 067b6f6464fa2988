"""Batches to the device: an endless training loader whose position is state, and a plain pass for evaluation."""

import contextlib
import copy
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from data.dataset import Dataset
from data.sampler import GlobalSampler, SampleKeys
from utils.memory import cores

# Measurements of how many threads decode (`data.workers: auto`)
MEASURED_IMAGES = 64  # read for one at most
REPEATS = 3
GAIN = 1.1  # another thread count must be so much faster to be taken


@dataclass
class Batch:
    """Images and labels of one rank."""

    images: torch.Tensor  # uint8 [n, C, H, W]
    labels: torch.Tensor  # int64 [n]

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on `device`; asynchronous from pinned memory."""
        return Batch(self.images.to(device, non_blocking=True), self.labels.to(device, non_blocking=True))


def read_batch(reader: Dataset, indices: np.ndarray, *, pin: bool = False, keys: SampleKeys | None = None) -> Batch:
    """Read records into new tensors on the CPU, pinned if asked to; `keys` as for Dataset.read. Decoded images lie in
    memory as the decoder gives them, channels last.
    """
    n, channels, side = len(indices), reader.meta.channels, reader.resolution
    shape = (n, channels, side, side) if reader.gathers else (n, side, side, channels)
    if pin:
        memory = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
    else:  # NumPy reuses freed memory where torch maps new pages for every batch
        memory = torch.from_numpy(np.empty(shape, np.uint8))
    images = memory if reader.gathers else memory.permute(0, 3, 1, 2)
    _, labels = reader.read(indices, out=images.numpy(), keys=keys)
    on_cpu = torch.from_numpy(labels)
    return Batch(images, on_cpu.pin_memory() if pin else on_cpu)


def _next_batch(reader: Dataset, sampler: GlobalSampler, *, pin: bool) -> Batch:
    """Read the sampler's next batch; random crops are keyed by the run's seed and each sample's epoch."""
    indices, start = sampler.next_batch()
    return read_batch(reader, indices, pin=pin, keys=sampler.batch_keys(start) if reader.crop else None)


class InfiniteLoader:
    """Endless iterator over a rank's batches, on the device.

    A background thread reads up to `prefetch` batches ahead (0: none, batches are read when asked for); for an
    accelerator it reads into pinned memory and copies on a stream of its own. `sampler` always stands where the batches
    handed out end, whatever has been read ahead, and is the loader's state. `wait_seconds` adds up the time that `next`
    took; set it to 0 when it has been logged. An error of the thread is raised by `next`. With `end` it stops there:
    nothing beyond is read, `next` raises StopIteration.
    """

    def __init__(
        self,
        reader: Dataset,
        sampler: GlobalSampler,
        *,
        device: torch.device | str,
        prefetch: int = 2,
        end: int | None = None,  # samples of all ranks, as the sampler counts them; None: endless
    ) -> None:
        self.reader, self.sampler, self.device = reader, sampler, torch.device(device)
        self.prefetch, self.end = prefetch, end
        self.wait_seconds = 0.0
        self._worker: _Worker | None = None

    def __iter__(self) -> "InfiniteLoader":
        return self

    def __next__(self) -> Batch:
        if _ended(self.sampler, self.end):
            raise StopIteration
        started = time.perf_counter()
        if self.prefetch:
            batch = self._prefetched()
        else:
            batch = _next_batch(self.reader, copy.copy(self.sampler), pin=self.device.type != "cpu").to(self.device)
        # Advanced only now: a read that failed or was interrupted is not counted.
        self.sampler.advance()
        self.wait_seconds += time.perf_counter() - started
        return batch

    def _prefetched(self) -> Batch:
        if self._worker is None:
            self._worker = _Worker(self.reader, copy.copy(self.sampler), self.device, self.prefetch, self.end)
            weakref.finalize(self, self._worker.stop)
        try:
            return self._worker.next()
        except Exception:
            self.close()
            raise

    @property
    def damaged_records(self) -> set[int]:
        """Records that this process has replaced because they are damaged (`data.on_damage: skip`)."""
        return set(self.reader.damaged)

    def state_dict(self) -> dict[str, int | bool]:
        """The sampler's position after the batches handed out."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Continue from `state`; what was read ahead is dropped. Raises UserError as the sampler does."""
        self.close()
        self.sampler.load_state_dict(state)

    def close(self) -> None:
        """Stop the thread. The loader can still be used: it starts again where the batches handed out end."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


def _ended(sampler: GlobalSampler, end: int | None) -> bool:
    return end is not None and sampler.consumed >= end


class _Worker:
    """The thread that reads ahead. It knows nothing of the loader, so that a forgotten loader can be collected."""

    def __init__(
        self, reader: Dataset, sampler: GlobalSampler, device: torch.device, prefetch: int, end: int | None
    ) -> None:
        self._reader, self._sampler, self._device, self._end = reader, sampler, device, end
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._ready: queue.Queue[tuple[Batch, torch.Event | None] | Exception] = queue.Queue(prefetch)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="data-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set() and not _ended(self._sampler, self._end):
                self._ready.put(self._load())
        except Exception as error:  # handed to the consumer, who raises it
            self._ready.put(error)

    def _load(self) -> tuple[Batch, torch.Event | None]:
        if self._stream is None:
            return _next_batch(self._reader, self._sampler, pin=False), None
        with self._stream:
            batch = _next_batch(self._reader, self._sampler, pin=True).to(self._device)
            return batch, self._stream.record_event()

    def next(self) -> Batch:
        """The next batch; the consumer's stream waits for its copy, the consumer does not."""
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        batch, copied = item
        if copied is not None:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in (batch.images, batch.labels):
                tensor.record_stream(stream)
        return batch

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        with contextlib.suppress(queue.Empty):  # room for the batch it may be about to put, its last
            while True:
                self._ready.get_nowait()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def evaluation_batches(
    reader: Dataset, batch_size: int, *, rank: int = 0, world_size: int = 1, limit: int | None = None
) -> Iterator[Batch]:
    """Every sample exactly once over the ranks, in order, on the CPU; the last batch may be smaller.

    Rank r of N takes the contiguous share [count*r//N, count*(r+1)//N) of the first `limit` (default: all) samples, in
    batches of at most `batch_size` per rank; a rank may get none.
    """
    count = len(reader) if limit is None else min(limit, len(reader))
    end = count * (rank + 1) // world_size
    for start in range(count * rank // world_size, end, batch_size):
        yield read_batch(reader, np.arange(start, min(end, start + batch_size)))


def choose_workers(dataset: Dataset, batch_size: int) -> tuple[int, dict[int, float]]:
    """The number of decoding threads that reads batches fastest, and the images per second of each number tried.

    Raw images need none: nothing is measured. Otherwise 0, 2, 4, ... threads up to the cores of this process read
    the same few images; the count grows as long as it pays. The dataset's own number stays as it was.
    """
    if dataset.gathers or len(dataset) == 0:
        return 0, {}
    count = min(len(dataset), batch_size, MEASURED_IMAGES)
    records = np.linspace(0, len(dataset) - 1, count).astype(np.int64)
    before, cache = dataset.workers, dataset.cache
    rates: dict[int, float] = {}
    best = 0
    dataset.cache = None  # the second read of an image would cost nothing
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
        dataset.workers, dataset.cache = before, cache
    return best, rates


def candidates(limit: int) -> list[int]:
    """0 and the powers of two from 2 up to the number of cores, which itself is the last."""
    powers = [2**power for power in range(1, limit.bit_length()) if 2**power < limit]
    return [0, *powers, *([limit] if limit > 1 else [])]


def _seconds(dataset: Dataset, records: np.ndarray) -> float:
    """The median time of reading the records; once before, to start the threads."""
    keys = SampleKeys(0, np.zeros(len(records), np.int64))
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        dataset.read(records, keys=keys)
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))
