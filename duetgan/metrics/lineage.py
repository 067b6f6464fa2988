"""Trace images and weights to their origin, and check that a judge is independent.

A judge is a classifier that evaluates a generator's samples. It must have learnt neither from the
generator nor from the test images.
"""

import glob
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import nn

from duetgan.data.lmdb.format import Meta
from duetgan.data.opening import dataset_for_model
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import fingerprint
from duetgan.models.classifier import Classifier
from duetgan.models.restore import classifier_from, read
from duetgan.utils.checkpoint import Checkpoint, resolve
from duetgan.utils.checkpoint.provenance import Generated, Lineage, Provenance, recorded
from duetgan.utils.errors import UserError, explained, require_same_classes
from duetgan.utils.runlog.run_log import say

NO_DATA_PATH = "the run's config names no data.path"
# fraction of the test images that a judge may have been trained on, because training and test sets
# of public datasets have a few images in common
TOLERATED = 0.01


def provenance_of(
    generator: nn.Module,
    checkpoint: Checkpoint,  # of the generator
    *,
    seed: int,  # of the samples
    truncation_psi: float = 1.0,
    selection: str | None = None,  # rule that selected the samples, if any
) -> Provenance:
    """Return the provenance of a generator's samples: weights, seed, truncation and selection.

    Raises UserError if a packed file cannot hold the seed or psi.
    """
    provenance = {
        "generator": fingerprint(generator),
        "step": checkpoint["step"],
        "seed": seed,
        "truncation_psi": float(truncation_psi),
        "selection": selection,
        "trained_on": (checkpoint.get("data") or {}).get("content_hash") or None,
        "classes": list(checkpoint["classes"]),
    }
    with explained(
        ValueError,
        lambda error: f"the samples' provenance cannot be written: {error}; give another value",
    ):
        return Generated.read(provenance).model_dump()


def lineage_of(*datasets: Dataset, samples: Sequence[Provenance] = ()) -> Lineage:
    """Return the lineage of weights that were trained on `datasets` and on samples.

    A lineage has the hashes of all images that weights were trained on. `samples` are provenances
    of generated images that are in none of the datasets.
    """
    metas = [meta for dataset in datasets for meta in metas_of(dataset)]
    hashes = chain.from_iterable((meta.content_hash, meta.fingerprint) for meta in metas)
    return Lineage.of(
        trained_on=list(filter(None, hashes)),
        synthetic=[*(meta.passport for meta in metas if meta.passport), *samples],
    )


def metas_of(dataset: Dataset) -> list[Meta]:
    """Return the metadata of a dataset, and of each of its files if there are several."""
    return [dataset.meta, *(shard.meta for shard in dataset.shards if len(dataset.shards) > 1)]


def data_of(checkpoint: Checkpoint, key: str) -> str | None:
    """Return `data.path` or `data.val_path` of a run's config, if possible as an existing path.

    A path that does not exist is tried relative to each folder above the checkpoint, because the
    run was most likely started in one of them. Then its file name is tried in a subfolder `data` of
    the nearest three of these folders, because quickstart.py has the data beside the runs.

    Args:
        key: `path` or `val_path`.

    Returns:
        A path or pattern, or None if the config has none.
    """
    path: str | None = (checkpoint["config"].get("data") or {}).get(key)
    if not path:
        return None
    parents = Path(checkpoint.get("file", "")).absolute().parents
    candidates = [path, *(str(folder / path) for folder in parents)]
    candidates += [str(folder / "data" / Path(path).name) for folder in parents[:3]]
    for candidate in candidates:
        if glob.glob(candidate):
            return candidate
    return path


def training_images(checkpoint: Checkpoint) -> tuple[Dataset | None, str]:
    """Open the dataset that a checkpoint's model was trained on.

    Returns the dataset and "", or None and the reason why it is not available.
    """
    path = data_of(checkpoint, "path")
    if not path:
        return None, NO_DATA_PATH
    try:
        train = dataset_for_model(path, checkpoint)
    except UserError as error:
        return None, f"the training images cannot be read: {error}"
    content = (checkpoint.get("data") or {}).get("content_hash")
    if content and content != train.meta.content_hash:
        train.close()
        return None, f"{train.path} holds other images by now"
    return train, ""


def leaks(dataset: Dataset, train: Dataset | None, reason: str) -> dict[str, str]:
    """Return {"leaks": note} if test images are also training images, pixel for pixel; else {}.

    If this cannot be checked, the note says so, except for a run whose config names no training
    images.

    Args:
        dataset: The test images.
        train: The training images, or None if they are not available.
        reason: The reason why the training images are not available.
    """
    if train is None:
        if reason == NO_DATA_PATH:
            return {}
        return {"leaks": f"whether test images are training images as well is not known: {reason}"}
    if not (count := overlap(dataset, train)):
        return {}
    text = (
        f"{count} of {len(dataset)} test images are training images as well, so the metrics are too good: see "
        f"duet duplicates {train.path} {dataset.path}"
    )
    return {"leaks": text}


