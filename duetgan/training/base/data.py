"""The data of a run: opened, checked against each other, sampled and loaded as the config says."""

import resource
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import torch

from duetgan.data.decode import RandomCrop
from duetgan.data.errors import DamageError
from duetgan.data.reading.dataset import Dataset, choose_workers
from duetgan.data.reading.loader import InfiniteLoader
from duetgan.data.reading.mixture import MixedDataset, MixedSampler
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.data.reading.several_files import open_at_once, shard_paths
from duetgan.data.reading.weighted_sampling import (
    balanced_weights,
    class_weights,
    load_sample_weights,
)
from duetgan.metrics.lineage import lineage_of
from duetgan.training.base.config import DataConfig, RunConfig, SyntheticConfig
from duetgan.training.base.generated import GeneratedSamples
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.provenance import Lineage
from duetgan.utils.runlog.run_log import say

OPEN_FILES = 96  # that a process needs besides the packed files: libraries, sockets, logs


def open_training(config: DataConfig) -> Dataset:
    """The training images, with synthetic ones behind them if there are any. Raises UserError
    naming the key.
    """
    if not config.path:
        raise UserError(
            "data.path is not set; pack images with `duet pack SOURCE FILE` and give --data.path FILE"
        )
    crop = (
        RandomCrop(area=config.crop_area, aspect=config.crop_aspect)
        if config.crop == "random"
        else None
    )
    synthetic = config.synthetic
    check_open_files(
        sum(open_at_once(path) for path in (config.path, config.val_path, synthetic.path) if path)
    )
    training = (MixedDataset if synthetic.on else Dataset)(
        config.path,
        resolution=config.resolution,
        crop=crop,
        workers=0 if config.workers == "auto" else config.workers,
        on_damage=config.on_damage,
    )
    if synthetic.checkpoint is not None:
        lack = (
            lack_of(real_label_shares(config, training)).tolist()
            if synthetic.balance == "fill"
            else None
        )
        training.synthetic = GeneratedSamples(synthetic.checkpoint, len(training), lack)
    elif synthetic.path is not None:
        remedy, size = "make it with `python generate.py dataset`", training.resolution or None
        like: Any = {"crop": crop, "workers": training.workers, "on_damage": config.on_damage}
        training.synthetic = open_images(
            "data.synthetic.path", synthetic.path, remedy, resolution=size, **like
        )
    return training


def open_images(key: str, path: str, remedy: str, **options: Any) -> Dataset:
    try:
        return Dataset(path, **options)
    except UserError as error:
        if all(file.exists() for file in shard_paths(path)):
            raise
        raise UserError(
            f"{key} {str(error).removesuffix('; make it with duet pack')}; {remedy}"
        ) from None


def facts(training: Dataset, held_out: Dataset | None) -> dict[str, dict[str, Any]]:
    """What the run's report says of its images, by their role."""
    return {
        role: {
            "path": str(reader.path),
            "count": len(reader),
            "by_class": dict(zip(reader.meta.classes, reader.meta.by_class, strict=False)),
            "channels": reader.meta.channels,
            "resolution": reader.spec.resolution,
            "encoding": reader.meta.encoding,
            "content_hash": reader.meta.content_hash,
        }
        for role, reader in {
            "training": training,
            "held-out": held_out,
            "synthetic": training.synthetic,
        }.items()
        if reader is not None
    }


def lineage(config: RunConfig, training: Dataset) -> Lineage:
    """What the checkpoints of a run on these images record of them: the files, and who drew the
    synthetic ones.
    """
    second = training.synthetic
    if isinstance(second, GeneratedSamples):
        return lineage_of(training, samples=[second.passport(config.seed)])
    return lineage_of(training, *([] if second is None else [second]))


