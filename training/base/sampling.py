"""How often each image is seen in training, how synthetic ones are mixed in, and in which order they come."""

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.mixture import MixedDataset, MixedSampler
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.data.reading.weighted_sampling import balanced_weights, class_weights, load_sample_weights
from duetgan.training.base.config import DataConfig, RunConfig, SyntheticConfig
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError


def sampling_weights(config: DataConfig, dataset: Dataset) -> np.ndarray | None:
    """How often each record is seen in an epoch, float64, relative to the others; None: once. Raises UserError."""
    factors = []
    if config.sampling == "balanced":
        factors.append(balanced_weights(dataset.labels(), dataset.classes))
    if config.class_rates:
        factors.append(class_weights(dataset.labels(), dataset.classes, config.class_rates))
    if config.sample_weights:
        factors.append(load_sample_weights(config.sample_weights, len(dataset)))
    return reduce(np.multiply, factors) if factors else None


def real_label_shares(config: DataConfig, dataset: Dataset) -> np.ndarray:
    """How often each class of the real images is seen, relative to the others, float64 [classes]."""
    weights = sampling_weights(config, dataset)
    if weights is None:
        return np.array(dataset.meta.histogram, np.float64)
    return np.bincount(dataset.labels(), weights, minlength=len(dataset.classes))


def label_shares(config: DataConfig, dataset: Dataset) -> list[float]:
    """How often each class is seen, relative to the others: the histogram, unless sampling is weighted or synthetic
    images are mixed in.
    """
    real, source = real_label_shares(config, dataset), dataset.synthetic
    if source is None or not len(real):
        return real.tolist()
    fill = config.synthetic.balance == "fill"
    drawn = lack_of(real) if fill else np.array(source.meta.histogram, np.float64)
    share = float(share_of(config.synthetic, real))
    return ((1 - share) * real / real.sum() + share * drawn / drawn.sum()).tolist()


def lack_of(shares: Sequence[float] | np.ndarray) -> np.ndarray:
    """How many images each class lacks of the largest, float64 [classes]; `shares`: how many real ones are seen.

    Raises UserError where none lacks any.
    """
    have = np.array(shares, np.float64)
    largest = have.max(initial=0.0)
    lack = largest - have
    lack[lack <= 1e-9 * largest] = 0.0  # sums of weights are rounded
    if not lack.any():
        raise UserError(
            "data.synthetic.balance fill: no class lacks images, all are seen equally often; set it off and give "
            "data.synthetic.share"
        )
    return lack


def share_of(config: SyntheticConfig, shares: Sequence[float] | np.ndarray) -> Fraction:
    """The share of the global batch that is synthetic; `shares`: how often each class's real images are seen."""
    if config.share is not None:
        return Fraction(str(config.share))
    lack = Fraction(float(lack_of(shares).sum()))
    return lack / (lack + Fraction(float(np.sum(shares))))


def fill_weights(config: DataConfig, dataset: Dataset) -> np.ndarray | None:
    """How often each record of a file of synthetic images is seen, relative to the others, so that classes are filled
    up: float64 [n]; None where they are not. Raises UserError for a class that lacks images and has none there.
    """
    source = dataset.synthetic
    if config.synthetic.balance != "fill" or not isinstance(source, Dataset):
        return None
    lack = lack_of(real_label_shares(config, dataset))
    have = np.bincount(source.labels(), minlength=len(lack))
    empty = np.flatnonzero((lack > 0) & (have == 0))
    if len(empty):
        name = source.classes[empty[0]]
        raise UserError(f"{source.path}: no image of class {name!r}, which data.synthetic.balance fill is to fill up")
    return (lack / np.maximum(have, 1))[source.labels()]


def make_sampler(config: RunConfig, dataset: Dataset) -> GlobalSampler:
    """The order of this rank's samples. Raises UserError for weights, and for classes that cannot be filled up."""
    weights = sampling_weights(config.data, dataset)
    groups = None if weights is None or not dataset.classes else dataset.labels()
    same: dict[str, Any] = {
        "batch_size": config.batch_size,
        "seed": config.seed,
        "rank": collectives.rank(),
        "world_size": collectives.world_size(),
    }
    order = {"weights": weights, "groups": groups, **same}
    if not isinstance(dataset, MixedDataset):
        return GlobalSampler(len(dataset), **order)
    source, mixture = dataset.synthetic, config.data.synthetic
    weights = fill_weights(config.data, dataset)
    groups = None if weights is None else source.labels()
    stored = isinstance(source, Dataset)  # fresh samples have the labels that are wanted, and any order is random
    second = GlobalSampler(len(source), weights=weights, groups=groups, shuffle=stored, stream="synthetic", **same)
    share, end = share_of(mixture, real_label_shares(config.data, dataset)), mixture.last_step(config.steps)
    until = None if end is None else end * config.batches_per_step
    content = source.meta.content_hash
    return MixedSampler(len(dataset), synthetic=second, content=content, share=share, until=until, **order)
