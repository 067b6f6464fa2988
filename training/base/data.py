"""The data of a run: opened, checked against each other, sampled and loaded as the config says."""

import resource
from functools import reduce
from typing import Any

import numpy as np
import torch

from data.augment.transforms import Augment
from data.decode import RandomCrop
from data.errors import DamageError
from data.reading.dataset import Dataset
from data.reading.loader import InfiniteLoader
from data.reading.mixture import MixedDataset
from data.reading.sampler import GlobalSampler
from data.reading.several_files import open_at_once
from data.reading.weighted_sampling import balanced_weights, class_weights, load_sample_weights
from data.reading.workers import choose_workers
from metrics.lineage import lineage_of
from training.base.config import DataConfig, RunConfig
from training.base.generated import GeneratedSamples
from training.base.synthetic import (
    check_synthetic,
    class_shares,
    make_sampler,
    open_images,
    open_synthetic,
    require_same_images,
    synthetic_text,
)
from utils.classes import require_same_classes
from utils.distributed import collectives
from utils.errors import UserError
from utils.provenance import Lineage
from utils.runlog.run_log import say

OPEN_FILES = 96  # that a process needs besides the packed files: libraries, sockets, logs


def open_training(config: DataConfig) -> Dataset:
    """The training images, with synthetic ones behind them if there are any. Raises UserError naming the key."""
    if not config.path:
        raise UserError(
            "data.path is not set; pack images with `python -m data.pack SOURCE FILE` (installed: `duet pack`) "
            "and give --data.path FILE"
        )
    crop = RandomCrop(area=config.crop_area, aspect=config.crop_aspect) if config.crop == "random" else None
    synthetic = config.synthetic
    check_open_files(sum(open_at_once(path) for path in (config.path, config.val_path, synthetic.path) if path))
    training = (MixedDataset if synthetic.on else Dataset)(
        config.path,
        resolution=config.resolution,
        crop=crop,
        workers=0 if config.workers == "auto" else config.workers,
        on_damage=config.on_damage,
    )
    if synthetic.on:
        training.synthetic = open_synthetic(synthetic, training, real_label_shares(config, training))
    return training


def facts(training: Dataset, held_out: Dataset | None) -> dict[str, dict[str, Any]]:
    """What the run's report says of its images, by their role."""
    found = {}
    for role, reader in (("training", training), ("held-out", held_out), ("synthetic", training.synthetic)):
        if reader is not None:
            meta = reader.meta
            found[role] = {
                "path": str(reader.path),
                "count": len(reader),
                "by_class": dict(zip(meta.classes, meta.histogram, strict=False)),
                "channels": meta.channels,
                "resolution": reader.resolution,
                "encoding": meta.encoding,
                "content_hash": meta.content_hash,
            }
    return found


def lineage(config: RunConfig, training: Dataset) -> Lineage:
    """What the checkpoints of a run on these images record of them: the files, and who drew the synthetic ones."""
    second = training.synthetic
    if isinstance(second, GeneratedSamples):
        return lineage_of(training, passports=[second.passport(config.seed)])
    return lineage_of(training, *([] if second is None else [second]))


def open_held_out(config: DataConfig, training: Dataset) -> Dataset | None:
    """The held-out images at the training images' resolution, whole and in the middle, if there are any. Damage
    always stops their reading: a figure over other images would be another figure.
    """
    if not config.val_path:
        return None
    remedy = (
        f"give images held out from {config.path} with --data.val_path FILE (`python -m data.pack SOURCE FILE "
        "--val-share 0.1` makes both files), or leave it out: --data.val_path null"
    )
    size = training.resolution or None
    return open_images("data.val_path", config.val_path, remedy, resolution=size, workers=training.workers)


def check_data(config: RunConfig, training: Dataset, held_out: Dataset | None) -> None:
    """Raise UserError unless the files hold images of one size, labels of their classes and fit each other; warn of
    leaks.
    """
    if training.resolution == 0:
        raise UserError(
            f"{config.data.path}: its images have sizes of their own; set data.resolution N, or pack again with "
            "--size N"
        )
    training.labels()  # a damaged index or a label without a class ends it here, also for a GAN
    if training.synthetic is not None:
        shares, asked = real_label_shares(config.data, training), config.data.resolution is not None
        check_synthetic(config.data.synthetic, training, shares, scaled=asked)
    if held_out is None:
        return
    held_out.labels()
    paths, asked = (config.data.val_path, config.data.path), config.data.resolution is not None
    require_same_images(paths[0], held_out, paths[1], training, "pack both alike", scaled=asked)
    if collectives.is_main():
        _warn_of_leaks(training, held_out)
        if isinstance(training.synthetic, Dataset):
            _warn_of_leaks(training.synthetic, held_out)


def _warn_of_leaks(training: Dataset, held_out: Dataset) -> None:
    """Say how many held-out images are training images too, to the pixel."""
    try:
        leaked = int(np.isin(held_out.signatures()["digest"], training.signatures()["digest"]).sum())
    except DamageError as error:
        say(f"warning: {error}; whether held-out images are training images too is not checked")
        return
    if leaked:
        say(
            f"warning: {leaked:,} of the {len(held_out):,} images of {held_out.path} are training images too; "
            f"see `python -m data.duplicates {training.path} {held_out.path}`"
        )