def open_held_out(config: DataConfig, training: Dataset) -> Dataset | None:
    """The held-out images at the training images' resolution, whole; damage always stops their
    reading.
    """
    if not config.val_path:
        return None
    remedy = (
        f"give images held out from {config.path} with --data.val_path FILE (`duet pack SOURCE FILE "
        "--val-share 0.1` makes both files), or leave it out: --data.val_path null"
    )
    size = training.resolution or None
    return open_images(
        "data.val_path", config.val_path, remedy, resolution=size, workers=training.workers
    )


def check_data(config: RunConfig, training: Dataset, held_out: Dataset | None) -> None:
    """Raise UserError unless the files hold images of one size and labels that fit each other; warn
    of leaks.
    """
    if training.resolution == 0:
        raise UserError(
            f"{config.data.path}: its images have sizes of their own; set data.resolution N, or pack again with "
            "--size N"
        )
    if getattr(vars(config).get("augment"), "trivial_augment", False) and not training.spec.plain:
        raise UserError(
            f"augment.trivial_augment means 8-bit grey or RGB, the images of {training.path} are "
            f"{training.spec.words}: set it false"
        )
    # a damaged index or a label without a class ends it here, also for a GAN
    training.label_numbers()
    # files' images, to the size asked for
    second, scaled = training.synthetic, config.data.resolution is not None
    if second is not None:
        for images in (training, second):  # of one label each
            images.labels()
        remedy = "draw samples from a generator of these images"
        sized = scaled and isinstance(second, Dataset)
        require_same_images(second.path, second, training.path, training, remedy, scaled=sized)
        remedy = "draw samples from a generator that was trained on these classes"
        require_same_classes(second.path, second.classes, training.path, training.classes, remedy)
        fill_weights(config.data, training)
    if held_out is None:
        return
    held_out.label_numbers()
    path, remedy = config.data.val_path, "pack both alike, floats with one --range"
    require_same_images(path, held_out, config.data.path, training, remedy, scaled=scaled)
    if collectives.is_main():
        _warn_of_leaks(training, held_out)
        if isinstance(second, Dataset):
            _warn_of_leaks(second, held_out)


def require_same_images(
    path: object,
    images: Dataset | GeneratedSamples,
    like: object,
    training: Dataset,
    remedy: str,
    *,
    scaled: bool,
) -> None:
    """Raise UserError unless images have the channels and, where they are not `scaled`, the size of
    the training's.
    """
    spec, wanted = images.meta.spec, training.spec
    same = replace(spec, height=wanted.height, width=wanted.width) == wanted
    if not same or not (scaled or not spec.side or spec.size == wanted.size):
        raise UserError(
            f"{path}: images of {spec if spec.side else wanted}, {spec.words}, those of {like} are of {wanted}, "
            f"{wanted.words}; {remedy}"
        )


def _warn_of_leaks(training: Dataset, held_out: Dataset) -> None:
    ours, theirs = training.meta, held_out.meta
    if len({meta.resize_filter.split("+2x2")[0] for meta in (ours, theirs)} - {"none"}) > 1:
        say(
            f"warning: {held_out.path} is of {theirs.resize_filter}, {training.path} of {ours.resize_filter}"
        )
    if ours.spec.size != theirs.spec.size:
        say(
            "warning: whether held-out images are training images too is not checked: they have other sizes"
        )
        return
    try:
        leaked = int(
            np.isin(held_out.signatures()["digest"], training.signatures()["digest"]).sum()
        )
    except DamageError as error:
        say(f"warning: {error}; whether held-out images are training images too is not checked")
        return
    if leaked:
        say(
            f"warning: {leaked:,} of the {len(held_out):,} images of {held_out.path} are training images too; "
            f"see `duet duplicates {training.path} {held_out.path}`"
        )


def check_same_images(config: DataConfig, training: Dataset, held_out: Dataset | None) -> None:
    """Raise UserError, on all ranks, unless all of them have the same files: each node may have its
    own copies.
    """
    second = training.synthetic
    third = None if second is None else second.path
    for path, dataset in ((config.path, training), (config.val_path, held_out), (third, second)):
        first, *hashes = collectives.gather_objects(
            None if dataset is None else dataset.meta.content_hash
        )
        if (
            other := next(
                (rank for rank, content in enumerate(hashes, 1) if content != first), None
            )
        ) is not None:
            raise UserError(
                f"{path}: rank {other} has other images than rank 0; copy one file to all nodes"
            )


