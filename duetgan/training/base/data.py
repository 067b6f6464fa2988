"""Open, check, sample and load the images of a run, as its config says."""

import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial, reduce

import numpy as np
import torch

from duetgan.data.images.decode import RandomCrop
from duetgan.data.opening import open_dataset
from duetgan.data.packing.packed_files import shard_paths
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import InfiniteLoader
from duetgan.data.reading.mixture import MixedDataset, MixedSampler
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.data.reading.stages import StagedLoader
from duetgan.data.reading.weighted_sampling import balanced_weights, class_weights
from duetgan.metrics.lineage import lineage_of
from duetgan.training.base.config import DataConfig, RunConfig, SyntheticConfig
from duetgan.training.base.generated import GeneratedSamples
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import DamageError, UserError, refuse, require_same_classes
from duetgan.utils.machine import cores
from duetgan.utils.runlog.run_log import say


def open_training(config: DataConfig) -> Dataset:
    """Open the training images, mixed with synthetic images if the config names some.

    Raises UserError if images are missing or cannot be opened.
    """
    if not config.path:
        raise UserError(
            "data.path is not set; pack images with `duet pack SOURCE FILE` and give --data.path FILE"
        )
    crop = None
    if config.crop == "random":
        crop = RandomCrop(area=config.crop_area, aspect=config.crop_aspect)
    synthetic = config.synthetic
    with suppress(ValueError):  # Many files may be open at once; macOS refuses its hard limit.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    training = open_dataset(
        config.path,
        MixedDataset if synthetic.on else Dataset,
        resolution=config.resolution,
        crop=crop,
        workers=decoding_threads(config),
    )
    if synthetic.checkpoint is not None:
        frequencies = None
        if synthetic.balance == "fill":
            frequencies = missing_per_class(real_label_frequencies(config, training)).tolist()
        training.synthetic = GeneratedSamples(synthetic.checkpoint, len(training), frequencies)
    elif synthetic.path is not None:
        training.synthetic = open_images(
            "data.synthetic.path",
            synthetic.path,
            "make it with `python generate.py dataset`",
            resolution=training.resolution or None,
            workers=training.workers,
            crop=crop,
        )
    return training


def open_images(
    key: str,
    path: str,
    remedy: str,
    *,
    resolution: int | str | None,
    workers: int,
    crop: RandomCrop | None = None,
) -> Dataset:
    """Open the images at `path`, which is the value of the config key `key`.

    Raises UserError if they cannot be opened. If a file is missing, the message contains the key
    and `remedy`.
    """
    try:
        return open_dataset(path, resolution=resolution, workers=workers, crop=crop)
    except UserError as error:
        if all(file.exists() for file in shard_paths(path)):
            raise
        problem = str(error).removesuffix("; make it with duet pack")
        raise UserError(f"{key} {problem}; {remedy}") from None


def facts(training: Dataset, held_out: Dataset | None) -> dict[str, dict[str, object]]:
    """Return a dict from role to properties of the images, for the run's report.

    Roles are "training", "held-out" and "synthetic". A role without images is left out.
    """
    roles = {"training": training, "held-out": held_out, "synthetic": training.synthetic}
    result: dict[str, dict[str, object]] = {}
    for role, dataset in roles.items():
        if dataset is None:
            continue
        meta = dataset.meta
        result[role] = {
            "path": str(dataset.path),
            "count": len(dataset),
            "by_class": dict(zip(meta.classes, meta.by_class, strict=False)),
            "channels": meta.channels,
            "resolution": dataset.spec.resolution,
            "encoding": meta.encoding,
            "content_hash": meta.content_hash,
        }
        if meta.split is not None and meta.split.groups is not None:
            result[role]["groups"] = f"{meta.split.groups:,} ({meta.split.group_by})"
    return result


