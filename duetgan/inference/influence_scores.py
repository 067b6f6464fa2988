"""Which training images helped or hurt a prediction, and which labels are likely wrong: scores of
every image, from the gradients of every image's own loss.

By hand: captum's TracInCP gives the same numbers for the head in the same time, but refuses
channels_last networks for other layers, and needs as many lines around it; cleanlab brings pandas
and scikit-learn for one formula.
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

from duetgan.data.reading.dataset import Dataset, dataset_for_model
from duetgan.data.reading.loader import evaluation_batches
from duetgan.inference.inputs import read_target
from duetgan.inference.settings import label_of
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.metrics.features.extractors import classifier_input
from duetgan.metrics.features.precision import device_of, full_float32
from duetgan.models.classifier import Classifier
from duetgan.models.restore import classifier_from
from duetgan.utils import bounded
from duetgan.utils.checkpoint import load
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.images import save_captioned
from duetgan.utils.runlog.progress import Bar

MOST_ELEMENTS = 1 << 26  # of gradients held at once: 256 MiB of float32


@dataclass(frozen=True)
class Gradients:
    """Gradients of n images as outer products of two factors, [n, K] x [n, F], which need not be
    made.

    Of the last linear layer, with p = softmax(logits), y the label as one-hot and f what the layer
    takes: the weight's is (p - y) f^T, the bias's p - y. Gradients that are at hand [n, P] have
    ones [n, 1] as their first factor.
    """

    errors: Tensor  # [n, K]
    inputs: Tensor  # [n, F]
    bias: bool = False  # whether `errors` are a part of the gradients too

    def dot(self, other: "Gradients") -> Tensor:
        """Dot products [n, m] of all these gradients with all of `other`'s."""
        return (self.errors @ other.errors.T) * (self.inputs @ other.inputs.T + self.bias)

    def squared_norms(self) -> Tensor:
        """[n]: the dot product of each with itself."""
        return self.errors.square().sum(1) * (self.inputs.square().sum(1) + self.bias)


def sample_gradients(
    model: nn.Module,  # images -> logits, in evaluation mode: BatchNorm must not mix the images
    images: Tensor,  # [n, C, H, W] as the model takes them
    labels: Tensor,  # int64 [n]
    names: Sequence[str],  # of the parameters that gradients are taken of
    *,
    # images at once; None: one on a CPU, else as many as MOST_ELEMENTS allows
    chunk: int | None = None,
) -> Gradients:
    """d cross_entropy(model(x_i), y_i) / d parameters, [n, P]: the named parameters flattened one
    after the other.

    Parameters need not require gradients and their `.grad` is not touched. Raises ValueError for a
    model in training mode.
    """
    if any(module.training for module in model.modules()):
        raise ValueError(
            "per-sample gradients need a model in evaluation mode: BatchNorm mixes the images otherwise"
        )
    tensors = {name: p.detach() for name, p in model.named_parameters()} | dict(
        model.named_buffers()
    )
    asked = {name: tensors.pop(name) for name in names}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(
            functional_call(model, (parameters, tensors), (image[None],)), label[None]
        )

    if chunk is None:
        most = max(1, MOST_ELEMENTS // sum(tensor.numel() for tensor in asked.values()))
        # there convolutions with a weight for each image are slow
        chunk = 1 if images.device.type == "cpu" else most
    each = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=chunk)(asked, images, labels)
    found = torch.cat([each[name].flatten(1) for name in names], dim=1)
    return Gradients(torch.ones_like(found[:, :1]), found)


def head_gradients(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Gradients, Tensor]:
    """Gradients of each image's cross entropy with respect to the last linear layer, and the logits
    [n, K].

    One forward pass where the layer's output are the logits, else `sample_gradients`. Raises
    UserError for a model without a linear layer.
    """
    linear = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    if not linear:
        raise UserError(
            "the network has no linear layer, whose gradients tell the influence of an image"
        )
    (name, layer), seen = linear[-1], []
    note = layer.register_forward_hook(
        lambda _layer, inputs, output: seen.append((inputs[0], output))
    )
    with note, torch.no_grad():
        logits = model(images)
    if not torch.equal(seen[-1][1], logits):  # the logits are scaled, say
        names = [f"{name}.{parameter}".lstrip(".") for parameter, _ in layer.named_parameters()]
        return sample_gradients(model, images, labels, names), logits
    errors = logits.softmax(1) - F.one_hot(labels, logits.shape[1])
    return Gradients(errors, seen[-1][0], layer.bias is not None), logits


