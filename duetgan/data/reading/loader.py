"""Batches to the device: an endless training loader whose position is state, and a plain pass for
evaluation.
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
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator

# indices -> a batch on the CPU, of what stands for the images
Source = Callable[[np.ndarray], "Batch"]


@dataclass
class Batch:
    """Images and labels of one rank."""

    # [n, C, H, W] of the reader's depth; of a Source float [n, F, 1, views], the mirror image's the
    # last
    images: torch.Tensor
    # int64 [n]: numbers of classes, or of sets of them (data.lmdb.format.Meta)
    labels: torch.Tensor
    # bool [n]: which are no real images; None: nothing is mixed in
    synthetic: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on `device`; asynchronous from pinned memory."""
        return Batch(*(part.to(device, non_blocking=True) for part in self.parts()))

    def parts(self) -> list[torch.Tensor]:
        return [self.images, self.labels, *([] if self.synthetic is None else [self.synthetic])]


def read_batch(
    reader: Dataset, indices: np.ndarray, *, pin: bool = False, keys: SampleKeys | None = None
) -> Batch:
    """Read records into new tensors on the CPU, pinned if asked to; `keys` as for Dataset.read.
    Decoded images lie in memory as the decoder gives them, channels last.
    """
    channels, *size = reader.spec.shape
    shape = (len(indices), channels, *size) if reader.gathers else (len(indices), *size, channels)
    if pin:
        memory = torch.empty(shape, dtype=getattr(torch, reader.spec.depth), pin_memory=True)
    else:  # NumPy reuses freed memory where torch maps new pages for every batch
        memory = torch.from_numpy(np.empty(shape, reader.spec.depth))
    images = memory if reader.gathers else memory.permute(0, 3, 1, 2)
    _, labels = reader.read(indices, out=images.numpy(), keys=keys)
    batch = Batch(images, torch.from_numpy(labels))
    if reader.synthetic is not None:
        batch.synthetic = torch.from_numpy(indices >= len(reader))
    return batch


def _next_batch(
    reader: Dataset, sampler: GlobalSampler, sides: Any, source: Source | None, *, pin: bool
) -> Batch:
    """Read the sampler's next batch; random crops are keyed by the run's seed and each sample's
    epoch. `sides` as for `mirror_in_turn`; None: no image is mirrored.
    """
    indices, keys = sampler.next_batch()
    batch = source(indices) if source else read_batch(reader, indices, pin=pin, keys=keys)
    if sides is not None:
        mirror_in_turn(batch.images, sides[indices], keys)
    return Batch(*(part.pin_memory() for part in batch.parts())) if pin else batch


def mirror_in_turn(images: torch.Tensor, sides: np.ndarray, keys: SampleKeys) -> None:
    """Mirror images [n, C, H, W] left-right in place where their side, 0 or 1 [n], and epoch add up
    to an odd number: where sampling is uniform, each is seen both ways in any two epochs in a row
    (2404.00498, section 3.6). A repeat within an epoch counts as one.
    """
    rows = torch.from_numpy(np.flatnonzero((sides + keys.epochs + keys.repeats) % 2))
    # which torch cannot write so
    images = images.view(torch.int16) if images.dtype == torch.uint16 else images
    images[rows] = images[rows].flip(3)


