"""Load batches: endlessly for training (`InfiniteLoader`), or once (`evaluation_batches`)."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.sampler import GlobalSampler, Position, SampleKeys
from duetgan.utils.seeding import numpy_generator

if TYPE_CHECKING:
    from duetgan.data.reading.cached_features import CachedFeatures


@dataclass
class Batch:
    """The images and labels of one rank's part of a global batch."""

    images: torch.Tensor  # [n, C, H, W] of the data set's depth; [n, 0] if there are `features`
    # int64 [n]: indices of classes, or of label sets (data.lmdb.format.Meta)
    labels: torch.Tensor
    # bool [n]: True for synthetic samples; None: all images are real
    synthetic: torch.Tensor | None = None
    # float [n, F, 1, views]: cached features in place of images, the mirrored view last
    features: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Batch":
        """Copy the batch to `device`. From pinned memory, the copy is asynchronous."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """Copy the batch to pinned memory."""
        return self._map(torch.Tensor.pin_memory)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        return Batch(**{name: function(tensor) for name, tensor in self.tensors().items()})


def read_batch(dataset: Dataset, indices: np.ndarray, keys: SampleKeys | None = None) -> Batch:
    """Read the records `indices`, int64 [n], into new tensors on the CPU.

    Decoded images are channels last in memory. `keys` are the random keys of crops.
    """
    images, labels = dataset.read(indices, keys=keys)
    batch = Batch(torch.from_numpy(images), torch.from_numpy(labels))
    if dataset.synthetic is not None:
        batch.synthetic = torch.from_numpy(indices >= len(dataset))
    return batch


def alternating_flip_(images: torch.Tensor, phases: np.ndarray, keys: SampleKeys) -> None:
    """Flip images [n, C, H, W] left-right in place, each image in every second epoch.

    An image is flipped if its phase (0 or 1, int [n]), its epoch, and the number of its earlier
    draws in this epoch have an odd sum (2404.00498, section 3.6).
    """
    rows = torch.from_numpy(np.flatnonzero((phases + keys.epochs + keys.repeats) % 2))
    if images.dtype == torch.uint16:  # torch cannot index-assign uint16
        images = images.view(torch.int16)
    images[rows] = images[rows].flip(3)


class InfiniteLoader:
    """An endless iterator over a rank's batches, on the device.

    A background thread reads up to `prefetch` batches ahead, and `next` raises its errors. If
    `prefetch` is 0, `next` reads the batch itself. For an accelerator, batches are read into pinned
    memory and copied on a separate stream.

    The loader's state is a position in the sampler's order: the one after the last batch that
    `next` returned. Batches that were read ahead do not count. `wait_seconds` is the time spent in
    `next` since the caller set it to 0.
    """

    saves_step = False  # True if batches depend on the training step, so that the state has it

    def __init__(
        self,
        dataset: Dataset,
        sampler: GlobalSampler,
        *,
        device: torch.device | str,
        prefetch: int = 2,
        batches_per_step: int = 1,
        alternating: bool = False,  # mirror each image in every second epoch
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.device = torch.device(device)
        self.prefetch = prefetch
        self.batches_per_step = batches_per_step
        self.position = Position()  # of the next batch
        self.wait_seconds = 0.0
        self._dataset = dataset  # the data set that is read; a StagedLoader changes it
        self._features: CachedFeatures | None = None  # read in place of the images
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.Stream | None = None  # of the thread's copies
        # batches from `position` on that are read or being read, each with the end of its copy
        self._ahead: deque[Future[tuple[Batch, torch.Event | None]]] = deque()
        self._next_ahead = self.position  # of the next batch to be read ahead
        self._flip_phases: np.ndarray | None = None  # of all images, see `alternating_flip_`
        if alternating:
            count = len(dataset)
            if dataset.synthetic is not None:
                count += len(dataset.synthetic)
            self._flip_phases = numpy_generator(sampler.seed, "flip").integers(2, size=count)

    @property
    def step(self) -> int:
        """Training step that the next batch belongs to."""
        return self.position.batches // self.batches_per_step

    def __iter__(self) -> "InfiniteLoader":
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        if self.prefetch:
            batch = self._prefetched()
        else:
            batch = self._read(self.position).to(self.device)
        # Advance after the read, so that one that failed or was interrupted is not counted.
        self.position = self.sampler.next_position(self.position)
        self.wait_seconds += time.perf_counter() - started
        return batch

    def _read(self, position: Position) -> Batch:
        """Read the batch at a position into CPU memory, which is pinned for an accelerator."""
        indices, keys = self.sampler.batch(position)
        if self._features is None:
            batch = read_batch(self._dataset, indices, keys)
        else:
            batch = self._features.batch(indices)
        if self._flip_phases is not None:
            pixels = batch.images if batch.features is None else batch.features
            alternating_flip_(pixels, self._flip_phases[indices], keys)
        return batch if self.device.type == "cpu" else batch.pinned()

    def _copy(self, position: Position) -> tuple[Batch, torch.Event | None]:
        """Return the batch at a position, on the device, and an event that marks the copy's end.

        The event is None if the device is the CPU.
        """
        batch = self._read(position)
        if self._stream is None:
            return batch, None
        # Without this line, leaving the stream creates a context on GPU 0.
        torch.accelerator.set_device_index(self.device.index or 0)
        with self._stream:
            return batch.to(self.device), self._stream.record_event()

    def _prefetched(self) -> Batch:
        """Return the next batch that the thread has read; let the thread read further ones."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "data-loader")
            self._stream = torch.Stream(self.device) if self.device.type != "cpu" else None
            self._next_ahead = self.position
        while len(self._ahead) <= self.prefetch:
            self._ahead.append(self._thread.submit(self._copy, self._next_ahead))
            self._next_ahead = self.sampler.next_position(self._next_ahead)
        try:
            batch, copied = self._ahead[0].result()
        except Exception:
            self.close()
            raise
        self._ahead.popleft()
        if copied is not None:  # The stream waits for the copy, this thread does not.
            stream = torch.accelerator.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in batch.tensors().values():
                tensor.record_stream(stream)
        return batch

    def read_from(self, features: "CachedFeatures | None") -> None:
        """Read all further batches from `features`, or from the images if `features` is None."""
        if features is not self._features:
            self.close()
            self._features = features

    def state_dict(self, position: Position | None = None) -> dict[str, object]:
        """Return the state at `position`, by default after the last batch that `next` returned.

        If batches depend on the training step, the state has the step and the number of the batch
        within the step.
        """
        position = position or self.position
        state = self.sampler.state_at(position)
        if self.saves_step or self.dataset.synthetic is not None:
            step, batch = divmod(position.batches, self.batches_per_step)
            state |= {"step": step, "batch": batch}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, and drop the batches that were read ahead.

        Raises UserError if the sampler's order cannot be continued.
        """
        position = self.sampler.position_of(state)
        self.close()
        batches = state.get("step", 0) * self.batches_per_step + state.get("batch", 0)
        self.position = position._replace(batches=batches)

    def close(self) -> None:
        """Stop the thread. `next` continues after the last batch that it returned."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._ahead.clear()


def evaluation_batches(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """Yield batches with every image once, in order, on the CPU. The last batch may be smaller."""
    for start in range(0, len(dataset), batch_size):
        yield read_batch(dataset, np.arange(start, min(start + batch_size, len(dataset))))
