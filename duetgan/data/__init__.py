"""Store images in packed files, read them as data sets, and load batches for training."""

from typing import TYPE_CHECKING

from duetgan.lazy import lazily

if TYPE_CHECKING:
    from duetgan.data.augment.transforms import Augment, to_float
    from duetgan.data.opening import open_dataset
    from duetgan.data.reading.dataset import Dataset
    from duetgan.data.reading.loader import Batch, InfiniteLoader
    from duetgan.data.reading.sampler import GlobalSampler

__all__ = [
    "Augment",
    "Batch",
    "Dataset",
    "GlobalSampler",
    "InfiniteLoader",
    "open_dataset",
    "to_float",
]
__getattr__ = lazily(
    "duetgan.data",
    {
        "augment.transforms": ["Augment", "to_float"],
        "opening": ["open_dataset"],
        "reading.dataset": ["Dataset"],
        "reading.loader": ["Batch", "InfiniteLoader"],
        "reading.sampler": ["GlobalSampler"],
    },
)