def check_same_classes(config: DataConfig, training: Dataset, held_out: Dataset) -> None:
    """Raise UserError unless both have the same classes in the same order."""
    path, remedy = str(config.val_path), "pack both from the same class folders"
    require_same_classes(path, held_out.classes, str(config.path), training.classes, remedy)
    if (held_out.meta.sets is None) != (training.meta.sets is None):
        raise UserError(
            f"{path} and {config.path}: in one of them alone images have several labels; {remedy}"
        )


def check_open_files(shards: int) -> None:
    """Raise the limit of open files as far as needed and allowed. Raises UserError if that is not
    enough.
    """
    needed = OPEN_FILES + 2 * shards
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"a process may open {hard} files here (ulimit -n), training needs {needed}; run `ulimit -n {needed}` or "
            "more, or ask the administrator"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


# --- how often each image is seen, how synthetic ones are mixed in, and in which order they come


def sampling_weights(config: DataConfig, dataset: Dataset) -> np.ndarray | None:
    """How often each record is seen in an epoch, float64, relative to the others; None: once.
    Raises UserError.
    """
    factors = []
    if config.sampling == "balanced":
        factors.append(balanced_weights(dataset.labels(), dataset.classes))
    if config.class_rates:
        factors.append(class_weights(dataset.labels(), dataset.classes, config.class_rates))
    if config.sample_weights:
        factors.append(load_sample_weights(config.sample_weights, len(dataset)))
    return reduce(np.multiply, factors) if factors else None


def real_label_shares(config: DataConfig, dataset: Dataset) -> np.ndarray:
    """How often each label of the real images is seen, relative to the others, float64 [labels]."""
    if (weights := sampling_weights(config, dataset)) is None:
        return np.array(dataset.meta.histogram, np.float64)
    return np.bincount(dataset.label_numbers(), weights, minlength=dataset.meta.labels)


def label_shares(config: DataConfig, dataset: Dataset) -> list[float]:
    """How often each label is seen, relative to the others, by weighted sampling and in synthetic
    images too.
    """
    real, source = real_label_shares(config, dataset), dataset.synthetic
    if source is None or not len(real):
        return real.tolist()
    fill = config.synthetic.balance == "fill"
    drawn = lack_of(real) if fill else np.array(source.meta.histogram, np.float64)
    share = float(share_of(config.synthetic, real))
    return ((1 - share) * real / real.sum() + share * drawn / drawn.sum()).tolist()


