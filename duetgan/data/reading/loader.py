"""Batches on the device: an endless training loader with a position that can be saved, and a plain
pass for evaluation.
"""

import contextlib
import copy
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from duetgan.data.reading.dataset import Dataset, Stage, at_resolution, checked_stages
from duetgan.data.reading.sampler import GlobalSampler, SampleKeys
from duetgan.utils.errors import refuse
from duetgan.utils.seeding import numpy_generator

# A function called instead of reading images: sample indices -> CPU batch, as of cached features.
Source = Callable[[np.ndarray], "Batch"]


@dataclass
class Batch:
    """Images and labels of one rank."""

    # [n, C, H, W] of the data set's depth. A Source of features gives float [n, F, 1, views] with
    # the mirrored view last.
    images: torch.Tensor
    # int64 [n]: indices of classes, or of label sets (data.lmdb.format.Meta)
    labels: torch.Tensor
    # bool [n]: True for synthetic samples; None: all images are real
    synthetic: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Batch":
        """Copy the batch to `device`, asynchronously from pinned memory."""
        return Batch(*(part.to(device, non_blocking=True) for part in self.parts()))

    def parts(self) -> list[torch.Tensor]:
        tensors = [self.images, self.labels]
        if self.synthetic is not None:
            tensors.append(self.synthetic)
        return tensors


def read_batch(
    dataset: Dataset, indices: np.ndarray, *, pin: bool = False, keys: SampleKeys | None = None
) -> Batch:
    """Read records into new tensors on the CPU.

    Decoded images are channels last in memory, as the decoder writes them.

    Args:
        indices: int64 [n].
        pin: allocate pinned memory.
        keys: keys of random crops.
    """
    channels, height, width = dataset.spec.shape
    if dataset.gathers:
        shape = (len(indices), channels, height, width)
    else:
        shape = (len(indices), height, width, channels)
    if pin:
        memory = torch.empty(shape, dtype=getattr(torch, dataset.spec.depth), pin_memory=True)
    else:  # NumPy reuses freed memory, while torch maps new pages for every batch.
        memory = torch.from_numpy(np.empty(shape, dataset.spec.depth))
    images = memory if dataset.gathers else memory.permute(0, 3, 1, 2)
    _, labels = dataset.read(indices, out=images.numpy(), keys=keys)
    batch = Batch(images, torch.from_numpy(labels))
    if dataset.synthetic is not None:
        batch.synthetic = torch.from_numpy(indices >= len(dataset))
    return batch


def _next_batch(
    dataset: Dataset,
    sampler: GlobalSampler,
    flip_phases: np.ndarray | None,  # of all images, see `alternating_flip_`; None: no flips
    source: Source | None,
    *,
    pin: bool,
) -> Batch:
    """Read the sampler's next batch. Random crops are keyed by seed, epoch and sample."""
    indices, keys = sampler.next_batch()
    batch = source(indices) if source else read_batch(dataset, indices, pin=pin, keys=keys)
    if flip_phases is not None:
        alternating_flip_(batch.images, flip_phases[indices], keys)
    return Batch(*(tensor.pin_memory() for tensor in batch.parts())) if pin else batch


def alternating_flip_(images: torch.Tensor, phases: np.ndarray, keys: SampleKeys) -> None:
    """Flip images left-right in place, each in every second epoch (2404.00498, section 3.6).

    An image is flipped where phase, epoch and repeat within the epoch add up to an odd number. With
    uniform sampling every image is seen in both orientations in any two consecutive epochs.

    Args:
        images: [n, C, H, W].
        phases: int [n], 0 or 1 for each image.
        keys: epochs and repeats of the samples.
    """
    rows = torch.from_numpy(np.flatnonzero((phases + keys.epochs + keys.repeats) % 2))
    if images.dtype == torch.uint16:  # torch cannot index-assign uint16
        images = images.view(torch.int16)
    images[rows] = images[rows].flip(3)


