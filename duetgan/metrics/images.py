"""Images that go with the figures: confusion matrix, captioned images, and the picking of those
worth a look.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.data.lmdb.format import Meta
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.classification.answers import Answers
from duetgan.metrics.classification.corruptions import CORRUPTIONS, STRENGTHS
from duetgan.metrics.grad_cam import image_heat, overlay
from duetgan.models.classifier import Classifier
from duetgan.utils.errors import UserError
from duetgan.utils.files import building
from duetgan.utils.images import drawable, families, save_captioned, save_rows, save_table, visible

SHOWN = 24  # images of a picture of single ones
MOST_ROWS = 50  # classes of a grid
MANY_CLASSES = 30  # beyond that, names and numbers in a confusion matrix could not be read


class SampleBoard:
    """Picks images out of a generator's evaluation; `observe` is an `Observer` of
    `evaluate_generator`.
    """

    def __init__(
        self, classes: Sequence[str], *, columns: int = 10, sets: Meta | None = None
    ) -> None:
        """Args: `classes` names by label, empty for an unconditional generator; `columns` samples
        of each class; `sets` of the test images, where labels are of sets of classes: then the most
        frequent ones' rows are all.
        """
        self.names, self.columns, self.sets = (
            list(classes) if sets is None else sets.label_names,
            columns,
            sets,
        )
        self.rows: list[list[Tensor]] = [[] for _ in range(max(1, len(self.names)))]
        self.shown = list(range(len(self.rows)))[:MOST_ROWS]  # rows, in order
        if sets is not None:
            self.shown = np.argsort(np.negative(sets.histogram), kind="stable")[:SHOWN].tolist()
        self.captions = [self.names[row] for row in self.shown if self.names]
        self.capacity = columns if classes else columns * columns
        # file -> score, uint8 [C, H, W] and caption of the samples that the judge is surest, and
        # least sure of
        self.kept: dict[str, list[tuple[float, Tensor, str]]] = {
            "recognised_best.png": [],
            "recognised_worst.png": [],
        }

    def observe(self, images: Tensor, labels: Tensor, probabilities: Tensor | None) -> None:
        """Keep the first samples of each class, and those with the highest scores; of equal ones
        the earlier.
        """
        for image, label in zip(images, labels.tolist(), strict=True):
            if len(self.rows[label]) < self.capacity:
                self.rows[label].append(image.clone())
        if probabilities is None or not self.names or self.sets is not None:
            return
        asked = probabilities.gather(1, labels[:, None])[:, 0]
        each = zip(
            *(column.tolist() for column in (labels, probabilities.argmax(1), asked)), strict=True
        )
        texts = [
            f"{self.names[label]} {share:.2f}"
            + ("" if label == other else f"\nnamed {self.names[other]}")
            for label, other, share in each
        ]
        for (name, kept), scores in zip(self.kept.items(), (asked, 1 - asked), strict=True):
            best = sorted(
                [*kept, *zip(scores.tolist(), images, texts, strict=True)],
                key=lambda each: -each[0],
            )[:SHOWN]
            # no view of the batch
            self.kept[name] = [(score, image.clone(), text) for score, image, text in best]

    def save(self, folder: Path, real: Dataset | None = None) -> list[str]:
        """Write samples.png (rows are classes), recognised_best.png and recognised_worst.png, and
        real.png, test images in the same rows; returns the names.
        """
        spec = None if real is None else real.spec
        tables = {"samples.png": [self.rows[row] for row in self.shown]}
        judged = {name: kept for name, kept in self.kept.items() if kept}
        for name, kept in judged.items():
            save_captioned(
                [image for _, image, _ in kept],
                [text for *_, text in kept],
                folder / name,
                spec=spec,
            )
        if real is not None:
            labels = real.label_numbers() if self.names else np.zeros(len(real), dtype=np.int64)
            places = [np.flatnonzero(labels == label)[: self.capacity] for label in self.shown]
            tables["real.png"] = [list(torch.from_numpy(real.read(each)[0])) for each in places]
        for name, rows in tables.items():
            save_rows(rows, folder / name, columns=self.columns, captions=self.captions, spec=spec)
        return ["samples.png", *judged, *list(tables)[1:]]


def save_mistakes(reader: Dataset, answers: Answers, path: Path, *, size: int = SHOWN) -> bool:
    """Draw the most confident mistakes with their record numbers; of equal ones the earlier. False
    if there is none.
    """
    if wrong := surest(~answers.hits, answers)[:size].tolist():
        true, predicted = (
            [answers.words(each[i]) for i in wrong] for each in (answers.shown, answers.named)
        )
        rows = zip(wrong, answers.places(wrong), true, predicted, strict=True)
        captions = [
            f"{record}: {a}\nnamed {b} {answers.confidence[i]:.2f}" for i, record, a, b in rows
        ]
        images = torch.from_numpy(reader.read(answers.places(wrong))[0])
        save_captioned(list(images), captions, path, spec=reader.spec)
    return bool(wrong)


def save_confused(
    reader: Dataset,
    answers: Answers,
    pairs: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    columns: int = 8,
) -> None:
    """Draw a row for each of the `confused_pairs`, with its most confident images first."""
    rows, names = [], list(answers.names)
    for pair in pairs:
        true, predicted = names.index(pair["true"]), names.index(pair["predicted"])
        chosen = surest((answers.labels == true) & (answers.predicted == predicted), answers)[
            :columns
        ]
        rows.append(list(reader.read(answers.places(chosen))[0]))
    heads = [f"{each['true']} as {each['predicted']} ({each['n']})" for each in pairs]
    save_table(rows, path, row_heads=heads, spec=reader.spec)


def save_evidence(
    classifier: Classifier, reader: Dataset, answers: Answers, path: Path, *, size: int = 4
) -> bool:
    """Draw the surest mistakes, then the surest right answers, each beside the evidence for what
    was named: Grad-CAM. False for a network without maps, and where there is no mistake.
    """
    wrong, right = (surest(which, answers)[:size] for which in (~answers.hits, answers.hits))
    if not len(wrong):
        return False
    chosen = np.concatenate([wrong, right])
    images = torch.from_numpy(reader.read(answers.places(chosen))[0])
    try:
        heats = image_heat(classifier, images, answers.predicted[chosen])
    except UserError:
        return False
    pictures: list[Tensor] = []
    captions: list[str] = []
    for index, image, heat in zip(
        chosen.tolist(), visible(images, reader.spec), heats, strict=True
    ):
        pictures += overlay(image, heat)
        captions += [f"{answers.places([index])[0]}: {answers.words(answers.shown[index])}"]
        captions += [f"named {answers.words(answers.named[index])} {answers.confidence[index]:.2f}"]
    save_captioned(pictures, captions, path, columns=4)
    return True


def surest(wanted: Tensor, answers: Answers) -> np.ndarray:
    """Indices where `wanted`, bool [n], is true, by falling confidence; of equal ones the earlier
    first.
    """
    indices = np.flatnonzero(wanted.numpy())
    return indices[np.argsort(-answers.confidence.numpy()[indices], kind="stable")]


def save_corruptions(image: np.ndarray, path: Path, *, seed: int) -> None:
    """Draw a row for each corruption: the image uint8 [C, H, W] as it is, and at each strength."""
    rows = [
        [
            image,
            *(
                corruption(image, strength, seed=seed, index=0)
                for strength in range(1, STRENGTHS + 1)
            ),
        ]
        for corruption in CORRUPTIONS.values()
    ]
    heads = ["as it is", *(f"strength {strength}" for strength in range(1, STRENGTHS + 1))]
    save_table(rows, path, row_heads=list(CORRUPTIONS), column_heads=heads)


def save_reliability(
    reliability: Sequence[Mapping[str, Any]], ece: float, path: str | Path
) -> None:
    """Draw accuracy by confidence, a bar for each bin that has images, above how many images it
    has.
    """
    shown = [(place, row) for place, row in enumerate(reliability) if row["n"]]
    places = (np.array([place for place, _ in shown]) + 0.5) / len(reliability)
    accuracy, confidence, counts = (
        np.array([row[key] for _, row in shown]) for key in ("accuracy", "confidence", "n")
    )
    figure = new_figure(4.5, 5.5)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    width = 1 / len(reliability)
    above.bar(places, accuracy, width, color="#3b6ea5", edgecolor="white", label="accuracy")
    above.plot(places, confidence, "o", color="#d9822b", label="mean confidence")
    above.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--")
    above.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy", title=f"calibration error {ece:.4f}")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    below.bar(places, counts, width, color="#888888", edgecolor="white")
    below.set(xlabel="confidence", ylabel="images")
    save_figure(figure, path)


def save_confusion(
    confusion: Sequence[Sequence[int]], classes: Sequence[str], path: str | Path
) -> None:
    """Draw a confusion matrix, counts [true][named]; the shade is the share of the true class."""
    counts = np.asarray(confusion, dtype=np.float64)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    count = len(classes)
    side = min(12.0, 3.0 + 0.55 * count)
    figure = new_figure(side, side)
    axes = figure.add_subplot()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="named by the classifier", ylabel="true class")
    if count <= MANY_CLASSES:
        names, fonts = list(map(drawable, classes)), families()
        axes.set_xticks(
            range(count), names, rotation=45, ha="right", parse_math=False, fontfamily=fonts
        )
        axes.set_yticks(range(count), names, parse_math=False, fontfamily=fonts)
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > 0.5 else "black"
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


def new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # here: who trains does not wait for it

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: str | Path) -> None:
    with building(Path(path)) as temporary:
        figure.savefig(temporary, format="png", dpi=100)


def save_audit(scores: Mapping[str, Tensor], members: int, path: str | Path) -> None:
    """Draw an audit: for each score [members + held out] both sides' histograms, and the ROC curve
    beside them.
    """
    figure = new_figure(9.0, 3.2 * len(scores))
    axes = figure.subplots(len(scores), 2, squeeze=False)
    titles = {
        "generator": "minus the distance to the nearest sample",
        "discriminator": "the discriminator's logit",
    }
    for (name, score), (left, right) in zip(scores.items(), axes, strict=True):
        sides = score[:members].double().numpy(), score[members:].double().numpy()
        edges = np.histogram_bin_edges(np.concatenate(sides), bins=60)
        for side, label in zip(sides, ("training images", "held-out images"), strict=True):
            left.hist(side, edges, density=True, histtype="step", label=label)
        left.set(xlabel=titles.get(name, name), yticks=[])
        left.legend(fontsize=8)
        thresholds = np.unique(np.concatenate(sides))[::-1]
        above = [
            1 - np.searchsorted(np.sort(side), thresholds, side="left") / len(side)
            for side in sides
        ]
        right.plot([0, *above[1]], [0, *above[0]])
        right.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        right.set(xlabel="held-out images above a threshold", ylabel="training images above it")
    save_figure(figure, path)
