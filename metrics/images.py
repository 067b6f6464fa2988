"""Images that go with the figures: confusion matrix, captioned images, and the picking of those worth a look."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from utils.files import write_atomic
from utils.fonts import drawable, families
from utils.image_tables import save_captioned, save_rows

MANY_CLASSES = 30  # beyond that, names and numbers in a confusion matrix could not be read


@dataclass
class Best:
    """The `size` images with the highest scores out of any number of batches, best first; ties go to the earlier."""

    size: int
    images: list[Tensor] = field(default_factory=list)  # uint8 [C, H, W] each
    captions: list[str] = field(default_factory=list)
    _scores: list[float] = field(default_factory=list)

    def add(self, images: Tensor, scores: Tensor, captions: Sequence[str]) -> None:
        """Offer a batch: uint8 [n, C, H, W], scores [n] and a caption for each."""
        offered = self.images + list(images)
        texts = self.captions + list(captions)
        values = torch.cat([torch.tensor(self._scores, dtype=torch.float64), scores.double()])
        order = values.sort(descending=True, stable=True).indices[: self.size].tolist()
        self.images = [offered[i].clone() for i in order]  # a view would keep the whole batch in memory
        self.captions = [texts[i] for i in order]
        self._scores = values[order].tolist()


class SampleBoard:
    """Picks images out of a generator's evaluation; `observe` is an `Observer` of `evaluate_generator`."""

    def __init__(self, classes: Sequence[str], *, columns: int = 10) -> None:
        """Args: `classes` names by label, empty for an unconditional generator; `columns` samples of each class."""
        self.classes = list(classes)
        self.columns = columns
        self.rows: list[list[Tensor]] = [[] for _ in range(max(1, len(classes)))]
        self.capacity = columns if classes else columns * columns
        self.best, self.worst = Best(24), Best(24)

    def observe(self, images: Tensor, labels: Tensor, probabilities: Tensor | None) -> None:
        """Keep the first samples of each class, and those that the judge is surest and least sure of."""
        for image, label in zip(images, labels.tolist(), strict=True):
            if len(self.rows[label]) < self.capacity:
                self.rows[label].append(image.clone())
        if probabilities is not None and self.classes:
            asked = probabilities.gather(1, labels[:, None])[:, 0]
            named = probabilities.argmax(1).tolist()
            texts = [
                f"{self.classes[label]} {share:.2f}" + ("" if label == other else f"\nnamed {self.classes[other]}")
                for label, other, share in zip(labels.tolist(), named, asked.tolist(), strict=True)
            ]
            self.best.add(images, asked, texts)
            self.worst.add(images, 1 - asked, texts)

    def save(self, folder: Path) -> list[str]:
        """Write samples.png (rows are classes), recognised_best.png and recognised_worst.png; returns the names."""
        names = ["samples.png"]
        save_rows(self.rows, folder / names[0], columns=self.columns, captions=self.classes)
        for name, kept in (("recognised_best.png", self.best), ("recognised_worst.png", self.worst)):
            if kept.images:
                save_captioned(kept.images, kept.captions, folder / name)
                names.append(name)
        return names


class MistakeBoard:
    """Picks the most confident mistakes of a classifier; `observe` is an `Observer` of `evaluate_classifier`."""

    def __init__(self, classes: Sequence[str], *, size: int = 24) -> None:
        self.classes = list(classes)
        self.mistakes = Best(size)
        self._seen = 0

    def observe(self, images: Tensor, labels: Tensor, probabilities: Tensor) -> None:
        """Keep the wrongly named images of highest confidence, with their place in the file."""
        confidence, named = probabilities.max(1)
        wrong = (named != labels).nonzero()[:, 0].tolist()
        texts = [
            f"{self._seen + i}: {self.classes[int(labels[i])]}\nnamed {self.classes[int(named[i])]} {confidence[i]:.2f}"
            for i in wrong
        ]
        self.mistakes.add(images[wrong], confidence[wrong], texts)
        self._seen += len(labels)

    def save(self, folder: Path) -> list[str]:
        """Write mistakes.png unless there was none; returns the names written."""
        if not self.mistakes.images:
            return []
        save_captioned(self.mistakes.images, self.mistakes.captions, folder / "mistakes.png")
        return ["mistakes.png"]


def save_confusion(confusion: Sequence[Sequence[int]], classes: Sequence[str], path: str | Path) -> None:
    """Draw a confusion matrix, counts [true][named]; the shade is the share of the true class."""
    counts = np.asarray(confusion, dtype=np.float64)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    count = len(classes)
    side = min(12.0, 3.0 + 0.55 * count)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xlabel("named by the classifier")
    axes.set_ylabel("true class")
    if count <= MANY_CLASSES:
        names, fonts = list(map(drawable, classes)), families()
        axes.set_xticks(range(count), names, rotation=45, ha="right", parse_math=False, fontfamily=fonts)
        axes.set_yticks(range(count), names, parse_math=False, fontfamily=fonts)
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", color=colour, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    write_atomic(path, buffer.getvalue())


def save_audit(scores: Mapping[str, Tensor], members: int, path: str | Path) -> None:
    """Draw an audit: for each score [members + held out] both sides' histograms, and the ROC curve beside them."""
    figure = Figure(figsize=(9.0, 3.2 * len(scores)), layout="constrained")
    axes = figure.subplots(len(scores), 2, squeeze=False)
    titles = {"generator": "minus the distance to the nearest sample", "discriminator": "the discriminator's logit"}
    for (name, score), (left, right) in zip(scores.items(), axes, strict=True):
        sides = score[:members].double().numpy(), score[members:].double().numpy()
        edges = np.histogram_bin_edges(np.concatenate(sides), bins=60)
        for side, label in zip(sides, ("training images", "held-out images"), strict=True):
            left.hist(side, edges, density=True, histtype="step", label=label)
        left.set_xlabel(titles.get(name, name))
        left.set_yticks([])
        left.legend(fontsize=8)
        thresholds = np.unique(np.concatenate(sides))[::-1]
        above = [1 - np.searchsorted(np.sort(side), thresholds, side="left") / len(side) for side in sides]
        right.plot([0, *above[1]], [0, *above[0]])
        right.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        right.set_xlabel("held-out images above a threshold")
        right.set_ylabel("training images above it")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    write_atomic(path, buffer.getvalue())
