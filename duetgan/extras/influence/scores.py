"""Score training images by their influence on a prediction, and find those with wrong labels.

The influence is computed from per-sample gradients of the loss. Wrong labels are found by predicted
probabilities.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.data.opening import dataset_for_model
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import evaluation_batches
from duetgan.inference.inputs import read_target
from duetgan.inference.settings import label_of
from duetgan.metrics.evaluate_classifier import classify
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.metrics.features.extractors import classifier_input
from duetgan.metrics.features.precision import device_of, full_float32
from duetgan.models.classifier import Classifier
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import Checkpoint, load
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.images import save_captioned
from duetgan.utils.runlog.progress import Bar

Document = dict[str, Any]  # a JSON object


@dataclass(frozen=True)
class Gradients:
    """The loss gradients of n images with respect to the last linear layer, in factored form.

    With p = softmax(logits), y the one-hot label and f the layer's input, the gradient of the bias
    is p - y, and the gradient of the weight is the outer product (p - y) f^T, which is never
    computed.
    """

    errors: Tensor  # p - y, [n, K]
    inputs: Tensor  # f, [n, F]
    bias: bool  # True if the layer has a bias, whose gradients are `errors`

    def dot(self, columns: "Gradients") -> Tensor:
        """Return the dot products [n, m] of these n gradients with the m gradients `columns`."""
        return (self.errors @ columns.errors.T) * (self.inputs @ columns.inputs.T + self.bias)


def head_gradients(model: nn.Module, images: Tensor, labels: Tensor) -> Gradients:
    """Return the gradient of each image's cross entropy with respect to the last linear layer.

    If the network divides this layer's output by a temperature, the result is too large by the
    factor of the temperature. Raises UserError if the network has no linear layer that gives the
    logits.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    calls: list[tuple[Tensor, Tensor]] = []
    if linear:
        hook = linear[-1].register_forward_hook(
            lambda _layer, inputs, output: calls.append((inputs[0], output))
        )
        with hook, torch.no_grad():
            logits = model(images)
    if not calls or calls[-1][1].shape != logits.shape:
        raise UserError("the network has no linear layer that gives the logits")
    errors = logits.softmax(1) - F.one_hot(labels, logits.shape[1])
    return Gradients(errors, calls[-1][0], linear[-1].bias is not None)


# --- scores


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint of the run and the learning rate of its optimizer."""

    rate: float
    load: Callable[[], Classifier]  # returns the model in evaluation mode on its device


def rate_of(checkpoint: Checkpoint) -> float:
    """Return the largest learning rate of a checkpoint's optimizer; 1 without an optimizer."""
    groups = (checkpoint["state"].get("optimizer") or {}).get("param_groups") or []
    return max((float(group["lr"]) for group in groups), default=1.0)


def gradients_of(model: Classifier, images: Tensor, labels: Tensor) -> Gradients:
    """Return `head_gradients` of a classifier for uint8 images [n, C, H, W] with labels [n]."""
    device = device_of(model)
    with full_float32(device):
        return head_gradients(model, classifier_input(model, images), labels.to(device))


def influence(
    snapshots: Sequence[Snapshot],
    dataset: Dataset,  # the training images
    image: Tensor,  # uint8 [C, H, W]: the image whose prediction is explained
    label: int,  # the class that is explained
    *,
    batch_size: int = 64,
) -> Tensor:
    """Return the influence of each training image on the loss of `image`, float64 [n].

    The influence is a sum over checkpoints: the learning rate times the dot product of the
    gradients of the training image and of `image` (TracInCP, Pruthi et al. 2002.08484, section
    3.3). The rates are scaled to a sum of 1; if all are 0, checkpoints have equal weights.
    Gradients are those of the EMA model's last layer, without augmentation. A positive score means
    that training on the image lowered the loss, a negative one that it raised the loss.
    """
    total = sum(snapshot.rate for snapshot in snapshots)
    scores = torch.zeros(len(dataset), dtype=torch.float64)
    with Bar(total=len(dataset) * len(snapshots), desc="images", unit="image") as bar:
        for snapshot in snapshots:
            weight = snapshot.rate / total if total else 1 / len(snapshots)
            model = snapshot.load()
            explained = gradients_of(model, image[None], torch.tensor([label]))
            start = 0
            for batch in evaluation_batches(dataset, batch_size):
                gradients = gradients_of(model, batch.images, batch.labels)
                products = gradients.dot(explained)[:, 0].cpu().double()
                scores[start : start + len(batch)] += weight * products
                start += len(batch)
                bar.update(len(batch))
    return scores


