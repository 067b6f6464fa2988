"""The classifier that names a generator's samples, and what makes it unfit to judge: what it has seen before."""

from pathlib import Path

import torch

from data.reading.dataset import Dataset, dataset_for_model
from metrics.evidence import TOLERATED, overlap
from metrics.extractors import fingerprint
from metrics.lineage import metas_of
from models.classifier import Classifier
from models.restore import classifier_from
from utils.checkpoint import Checkpoint, load, resolve
from utils.classes import require_same_classes
from utils.errors import UserError
from utils.passport import recorded


def run_folder(checkpoint: Path) -> Path:
    """The run that a checkpoint file belongs to; for a file outside a run the folder that it lies in."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent


def load_judge(
    run: str,  # folder or file
    checkpoint: Checkpoint,  # of the generator
    names: list[str],  # of its classes
    device: torch.device,
    reader: Dataset | None,  # the test images; None: there are none
    *,
    option: str = "--classifier",  # that named it
    guide: str | None = None,  # folder or file of a classifier whose gradients or answers edits were found with
) -> Classifier:
    """The classifier that names the samples.

    Raises UserError if it helped to train the generator or to find edits, was trained on samples of any generator, has
    seen the test images, or knows other classes. What it is and has seen is known by fingerprints and hashes, wherever
    files lie; a guide also by its run, whose other checkpoints are too near to it.
    """
    file = resolve(run)
    judge = load(file)
    classifier = classifier_from(judge, device)
    helper = (checkpoint["config"].get("loss") or {}).get("classifier")
    taught = helper and run_folder(file).resolve() in (Path(helper).resolve(), run_folder(Path(helper)).resolve())
    if taught or fingerprint(classifier) in checkpoint.get("teachers", []):
        raise UserError(f"{option} {run} supplied a loss to this generator, so it cannot judge it; give another")
    if guide is not None and _same(file, classifier, resolve(guide)):
        raise UserError(
            f"{option} {run} is the classifier that the edits were found with; give one of another training"
        )
    if told := unfit(judge, reader):
        raise UserError(f"{option} {run} {told}")
    if names:
        require_same_classes("the generator", names, f"the classifier {run}", judge["classes"])
    return classifier


def _same(file: Path, classifier: Classifier, other: Path) -> bool:
    """Whether two checkpoints of classifiers are of one run, or have the same weights."""
    if run_folder(file).resolve() == run_folder(other).resolve() and file.parent.name == "checkpoints":
        return True
    return fingerprint(classifier) == fingerprint(classifier_from(load(other)))


def unfit(judge: Checkpoint, reader: Dataset | None) -> str:
    """Why a classifier cannot judge samples beside these test images, and the remedy; empty if it can.

    Neither it nor the weights it started from may have been trained on samples, or on the test images: on a file of
    the same content or source, or on one they were drawn from. Where the file it was trained on is at hand, no more
    than `TOLERATED` of the test images may be in it, pixel for pixel. Without test images that is not asked.
    """
    lineage = recorded(judge)
    if lineage["synthetic"]:
        whose = ", ".join(dict.fromkeys(passport["generator"] for passport in lineage["synthetic"]))
        return (
            f"was trained on samples (of {whose[:200]}), so it would recognise them too well; give one that has seen "
            "real images only"
        )
    if reader is None:
        return ""
    if not set(lineage["trained_on"]).isdisjoint(identities(reader)):
        return f"was trained on the test images {reader.path}; give one that was not, or other images with --data"
    share = shared(judge, reader)
    if share > TOLERATED:
        return (
            f"was trained on {share:.1%} of the test images {reader.path} (pixel for pixel; {TOLERATED:.0%} are "
            "tolerated); give one that was not, or other images with --data"
        )
    return ""


def identities(reader: Dataset) -> set[str]:
    """What test images are known by: hashes of content and source, of every file, and of the set it was drawn from."""
    metas = metas_of(reader)
    known = [text for meta in metas for text in (meta.content_hash, meta.fingerprint, (meta.split or {}).get("whole"))]
    return {text for text in known if text}


def shared(judge: Checkpoint, reader: Dataset) -> float:
    """The share of the test images that are in the file a classifier was trained on, pixel for pixel; 0 if that is not
    at hand, is another one by now, or holds images of other sizes or channels.
    """
    path = (judge["config"].get("data") or {}).get("path")
    content = (judge.get("data") or {}).get("content_hash")
    if not path or not content:
        return 0.0
    try:
        with dataset_for_model(path, judge) as trained:
            if trained.meta.content_hash != content:
                return 0.0
            return overlap(reader, trained) / len(reader)
    except UserError:
        return 0.0
