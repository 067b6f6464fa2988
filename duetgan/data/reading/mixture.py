"""Train on real and synthetic images.

`MixedDataset` reads two data sets as one. `MixedSampler` makes global batches with a fixed fraction
of synthetic images.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.sampler import GlobalSampler, Position, SampleKeys, order_error
from duetgan.utils.seeding import numpy_generator


class MixedDataset(Dataset):
    """Real images, followed by synthetic ones: index len(self) + i is image i of `synthetic`.

    `synthetic` is a Dataset, or an object with the same `path`, `meta`, `classes`, `workers`,
    `labels`, `read` and `close`. Length, metadata and labels are those of the real images, so that
    metrics of the data set are of real images.
    """

    def read(
        self,
        indices: Sequence[int] | np.ndarray,
        keys: SampleKeys | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read real and synthetic records as Dataset.read does.

        The random keys of synthetic images differ from those of real images.
        """
        requested = np.asarray(indices, dtype=np.int64)
        is_synthetic = requested >= len(self)
        if not is_synthetic.any():
            return super().read(requested, keys)
        images = np.empty((len(requested), *self.spec.shape), self.spec.depth)
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
    """A sampler of global batches with a fixed fraction of synthetic images.

    The indices of synthetic images follow those of the real ones. Real and synthetic images each
    have an endless order; GlobalSampler describes that of the real images. Of the first n samples
    of the run, floor(fraction * n) are synthetic, so a batch has fraction * batch_size of them,
    rounded down or up.

    The positions of synthetic images in the global batch are drawn from the key (seed, "synthetic",
    "places", samples before the batch). Mixup pairs and the ranks' slices are thus random mixtures.
    From global batch number `until` on, all images are real.
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

    def synthetic_count(self, position: Position) -> int:
        """Return the number of synthetic images in the global batch at `position`."""
        if self.until is not None and position.batches >= self.until:
            return 0
        start = position.consumed + position.synthetic
        return floor(self.fraction * (start + self.batch_size)) - floor(self.fraction * start)

    def batch(self, position: Position) -> tuple[np.ndarray, SampleKeys]:
        count = self.synthetic_count(position)
        is_synthetic = np.zeros(self.batch_size, bool)
        if count:
            start = position.consumed + position.synthetic
            generator = numpy_generator(self.seed, "synthetic", "places", start)
            is_synthetic[generator.permutation(self.batch_size)[:count]] = True
        indices = np.empty(self.batch_size, np.int64)  # of the global batch
        epochs = np.empty(self.batch_size, np.int64)
        repeats = np.empty(self.batch_size, np.int64)
        for rows, (numbers, keys), first in (
            (~is_synthetic, self.at(position.consumed, self.batch_size - count), 0),
            (is_synthetic, self.synthetic.at(position.synthetic, count), self.count),
        ):
            indices[rows] = first + numbers
            epochs[rows] = keys.epochs
            repeats[rows] = keys.repeats
        part = self.rank_rows
        return indices[part], SampleKeys(self.seed, epochs[part], repeats[part])

    def next_position(self, position: Position) -> Position:
        synthetic = self.synthetic_count(position)
        real = self.batch_size - synthetic
        return Position(
            position.consumed + real, position.synthetic + synthetic, position.batches + 1
        )

    def state_at(self, position: Position) -> dict[str, object]:
        """Return the state of the order of real images.

        Its entry `synthetic` is the state of the order of synthetic images, and the hash of these
        images.
        """
        synthetic = self.synthetic.state_at(Position(position.synthetic))
        return super().state_at(position) | {"synthetic": synthetic | {"content": self.content}}

    def position_of(self, state: Mapping[str, Any]) -> Position:
        real = dict(state)
        synthetic = real.pop("synthetic", None)
        if synthetic is None:
            raise order_error(
                "the run has been trained on real images alone; use no data.synthetic"
            )
        if synthetic["content"] != self.content:
            raise order_error("data.synthetic has other images now; use the same")
        if synthetic["weights"] != self.synthetic.state_at(Position())["weights"]:
            raise order_error("data.synthetic.balance changed (or what it fills up); use the same")
        consumed = self.synthetic.position_of(synthetic).consumed
        return super().position_of(real)._replace(synthetic=consumed)