# --- scores


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint of the run and the learning rate that it was trained on with."""

    rate: float
    load: Callable[[], Classifier]  # in evaluation mode on its device


def rate_of(checkpoint: dict[str, Any]) -> float:
    """The largest rate of a checkpoint's optimizer; 1 where it has none."""
    groups = (checkpoint["state"].get("optimizer") or {}).get("param_groups") or []
    rates, faults = (
        f"{checkpoint.get('file')}: state.optimizer",
        (TypeError, LookupError, ValueError, RuntimeError),
    )
    with bounded.reading(rates, "use another checkpoint", *faults):
        return max((float(group["lr"]) for group in groups), default=1.0)


def gradients_of(model: Classifier, images: Tensor, labels: Tensor) -> tuple[Gradients, Tensor]:
    """`head_gradients` of uint8 images [n, C, H, W] with labels [n]."""
    device = device_of(model)
    with full_float32(device):
        return head_gradients(model, classifier_input(model, images), labels.to(device))


@dataclass(frozen=True)
class Part:
    """A batch of training images as one checkpoint sees them. Kept, it takes 4 (2 K + F) bytes an
    image, e.g. 2 KiB.
    """

    share: float  # of the checkpoint in a score
    model: Classifier
    rows: slice  # where the images lie
    gradients: Gradients  # of the head, of the average model, for whole images without augmentation
    logits: Tensor  # [n, K]


def passes(
    snapshots: Sequence[Snapshot], reader: Dataset, *, batch_size: int = 64
) -> Iterator[Part]:
    """All training images, by each checkpoint in turn. Shares are rates scaled to a sum of 1; equal
    where all are 0.
    """
    total = sum(snapshot.rate for snapshot in snapshots)
    with Bar(total=len(reader) * len(snapshots), desc="images", unit="image") as bar:
        for snapshot in snapshots:
            share = snapshot.rate / total if total else 1 / len(snapshots)
            model = snapshot.load()
            start = 0
            for batch in evaluation_batches(reader, batch_size):
                gradients, logits = gradients_of(model, batch.images, batch.labels)
                yield Part(share, model, slice(start, start + len(batch)), gradients, logits)
                start += len(batch)
                bar.update(len(batch))


def influence(
    parts: Iterable[Part],  # `passes`, or what was kept of it
    count: int,  # of all training images
    image: Tensor,  # uint8 [C, H, W]: the image whose prediction is to be explained
    label: int,  # the class that the prediction is explained for
) -> Tensor:
    """TracInCP (Pruthi et al. 2002.08484, section 3.3): how much a step on each training image
    lowered the loss of this one, [count] float64: sum over checkpoints of rate x gradient .
    gradient, the rates scaled to a sum of 1.

    Positive: it helped (a proponent), negative: it hurt.
    """
    scores = torch.zeros(count, dtype=torch.float64)
    model: Classifier | None = None
    for part in parts:
        if part.model is not model:  # a checkpoint begins
            model = part.model
            own, _ = gradients_of(model, image[None], torch.tensor([label]))
        scores[part.rows] += part.share * part.gradients.dot(own)[:, 0].cpu().double()
    return scores


@dataclass(frozen=True)
class Suspicion:
    """How likely each image's label is wrong, by two measures; float64 [count]."""

    self_influence: Tensor  # sum over checkpoints of rate x squared norm of its own gradient
    probabilities: Tensor  # [count, K] by the last checkpoint
    labels: Tensor  # int64 [count]

    @property
    def given(self) -> Tensor:
        """The probability of the label that an image has."""
        return self.probabilities.gather(1, self.labels[:, None])[:, 0]

    def issues(self) -> Tensor:
        """The class that confident learning would rather give, else -1: int64 [count].

        Northcutt et al. (1911.00068, equation 2): among the classes whose probability reaches the
        mean that it has in the images labelled so, the likeliest, where that is not the image's
        label.
        """
        classes = self.probabilities.shape[1]
        sums = torch.zeros(classes, dtype=torch.float64).index_add_(0, self.labels, self.given)
        members = torch.bincount(self.labels, minlength=classes)
        thresholds = torch.where(members > 0, sums / members.clamp(min=1), torch.inf)
        best, named = torch.where(self.probabilities >= thresholds, self.probabilities, -1.0).max(1)
        return torch.where((best >= 0) & (named != self.labels), named, -1)

    def order(self, by: str) -> Tensor:
        """Image numbers, the most suspicious first: by `self-influence`, or by `probability`: those
        that confident learning would rename come first, then it is the lowest probability of the
        given label.
        """
        if by == "self-influence":
            return self.self_influence.argsort(descending=True, stable=True)
        return (self.given - (self.issues() >= 0).double()).argsort(stable=True)


def suspicion(parts: Iterable[Part], reader: Dataset) -> Suspicion:
    """Both measures for every image of the file."""
    norms = torch.zeros(len(reader), dtype=torch.float64)
    probabilities = torch.zeros(len(reader), len(reader.classes), dtype=torch.float64)
    for part in parts:
        norms[part.rows] += part.share * part.gradients.squared_norms().cpu().double()
        # the last checkpoint's stay
        probabilities[part.rows] = part.logits.cpu().double().softmax(1)
    return Suspicion(norms, probabilities, torch.from_numpy(reader.labels().copy()))