def lineage(config: RunConfig, training: Dataset) -> Lineage:
    """Return the lineage of a run that trains on `training` and the synthetic images in it."""
    synthetic = training.synthetic
    if synthetic is None:
        return lineage_of(training)
    if isinstance(synthetic, GeneratedSamples):
        return lineage_of(training, samples=[synthetic.passport(config.seed)])
    return lineage_of(training, synthetic)


def open_held_out(config: DataConfig, training: Dataset) -> Dataset | None:
    """Open the held-out images at the resolution of the training images, without random crops.

    Return None if the config names none.
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
    """Check that all images have one size, and that training, synthetic and held-out images match.

    Raises UserError if a check fails. Prints a warning about held-out images that are training
    images too.
    """
    refuse(
        (
            training.resolution == 0,
            f"{config.data.path}: its images have sizes of their own; set data.resolution N, or pack "
            "again with --size N",
        ),
        (
            getattr(vars(config).get("augment"), "trivial_augment", False)
            and not training.spec.plain,
            f"augment.trivial_augment means 8-bit grey or RGB, the images of {training.path} are "
            f"{training.spec.words}: set it false",
        ),
    )
    # Reading the labels raises an error for a damaged index and for a label without a class.
    training.label_numbers()
    synthetic = training.synthetic
    resized = config.data.resolution is not None  # applies to files, not to generated images
    if synthetic is not None:
        for images in (training, synthetic):  # labels() raises an error for several labels an image
            images.labels()
        remedy = "draw samples from a generator of these images"
        any_size = resized and isinstance(synthetic, Dataset)
        require_same_images(
            synthetic.path, synthetic, training.path, training, remedy, any_size=any_size
        )
        remedy = "draw samples from a generator that was trained on these classes"
        require_same_classes(
            synthetic.path, synthetic.classes, training.path, training.classes, remedy
        )
        fill_weights(config.data, training)
    if held_out is None:
        return
    held_out.label_numbers()
    path, remedy = config.data.val_path, "pack both alike, floats with one --range"
    require_same_images(path, held_out, config.data.path, training, remedy, any_size=resized)
    if collectives.is_main():
        _warn_of_leaks(training, held_out)
        if isinstance(synthetic, Dataset):
            _warn_of_leaks(synthetic, held_out)


def require_same_images(
    path: object,
    images: Dataset | GeneratedSamples,
    training_path: object,
    training: Dataset,
    remedy: str,
    *,
    any_size: bool,
) -> None:
    """Raise UserError unless `images` have the channels, bit depth and size of the training images.

    With `any_size` the size may differ. The two paths and `remedy` are parts of the message.
    """
    spec, expected = images.meta.spec, training.spec
    resized = replace(spec, height=expected.height, width=expected.width)
    same_size = any_size or not spec.side or spec.size == expected.size
    if resized != expected or not same_size:
        described = spec if spec.side else expected
        raise UserError(
            f"{path}: images of {described}, {spec.words}, those of {training_path} are of "
            f"{expected}, {expected.words}; {remedy}"
        )


def _warn_of_leaks(training: Dataset, held_out: Dataset) -> None:
    if training.meta.spec.size != held_out.meta.spec.size:
        say("warning: leaks of held-out images are not checked: they have other sizes")
        return
    try:
        digests = held_out.signatures()["digest"]
        leaked = int(np.isin(digests, training.signatures()["digest"]).sum())
    except DamageError as error:
        say(f"warning: {error}; whether held-out images are training images too is not checked")
        return
    if leaked:
        say(
            f"warning: {leaked:,} of the {len(held_out):,} images of {held_out.path} are training "
            f"images too; see `duet duplicates {training.path} {held_out.path}`"
        )


def check_same_images(config: DataConfig, training: Dataset, held_out: Dataset | None) -> None:
    """Raise UserError on all ranks if the ranks have opened files with different content.

    The content may differ because each node may have its own copies of the files.
    """
    synthetic = training.synthetic
    synthetic_path = None if synthetic is None else synthetic.path
    datasets = (
        (config.path, training),
        (config.val_path, held_out),
        (synthetic_path, synthetic),
    )
    for path, dataset in datasets:
        content = None if dataset is None else dataset.meta.content_hash
        hashes = collectives.gather_objects(content)
        for rank, rank_content in enumerate(hashes):
            if rank_content != hashes[0]:
                raise UserError(
                    f"{path}: rank {rank} has other images than rank 0; copy one file to all nodes"
                )


def check_same_classes(config: DataConfig, training: Dataset, held_out: Dataset) -> None:
    """Raise UserError unless training and held-out images have the same classes in the same order.

    Also raise it if images have several labels in only one of the two data sets.
    """
    path, remedy = str(config.val_path), "pack both from the same class folders"
    require_same_classes(path, held_out.classes, str(config.path), training.classes, remedy)
    if (held_out.meta.sets is None) != (training.meta.sets is None):
        raise UserError(
            f"{path} and {config.path}: in one of them alone images have several labels; {remedy}"
        )


# --- sampling weights, the mixture with synthetic images, and the order of samples


def sampling_weights(config: DataConfig, dataset: Dataset) -> np.ndarray | None:
    """Return the sampling weight of each record, float64 [records]; None if all are equal.

    Raises UserError if the config's weights do not fit the data set.
    """
    factors = []
    if config.sampling == "balanced":
        factors.append(balanced_weights(dataset.labels(), dataset.classes))
    if config.class_rates:
        factors.append(class_weights(dataset.labels(), dataset.classes, config.class_rates))
    return reduce(np.multiply, factors) if factors else None


def real_label_frequencies(config: DataConfig, dataset: Dataset) -> np.ndarray:
    """Return the relative frequency of each label among the real images, float64 [labels]."""
    weights = sampling_weights(config, dataset)
    if weights is None:
        return np.array(dataset.meta.histogram, np.float64)
    return np.bincount(dataset.label_numbers(), weights, minlength=dataset.meta.labels)


def label_frequencies(config: DataConfig, dataset: Dataset) -> list[float]:
    """Return the relative frequency of each label among real and synthetic images together."""
    real, source = real_label_frequencies(config, dataset), dataset.synthetic
    if source is None or not len(real):
        return real.tolist()
    if config.synthetic.balance == "fill":
        synthetic = missing_per_class(real)
    else:
        synthetic = np.array(source.meta.histogram, np.float64)
    fraction = float(synthetic_fraction(config.synthetic, real))
    mixed = (1 - fraction) * real / real.sum() + fraction * synthetic / synthetic.sum()
    return mixed.tolist()


def missing_per_class(class_frequencies: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the difference of each class's frequency from the largest one, float64 [classes].

    Raises UserError if all classes are equally frequent.
    """
    frequencies = np.array(class_frequencies, np.float64)
    largest = frequencies.max(initial=0.0)
    missing = largest - frequencies
    missing[missing <= 1e-9 * largest] = 0.0  # sums of weights are rounded
    if not missing.any():
        raise UserError(
            "data.synthetic.balance fill: no class lacks images, all are seen equally often; set it "
            "off and give data.synthetic.share"
        )
    return missing


