"""From images to features: which images are taken, and passes over them that all processes share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import Extractor, extract
from duetgan.utils.distributed import collectives
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.seeding import numpy_generator

T = TypeVar("T")

MOST, LEAST = 64, 4  # images of a chunk
PIXELS = 2**20  # of a chunk, between these bounds: what a network needs of memory does not grow with the image size
Source = Callable[[range], tuple[Tensor, Any]]
"""Images of a range, uint8 [b, C, H, W], and whatever else rank 0 shall get of them (plain data, CPU tensors)."""


@dataclass(frozen=True)
class Selection:
    """Which images of a file are looked at."""

    indices: np.ndarray  # int64 [m]
    labels: np.ndarray  # int64 [m]
    key: str  # tells this draw from every other one of the same file

    def images(self, reader: Dataset, rows: range) -> Tensor:
        """Those at some places of the draw, uint8 [b, C, H, W]."""
        return torch.from_numpy(reader.read(self.indices[rows.start : rows.stop])[0])


def select(labels: np.ndarray, *, n: int, seed: int, role: str, per_class: int = 0) -> Selection:
    """Draw n images without replacement by the key (seed, "eval", role), then add until a class has `per_class`.

    `labels` int64 [count] are those of the whole file. A class with fewer than `per_class` in it comes with all it has.
    """
    order = numpy_generator(seed, "eval", role).permutation(len(labels))
    wanted = np.zeros(len(order), dtype=bool)
    for label in np.unique(labels):
        wanted[np.flatnonzero(labels[order] == label)[:per_class]] = True
    order = np.concatenate([order[:n], order[n:][wanted[n:]]])
    return Selection(order, labels[order], f"{role} {seed} {n} {per_class}")


def chunk_size(side: int) -> int:
    """Images of `side` px that networks compute together: 64 up to 128 px, 16 at 256 px, 4 from 512 px on."""
    return max(LEAST, min(MOST, PIXELS // side**2))


def shared_pass(
    count: int,  # images
    work: Callable[[range], T],  # what is made of the images of a chunk: plain data, and tensors on the CPU
    *,
    side: int,  # of the images, in px
    batch_size: int,  # images that a process takes before the results are sent, in whole chunks and at least one
    multiple: int = 1,  # of which a chunk's size must be one
    what: str = "",  # the images on a progress bar; empty: there is none
) -> Iterator[T]:
    """The results of `work` for every chunk of images: on rank 0 all of them in order, on the others none.

    The chunks begin at fixed images whatever the batch size and the number of processes, and each is computed as a
    whole by one process: the last bits of a network's float32 outputs depend on the images they are computed with. All
    ranks must exhaust it. A UserError of one rank is raised on all of them.
    """
    size = max(1, chunk_size(side) // multiple) * multiple
    chunks = [range(start, min(start + size, count)) for start in range(0, count, size)]
    each = max(1, batch_size // size)
    rank, world = collectives.rank(), collectives.world_size()
    with Bar(total=count, desc=what, unit="image", disable=not (what and rank == 0)) as bar:
        for first in range(0, len(chunks), each * world):
            own = chunks[first + rank * each : first + (rank + 1) * each]
            for results in collectives.gather_to_main(lambda own=own: [work(rows) for rows in own]):  # type: ignore[misc]
                for result in results:
                    yield result
                    bar.update(min(size, count - bar.n))


def feature_sets(
    source: Source,
    extractors: Sequence[Extractor],
    *,
    total: int,  # images
    side: int,  # of the images, in px
    batch_size: int = 64,
    what: str = "",  # the images on a progress bar; empty: there is none
    take: Callable[[Any], None] = lambda _: None,
) -> list[Tensor]:
    """One pass over the images for all extractors, shared by the ranks: float32 [total, F] of each on rank 0, [0, F]
    on the others.

    `take` is called on rank 0 with what `source` gave besides the images, in their order. All ranks must call this.
    """
    rows: list[list[Tensor]] = [[] for _ in extractors]

    def work(chunk: range) -> tuple[list[Tensor], Any]:
        images, besides = source(chunk)
        return [extract(extractor, images) for extractor in extractors], besides

    for features, besides in shared_pass(total, work, side=side, batch_size=batch_size, what=what):
        for part, new in zip(rows, features, strict=True):
            part.append(new)
        take(besides)
    none = [torch.empty(0, extractor.dim) for extractor in extractors]
    return [torch.cat([empty, *part]) for empty, part in zip(none, rows, strict=True)]


@dataclass
class RealFeatures:
    """Features of real images, kept between the evaluations of one training run.

    Keyed by the file's content, the draw, and the extractor's name and weights, so that no stale entry is met.
    """

    batch_size: int = 64
    show: bool = False  # a progress bar
    _sets: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    def get(self, reader: Dataset, selection: Selection, extractors: Sequence[Extractor]) -> list[Tensor]:
        """The features of `selection` under each extractor; reads images only for those not kept yet. All ranks must
        call this; rank 0 has the features.
        """
        keys = [(reader.meta.content_hash, selection.key, each.name, each.source) for each in extractors]
        missing = {key: each for key, each in zip(keys, extractors, strict=True) if key not in self._sets}
        if missing:
            features = feature_sets(
                lambda rows: (selection.images(reader, rows), None),
                list(missing.values()),
                total=len(selection.indices),
                side=reader.resolution,
                batch_size=self.batch_size,
                what=f"real {selection.key.split()[0]} images" if self.show else "",
            )
            self._sets.update(zip(missing, features, strict=True))
        return [self._sets[key] for key in keys]
