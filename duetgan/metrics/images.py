"""Draw the pictures of an evaluation: samples, mistakes, confusion matrix and calibration."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.classification.answers import Answers
from duetgan.metrics.features.selection import draw_samples
from duetgan.metrics.grad_cam import image_heat, overlay
from duetgan.models.classifier import Classifier
from duetgan.models.gan import ImageGenerator
from duetgan.utils.errors import UserError
from duetgan.utils.files import building
from duetgan.utils.images import drawable, save_captioned, save_rows, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_IMAGES = 24  # in a picture of captioned images
COLUMNS = 10  # in a grid of samples
EVIDENCE = 4  # mistakes, and as many correct predictions, with heat maps
MAX_ROWS = 50  # in a grid of images, a row for each class
MAX_LABELLED_CLASSES = 30  # with more, text in a confusion matrix would be too small to read


def save_samples(
    generator: ImageGenerator,
    dataset: Dataset,  # test images
    labels: Tensor,  # label number of each sample, int64 [n]
    probabilities: Tensor | None,  # of the judge, [n, K], if samples have one class each
    folder: Path,
    *,
    seed: int,
) -> list[str]:
    """Generate an evaluation's samples again, save pictures of them, and return the file names.

    samples.png has a row of samples for each class, at most MAX_ROWS rows. real.png has the same
    rows with test images. If there is a judge, recognised_best.png and recognised_worst.png show
    the samples whose requested class has the highest and the lowest probability. If images have
    several labels, each row is for a label set, and only the most frequent sets have rows.
    """
    spec = dataset.spec
    names = dataset.meta.label_names if generator.classes else []
    rows = list(range(max(1, len(names))))[:MAX_ROWS]
    if names and dataset.meta.sets is not None:
        rows = np.argsort(np.negative(dataset.meta.histogram), kind="stable")[:MAX_IMAGES].tolist()

    def sampled(indices: np.ndarray) -> Tensor:
        conditions = None
        if names:
            conditions = torch.from_numpy(dataset.meta.conditions(labels[indices].numpy()))
        return draw_samples(generator, conditions, indices.tolist(), seed=seed)

    def save_grid(name: str, read: Callable[[np.ndarray], Tensor], numbers: np.ndarray) -> None:
        capacity = COLUMNS if names else COLUMNS * COLUMNS
        places = [np.flatnonzero(numbers == row)[:capacity] for row in rows]
        images = read(np.concatenate(places)).split([len(row) for row in places])
        captions = [names[row] for row in rows if names]
        save_rows(images, folder / name, columns=COLUMNS, captions=captions, spec=spec)

    save_grid("samples.png", sampled, labels.numpy())
    files = ["samples.png"]
    if probabilities is not None and names:
        confidence = probabilities.gather(1, labels[:, None])[:, 0].numpy()
        predicted = probabilities.argmax(1).numpy()
        for name, score in (("best", confidence), ("worst", -confidence)):
            chosen = np.argsort(-score, kind="stable")[:MAX_IMAGES]
            captions = []
            for label, prediction, value in zip(
                labels[chosen].tolist(), predicted[chosen], confidence[chosen], strict=True
            ):
                mistake = "" if label == prediction else f"\npred. {names[prediction]}"
                captions.append(f"{names[label]} {value:.2f}{mistake}")
            files.append(f"recognised_{name}.png")
            save_captioned(list(sampled(chosen)), captions, folder / files[-1], spec=spec)
    real = dataset.label_numbers() if names else np.zeros(len(dataset), dtype=np.int64)
    save_grid("real.png", lambda records: torch.from_numpy(dataset.read(records)[0]), real)
    return [*files, "real.png"]


def save_mistakes(dataset: Dataset, answers: Answers, path: Path) -> bool:
    """Draw the most confident mistakes, at most MAX_IMAGES, into a PNG file.

    Returns True, or False if there is no mistake. In this case, no file is written.
    """
    if wrong := surest(~answers.hits, answers)[:MAX_IMAGES].tolist():
        records = answers.record_numbers(wrong)
        captions = ["\n".join(_captions(answers, index)) for index in wrong]
        images = torch.from_numpy(dataset.read(records)[0])
        save_captioned(list(images), captions, path, spec=dataset.spec)
    return bool(wrong)


def save_evidence(classifier: Classifier, dataset: Dataset, answers: Answers, path: Path) -> bool:
    """Draw the most confident mistakes and correct predictions beside their Grad-CAM heat maps.

    There are at most EVIDENCE of each. Returns True. If there is no mistake, or Grad-CAM cannot use
    the network, draws nothing and returns False.
    """
    wrong = surest(~answers.hits, answers)[:EVIDENCE]
    if not len(wrong):
        return False
    chosen = np.concatenate([wrong, surest(answers.hits, answers)[:EVIDENCE]])
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
        f"pred. {predicted} {answers.confidence[index]:.2f}",
    ]


def surest(mask: Tensor, answers: Answers) -> np.ndarray:
    """Return the indices at which `mask`, bool [n], is True, the most confident predictions first.

    Indices of equal confidence keep their order.
    """
    indices = np.flatnonzero(mask.numpy())
    return indices[np.argsort(-answers.confidence.numpy()[indices], kind="stable")]


def save_reliability(
    reliability: Sequence[Mapping[str, Any]], ece: float, path: str | Path
) -> None:
    """Draw the accuracy in each bin of confidence, above the number of images in the bin.

    `reliability` is the result of `answers.reliability`. `ece` is the calibration error, which is
    shown in the title.
    """
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
    """Draw a confusion matrix of counts [true][predicted].

    A cell is shaded by its fraction of the images of the true class.
    """
    counts = np.asarray(confusion, dtype=np.float64)
    fractions = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    count = len(classes)
    side = min(12.0, 3.0 + 0.55 * count)
    figure = new_figure(side, side)
    axes = figure.add_subplot()
    axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted class", ylabel="true class")
    if count <= MAX_LABELLED_CLASSES:
        names = list(map(drawable, classes))
        axes.set_xticks(range(count), names, rotation=45, ha="right", parse_math=False)
        axes.set_yticks(range(count), names, parse_math=False)
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
