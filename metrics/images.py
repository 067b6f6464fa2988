"""Images that go with the figures: confusion matrix, captioned images, and the picking of those worth a look."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from utils.files import write_atomic
from utils.images import grid, save_png
from utils.text import shorten

TEXT = 11  # height of captions in pixels
LINE = 14  # from one line of a caption to the next
WIDEST_NAME = 150  # pixels that a row's caption may take
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


def save_rows(
    rows: Sequence[Sequence[Tensor]],
    path: str | Path,
    *,
    columns: int,
    most_rows: int = 50,
    captions: Sequence[str] = (),  # a row's name, written to the left of it; none: no room is left for them
) -> None:
    """Write images uint8 [C, H, W] as a grid with a row for each class; a single row is broken into several.

    A class with fewer than `columns` images leaves white places; of too many classes the first are shown. A single
    row gets no caption: there is nothing to tell apart.
    """
    if len(rows) == 1:
        images = torch.stack(list(rows[0]))
        save_png(grid(images, columns=columns, scale=grid_scale(images.shape[-1])), path)
        return
    blank = torch.full_like(next(image for row in rows for image in row), 255)
    shown = [[*row[:columns], *[blank] * (columns - len(row))] for row in rows[:most_rows]]
    images = torch.stack([image for row in shown for image in row])
    canvas = grid(images, columns=columns, scale=grid_scale(images.shape[-1]))
    save_png(beside(canvas, list(captions)[: len(shown)]) if captions else canvas, path)


def beside(canvas: np.ndarray, captions: Sequence[str]) -> np.ndarray:
    """An image uint8 [H, W, C] of rows of equal height, with the name of each row in a margin to its left."""
    font = _font()
    texts = [shorten(text, WIDEST_NAME, font.getlength) for text in captions]
    margin = math.ceil(max(font.getlength(text) for text in texts)) + 8
    image = Image.new("L", (margin, canvas.shape[0]), 255)
    draw = ImageDraw.Draw(image)
    for row, text in enumerate(texts):
        draw.text((margin - 4, (row + 0.5) * canvas.shape[0] / len(texts)), text, fill=0, font=font, anchor="rm")
    names = np.repeat(np.asarray(image)[:, :, None], canvas.shape[2], axis=2)
    return np.concatenate([names, canvas], axis=1)


def grid_scale(side: int) -> int:
    """How much images of so many pixels are enlarged to be seen: to about 64 px, large ones not at all."""
    return max(1, 64 // side)


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
        axes.set_xticks(range(count), list(classes), rotation=45, ha="right", parse_math=False)
        axes.set_yticks(range(count), list(classes), parse_math=False)
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", color=colour, fontsize=8)
    _save(figure, path)


def save_captioned(images: Sequence[Tensor], captions: Sequence[str], path: str | Path, *, columns: int = 6) -> None:
    """Draw images uint8 [C, H, W], all of one size, each with its caption of at most two lines below; at least one.

    A line that is wider than its image's cell loses its middle.
    """
    stacked = torch.stack(list(images))
    scale = max(1, round(112 / stacked.shape[-2]))
    drawn_height, drawn_width = (size * scale for size in stacked.shape[-2:])
    width, height = max(drawn_width, 112) + 12, drawn_height + 2 * LINE + 14  # of a cell, with room for the caption
    rows, columns = math.ceil(len(stacked) / columns), min(columns, len(stacked))
    font = _font()
    canvas = Image.new("RGB", (columns * width, rows * height), (255, 255, 255))
    draw = ImageDraw.Draw(canvas)
    for index, caption in enumerate(captions):
        left, top = index % columns * width + 6, index // columns * height + 6
        image = grid(stacked[index : index + 1], scale=scale)
        canvas.paste(Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0]), (left, top))
        for number, line in enumerate(caption.splitlines()[:2]):
            text = shorten(line, width - 12, font.getlength)
            draw.text((left, top + drawn_height + 2 + number * LINE), text, fill=0, font=font)
    save_png(np.asarray(canvas), path)


def _font() -> ImageFont.FreeTypeFont:
    """The font that matplotlib brings along, so that images look alike everywhere."""
    return ImageFont.truetype(findfont("DejaVu Sans"), TEXT)


def _save(figure: Figure, path: str | Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    write_atomic(path, buffer.getvalue())
