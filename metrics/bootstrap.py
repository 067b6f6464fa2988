"""95 % intervals of figures over images: the percentile bootstrap (Efron 1979), and the normal interval.

A resample draws as many images as there are, with replacement. Here it is a row of weights: how often each image was
drawn. A figure that is a function of weighted images is computed for many resamples at once, by matrix products.
For shares of a count there is a closed form: `metrics.intervals.wilson`.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from utils.seeding import Key, numpy_generator

RESAMPLES = 1000
CHUNK = 2**21  # weights at a time: 16 MiB, whatever the number of images

Statistic = Callable[[Tensor], Tensor]
"""From weights float64 [b, n], whole numbers that sum to n in each row, to the figures of the b resamples: [b] for one
figure, [b, k] for k of them. NaN where a resample leaves a figure undefined."""


def resamples(n: int, *key: Key, count: int = RESAMPLES) -> Iterator[Tensor]:
    """`count` resamples of n images, as weights float64 [b, n] in chunks; the same for a key, whatever the chunks."""
    if n < 1:
        raise ValueError("no images to draw from")
    draw = numpy_generator(*key)
    size = max(1, CHUNK // n)
    for start in range(0, count, size):
        rows = [np.bincount(draw.integers(0, n, n), minlength=n) for _ in range(min(size, count - start))]
        yield torch.from_numpy(np.stack(rows)).double()


def bootstrap(statistic: Statistic, n: int, *key: Key, count: int = RESAMPLES) -> Tensor:
    """The statistic of each resample of n images, float64 [count] or [count, k]."""
    return torch.cat([statistic(weights).double() for weights in resamples(n, *key, count=count)])


def percentile_interval(values: Tensor) -> list[float] | None:
    """From the 2.5 % to the 97.5 % quantile of a figure's resamples [count]; None if more than half are undefined."""
    defined = values[~values.isnan()]
    if 2 * len(defined) <= len(values):
        return None
    low, high = np.quantile(defined.numpy(), [0.025, 0.975]).tolist()
    return [low, high]


def bootstrap_interval(statistic: Statistic, n: int, *key: Key, count: int = RESAMPLES) -> list[float] | None:
    """The 95 % percentile interval [low, high] of one figure over n images; None where it is mostly undefined."""
    return percentile_interval(bootstrap(statistic, n, *key, count=count))