def overlap(dataset: Dataset, train: Dataset) -> int:
    """Return the number of images of `dataset` that are also in `train`, pixel for pixel.

    Returns 0 if a file has no signatures.
    """
    try:
        return int(np.isin(dataset.signatures()["digest"], train.signatures()["digest"]).sum())
    except UserError:
        return 0


def run_folder(checkpoint: Path) -> Path:
    """Return the run folder of a checkpoint file: the folder above `checkpoints`.

    If the file is not in a folder `checkpoints`, return the file's folder.
    """
    folder = checkpoint.parent
    return folder.parent if folder.name == "checkpoints" else folder


def load_judge(
    run: str,  # run folder or checkpoint file of the classifier
    checkpoint: Checkpoint,  # of the generator
    names: list[str],  # class names of the generator
    device: torch.device,
    dataset: Dataset | None,  # the test images, if any
    *,
    option: str = "--classifier",  # the option to name in errors
) -> Classifier:
    """Load the judge, the classifier that evaluates a generator's samples.

    Raises:
        UserError: If the classifier helped to train the generator, was trained on samples or on the
            test images, has other classes than the generator, or takes images with another pixel
            format or number of labels (one or several) than the test images.
    """
    file = resolve(run)
    judge = read(file)
    several = dataset is not None and dataset.meta.sets is not None
    classifier = classifier_from(judge, device, several=several)
    kind = classifier.spec.pixel_format, classifier.thresholds is not None
    if dataset is not None and kind != (dataset.spec.pixel_format, several):
        labels = "one label" if classifier.thresholds is None else "several labels"
        raise UserError(
            f"{option} {run} was trained on images of {classifier.spec.words}, {labels} each; give a "
            "classifier of images like the generator's"
        )
    helper = (checkpoint["config"].get("loss") or {}).get("classifier")
    is_helper = helper and run_folder(file).resolve() in (
        Path(helper).resolve(),
        run_folder(Path(helper)).resolve(),
    )
    weights = fingerprint(classifier)
    generator_lineage = Lineage.of(teachers=[weights]) if is_helper else recorded(checkpoint)
    if reason := unfit(judge, dataset, generator_lineage, weights):
        raise UserError(f"{option} {run} {reason}")
    if names:
        require_same_classes("the generator", names, f"the classifier {run}", judge["classes"])
    return classifier


def unfit(
    judge: Checkpoint, dataset: Dataset | None, generator: Lineage | None = None, weights: str = ""
) -> str:
    """Return the reason why a classifier cannot judge a generator's samples, and the remedy.

    Neither the classifier nor the weights from which its training started may have learnt from
    samples or from the test images. The test images are recognised by the content and the source of
    their file, and by the larger dataset from which it was split. If the classifier's training
    images are available, at most the fraction `TOLERATED` of the test images may be among them,
    pixel for pixel.

    Args:
        judge: Checkpoint of the classifier.
        dataset: The test images; if None, the checks that need them are skipped.
        generator: Lineage of the generator.
        weights: Fingerprint of the classifier.

    Returns:
        The reason; empty if the classifier can judge.
    """
    images = set() if dataset is None else identities(dataset)
    reason = recorded(judge).may_not_judge(generator or Lineage.of(), weights, images)
    if dataset is None:
        return reason
    suffix = ""
    if not reason and (fraction := seen_fraction(judge, dataset)) > TOLERATED:
        reason = f"was trained on {fraction:.1%} of the test images"
        suffix = f" (pixel for pixel; {TOLERATED:.0%} are tolerated)"
    if not reason.endswith("test images"):
        return reason
    return f"{reason} {dataset.path}{suffix}; give one that was not, or other images with --data"


def identities(dataset: Dataset) -> set[str]:
    """Return the hashes that identify a dataset's files.

    They are the hashes of a file's content and source, and of the larger dataset from which the
    file was split.
    """
    hashes: set[str | None] = set()
    for meta in metas_of(dataset):
        hashes |= {meta.content_hash, meta.fingerprint}
        if meta.split is not None:
            hashes.add(meta.split.whole)
    return set(filter(None, hashes))


def seen_fraction(judge: Checkpoint, dataset: Dataset) -> float:
    """Return the fraction of the test images that a classifier was trained on, pixel for pixel.

    Returns 0 with a warning if the classifier's training images are missing or have changed.
    Returns 0 if a file has no signatures.
    """
    content = (judge.get("data") or {}).get("content_hash")
    trained, reason = training_images(judge)
    with trained or nullcontext():
        if trained is not None and content:
            return overlap(dataset, trained) / len(dataset)
    if content:
        say(f"warning: whether the judge saw test images, pixel for pixel, is not known: {reason}")
    return 0.0