def check_same_images(config: DataConfig, training: Dataset, held_out: Dataset | None) -> None:
    """Raise UserError, on all ranks, unless all of them have the same files: each node may have its own copies."""
    second = training.synthetic
    third = None if second is None else second.path
    for path, dataset in ((config.path, training), (config.val_path, held_out), (third, second)):
        hashes = collectives.gather_objects(None if dataset is None else dataset.meta.content_hash)
        other = next((rank for rank, found in enumerate(hashes) if found != hashes[0]), None)
        if other is not None:
            raise UserError(f"{path}: rank {other} has other images than rank 0; copy one file to all nodes")


def check_same_classes(config: DataConfig, training: Dataset, held_out: Dataset) -> None:
    """Raise UserError unless both have the same classes in the same order."""
    path, remedy = str(config.val_path), "pack both from the same class folders"
    require_same_classes(path, held_out.classes, str(config.path), training.classes, remedy)


def check_open_files(shards: int) -> None:
    """Raise the limit of open files as far as needed and allowed. Raises UserError if that is not enough."""
    needed = OPEN_FILES + 2 * shards
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return
    if hard != unlimited and hard < needed:
        raise UserError(
            f"a process may open {hard} files here (ulimit -n), training needs {needed}; run `ulimit -n {needed}` or "
            "more, or ask the administrator"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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


def label_shares(config: DataConfig, dataset: Dataset) -> list[float]:
    """How often each class is seen, relative to the others: the histogram, unless sampling is weighted or synthetic
    images are mixed in.
    """
    shares = real_label_shares(config, dataset)
    if dataset.synthetic is None or not shares:
        return shares
    return class_shares(config.synthetic, dataset.synthetic, shares).tolist()


def real_label_shares(config: DataConfig, dataset: Dataset) -> list[float]:
    """How often each class of the real images is seen, relative to the others."""
    weights = sampling_weights(config, dataset)
    if weights is None:
        return [float(count) for count in dataset.meta.histogram]
    return np.bincount(dataset.labels(), weights, minlength=len(dataset.classes)).tolist()


def make_loader(config: RunConfig, dataset: Dataset, device: torch.device) -> InfiniteLoader:
    """The endless training loader of this rank."""
    sampler = make_sampler_of(config, dataset)
    # on the CPU the step itself wants the cores, and a raw batch is read in microseconds
    prefetch = config.data.prefetch if device.type != "cpu" else 0
    if isinstance(dataset.synthetic, GeneratedSamples):  # between the steps: a thread would change their precision
        dataset.synthetic.to(device)
        prefetch = 0
    spans = config.spans(dataset.resolution)
    augment: Augment | None = vars(config).get("augment")  # both tasks have it, the common part of their configs not
    return InfiniteLoader(
        dataset,
        sampler,
        device=device,
        prefetch=prefetch,
        stages=spans if len(spans) > 1 else (),
        batches_per_step=config.batches_per_step,
        alternating=augment is not None and augment.flip == "alternating",
    )


def make_sampler_of(config: RunConfig, dataset: Dataset) -> GlobalSampler:
    """The order of this rank's samples. Raises UserError for weights, and for classes that cannot be filled up."""
    weights = sampling_weights(config.data, dataset)
    order: dict[str, Any] = {
        "batch_size": config.batch_size,
        "seed": config.seed,
        "rank": collectives.rank(),
        "world_size": collectives.world_size(),
        "weights": weights,
        "groups": None if weights is None or not dataset.classes else dataset.labels(),
    }
    if not isinstance(dataset, MixedDataset):
        return GlobalSampler(len(dataset), **order)
    shares, end = real_label_shares(config.data, dataset), config.data.synthetic.last_step(config.steps)
    until = None if end is None else end * config.batches_per_step
    return make_sampler(config.data.synthetic, dataset, shares, until=until, **order)


def tune_workers(config: RunConfig, training: Dataset, held_out: Dataset | None) -> str:
    """Measure the number of decoding threads if it is left open; returns what the plan says of reading."""
    second = training.synthetic
    if second is not None and not second.gathers and config.data.workers == "auto":
        second.workers = choose_workers(second, config.batch_size // collectives.world_size())[0]
    if training.gathers:
        return "raw images, gathered without workers"
    text = ""
    if config.data.workers == "auto":
        training.workers, rates = choose_workers(training, config.batch_size // collectives.world_size())
        text = " (images/s by threads: " + ", ".join(f"{n}: {rate:,.0f}" for n, rate in rates.items()) + ")"
    if held_out is not None:
        held_out.workers = training.workers
    crop = "random crops" if training.crop is not None else "whole or in the middle"
    where = f"by {training.workers} threads" if training.workers else "in the training's own thread"
    return f"decoded {where}{text}, {crop}"


def data_text(dataset: Dataset) -> str:
    """What the plan says of a data set."""
    meta = dataset.meta
    classes = f"{len(meta.classes)} classes" if meta.classes else "no labels"
    channels = "grey" if meta.channels == 1 else "RGB"
    files = f" in {len(dataset.shards)} files" if len(dataset.shards) > 1 else ""
    if meta.shards is not None:
        files = f" in {len(meta.shards)} tar files" if len(meta.shards) > 1 else " in a tar file"
    return f"{meta.count:,} images{files}, {dataset.resolution} px, {channels}, {classes}, {meta.encoding}"


def mixture_text(config: RunConfig, dataset: Dataset) -> str:
    """What the plan says of how synthetic images are mixed in."""
    second, shares = dataset.synthetic, real_label_shares(config.data, dataset)
    what = f"{second.meta.source}, {len(second):,} an epoch"
    if isinstance(second, Dataset):
        what = data_text(second) + ("" if second.meta.passport else ", no passport: they count as real")
    return f"{what}; {synthetic_text(config.data.synthetic, shares, config.steps)}"
