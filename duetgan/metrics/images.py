"""Pictures of an evaluation: samples, mistakes, confusion matrix, calibration and corruptions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from duetgan.data.lmdb.format import Meta
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.classification.answers import Answers
from duetgan.metrics.grad_cam import image_heat, overlay
from duetgan.models.classifier import Classifier
from duetgan.utils.errors import UserError
from duetgan.utils.files import building
from duetgan.utils.images import drawable, families, save_captioned, save_rows, save_table, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_IMAGES = 24  # in a picture of captioned images
MAX_ROWS = 50  # in a grid of images, a row for each class
MAX_LABELLED_CLASSES = 30  # with more, text in a confusion matrix would be too small to read


class SampleBoard:
    """Samples that are collected during a generator's evaluation, to be drawn in pictures.

    The evaluation calls `observe` with each chunk of samples.
    """

    def __init__(
        self, classes: Sequence[str], *, columns: int = 10, label_sets: Meta | None = None
    ) -> None:
        """Create an empty board.

        Args:
            classes: Class names; empty for an unconditional generator.
            columns: Number of samples of each class.
            label_sets: Metadata of the test images if they may have several labels. Then each label
                is a set of classes, and only the rows of the most frequent sets are drawn.
        """
        self.names = list(classes) if label_sets is None else label_sets.label_names
        self.columns = columns
        self.label_sets = label_sets
        self.rows: list[list[Tensor]] = [[] for _ in range(max(1, len(self.names)))]
        self.drawn_rows = list(range(len(self.rows)))[:MAX_ROWS]
        if label_sets is not None:
            order = np.argsort(np.negative(label_sets.histogram), kind="stable")
            self.drawn_rows = order[:MAX_IMAGES].tolist()
        self.captions = [self.names[row] for row in self.drawn_rows if self.names]
        self.capacity = columns if classes else columns * columns
        # file name -> (score, sample uint8 [C, H, W], caption)
        self.extremes: dict[str, list[tuple[float, Tensor, str]]] = {
            "recognised_best.png": [],
            "recognised_worst.png": [],
        }

    def observe(self, images: Tensor, labels: Tensor, probabilities: Tensor | None) -> None:
        """Keep the first samples of each class, and the most and least recognised samples.

        The latter are those whose class the judge gives the largest or smallest probability.
        Earlier samples win ties.
        """
        for image, label in zip(images, labels.tolist(), strict=True):
            if len(self.rows[label]) < self.capacity:
                self.rows[label].append(image.clone())
        if probabilities is None or not self.names or self.label_sets is not None:
            return
        confidence = probabilities.gather(1, labels[:, None])[:, 0]
        captions = []
        for label, predicted, probability in zip(
            labels.tolist(), probabilities.argmax(1).tolist(), confidence.tolist(), strict=True
        ):
            mistake = "" if label == predicted else f"\nnamed {self.names[predicted]}"
            captions.append(f"{self.names[label]} {probability:.2f}{mistake}")
        scores = {"recognised_best.png": confidence, "recognised_worst.png": 1 - confidence}
        for name, score in scores.items():
            candidates = [*self.extremes[name], *zip(score.tolist(), images, captions, strict=True)]
            best = sorted(candidates, key=lambda candidate: -candidate[0])[:MAX_IMAGES]
            # cloned, so that the batch is freed
            self.extremes[name] = [(value, image.clone(), text) for value, image, text in best]

    def save(self, folder: Path, real: Dataset | None = None) -> list[str]:
        """Write the pictures into a folder and return their file names.

        These are samples.png, with a row for each class, recognised_best.png and
        recognised_worst.png, if there is a judge, and real.png, with test images in the same rows.
        """
        spec = None if real is None else real.spec
        tables = {"samples.png": [self.rows[row] for row in self.drawn_rows]}
        judged = {name: samples for name, samples in self.extremes.items() if samples}
        for name, samples in judged.items():
            _, images, captions = zip(*samples, strict=True)
            save_captioned(list(images), list(captions), folder / name, spec=spec)
        if real is not None:
            labels = real.label_numbers() if self.names else np.zeros(len(real), dtype=np.int64)
            places = [np.flatnonzero(labels == row)[: self.capacity] for row in self.drawn_rows]
            tables["real.png"] = [list(torch.from_numpy(real.read(rows)[0])) for rows in places]
        for name, rows in tables.items():
            save_rows(rows, folder / name, columns=self.columns, captions=self.captions, spec=spec)
        return ["samples.png", *judged, *list(tables)[1:]]


def save_mistakes(
    dataset: Dataset, answers: Answers, path: Path, *, size: int = MAX_IMAGES
) -> bool:
    """Draw the most confident mistakes and return True, or return False if there is no mistake."""
    if wrong := surest(~answers.hits, answers)[:size].tolist():
        records = answers.record_numbers(wrong)
        captions = ["\n".join(_captions(answers, index)) for index in wrong]
        images = torch.from_numpy(dataset.read(records)[0])
        save_captioned(list(images), captions, path, spec=dataset.spec)
    return bool(wrong)


def save_confused(
    dataset: Dataset,
    answers: Answers,
    pairs: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    columns: int = 8,
) -> None:
    """Draw a row of mistakes, the most confident first, for each pair of `confused_pairs`."""
    names = list(answers.names)
    rows = []
    for pair in pairs:
        true, predicted = names.index(pair["true"]), names.index(pair["predicted"])
        is_pair = (answers.labels == true) & (answers.predicted == predicted)
        records = answers.record_numbers(surest(is_pair, answers)[:columns])
        rows.append(list(dataset.read(records)[0]))
    heads = [f"{pair['true']} as {pair['predicted']} ({pair['n']})" for pair in pairs]
    save_table(rows, path, row_heads=heads, spec=dataset.spec)


def save_evidence(
    classifier: Classifier, dataset: Dataset, answers: Answers, path: Path, *, size: int = 4
) -> bool:
    """Draw the most confident mistakes and correct predictions beside their Grad-CAM heat maps.

    Draws nothing and returns False if there is no mistake or no layer of the network has maps.
    """
    wrong = surest(~answers.hits, answers)[:size]
    if not len(wrong):
        return False
    chosen = np.concatenate([wrong, surest(answers.hits, answers)[:size]])
    images = torch.from_numpy(dataset.read(answers.record_numbers(chosen))[0])
    try:
        heats = image_heat(classifier, images, answers.predicted[chosen])
    except UserError:
        return False
    pictures: list[Tensor] = []
    captions: list[str] = []
    for index, image, heat in zip(
        chosen.tolist(), visible(images, dataset.spec), heats, strict=True
    ):
        pictures += overlay(image, heat)
        captions += _captions(answers, index)
    save_captioned(pictures, captions, path, columns=4)
    return True


def _captions(answers: Answers, index: int) -> list[str]:
    """Return two captions: record number and true class; predicted class and confidence."""
    predicted = answers.class_text(answers.predicted_classes[index])
    return [
        f"{answers.record_numbers([index])[0]}: {answers.class_text(answers.true_classes[index])}",
        f"named {predicted} {answers.confidence[index]:.2f}",
    ]


def surest(mask: Tensor, answers: Answers) -> np.ndarray:
    """Return the indices where `mask`, bool [n], is True, sorted stably by falling confidence."""
    indices = np.flatnonzero(mask.numpy())
    return indices[np.argsort(-answers.confidence.numpy()[indices], kind="stable")]


def save_reliability(
    reliability: Sequence[Mapping[str, Any]], ece: float, path: str | Path
) -> None:
    """Draw the accuracy in each bin of confidence, above the number of images in the bin."""
    filled = [index for index, row in enumerate(reliability) if row["n"]]
    centres = (np.array(filled) + 0.5) / len(reliability)
    accuracy, confidence, counts = (
        np.array([reliability[index][key] for index in filled])
        for key in ("accuracy", "confidence", "n")
    )
    figure = new_figure(4.5, 5.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    width = 1 / len(reliability)
    upper.bar(centres, accuracy, width, color="#3b6ea5", edgecolor="white", label="accuracy")
    upper.plot(centres, confidence, "o", color="#d9822b", label="mean confidence")
    upper.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--")
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy", title=f"calibration error {ece:.4f}")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    lower.bar(centres, counts, width, color="#888888", edgecolor="white")
    lower.set(xlabel="confidence", ylabel="images")
    save_figure(figure, path)


def save_confusion(
    confusion: Sequence[Sequence[int]], classes: Sequence[str], path: str | Path
) -> None:
    """Draw a confusion matrix, counts [true][predicted], shaded by fractions of the true class."""
    counts = np.asarray(confusion, dtype=np.float64)
    fractions = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    count = len(classes)
    side = min(12.0, 3.0 + 0.55 * count)
    figure = new_figure(side, side)
    axes = figure.add_subplot()
    axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted class", ylabel="true class")
    if count <= MAX_LABELLED_CLASSES:
        names, fonts = list(map(drawable, classes)), families()
        axes.set_xticks(
            range(count), names, rotation=45, ha="right", parse_math=False, fontfamily=fonts
        )
        axes.set_yticks(range(count), names, parse_math=False, fontfamily=fonts)
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(
                column,
                row,
                f"{counts[row, column]:.0f}",
                ha="center",
                va="center",
                color=colour,
                fontsize=8,
            )
    save_figure(figure, path)


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure  # imported here because training does not need it

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: str | Path) -> None:
    with building(Path(path)) as temporary:
        figure.savefig(temporary, format="png", dpi=100)