class InfiniteLoader:
    """Iterate endlessly over a rank's batches, on the device.

    A background thread reads up to `prefetch` batches ahead; with 0, `next` reads the batch. For an
    accelerator the thread reads into pinned memory and copies on its own stream. `next` raises the
    thread's errors. The position of `sampler` counts the batches that `next` has returned, not
    those read ahead, and is the loader's state. `wait_seconds` is the time spent in `next` since
    the caller set it to 0.

    With `stages` (progressive growing) resolution and batch size change with the step, which has
    `batches_per_step` batches. The files of a stage are open from its first batch to its last. The
    sample order continues across stages.

    Raises:
        UserError: for a batch size that the number of ranks does not divide.
        ValueError: for stages that do not start at step 0 or are not in ascending order.
    """

    def __init__(
        self,
        dataset: Dataset,  # at the full resolution
        sampler: GlobalSampler,  # its batch size is set to that of the stage
        *,
        device: torch.device | str,
        prefetch: int = 2,
        stages: Sequence[tuple[int, int, int]] = (),  # (first step, px, global batch size)
        batches_per_step: int = 1,
        alternating: bool = False,  # mirror each image in every second epoch
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.device = torch.device(device)
        self.prefetch = prefetch
        self.batches_per_step = batches_per_step
        self.stages = checked_stages(stages, sampler.world_size)
        self.wait_seconds = 0.0
        self._batches = 0  # number returned by `next`
        self._stage: Stage | None = None  # the open stage
        self._stage_dataset = dataset
        self._source: Source | None = None  # replaces reading the images
        self._damaged: set[int] = set()  # records replaced in closed stages
        self._worker: _Worker | None = None
        self._flip_phases: np.ndarray | None = None
        if alternating:
            count = len(dataset)
            if dataset.synthetic is not None:
                count += len(dataset.synthetic)
            self._flip_phases = numpy_generator(sampler.seed, "flip").integers(2, size=count)

    @property
    def step(self) -> int:
        """Training step that the next batch belongs to."""
        return self._batches // self.batches_per_step

    def __iter__(self) -> "InfiniteLoader":
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        if self.stages:
            self._enter_stage()
        if self.prefetch:
            batch = self._prefetched()
        else:
            pin = self.device.type != "cpu"
            batch = self._batch_reader()(pin=pin)
            if pin:
                batch = batch.to(self.device)
        # Advance after the read, so that one that failed or was interrupted is not counted.
        self.sampler.advance()
        self._batches += 1
        self.wait_seconds += time.perf_counter() - started
        return batch

    def read_from(self, source: Source | None) -> None:
        """Take the next batches from `source`, or from the images if it is None."""
        if source is not self._source:
            self.close()
            self._source = source

    def _enter_stage(self) -> None:
        stage = max(stage for stage in self.stages if stage.first_step <= self.step)
        if stage != self._stage:
            self.close()
            self.sampler.batch_size = stage.batch_size
            self._stage_dataset = at_resolution(self.dataset, stage.resolution)
            self._stage = stage

    def _batch_reader(self) -> Callable[..., Batch]:
        """Return a function that reads the next batch at each call, without advancing `sampler`."""
        sampler = copy.copy(self.sampler)
        return partial(_next_batch, self._stage_dataset, sampler, self._flip_phases, self._source)

    def _prefetched(self) -> Batch:
        if self._worker is None:
            remaining = sys.maxsize  # batches of this stage
            later_stages = [stage for stage in self.stages if stage.first_step > self.step]
            if later_stages:
                remaining = min(later_stages).first_step * self.batches_per_step - self._batches
            self._worker = _Worker(self._batch_reader(), self.device, self.prefetch, remaining)
            weakref.finalize(self, self._worker.stop)
        try:
            return self._worker.next()
        except Exception:
            self.close()
            raise

    @property
    def damaged_records(self) -> set[int]:
        """Damaged records that this process has replaced (`data.on_damage: skip`)."""
        return self._damaged.union(self.dataset.replaced, self._stage_dataset.replaced)

    def state_dict(self) -> dict[str, object]:
        """Return the sampler's state after the batches that `next` has returned.

        With stages or synthetic images, whose batches depend on the step, the state also has the
        step and the number of the batch within it.
        """
        state = self.sampler.state_dict()
        if self.stages or self.dataset.synthetic is not None:
            step, batch = divmod(self._batches, self.batches_per_step)
            state |= {"step": step, "batch": batch}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, and drop the batches read ahead. The stages may have changed.

        Raises UserError if the sampler's order cannot be continued, and for the state of a run
        without stages if this loader has stages.
        """
        if self.stages:
            refuse(
                (
                    "step" not in state,
                    "the order cannot be resumed in stages: the run has been trained without "
                    "progressive growing; set progressive.start to null, or use a new run folder",
                ),
                (
                    state.get("batch", 0) >= self.batches_per_step,
                    f"the order cannot be resumed: a step took more than {self.batches_per_step} "
                    "batches; use the same loss.objective, or a new run folder",
                ),
            )
        self.close()
        self.sampler.load_state_dict(state)
        step = int(state.get("step", 0))
        self._batches = step * self.batches_per_step + int(state.get("batch", 0))
        self.sampler.batches = self._batches

    def close(self) -> None:
        """Stop the thread and close the files of a stage. `next` continues after the last batch
        that it returned.
        """
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        if self._stage_dataset is not self.dataset:
            self._damaged |= self._stage_dataset.replaced
            self._stage_dataset.close()
            self._stage_dataset = self.dataset
            self._stage = None


class _Worker:
    """The thread that reads ahead. It has no reference to the loader, so that an unused loader is
    garbage-collected.
    """

    def __init__(
        self, read: Callable[..., Batch], device: torch.device, prefetch: int, batches: int
    ) -> None:
        self._read, self._device = read, device
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._ready: queue.Queue[tuple[Batch, torch.Event | None] | Exception] = queue.Queue(
            prefetch
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(batches,), name="data-loader", daemon=True
        )
        self._thread.start()

    def _run(self, batches: int) -> None:
        try:
            for _ in range(batches):
                if self._stopped.is_set():
                    return
                self._ready.put(self._load())
        except Exception as error:  # `next` raises it in the consumer's thread
            self._ready.put(error)

    def _load(self) -> tuple[Batch, torch.Event | None]:
        if self._stream is None:
            return self._read(pin=False), None
        # Without this line, leaving the stream creates a context on GPU 0.
        torch.accelerator.set_device_index(self._device.index or 0)
        with self._stream:
            return self._read(pin=True).to(self._device), self._stream.record_event()

    def next(self) -> Batch:
        """Return the next batch. The consumer's stream waits for the copy, its thread does not."""
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        batch, copied = item
        if copied is not None:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in batch.parts():
                tensor.record_stream(stream)
        return batch

    def stop(self) -> None:
        self._stopped.set()
        # The thread may be about to put a last batch, which needs room in the queue.
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def evaluation_batches(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """Yield every sample once, in order, on the CPU. The last batch may be smaller."""
    for start in range(0, len(dataset), batch_size):
        yield read_batch(dataset, np.arange(start, min(start + batch_size, len(dataset))))