def synthetic_fraction(
    config: SyntheticConfig, class_frequencies: Sequence[float] | np.ndarray
) -> Fraction:
    """Return the fraction of the global batch that is synthetic, in 0..1.

    `class_frequencies` are those of the real images.
    """
    if config.share is not None:
        return Fraction(str(config.share))
    missing = Fraction(float(missing_per_class(class_frequencies).sum()))
    return missing / (missing + Fraction(float(np.sum(class_frequencies))))


def fill_weights(config: DataConfig, dataset: Dataset) -> np.ndarray | None:
    """Return the sampling weights of synthetic images that make all classes equally frequent.

    The weights are float64 [n]. Return None if `data.synthetic.balance` is off, or if the images
    are generated during training.

    Raises UserError if a class that needs synthetic images has none in the file.
    """
    source = dataset.synthetic
    if config.synthetic.balance != "fill" or not isinstance(source, Dataset):
        return None
    missing = missing_per_class(real_label_frequencies(config, dataset))
    present = np.bincount(source.labels(), minlength=len(missing))
    empty = np.flatnonzero((missing > 0) & (present == 0))
    if len(empty):
        name = source.classes[empty[0]]
        raise UserError(
            f"{source.path}: no image of class {name!r}, which data.synthetic.balance fill is to "
            "fill up"
        )
    return (missing / np.maximum(present, 1))[source.labels()]