class InfiniteLoader:
    """Endless iterator over a rank's batches, on the device.

    A background thread reads up to `prefetch` batches ahead (0: none, batches are read when asked
    for); for an accelerator it reads into pinned memory and copies on a stream of its own.
    `sampler` always stands where the batches handed out end, whatever has been read ahead, and is
    the loader's state. `wait_seconds` adds up the time that `next` took; set it to 0 when it has
    been logged. An error of the thread is raised by `next`.

    With `stages` resolution and batch size change with the steps (progressive growing), each of
    `batches_per_step` batches. A stage's images are opened for its first batch and closed after its
    last. The order of samples goes on.

    Raises UserError for a batch size that the ranks cannot share, ValueError for stages not ordered
    from step 0 on.
    """

    def __init__(
        self,
        reader: Dataset,  # of the full resolution
        sampler: GlobalSampler,  # its batch size becomes that of the stage
        *,
        device: torch.device | str,
        prefetch: int = 2,
        stages: Sequence[tuple[int, int, int]] = (),  # (first step, px, global batch size) each
        batches_per_step: int = 1,
        alternating: bool = False,  # `mirror_in_turn`
    ) -> None:
        self.reader, self.sampler, self.device = reader, sampler, torch.device(device)
        self.prefetch, self.batches_per_step = prefetch, batches_per_step
        self.stages = checked_stages(stages, sampler.world_size)
        self.wait_seconds = 0.0
        self._batches = 0  # handed out
        self._stage: Stage | None = None  # the one that is open
        self._images = reader  # of the stage
        self._source: Source | None = None  # what stands for the images
        self._damaged: set[int] = set()  # records replaced in stages that are closed
        self._worker: _Worker | None = None
        self._sides: np.ndarray | None = None
        if alternating:
            count = len(reader) + (0 if reader.synthetic is None else len(reader.synthetic))
            self._sides = numpy_generator(sampler.seed, "flip").integers(2, size=count)

    @property
    def step(self) -> int:
        """The step that the next batch belongs to."""
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
            batch = _next_batch(
                self._images, copy.copy(self.sampler), self._sides, self._source, pin=pin
            )
            batch = batch.to(self.device) if pin else batch
        # Advanced only now: a read that failed or was interrupted is not counted.
        self.sampler.advance()
        self._batches += 1
        self.wait_seconds += time.perf_counter() - started
        return batch

    def read_from(self, source: Source | None) -> None:
        """Take what stands for the images of the next batches from `source`; None: read the images."""
        if source is not self._source:
            self.close()
            self._source = source

    def _enter_stage(self) -> None:
        """Close the last stage's images and open those of the next batch, if it is another one."""
        stage = max(stage for stage in self.stages if stage.first_step <= self.step)
        if stage != self._stage:
            self.close()
            self.sampler.batch_size = stage.batch_size
            self._images = at_resolution(self.reader, stage.resolution)
            self._stage = stage

    def _prefetched(self) -> Batch:
        if self._worker is None:
            later = [stage.first_step for stage in self.stages if stage.first_step > self.step]
            left = min(later) * self.batches_per_step - self._batches if later else sys.maxsize
            read = partial(
                _next_batch, self._images, copy.copy(self.sampler), self._sides, self._source
            )
            self._worker = _Worker(read, self.device, self.prefetch, left)
            weakref.finalize(self, self._worker.stop)
        try:
            return self._worker.next()
        except Exception:
            self.close()
            raise

    @property
    def damaged_records(self) -> set[int]:
        """Records that this process has replaced because they are damaged (`data.on_damage: skip`)."""
        return self._damaged.union(self.reader.replaced, self._images.replaced)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's position after the batches handed out; with stages or a mixture, whose
        batches depend on the steps, also the step and the batch within it.
        """
        step, batch = divmod(self._batches, self.batches_per_step)
        counted = self.stages or self.reader.synthetic is not None
        return self.sampler.state_dict() | ({"step": step, "batch": batch} if counted else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; what was read ahead is dropped. The stages may have changed: the
        step counts.

        Raises UserError as the sampler does, and for the state of a run without stages if there are
        some.
        """
        if self.stages and "step" not in state:
            raise UserError(
                "the order cannot be resumed in stages: the run has been trained without progressive growing; set "
                "progressive.start to null, or use a new run folder"
            )
        if self.stages and state["batch"] >= self.batches_per_step:
            raise UserError(
                f"the order cannot be resumed: a step took more than {self.batches_per_step} batches; use the same "
                "loss.objective, or a new run folder"
            )
        self.close()
        self.sampler.load_state_dict(state)
        self._batches = int(state.get("step", 0)) * self.batches_per_step + int(
            state.get("batch", 0)
        )
        self.sampler.batches = self._batches

    def close(self) -> None:
        """Stop the thread and let a stage's files go. A loader used again goes on where the batches
        handed out end.
        """
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        if self._images is not self.reader:
            self._damaged |= self._images.replaced
            self._images.close()
            self._images, self._stage = self.reader, None


class _Worker:
    """The thread that reads ahead. It knows nothing of the loader, so that a forgotten loader can
    be collected.
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
        except Exception as error:  # handed to the consumer, who raises it
            self._ready.put(error)

    def _load(self) -> tuple[Batch, torch.Event | None]:
        if self._stream is None:
            return self._read(pin=False), None
        # else leaving the stream makes a context on GPU 0
        torch.accelerator.set_device_index(self._device.index or 0)
        with self._stream:
            return self._read(pin=True).to(self._device), self._stream.record_event()

    def next(self) -> Batch:
        """The next batch; the consumer's stream waits for its copy, the consumer does not."""
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
        # room for the batch it may be about to put, its last
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def evaluation_batches(reader: Dataset, batch_size: int) -> Iterator[Batch]:
    """Every sample once, in order, on the CPU; the last batch may be smaller."""
    for start in range(0, len(reader), batch_size):
        yield read_batch(reader, np.arange(start, min(start + batch_size, len(reader))))
