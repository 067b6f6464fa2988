"""Training on real and synthetic images: two data sets read as one, and global batches that hold a
share of each.
"""

import copy
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.sampler import GlobalSampler, SampleKeys, other_order
from duetgan.utils.seeding import numpy_generator


class MixedDataset(Dataset):
    """Real images with synthetic ones behind them: index len(self) + i is number i of `synthetic`,
    a Dataset or what has its `path`, `meta`, `classes`, `workers`, `replaced`, `labels`, `read` and
    `close`.

    Only `read` reaches the synthetic images. Length, metadata, labels and all else are those of the
    real images, so that figures over the data set are figures over real images.
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
        """As Dataset.read; the keys of synthetic images are apart from those of real ones."""
        wanted = np.asarray(indices, dtype=np.int64)
        behind = wanted >= len(self)
        if not behind.any():
            return super().read(wanted, out, keys)
        shape = (len(wanted), *self.spec.shape)
        images, labels = (
            np.empty(shape, self.spec.depth) if out is None else out,
            np.empty(len(wanted), np.int64),
        )
        for places, read, first in (
            (~behind, super().read, 0),
            (behind, self.synthetic.read, len(self)),
        ):
            part = None
            if keys is not None:
                part = SampleKeys(
                    keys.seed, keys.epochs[places], keys.repeats[places], synthetic=first > 0
                )
            images[places], labels[places] = read(wanted[places] - first, keys=part)
        return images, labels

    def close(self) -> None:
        super().close()
        self.synthetic.close()


class MixedSampler(GlobalSampler):
    """Global batches with a fixed share of synthetic images, whose indices lie behind those of the
    real ones.

    Real and synthetic images have an endless order each; the real one is GlobalSampler's. Of the
    first n samples of the run floor(share * n) are synthetic, so a batch holds share * batch_size
    of them, rounded down or up such that the share is exact in the long run. Their places in the
    global batch are drawn by the key (seed, "synthetic", "places", samples before the batch): pairs
    that are mixed, and the ranks' slices, are of both kinds at random. From global batch number
    `until` on all images are real.

    `batches` counts the batches; the loader sets it, for its own steps may go back (a roll-back)
    where the samples do not.
    """

    def __init__(
        self,
        count: int,  # real images
        *,
        synthetic: GlobalSampler,  # their order, for the same ranks
        content: str,  # hash of the synthetic images
        share: Fraction,  # above 0, at most 1
        until: int | None = None,  # global batches; None: the mixture has no end
        **order: Any,  # as for GlobalSampler
    ) -> None:
        super().__init__(count, **order)
        self.synthetic, self.content, self.share, self.until = synthetic, content, share, until

    def __copy__(self) -> "MixedSampler":
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.synthetic = copy.copy(self.synthetic)
        return twin

    @property
    def taken(self) -> int:
        """Samples of both kinds that all ranks together have taken."""
        return self.consumed + self.synthetic.consumed

    @property
    def synthetic_count(self) -> int:
        """Synthetic images in the next global batch."""
        if self.until is not None and self.batches >= self.until:
            return 0
        return floor(self.share * (self.taken + self.batch_size)) - floor(self.share * self.taken)

    def next_batch(self) -> tuple[np.ndarray, SampleKeys]:
        places = np.zeros(self.batch_size, bool)  # of synthetic samples in the global batch
        if count := self.synthetic_count:
            generator = numpy_generator(self.seed, "synthetic", "places", self.taken)
            places[generator.permutation(self.batch_size)[:count]] = True
        share = self.batch_size // self.world_size
        first = self.rank * share
        before, drawn = int(places[:first].sum()), places[first : first + share]
        indices, epochs, repeats = (np.empty(share, np.int64) for _ in range(3))
        for chosen, order, position, offset in (
            (~drawn, self, self.consumed + first - before, 0),
            (drawn, self.synthetic, self.synthetic.consumed + before, self.count),
        ):
            numbers, keys = order.at(position, int(chosen.sum()))
            indices[chosen] = offset + numbers
            epochs[chosen], repeats[chosen] = keys.epochs, keys.repeats
        self.advance()
        return indices, SampleKeys(self.seed, epochs, repeats)

    def advance(self, batches: int = 1) -> None:
        for _ in range(batches):
            drawn = self.synthetic_count
            self.consumed += self.batch_size - drawn
            self.synthetic.consumed += drawn
            self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        """The real order's state, and under `synthetic` the other's with the hash of its images."""
        return super().state_dict() | {
            "synthetic": self.synthetic.state_dict() | {"content": self.content}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (second := state.get("synthetic")) is None:
            raise other_order(
                "the run has been trained on real images alone; use no data.synthetic"
            )
        if second["content"] != self.content:
            raise other_order("data.synthetic has other images now; use the same")
        if second["weights"] != self.synthetic.state_dict()["weights"]:
            raise other_order("data.synthetic.balance changed (or what it fills up); use the same")
        self.synthetic.load_state_dict(second)
        super().load_state_dict(
            {name: value for name, value in state.items() if name != "synthetic"}
        )
