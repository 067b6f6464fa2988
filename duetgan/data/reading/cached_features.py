"""Hold the features of a data set's images, which training reads in place of the images."""

from dataclasses import dataclass

import numpy as np
import torch

from duetgan.data.reading.loader import Batch


@dataclass(frozen=True)
class CachedFeatures:
    """The features of every image of a data set: the outputs of a network's frozen stages.

    Row i has the features of image i. Synthetic images follow the real ones.
    """

    rows: np.ndarray  # uint8 [count, bytes of an image's features], in memory or a mapped file
    dtype: torch.dtype  # of the features
    views: int  # 1, or 2 with the mirrored image
    labels: np.ndarray  # int64 [count]
    real_images: int | None  # number of real images if there are synthetic ones

    def batch(self, indices: np.ndarray) -> Batch:
        """Return the features and labels of images, `indices` int64 [n]."""
        values = torch.from_numpy(self.rows[indices]).view(self.dtype)
        batch = Batch(
            torch.empty(len(indices), 0),
            torch.from_numpy(self.labels[indices]),
            features=values.view(len(indices), -1, 1, self.views),
        )
        if self.real_images is not None:
            batch.synthetic = torch.from_numpy(indices >= self.real_images)
        return batch