def label_probabilities(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the probability of each image's label, [n], from probabilities [n, K]."""
    return probabilities.gather(1, labels[:, None])[:, 0]


def label_issues(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the class that confident learning suggests for each image, int64 [n].

    The value is -1 for images whose label seems right. The threshold of a class is its mean
    probability over the images with this label. The suggestion is the most probable class among
    those that reach their thresholds, if it differs from the label. Source: Northcutt et al.
    (1911.00068, equation 2).

    Args:
        probabilities: Predicted probabilities of the classes, float64 [n, K].
        labels: Labels of the images, int64 [n].
    """
    classes = probabilities.shape[1]
    sums = torch.zeros(classes, dtype=torch.float64)
    sums.index_add_(0, labels, label_probabilities(probabilities, labels))
    members = torch.bincount(labels, minlength=classes)
    thresholds = torch.where(members > 0, sums / members.clamp(min=1), torch.inf)
    reaching = torch.where(probabilities >= thresholds, probabilities, -1.0)
    best, suggested = reaching.max(1)
    return torch.where((best >= 0) & (suggested != labels), suggested, -1)


def top_records(scores: Tensor, count: int) -> list[int]:
    """Return the indices of the largest positive scores, at most `count` of them, largest first."""
    records = scores.argsort(descending=True, stable=True)[:count].tolist()
    return [record for record in records if scores[record] > 0]


# --- the command


def answer(options: Namespace, files: list[Path]) -> Document:
    """Run `duet influence` with the checkpoints `files`, the earliest first.

    Writes the image grid and returns the JSON document.
    """
    device, last = choose_device(options.device), load(files[-1])
    snapshots = [snapshot(file, device) for file in files]
    with dataset_for_model(options.data, last) as dataset:
        check_data(dataset, last, options.data)
        if options.mislabelled:
            return _mislabelled(options, dataset, snapshots[-1].load())
        image = read_target(options.image, last, None)
        return _explain(options, snapshots, dataset, image)


def snapshot(file: Path, device: torch.device) -> Snapshot:
    """Return the snapshot of a checkpoint file. Raises UserError unless it is a classifier's."""
    checkpoint = load(file, verify=False)
    if checkpoint["task"] != "classifier":
        raise UserError(
            f"{file}: is a checkpoint of task {checkpoint['task']!r}; give one of a classifier"
        )
    # Loaded when needed, because all networks of a run may not fit into memory.
    return Snapshot(rate_of(checkpoint), lambda: classifier_from(load(file, verify=False), device))


def check_data(dataset: Dataset, checkpoint: Checkpoint, path: str) -> None:
    """Raise UserError unless the images have the classifier's classes; print a note if the
    classifier was not trained on these images.
    """
    require_same_classes(
        path,
        dataset.classes,
        "the classifier",
        checkpoint["classes"],
        "give the images that it was trained on",
    )
    if dataset.meta.content_hash != (checkpoint.get("data") or {}).get("content_hash"):
        print(f"note: {path} is not what the classifier was trained on", file=sys.stderr)


def images_of(dataset: Dataset, records: list[int]) -> list[Tensor]:
    """Return the images of some records of a packed file, each uint8 [C, H, W]."""
    return list(torch.from_numpy(dataset.read(records)[0])) if records else []


def _explain(
    options: Namespace, snapshots: Sequence[Snapshot], dataset: Dataset, image: Tensor
) -> Document:
    """Write a grid of the training images that helped and hurt a prediction most.

    The prediction is that of `image`. Returns the JSON document.
    """
    classes, top = dataset.classes, options.top
    probabilities = judge_images(snapshots[-1].load(), image[None])[0]
    predicted = int(probabilities.argmax())
    label = predicted if options.label is None else label_of(options.label, classes, "--label")
    scores = influence(snapshots, dataset, image, label, batch_size=options.batch_size)
    labels, blank = dataset.labels(), torch.full(image.shape, dataset.spec.high).to(image)
    # The grid has two rows; only the first begins with the explained image.
    first, title = image, f"predicted {classes[predicted]} {probabilities[predicted]:.2f}"
    document: Document = {
        "image": options.image,
        "named": classes[predicted],
        "probability": float(probabilities[predicted]),
        "label": classes[label],
    }
    images, captions = [], []
    for kind, kind_scores in (("helped", scores), ("hurt", -scores)):
        records = top_records(kind_scores, top)
        images += [first, *images_of(dataset, records), *[blank] * (top - len(records))]
        captions.append(f"{title}\n{kind} {classes[label]}:")
        document[kind] = []
        for record in records:
            name, score = classes[labels[record]], float(scores[record])
            document[kind].append({"record": record, "label": name, "score": score})
            captions.append(f"{record}: {name}\n{score:+.3g}")
        captions += [""] * (top - len(records))
        first, title = blank, ""
    save_captioned(images, captions, options.out, columns=top + 1, spec=dataset.spec)
    return document


def _mislabelled(options: Namespace, dataset: Dataset, model: Classifier) -> Document:
    """Write a grid of the images whose labels are most likely wrong, and return the JSON document.

    First come the images that confident learning would relabel, then the other images. In both
    groups, the images with the lowest probability of their label come first.
    """
    classes, labels = dataset.classes, torch.from_numpy(dataset.labels().copy())
    logits = classify(model, dataset, batch_size=options.batch_size)
    probabilities = logits.double().softmax(1)
    issues = label_issues(probabilities, labels)
    own_probabilities = label_probabilities(probabilities, labels)
    order = (own_probabilities - (issues >= 0).double()).argsort(stable=True)
    records = order[: options.top].tolist()
    # the most probable class other than the label
    best = probabilities.scatter(1, labels[:, None], -1).max(1)
    suspects: list[Document] = []
    captions = []
    for record in records:
        label, suggestion = classes[int(labels[record])], classes[int(best.indices[record])]
        suspects.append(
            {
                "record": record,
                "label": label,
                "given": float(own_probabilities[record]),
                "named": suggestion,
                "probability": float(best.values[record]),
            }
        )
        captions.append(f"{record}: {label} {float(own_probabilities[record]):.2f}\n{suggestion}?")
    images = images_of(dataset, records)
    save_captioned(images, captions, options.out, columns=min(10, len(records)), spec=dataset.spec)
    return {"issues": int((issues >= 0).sum()), "mislabelled": suspects}
