"""Our own contenders: what training reads, from opening the file on."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.loading.timing import Stream
from duetgan.data.augment.transforms import Augment, draw_and_apply, to_float
from duetgan.data.images.decode import RandomCrop
from duetgan.data.opening import open_dataset
from duetgan.data.reading.loader import InfiniteLoader
from duetgan.data.reading.sampler import GlobalSampler

SEED = 0
FLIP = Augment(flip=True)


def stream(
    path: str | Path | Sequence[str | Path],
    batch_size: int,
    *,
    resolution: int | None = None,  # px
    crop: RandomCrop | None = None,
    workers: int = 0,  # decoding threads
    prefetch: int = 0,  # batches that are read ahead
    floats: bool = False,  # mirrored at random and in [-1, 1], else uint8 as they are stored
) -> Stream:
    """Shuffled batches, endlessly. The file is opened at the first one, and every checksum is compared anew."""
    with open_dataset(path, resolution=resolution, crop=crop, workers=workers) as dataset:
        sampler = GlobalSampler(len(dataset), batch_size=batch_size, seed=SEED)
        loader = InfiniteLoader(dataset, sampler, device="cpu", prefetch=prefetch)
        try:
            for step, batch in enumerate(loader):
                images = batch.images
                if floats:
                    images = draw_and_apply(images, FLIP, seed=SEED, step=step, start=0, global_batch=batch_size)
                    images = to_float(images)
                yield images, batch.labels
        finally:
            loader.close()
