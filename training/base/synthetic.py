"""Synthetic images beside the real ones in training: which, how many, and how they are drawn from their file."""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import Any, Literal

import numpy as np

from data.reading.dataset import Dataset
from data.reading.mixture import MixedDataset, MixedSampler, SyntheticSource
from data.reading.sampler import GlobalSampler
from data.reading.several_files import shard_paths
from training.base.generated import GeneratedSamples
from utils.classes import require_same_classes
from utils.config.model import Config, NonNegativeFloat, PositiveFloat, Share
from utils.errors import UserError


class SyntheticConfig(Config):
    """Synthetic images that training mixes with those of data.path."""

    path: str | None = None  # LMDB of samples, made by `generate.py dataset` or data.pack; null: none
    checkpoint: str | None = None  # instead: a GAN's run or checkpoint, from which new samples are drawn in every epoch
    share: Share | None = None  # of each global batch; null: as many as balance fill needs
    weight: NonNegativeFloat = 1.0  # of their loss; a real image's is 1. Classifiers only
    # from here on training is on real images alone: a share of the steps, or (above 1) a step
    until: PositiveFloat = 1.0
    balance: Literal["off", "fill"] = "off"  # fill: samples of rare classes, to bring them up to the largest

    def check(self) -> None:
        if self.on and self.share is None and self.balance == "off":
            raise UserError("share is not set; give the share of each batch, such as 0.5")
        if not self.on and self != SyntheticConfig.model_construct():
            raise UserError("has settings but no images; give data.synthetic.path FILE")
        if self.path is not None and self.checkpoint is not None:
            raise UserError("path and checkpoint are both set; give a file or a generator")
        if self.until > 1 and self.until != int(self.until):
            raise UserError(f"until {self.until}: give a share of the steps, up to 1, or a whole step")

    @property
    def on(self) -> bool:
        return self.path is not None or self.checkpoint is not None

    def last_step(self, steps: int) -> int | None:
        """The step of a training of `steps` steps before which images are mixed; None: in all of them."""
        end = ceil(Fraction(str(self.until)) * steps) if self.until <= 1 else int(self.until)
        return end if end < steps else None


def open_synthetic(config: SyntheticConfig, training: Dataset, shares: Sequence[float]) -> SyntheticSource:
    """The file, read as the training images are, or samples to be drawn, as many in an epoch as there are training
    images; `shares`: how often each class's real images are seen. Raises UserError naming file or checkpoint.
    """
    if config.checkpoint is not None:
        lack = lack_of(shares).tolist() if config.balance == "fill" else None
        return GeneratedSamples(config.checkpoint, len(training), lack)
    assert config.path is not None
    like: Any = {"crop": training.crop, "workers": training.workers, "on_damage": training.on_damage}
    remedy = "make it with `python generate.py dataset`"
    return open_images("data.synthetic.path", config.path, remedy, resolution=training.resolution or None, **like)


def open_images(key: str, path: str, remedy: str, **options: Any) -> Dataset:
    """A data set with these options. Raises UserError; where a file is missing it names the config's key."""
    try:
        return Dataset(path, **options)
    except UserError as error:
        if all(file.exists() for file in shard_paths(path)):
            raise
        raise UserError(f"{key} {str(error).removesuffix('; make it with data.pack')}; {remedy}") from None


def require_same_images(
    path: object, images: SyntheticSource, like: object, training: Dataset, remedy: str, *, scaled: bool
) -> None:
    """Raise UserError unless images have the channels and, where they are not `scaled`, the size of the training's."""
    side, channels = images.meta.resolutions[-1], images.meta.channels
    if channels != training.meta.channels or not (scaled or side in (0, training.resolution)):
        raise UserError(
            f"{path}: images of {side or training.resolution} px with {channels} channels, those of {like} have "
            f"{training.resolution} px and {training.meta.channels}; {remedy}"
        )


