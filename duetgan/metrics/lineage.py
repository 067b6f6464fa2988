"""Where images and weights come from, and who may judge a generator: not what has seen too much."""

import glob
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from duetgan.data.lmdb.format import Meta
from duetgan.data.reading.dataset import Dataset, dataset_for_model
from duetgan.data.reading.several_files import expand_braces
from duetgan.metrics.features.extractors import fingerprint
from duetgan.models.classifier import Classifier
from duetgan.models.restore import classifier_from, read
from duetgan.utils.checkpoint import Checkpoint, resolve
from duetgan.utils.errors import UserError, explained, require_same_classes
from duetgan.utils.provenance import Generated, Lineage, Provenance, recorded
from duetgan.utils.runlog.run_log import say

NONE_NAMED = "the run's config names no data.path"
# share of the test images that a judge may have been trained on: public splits share a few
TOLERATED = 0.01


def provenance_of(
    generator: nn.Module,
    checkpoint: Checkpoint,  # that it comes from
    *,
    seed: int,  # of the draws
    truncation_psi: float = 1.0,
    selection: str | None = None,  # the rule by which samples are chosen; None: all that are drawn
) -> Provenance:
    """The provenance of samples of a generator. Raises UserError for a seed or psi that no file can
    hold.
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
        lambda why: f"the samples' provenance cannot be written: {why}; give another value",
    ):
        return Generated.read(provenance).model_dump()


def lineage_of(*readers: Dataset, samples: Sequence[Provenance] = ()) -> Lineage:
    """What training on these files, and on samples of this provenance, leaves in a checkpoint."""
    metas = [meta for reader in readers for meta in metas_of(reader)]
    return Lineage.of(
        trained_on=[
            known for meta in metas for known in (meta.content_hash, meta.fingerprint) if known
        ],
        synthetic=[*(meta.passport for meta in metas if meta.passport), *samples],
    )


def metas_of(reader: Dataset) -> list[Meta]:
    """The metadata of a data set, and of each of its files where there are several."""
    return [reader.meta, *(shard.meta for shard in reader.shards if len(reader.shards) > 1)]


def data_of(checkpoint: Checkpoint, key: str) -> Any:
    """`data.path` or `data.val_path` of a run's config: a path or pattern, several, or None. A
    relative one that is not below the current folder is looked for below those that the checkpoint
    lies in: the run was most likely started in one; then in a folder data beside the run, where a
    quickstart has it.
    """

    def found(path: str) -> str:
        above = Path(checkpoint.get("file", "")).absolute().parents
        places = [path, *(str(folder / path) for folder in above)]
        places += [str(folder / "data" / Path(path).name) for folder in above[:3]]
        return next((place for place in places if any(map(glob.glob, expand_braces(place)))), path)

    paths = (checkpoint["config"].get("data") or {}).get(key)
    return found(paths) if isinstance(paths, str) else paths and [found(path) for path in paths]


def training_images(checkpoint: Checkpoint) -> tuple[Dataset | None, str]:
    """The images that a checkpoint's model was trained on, a GAN's second real set; or None and the
    reason.
    """
    path = data_of(checkpoint, "path")
    if not path:
        return None, NONE_NAMED
    try:
        train = dataset_for_model(path, checkpoint)
    except UserError as error:
        return None, f"the training images cannot be read: {error}"
    content = (checkpoint.get("data") or {}).get("content_hash")
    if content and content != train.meta.content_hash:
        train.close()
        return None, f"{train.path} holds other images by now"
    return train, ""


def leaks(reader: Dataset, train: Dataset | None, why: str = "") -> dict[str, str]:
    """A note under the key `leaks` where test images are among the training images, pixel for
    pixel, or why that is not known; else none.
    """
    if train is None:
        told = f"whether test images are training images as well is not known: {why}"
        return {} if why == NONE_NAMED else {"leaks": told}
    if not (count := overlap(reader, train)):
        return {}
    text = (
        f"{count} of {len(reader)} test images are training images as well, so the figures flatter: see "
        f"duet duplicates {train.path} {reader.path}"
    )
    return {"leaks": text}


def overlap(reader: Dataset, train: Dataset) -> int:
    """How many of `reader`'s images are in `train`, pixel for pixel; 0 where a file has no
    signatures.
    """
    try:
        return int(np.isin(reader.signatures()["digest"], train.signatures()["digest"]).sum())
    except UserError:
        return 0


def run_folder(checkpoint: Path) -> Path:
    """The run that a checkpoint file belongs to; for a file outside a run the folder that it lies
    in.
    """
    return (
        checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    )


def load_judge(
    run: str,  # folder or file
    checkpoint: Checkpoint,  # of the generator
    names: list[str],  # of its classes
    device: torch.device,
    reader: Dataset | None,  # the test images; None: there are none
    *,
    option: str = "--classifier",  # that named it
    # folder or file of a classifier whose gradients or answers edits were found with
    guide: str | None = None,
) -> Classifier:
    """The classifier that names the samples.

    Raises UserError if it helped to train the generator or to find edits (a guide's other
    checkpoints, too), was trained on samples of any generator, has seen the test images, or knows
    other classes.
    """
    file = resolve(run)
    judge = read(file)
    several = reader is not None and reader.meta.sets is not None
    classifier = classifier_from(judge, device, several=several)
    own, many = classifier.spec, classifier.thresholds is not None
    if reader is not None and (own.pixel_format, many) != (reader.spec.pixel_format, several):
        raise UserError(
            f"{option} {run} was trained on images of {own.words}, {'several labels' if many else 'one label'} each; "
            "give one of such as the generator's"
        )
    helper = (checkpoint["config"].get("loss") or {}).get("classifier")
    taught = helper and run_folder(file).resolve() in (
        Path(helper).resolve(),
        run_folder(Path(helper)).resolve(),
    )
    weights = fingerprint(classifier)
    if guide is not None:
        other = resolve(guide)
        of_its_run = (
            file.parent.name == "checkpoints"
            and run_folder(file).resolve() == run_folder(other).resolve()
        )
        if of_its_run or weights == fingerprint(classifier_from(read(other))):
            raise UserError(
                f"{option} {run} is the classifier that the edits were found with; give one of another training"
            )
    taught_by = Lineage.of(teachers=[weights]) if taught else recorded(checkpoint)
    if why := unfit(judge, reader, taught_by, weights):
        raise UserError(f"{option} {run} {why}")
    if names:
        require_same_classes("the generator", names, f"the classifier {run}", judge["classes"])
    return classifier


def unfit(
    judge: Checkpoint, reader: Dataset | None, generator: Lineage | None = None, weights: str = ""
) -> str:
    """Why a classifier with these weights cannot judge a generator's samples beside these test
    images, and the remedy; empty if it can.

    Neither it nor the weights it started from may have been trained on samples, or on the test
    images: on a file of the same content or source, or on one they were drawn from. Where the file
    it was trained on is at hand, no more than `TOLERATED` of the test images may be in it, pixel
    for pixel. Without test images that is not asked.
    """
    images = set() if reader is None else identities(reader)
    why = recorded(judge).may_not_judge(generator or Lineage.of(), weights, images)
    share = 0.0 if reader is None or why else shared(judge, reader)
    if share > TOLERATED:
        why = f"was trained on {share:.1%} of the test images"
    if reader is None or not why.endswith("test images"):
        return why
    how = f" (pixel for pixel; {TOLERATED:.0%} are tolerated)" if share else ""
    return f"{why} {reader.path}{how}; give one that was not, or other images with --data"


def identities(reader: Dataset) -> set[str]:
    """What test images are known by: hashes of content and source, of every file, and of the set it
    was drawn from.
    """
    metas = metas_of(reader)
    known = [
        text
        for meta in metas
        for text in (meta.content_hash, meta.fingerprint, meta.split and meta.split.whole)
    ]
    return {text for text in known if text}


def shared(judge: Checkpoint, reader: Dataset) -> float:
    """The share of the test images that are in the file a classifier was trained on, pixel for
    pixel; 0 if that is not at hand or another one by now, with a warning, and as `overlap`.
    """
    content, (trained, why) = (judge.get("data") or {}).get("content_hash"), training_images(judge)
    with trained or nullcontext():
        if trained is not None and content:
            return overlap(reader, trained) / len(reader)
    if content:
        say(f"warning: whether the judge saw test images, pixel for pixel, is not known: {why}")
    return 0.0
