"""Scores of training images: their influence on a prediction, and how likely their labels are
wrong. The scores come from per-sample gradients of the loss, and from predicted probabilities.

No library is used: captum's TracInCP gives the same numbers for the head in the same time, but
refuses channels_last networks for other layers, and needs as many lines around it; cleanlab depends
on pandas and scikit-learn for one formula.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

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

MOST_ELEMENTS = 1 << 26  # elements of gradients in memory at once: 256 MiB of float32


@dataclass(frozen=True)
class Gradients:
    """Gradients of n images in factored form, [n, K] x [n, F], whose outer products are never
    computed.

    For the last linear layer, with p = softmax(logits), y the one-hot label and f the layer's
    input, the gradient of the weight is (p - y) f^T and that of the bias is p - y. Explicit
    gradients [n, P] have ones [n, 1] as their first factor.
    """

    errors: Tensor  # [n, K]
    inputs: Tensor  # [n, F]
    bias: bool = False  # True if the layer has a bias, whose gradients are `errors`

    def dot(self, columns: "Gradients") -> Tensor:
        """Return the dot products [n, m] of these n gradients with the m gradients `columns`."""
        return (self.errors @ columns.errors.T) * (self.inputs @ columns.inputs.T + self.bias)


def sample_gradients(
    model: nn.Module,  # images -> logits, in evaluation mode: BatchNorm must not mix the images
    images: Tensor,  # [n, C, H, W], the input of the model
    labels: Tensor,  # int64 [n]
    names: Sequence[str],  # names of the parameters to differentiate by
    *,
    # number of images at once; None: one on a CPU, else as many as MOST_ELEMENTS allows
    chunk: int | None = None,
) -> Gradients:
    """Return d cross_entropy(model(x_i), y_i) / d parameters, [n, P], the named parameters
    flattened and concatenated.

    Parameters need not require gradients, and their `.grad` does not change. Raises ValueError for
    a model in training mode.
    """
    if any(module.training for module in model.modules()):
        raise ValueError(
            "per-sample gradients need a model in evaluation mode: BatchNorm mixes the images otherwise"
        )
    constants = {name: parameter.detach() for name, parameter in model.named_parameters()}
    constants |= dict(model.named_buffers())
    variables = {name: constants.pop(name) for name in names}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, (parameters, constants), (image[None],))
        return F.cross_entropy(logits, label[None])

    if chunk is None:
        chunk = max(1, MOST_ELEMENTS // sum(tensor.numel() for tensor in variables.values()))
        if images.device.type == "cpu":
            chunk = 1  # On CPUs, convolutions with a weight for each image are slow.
    by_name = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=chunk)(variables, images, labels)
    gradients = torch.cat([by_name[name].flatten(1) for name in names], dim=1)
    return Gradients(torch.ones_like(gradients[:, :1]), gradients)


def head_gradients(model: nn.Module, images: Tensor, labels: Tensor) -> Gradients:
    """Return the gradients of each image's cross entropy for the last linear layer.

    If the layer's output is the logits, this takes one forward pass; otherwise `sample_gradients`
    is called too. Raises UserError for a model without a linear layer.
    """
    linear = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    if not linear:
        raise UserError("the network has no linear layer, which the influence is computed from")
    name, layer = linear[-1]
    calls: list[tuple[Tensor, Tensor]] = []
    hook = layer.register_forward_hook(
        lambda _layer, inputs, output: calls.append((inputs[0], output))
    )
    with hook, torch.no_grad():
        logits = model(images)
    features, output = calls[-1]
    if not torch.equal(output, logits):  # for example, a temperature scales the logits
        names = [f"{name}.{parameter}".lstrip(".") for parameter, _ in layer.named_parameters()]
        return sample_gradients(model, images, labels, names)
    errors = logits.softmax(1) - F.one_hot(labels, logits.shape[1])
    return Gradients(errors, features, layer.bias is not None)


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
    """Return the result of `head_gradients` for uint8 images [n, C, H, W] with labels [n]."""
    device = device_of(model)
    with full_float32(device):
        return head_gradients(model, classifier_input(model, images), labels.to(device))


@dataclass(frozen=True)
class GradientBatch:
    """The gradients of a batch of training images for one checkpoint. With K classes and F
    features, an image takes 4 (2 K + F) bytes, e.g. 2 KiB.
    """

    weight: float  # weight of the checkpoint in the scores
    model: Classifier
    rows: slice  # records of the images in the data set
    # for the last linear layer of the EMA model, and images without augmentation
    gradients: Gradients


def gradient_batches(
    snapshots: Sequence[Snapshot], dataset: Dataset, *, batch_size: int = 64
) -> Iterator[GradientBatch]:
    """Yield the gradients of all training images, checkpoint by checkpoint. A checkpoint's weight
    is its learning rate, scaled so that all sum to 1; if all rates are 0, the weights are equal.
    """
    total = sum(snapshot.rate for snapshot in snapshots)
    with Bar(total=len(dataset) * len(snapshots), desc="images", unit="image") as bar:
        for snapshot in snapshots:
            weight = snapshot.rate / total if total else 1 / len(snapshots)
            model = snapshot.load()
            start = 0
            for batch in evaluation_batches(dataset, batch_size):
                gradients = gradients_of(model, batch.images, batch.labels)
                rows = slice(start, start + len(batch))
                yield GradientBatch(weight, model, rows, gradients)
                start += len(batch)
                bar.update(len(batch))


def influence(
    batches: Iterable[GradientBatch],
    count: int,  # number of training images
    image: Tensor,  # uint8 [C, H, W]: the image whose prediction is explained
    label: int,  # the class that is explained
) -> Tensor:
    """Return the influence of each training image on the loss of `image`, float64 [count].

    TracInCP (Pruthi et al. 2002.08484, section 3.3): the sum over checkpoints of rate x dot product
    of the two images' gradients, with the rates scaled to a sum of 1. A positive score means that
    training on the image lowered the loss (a proponent), a negative one that it raised it.
    """
    scores = torch.zeros(count, dtype=torch.float64)
    model: Classifier | None = None
    for batch in batches:
        if batch.model is not model:  # the first batch of a checkpoint
            model = batch.model
            gradient = gradients_of(model, image[None], torch.tensor([label]))
        scores[batch.rows] += batch.weight * batch.gradients.dot(gradient)[:, 0].cpu().double()
    return scores


def label_probabilities(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the probability of each image's label, [n], from probabilities [n, K]."""
    return probabilities.gather(1, labels[:, None])[:, 0]