def make_sampler(config: RunConfig, dataset: Dataset) -> GlobalSampler:
    """Build this rank's sampler of training images.

    Raises UserError for wrong weights, or if the synthetic images cannot fill up rare classes.
    """
    weights = sampling_weights(config.data, dataset)
    groups = None if weights is None or not dataset.classes else dataset.label_numbers()
    build = partial(
        GlobalSampler,
        batch_size=config.batch_size,
        seed=config.seed,
        rank=collectives.rank(),
        world_size=collectives.world_size(),
    )
    if not isinstance(dataset, MixedDataset):
        return build(len(dataset), weights=weights, groups=groups)
    source, mixture = dataset.synthetic, config.data.synthetic
    fill = fill_weights(config.data, dataset)
    synthetic = build(
        len(source),
        weights=fill,
        groups=None if fill is None else source.labels(),
        # generated samples already have the right labels, and are random in any order
        shuffle=isinstance(source, Dataset),
        stream="synthetic",
    )
    end = mixture.last_step(config.steps)
    return MixedSampler(
        len(dataset),
        synthetic=synthetic,
        content=source.meta.content_hash,
        fraction=synthetic_fraction(mixture, real_label_frequencies(config.data, dataset)),
        until=None if end is None else end * config.batches_per_step,
        weights=weights,
        groups=groups,
        **build.keywords,
    )


def make_loader(config: RunConfig, dataset: Dataset, device: torch.device) -> InfiniteLoader:
    """Build this rank's endless loader of training images."""
    # On a CPU the step itself needs the cores, and a batch of raw images is read in microseconds.
    prefetch = config.data.prefetch if device.type != "cpu" else 0
    if isinstance(dataset.synthetic, GeneratedSamples):
        dataset.synthetic.generator.to(device)
        # Drawing samples changes the global precision, so it must not run in parallel with a step.
        prefetch = 0
    spans = config.spans(dataset.resolution)
    build: Callable[..., InfiniteLoader] = InfiniteLoader
    if len(spans) > 1:
        build = partial(StagedLoader, stages=spans)
    return build(
        dataset,
        make_sampler(config, dataset),
        device=device,
        prefetch=prefetch,
        batches_per_step=config.batches_per_step,
        # Both tasks' configs have a section `augment`, RunConfig has none.
        alternating=getattr(vars(config).get("augment"), "flip", None) == "alternating",
    )


def decoding_threads(config: DataConfig) -> int:
    """Return the number of decoding threads of this process: `config.workers`, if it is a number.

    For "auto" it is the number of cores, or 0 on a single core.
    """
    if config.workers != "auto":
        return config.workers
    return cores() if cores() > 1 else 0


def data_text(dataset: Dataset) -> str:
    meta = dataset.meta
    classes = f"{len(meta.classes)} classes" if meta.classes else "no labels"
    if meta.sets is not None:
        classes += f" in {len(meta.sets):,} sets of labels"
    return (
        f"{meta.count:,} images, {dataset.spec}, {dataset.spec.words}, {classes}, {meta.encoding}"
    )


def mixture_text(config: RunConfig, dataset: Dataset) -> str:
    source, mixture = dataset.synthetic, config.data.synthetic
    if isinstance(source, Dataset):
        text = data_text(source)
        if not source.meta.passport:
            text += ", no passport: they count as real"
    else:
        text = f"{source.meta.source}, {len(source):,} an epoch"
    fraction = synthetic_fraction(mixture, real_label_frequencies(config.data, dataset))
    text += f"; {float(fraction):.3g} of each batch"
    return text