def lack_of(shares: Sequence[float] | np.ndarray) -> np.ndarray:
    """How many images each class lacks of the largest, float64 [classes]; `shares`: how many real
    ones are seen.

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
    """The share of the global batch that is synthetic; `shares`: how often each class's real images
    are seen.
    """
    if config.share is not None:
        return Fraction(str(config.share))
    lack = Fraction(float(lack_of(shares).sum()))
    return lack / (lack + Fraction(float(np.sum(shares))))


def fill_weights(config: DataConfig, dataset: Dataset) -> np.ndarray | None:
    """How often each record of a file of synthetic images is seen, relative to the others, so that
    classes are filled up: float64 [n]; None where they are not. Raises UserError for a class that
    lacks images and has none there.
    """
    source = dataset.synthetic
    if config.synthetic.balance != "fill" or not isinstance(source, Dataset):
        return None
    lack = lack_of(real_label_shares(config, dataset))
    have = np.bincount(source.labels(), minlength=len(lack))
    empty = np.flatnonzero((lack > 0) & (have == 0))
    if len(empty):
        name = source.classes[empty[0]]
        raise UserError(
            f"{source.path}: no image of class {name!r}, which data.synthetic.balance fill is to fill up"
        )
    return (lack / np.maximum(have, 1))[source.labels()]


def make_sampler(config: RunConfig, dataset: Dataset) -> GlobalSampler:
    """The order of this rank's samples. Raises UserError for weights, and for classes that cannot
    be filled up.
    """
    weights = sampling_weights(config.data, dataset)
    groups = None if weights is None or not dataset.classes else dataset.label_numbers()
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
    # fresh samples have the labels that are wanted, and any order is random
    stored = isinstance(source, Dataset)
    second = GlobalSampler(
        len(source), weights=weights, groups=groups, shuffle=stored, stream="synthetic", **same
    )
    share, end = (
        share_of(mixture, real_label_shares(config.data, dataset)),
        mixture.last_step(config.steps),
    )
    until = None if end is None else end * config.batches_per_step
    content = source.meta.content_hash
    return MixedSampler(
        len(dataset), synthetic=second, content=content, share=share, until=until, **order
    )


def make_loader(config: RunConfig, dataset: Dataset, device: torch.device) -> InfiniteLoader:
    """The endless training loader of this rank."""
    # on the CPU the step itself wants the cores, and a raw batch is read in microseconds
    prefetch = config.data.prefetch if device.type != "cpu" else 0
    # between the steps: a thread would change their precision
    if isinstance(dataset.synthetic, GeneratedSamples):
        dataset.synthetic.generator.to(device)
        prefetch = 0
    spans = config.spans(dataset.resolution)
    return InfiniteLoader(
        dataset,
        make_sampler(config, dataset),
        device=device,
        prefetch=prefetch,
        stages=spans if len(spans) > 1 else (),
        batches_per_step=config.batches_per_step,
        # both tasks have it, the common part of their configs not
        alternating=getattr(vars(config).get("augment"), "flip", None) == "alternating",
    )


def tune_workers(config: RunConfig, training: Dataset, held_out: Dataset | None) -> str:
    """Measure the number of decoding threads if it is left open; returns what the plan says of
    reading.
    """
    auto, share = config.data.workers == "auto", config.batch_size // collectives.world_size()
    second, text = training.synthetic, ""
    if auto and second is not None and not second.gathers:
        second.workers = choose_workers(second, share)[0]
    if training.gathers:
        return "raw images, gathered without workers"
    if auto:
        training.workers, rates = choose_workers(training, share)
        text = (
            " (images/s by threads: "
            + ", ".join(f"{n}: {rate:,.0f}" for n, rate in rates.items())
            + ")"
        )
    if held_out is not None:
        held_out.workers = training.workers
    crop = "random crops" if training.crop is not None else "whole or in the middle"
    where = f"by {training.workers} threads" if training.workers else "in the training's own thread"
    return f"decoded {where}{text}, {crop}"


def data_text(dataset: Dataset) -> str:
    meta = dataset.meta
    classes = f"{len(meta.classes)} classes" if meta.classes else "no labels"
    classes += "" if meta.sets is None else f" in {len(meta.sets):,} sets of labels"
    files = f" in {len(dataset.shards)} files" if len(dataset.shards) > 1 else ""
    if meta.shards is not None:
        files = f" in {len(meta.shards)} tar files" if len(meta.shards) > 1 else " in a tar file"
    return f"{meta.count:,} images{files}, {dataset.spec}, {dataset.spec.words}, {classes}, {meta.encoding}"


def mixture_text(config: RunConfig, dataset: Dataset) -> str:
    second, mixture = dataset.synthetic, config.data.synthetic
    text = f"{second.meta.source}, {len(second):,} an epoch"
    if isinstance(second, Dataset):
        text = data_text(second) + (
            "" if second.meta.passport else ", no passport: they count as real"
        )
    text += (
        f"; {float(share_of(mixture, real_label_shares(config.data, dataset))):.3g} of each batch"
    )
    if (end := mixture.last_step(config.steps)) is not None:
        text += f", up to step {end}"
    text += f", loss weight {mixture.weight:g}" if mixture.weight != 1 else ""
    return text + (", of the classes that lack images" if mixture.balance == "fill" else "")