def most(scores: Tensor, count: int) -> list[int]:
    """The places of the largest scores, largest first; those above 0 only."""
    return [
        place
        for place in scores.argsort(descending=True, stable=True)[:count].tolist()
        if scores[place] > 0
    ]


# --- the command


def answer(options: Namespace, files: list[Path]) -> dict[str, Any]:
    """What `inference.influence` is asked for of these checkpoints, in words and numbers; writes
    its grid.
    """
    device, last = choose_device(options.device), load(files[-1])
    snapshots = [snapshot(file, device) for file in files]
    with dataset_for_model(options.data, last) as reader:
        check_data(reader, last, options.data)
        parts = passes(snapshots, reader, batch_size=options.batch_size)
        if options.mislabelled:
            return _mislabelled(options, parts, reader)
        return _explain(
            options, parts, reader, read_target(options.image, last), snapshots[-1].load()
        )


def snapshot(file: Path, device: torch.device) -> Snapshot:
    """A classifier's checkpoint. Raises UserError for another task's."""
    checkpoint = load(file, verify=False)
    if checkpoint["task"] != "classifier":
        raise UserError(
            f"{file}: is a checkpoint of task {checkpoint['task']!r}; give one of a classifier"
        )
    # read again when its turn comes: all of a run's networks at once may not fit into memory
    return Snapshot(rate_of(checkpoint), lambda: classifier_from(load(file, verify=False), device))


def check_data(reader: Dataset, checkpoint: dict[str, Any], path: str) -> None:
    """Raise UserError unless the images have the classifier's classes; tell where they are not its
    training's.
    """
    require_same_classes(
        path,
        reader.classes,
        "the classifier",
        checkpoint["classes"],
        "give the images that it was trained on",
    )
    if reader.meta.content_hash != (checkpoint.get("data") or {}).get("content_hash"):
        print(f"note: {path} is not what the classifier was trained on", file=sys.stderr)


def images_of(reader: Dataset, rows: list[int]) -> list[Tensor]:
    """Records of a packed file, uint8 [C, H, W]."""
    return list(torch.from_numpy(reader.read(rows)[0])) if rows else []


def _explain(
    options: Namespace, parts: Iterable[Part], reader: Dataset, image: Tensor, model: Classifier
) -> dict[str, Any]:
    classes, top = reader.classes, options.top
    probabilities = judge_images(model, image[None])[0]
    named = int(probabilities.argmax())
    label = named if options.label is None else label_of(options.label, classes, "--label")
    scores = influence(parts, len(reader), image, label)
    labels, blank = reader.labels(), torch.full(image.shape, reader.spec.high).to(image)
    first, head = image, f"named {classes[named]} {probabilities[named]:.2f}"
    kinds: dict[str, list[dict[str, Any]]] = {}
    images, captions = [], []
    for kind, rows in (("helped", most(scores, top)), ("hurt", most(-scores, top))):
        kinds[kind] = [
            {"record": row, "label": classes[labels[row]], "score": float(scores[row])}
            for row in rows
        ]
        told = [f"{item['record']}: {item['label']}\n{item['score']:+.3g}" for item in kinds[kind]]
        images += [first, *images_of(reader, rows), *[blank] * (top - len(rows))]
        captions += [f"{head}\n{kind} {classes[label]}:", *told, *[""] * (top - len(rows))]
        first, head = blank, ""
    save_captioned(images, captions, options.out, columns=top + 1, spec=reader.spec)
    about = {
        "image": options.image,
        "named": classes[named],
        "probability": float(probabilities[named]),
    }
    return {**about, "label": classes[label], **kinds}


def _mislabelled(options: Namespace, parts: Iterable[Part], reader: Dataset) -> dict[str, Any]:
    result, classes = suspicion(parts, reader), reader.classes
    measure = options.by or "probability"
    rows = result.order(measure)[: options.top].tolist()
    # the likeliest class but the given
    others = result.probabilities.scatter(1, result.labels[:, None], -1).max(1)
    suspects = [
        {
            "record": row,
            "label": classes[int(result.labels[row])],
            "given": float(result.given[row]),
            "named": classes[int(others.indices[row])],
            "probability": float(others.values[row]),
            "self_influence": float(result.self_influence[row]),
        }
        for row in rows
    ]
    captions = [
        f"{item['record']}: {item['label']} {item['given']:.2f}\n{item['named']}?"
        for item in suspects
    ]
    save_captioned(
        images_of(reader, rows), captions, options.out, columns=min(10, len(rows)), spec=reader.spec
    )
    return {
        "measure": measure,
        "issues": int((result.issues() >= 0).sum()),
        "mislabelled": suspects,
    }
