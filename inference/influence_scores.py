"""Which training images helped or hurt a prediction, and which labels are likely wrong: scores of every image.

By hand: captum's TracInCP gives the same numbers for the head in the same time, but refuses channels_last networks
for other layers, and needs as many lines around it; cleanlab brings pandas and scikit-learn for one formula.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.dataset import Dataset
from data.loader import evaluation_batches
from inference.sample_gradients import Gradients, head_gradients, matching_parameters, sample_gradients
from metrics.extractors import classifier_input
from metrics.precision import device_of, exact_float32
from models.classifier import Classifier
from utils.errors import UserError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint of the run and the learning rate that it was trained on with."""

    rate: float
    load: Callable[[], Classifier]  # in evaluation mode on its device


def rate_of(checkpoint: dict[str, Any]) -> float:
    """The largest rate of a checkpoint's optimizer; 1 where it has none."""
    groups = (checkpoint["state"].get("optimizer") or {}).get("param_groups") or []
    return max((float(group["lr"]) for group in groups), default=1.0)


def weights_of(snapshots: Sequence[Snapshot]) -> list[float]:
    """The checkpoints' shares in a score: their rates, scaled to a sum of 1; equal where all rates are 0."""
    total = sum(snapshot.rate for snapshot in snapshots)
    return [snapshot.rate / total if total else 1 / len(snapshots) for snapshot in snapshots]


def gradients_of(model: Classifier, images: Tensor, labels: Tensor, layers: Sequence[str]) -> tuple[Gradients, Tensor]:
    """Gradients of the losses of uint8 images [n, C, H, W] with labels [n], and the logits; see `sample_gradients`.

    Without `layers` of the head alone, which costs one forward pass.
    """
    device = device_of(model)
    with exact_float32(device):
        inputs, labels = classifier_input(model, images), labels.to(device)
        if not layers:
            return head_gradients(model, inputs, labels)
        with torch.no_grad():
            logits = model(inputs)
        return sample_gradients(model, inputs, labels, matching_parameters(model, layers)), logits


def influence(
    snapshots: Sequence[Snapshot],
    reader: Dataset,  # training images
    image: Tensor,  # uint8 [C, H, W]: the image whose prediction is to be explained
    label: int,  # the class that the prediction is explained for
    *,
    layers: Sequence[str] = (),
    batch_size: int = 64,
    progress: Progress | None = None,
) -> Tensor:
    """TracInCP (Pruthi et al. 2002.08484, section 3.3): how much a step on each training image lowered the loss of
    this one, [count] float64: sum over checkpoints of rate x gradient . gradient, the rates scaled to a sum of 1.

    Positive: it helped (a proponent), negative: it hurt. The gradients are of the head unless `layers` are named, of
    the average model, for whole images without augmentation. Raises UserError for layers that do not exist.
    """
    scores = torch.zeros(len(reader), dtype=torch.float64)
    for share, model, batches in _passes(snapshots, reader, batch_size, progress):
        own, _ = gradients_of(model, image[None], torch.tensor([label]), layers)
        for rows, images, labels in batches:
            found, _ = gradients_of(model, images, labels, layers)
            scores[rows] += share * found.dot(own)[:, 0].double().cpu()
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

        Northcutt et al. (1911.00068, equation 2): among the classes whose probability reaches the mean that it has in
        the images labelled so, the likeliest, where that is not the image's label.
        """
        classes = self.probabilities.shape[1]
        sums = torch.zeros(classes, dtype=torch.float64).index_add_(0, self.labels, self.given)
        members = torch.bincount(self.labels, minlength=classes)
        thresholds = torch.where(members > 0, sums / members.clamp(min=1), torch.inf)
        reached = torch.where(self.probabilities >= thresholds, self.probabilities, -1.0)
        best, named = reached.max(1)
        return torch.where((best >= 0) & (named != self.labels), named, -1)

    def order(self, by: str) -> Tensor:
        """Image numbers, the most suspicious first: by `self-influence`, or by `probability`: those that confident
        learning would rename come first, then it is the lowest probability of the given label.
        """
        if by == "self-influence":
            return self.self_influence.argsort(descending=True, stable=True)
        return (self.given - (self.issues() >= 0).double()).argsort(stable=True)


def suspicion(
    snapshots: Sequence[Snapshot],
    reader: Dataset,
    *,
    layers: Sequence[str] = (),
    batch_size: int = 64,
    progress: Progress | None = None,
) -> Suspicion:
    """Both measures for every image of the file. A wrong label keeps a large gradient through the training, and the
    network gives it a low probability, unless it has had the time to learn the label by heart.
    """
    own = torch.zeros(len(reader), dtype=torch.float64)
    probabilities = torch.zeros(len(reader), len(reader.classes), dtype=torch.float64)
    for share, model, batches in _passes(snapshots, reader, batch_size, progress):
        for rows, images, labels in batches:
            found, logits = gradients_of(model, images, labels, layers)
            own[rows] += share * found.squared_norms().double().cpu()
            probabilities[rows] = logits.double().softmax(1).cpu()  # the last checkpoint's stay
    return Suspicion(own, probabilities, torch.from_numpy(reader.labels().copy()))


Batches = Iterable[tuple[slice, Tensor, Tensor]]


def _passes(
    snapshots: Sequence[Snapshot], reader: Dataset, batch_size: int, progress: Progress | None
) -> Iterator[tuple[float, Classifier, Batches]]:
    """For each checkpoint its share, the model, and all images in batches with their places."""
    for number, (snapshot, share) in enumerate(zip(snapshots, weights_of(snapshots), strict=True)):
        model = snapshot.load()
        if model.classes != len(reader.classes):
            raise UserError(f"the images have {len(reader.classes)} classes, the classifier {model.classes}")

        def batches(number: int = number) -> Batches:
            start, total = 0, len(reader) * len(snapshots)
            for batch in evaluation_batches(reader, batch_size):
                yield slice(start, start + len(batch)), batch.images, batch.labels
                start += len(batch)
                if progress is not None:
                    progress("images", number * len(reader) + start, total)

        yield share, model, batches()


def most(scores: Tensor, count: int) -> list[int]:
    """The places of the largest scores, largest first; those above 0 only."""
    order = scores.argsort(descending=True, stable=True)[:count]
    return [place for place in order.tolist() if scores[place] > 0]