def check_synthetic(
    config: SyntheticConfig,
    training: Dataset,
    shares: Sequence[float],  # how often each class's real images are seen
    *,
    scaled: bool,  # a file's images of another size are brought to that of the real ones, as the config asks
) -> None:
    """Raise UserError unless the synthetic images have the size, the channels and the classes of the real ones, labels
    of these, and, where classes are filled up, images of them.
    """
    source: SyntheticSource = training.synthetic
    name, real = source.path, training.path
    source.labels()  # a damaged index, or a label without a class, ends it here
    remedy = "draw samples from a generator of these images"
    require_same_images(name, source, real, training, remedy, scaled=scaled and isinstance(source, Dataset))
    remedy = "draw samples from a generator that was trained on these classes"
    require_same_classes(name, source.classes, real, training.classes, remedy)
    if config.balance == "fill" and isinstance(source, Dataset):
        _fill_weights(source, shares)


def lack_of(shares: Sequence[float]) -> np.ndarray:
    """How many images each class lacks of the largest, float64 [classes]; `shares`: how many real ones are seen.

    Raises UserError where none lacks any.
    """
    lack = max(shares, default=0.0) - np.array(shares, np.float64)
    lack[lack <= 1e-9 * max(shares, default=0.0)] = 0.0  # sums of weights are rounded
    if not lack.any():
        raise UserError(
            "data.synthetic.balance fill: no class lacks images, all are seen equally often; set it off and give "
            "data.synthetic.share"
        )
    return lack


def share_of(config: SyntheticConfig, shares: Sequence[float]) -> Fraction:
    """The share of the global batch that is synthetic; `shares`: how often each class's real images are seen."""
    if config.share is not None:
        return Fraction(str(config.share))
    lack = Fraction(float(lack_of(shares).sum()))
    return lack / (lack + Fraction(float(np.sum(shares))))


def _fill_weights(source: Dataset, shares: Sequence[float]) -> np.ndarray:
    """How often each record of a file is seen, relative to the others, so that classes are filled up: float64 [n]."""
    lack, have = lack_of(shares), np.bincount(source.labels(), minlength=len(shares))
    empty = np.flatnonzero((lack > 0) & (have == 0))
    if len(empty):
        name = source.classes[empty[0]]
        raise UserError(f"{source.path}: no image of class {name!r}, which data.synthetic.balance fill is to fill up")
    return (lack / np.maximum(have, 1))[source.labels()]


def class_shares(config: SyntheticConfig, source: SyntheticSource, shares: Sequence[float]) -> np.ndarray:
    """How often each class is seen while the mixture lasts, float64 [classes], of sum 1."""
    drawn = lack_of(shares) if config.balance == "fill" else np.array(source.meta.histogram, np.float64)
    share, real = float(share_of(config, shares)), np.array(shares, np.float64)
    return (1 - share) * real / real.sum() + share * drawn / drawn.sum()


def make_sampler(
    config: SyntheticConfig,
    dataset: MixedDataset,
    shares: Sequence[float],  # how often each class's real images are seen
    *,
    until: int | None,  # global batches
    **order: Any,  # of the real images, as for GlobalSampler
) -> MixedSampler:
    """The order of both kinds of images."""
    source = dataset.synthetic
    stored = isinstance(source, Dataset)  # fresh samples have the labels that are wanted, and any order is random
    weights = _fill_weights(source, shares) if config.balance == "fill" and isinstance(source, Dataset) else None
    same = {name: order[name] for name in ("batch_size", "seed", "rank", "world_size")}
    groups = None if weights is None else source.labels()
    second = GlobalSampler(len(source), weights=weights, groups=groups, shuffle=stored, stream="synthetic", **same)
    content, share = source.meta.content_hash, share_of(config, shares)
    return MixedSampler(len(dataset), synthetic=second, content=content, share=share, until=until, **order)


def synthetic_text(config: SyntheticConfig, shares: Sequence[float], steps: int) -> str:
    """What the plan says of the mixture."""
    end = config.last_step(steps)
    text = f"{float(share_of(config, shares)):.3g} of each batch" + (f", up to step {end}" if end is not None else "")
    text += f", loss weight {config.weight:g}" if config.weight != 1 else ""
    return text + (", of the classes that lack images" if config.balance == "fill" else "")
