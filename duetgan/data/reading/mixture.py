"""Training on real and synthetic images: two data sets read as one, and global batches with a fixed
fraction of synthetic images.
"""

import copy
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.sampler import GlobalSampler, SampleKeys, order_error
from duetgan.utils.seeding import numpy_generator


class MixedDataset(Dataset):
    """Real images, followed by synthetic ones: index len(self) + i is image i of `synthetic`.

    `synthetic` is a Dataset, or an object with the same `path`, `meta`, `classes`, `workers`,
    `replaced`, `labels`, `read` and `close`. Length, metadata and labels are those of the real
    images, so that metrics of the data set are of real images.
    """

    @property
    def replaced(self) -> set[int]:
        return super().replaced | {len(self) + record for record in self.synthetic.replaced}

    def read(
        self,
        indices: Sequence[int] | np.ndarray,
        out: np.ndarray | None = None,
        keys: SampleKeys | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read real and synthetic records, as Dataset.read does. They have different keys."""
        requested = np.asarray(indices, dtype=np.int64)
        is_synthetic = requested >= len(self)
        if not is_synthetic.any():
            return super().read(requested, out, keys)
        shape = (len(requested), *self.spec.shape)
        images = np.empty(shape, self.spec.depth) if out is None else out
        labels = np.empty(len(requested), np.int64)
        for rows, read, first in (
            (~is_synthetic, super().read, 0),
            (is_synthetic, self.synthetic.read, len(self)),
        ):
            row_keys = None
            if keys is not None:
                row_keys = SampleKeys(
                    keys.seed, keys.epochs[rows], keys.repeats[rows], synthetic=first > 0
                )
            images[rows], labels[rows] = read(requested[rows] - first, keys=row_keys)
        return images, labels

    def close(self) -> None:
        super().close()
        self.synthetic.close()


class MixedSampler(GlobalSampler):
    """Global batches with a fixed fraction of synthetic images.

    The indices of synthetic images follow those of the real ones. Real and synthetic images each
    have an endless order; the real one is that of GlobalSampler. Of the first n samples of the run
    floor(fraction * n) are synthetic, so a batch has fraction * batch_size of them, rounded down or
    up. Their positions in the global batch are drawn from the key (seed, "synthetic", "places",
    samples before the batch), so that mixup pairs and the ranks' slices are random mixtures. From
    global batch number `until` on all images are real.

    `batches` is the number of the next global batch. The loader sets it, because a roll-back
    resets the step but not the position in the order of samples.
    """

    def __init__(
        self,
        count: int,  # real images
        *,
        synthetic: GlobalSampler,  # order of the synthetic images, for the same ranks
        content: str,  # hash of the synthetic images
        fraction: Fraction,  # of synthetic images, above 0, at most 1
        until: int | None = None,  # number of mixed global batches; None: all
        **order: Any,  # arguments of GlobalSampler
    ) -> None:
        super().__init__(count, **order)
        self.synthetic = synthetic
        self.content = content
        self.fraction = fraction
        self.until = until

    def __copy__(self) -> "MixedSampler":
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.synthetic = copy.copy(self.synthetic)
        return copied

    @property
    def consumed_total(self) -> int:
        """Samples of both kinds that all ranks together have taken."""
        return self.consumed + self.synthetic.consumed

    @property
    def synthetic_count(self) -> int:
        """Number of synthetic images in the next global batch."""
        if self.until is not None and self.batches >= self.until:
            return 0
        start = self.consumed_total
        return floor(self.fraction * (start + self.batch_size)) - floor(self.fraction * start)

    def next_batch(self) -> tuple[np.ndarray, SampleKeys]:
        is_synthetic = np.zeros(self.batch_size, bool)  # of the global batch
        if count := self.synthetic_count:
            generator = numpy_generator(self.seed, "synthetic", "places", self.consumed_total)
            is_synthetic[generator.permutation(self.batch_size)[:count]] = True
        rank_batch = self.batch_size // self.world_size
        first = self.rank * rank_batch
        earlier = int(is_synthetic[:first].sum())  # synthetic images of the ranks before this one
        is_synthetic = is_synthetic[first : first + rank_batch]
        indices = np.empty(rank_batch, np.int64)
        epochs = np.empty(rank_batch, np.int64)
        repeats = np.empty(rank_batch, np.int64)
        for rows, order, position, offset in (
            (~is_synthetic, self, self.consumed + first - earlier, 0),
            (is_synthetic, self.synthetic, self.synthetic.consumed + earlier, self.count),
        ):
            numbers, keys = order.at(position, int(rows.sum()))
            indices[rows] = offset + numbers
            epochs[rows] = keys.epochs
            repeats[rows] = keys.repeats
        self.advance()
        return indices, SampleKeys(self.seed, epochs, repeats)

    def advance(self, batches: int = 1) -> None:
        for _ in range(batches):
            synthetic = self.synthetic_count
            self.consumed += self.batch_size - synthetic
            self.synthetic.consumed += synthetic
            self.batches += 1

    def state_dict(self) -> dict[str, object]:
        """Return the state of the order of real images. Its entry `synthetic` is the state of the
        order of synthetic images, with the hash of these images.
        """
        synthetic = self.synthetic.state_dict() | {"content": self.content}
        return super().state_dict() | {"synthetic": synthetic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        synthetic = state.get("synthetic")
        if synthetic is None:
            raise order_error(
                "the run has been trained on real images alone; use no data.synthetic"
            )
        if synthetic["content"] != self.content:
            raise order_error("data.synthetic has other images now; use the same")
        if synthetic["weights"] != self.synthetic.state_dict()["weights"]:
            raise order_error("data.synthetic.balance changed (or what it fills up); use the same")
        self.synthetic.load_state_dict(synthetic)
        real = dict(state)
        del real["synthetic"]
        super().load_state_dict(real)