def label_issues(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the class that confident learning suggests for each image, or -1 if it accepts the
    label: int64 [n], from probabilities float64 [n, K] and labels int64 [n].

    Northcutt et al. (1911.00068, equation 2): the threshold of a class is its mean probability in
    the images with this label. The suggestion is the most probable class of those that reach their
    threshold, if it differs from the label.
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
    """Return the records of the largest positive scores, at most `count`, largest first."""
    records = scores.argsort(descending=True, stable=True)[:count].tolist()
    return [record for record in records if scores[record] > 0]


# --- the command


def answer(options: Namespace, files: list[Path]) -> Document:
    """Run `duet influence` for these checkpoints: write the image grid and return the JSON
    document.
    """
    device, last = choose_device(options.device), load(files[-1])
    snapshots = [snapshot(file, device) for file in files]
    with dataset_for_model(options.data, last) as dataset:
        check_data(dataset, last, options.data)
        if options.mislabelled:
            return _mislabelled(options, dataset, snapshots[-1].load())
        image = read_target(options.image, last)
        batches = gradient_batches(snapshots, dataset, batch_size=options.batch_size)
        return _explain(options, batches, dataset, image, snapshots[-1].load())


def snapshot(file: Path, device: torch.device) -> Snapshot:
    """Return the snapshot of a checkpoint file. Raises UserError if it is not of a classifier."""
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
    """Read records of a packed file, uint8 [C, H, W]."""
    return list(torch.from_numpy(dataset.read(records)[0])) if records else []


def _explain(
    options: Namespace,
    batches: Iterable[GradientBatch],
    dataset: Dataset,
    image: Tensor,
    model: Classifier,
) -> Document:
    """Write a grid of the training images with the largest influence on the prediction of `image`,
    and return the JSON document.
    """
    classes, top = dataset.classes, options.top
    probabilities = judge_images(model, image[None])[0]
    predicted = int(probabilities.argmax())
    label = predicted if options.label is None else label_of(options.label, classes, "--label")
    scores = influence(batches, len(dataset), image, label)
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

    First come the images that confident learning would relabel, then those with the lowest
    probability of their label.
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
