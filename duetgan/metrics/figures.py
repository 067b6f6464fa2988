"""The table of figures: each a pure function of a record, and a row that evaluation, training,
report, comparison and docs/evaluation.md read. `python -m duetgan.metrics.figures` writes the
tables of that page.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from duetgan.metrics.classification import answers, labels
from duetgan.metrics.intervals import Measured
from duetgan.metrics.protocol import PER_CLASS
from duetgan.metrics.samples import judged, neighbours
from duetgan.metrics.samples.frechet import frechet_distance, intra_class_frechet
from duetgan.metrics.samples.kernel import kernel_distance

Place = Literal["headline", "tile", "column", ""]


@dataclass(frozen=True, eq=False)
class Figure:
    """A row of the table."""

    key: str  # in an evaluation's document; its 95 % interval stands under KEY_interval
    title: str  # in tables for people
    meaning: str  # in a report and in the docs
    compute: Callable[[Any], Measured]  # of `Answers`, or of `Samples` under one extractor
    # what a comparison calls better; "": it is not compared. A verdict needs an interval, or the
    # images' influence
    better: Literal["larger", "smaller", ""] = ""
    # in a report: at the top of the page, in a tile, as a column of the table of distances
    place: Place = "tile"
    unit: Literal["share", ""] = "share"
    interval: bool = True  # whether there may be one
    # what the record must have, and the note where it has not
    needs: dict[str, str] = field(default_factory=dict)
    by_class: str = ""  # key of its values by class
    # made of a classifier's answers: it stands once in a document, not for each extractor
    by_judge: bool = False
    in_training: bool = False  # whether it is computed at evaluations during training, too
    digits: int = 4  # in tables

    def measure(self, record: Any) -> Measured:
        for name, note in self.needs.items():
            value = getattr(record, name)
            if value is None or (isinstance(value, Sequence) and not value):
                return Measured(None, note=note)
        return self.compute(record)

    def keys(self, measured: Measured, names: Sequence[str]) -> dict[str, Any]:
        """What a document says of it, with the names of the classes."""
        keys: dict[str, Any] = {self.key: measured.value}
        keys |= {f"{self.key}_interval": measured.interval} if self.interval else {}
        if self.by_class:
            by_class = measured.by_class if names else ()
            keys[self.by_class] = dict(zip(names, by_class, strict=True)) if by_class else None
        return keys


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A generator's samples beside real images in the features of one extractor, and a judge's
    answers to them.

    Sample i was asked for the label of the i-th real image. The first n make the figures, those
    after them fill up the classes for the diversity.
    """

    fake: Tensor  # features [m, F] of samples
    real: Tensor  # of real test images, [m, F]
    training: Tensor | None  # of training images, at least n of them; None: no floor is wanted
    labels: Tensor  # int64 [m]; all 0 without classes; bool [m, K] of several labels an image
    n: int
    names: Sequence[str]  # of the classes; empty for an unconditional generator
    probabilities: Tensor | None  # [n, K] of the judge; None: there is none
    thresholds: Tensor | None = None  # [K], the judge's, of several labels an image
    seed: int
    per_class: int = PER_CLASS  # images of a class for the diversity
    extractor: str = ""  # whose features they are

    @property
    def pixels(self) -> tuple[Tensor, Tensor] | None:
        """The n samples and the n real images at 8x8 px in [0, 1], [n, C * 64]; None under another
        extractor.
        """
        return self.counted if self.extractor == "pixels" else None

    @property
    def counted(self) -> tuple[Tensor, Tensor]:
        """Features of the n samples and of the n real images."""
        return self.fake[: self.n], self.real[: self.n]

    @cached_property
    def neighbourhoods(self) -> neighbours.Neighbourhoods | None:
        """Which images lie in whose neighbourhood; None for too few."""
        return neighbours.neighbourhoods(*self.counted) if self.n > neighbours.K_DENSITY else None

    @cached_property
    def diversity(self) -> Measured:
        """The diversity ratio by class; an unconditional generator is one class."""
        classes = max(1, len(self.names))
        return judged.diversity_by_class(
            self.fake, self.labels, self.real, self.labels, classes=classes, images=self.per_class
        )


# --- the rows

CLASSIFIER = [
    Figure(
        "accuracy", "accuracy", "share of the test images predicted correctly", answers.accuracy,
        better="larger", place="headline", in_training=True,
    ),
    Figure(
        "balanced_accuracy", "balanced accuracy",
        "balanced accuracy, the mean of the classes' recall: a rare class counts as much as a frequent one",
        answers.balanced_accuracy, better="larger",
    ),
    Figure(
        "top5_accuracy", "top-5 accuracy", "share of images whose class is among the five likeliest",
        answers.top5_accuracy, better="larger",
    ),
    Figure(
        "auroc", "AUROC (mean of the classes)",
        "area under the ROC curve of each class against all others, the mean of the classes", answers.auroc,
        better="larger", unit="",
    ),
    Figure(
        "average_precision", "average precision",
        "average precision, as scikit-learn defines it, of each class against all others, the mean of the classes",
        answers.average_precision, better="larger", unit="",
    ),
    Figure(
        "nll", "negative log-likelihood", "mean of -log of the true class's probability", answers.nll,
        better="smaller", unit="", in_training=True,
    ),
    Figure(
        "ece", "calibration error (ECE)",
        "expected calibration error: gap between confidence and accuracy over 15 bins. 0 is calibrated",
        answers.ece, better="smaller", in_training=True,
    ),
]  # fmt: skip

LABELS = [  # of images that may have several labels
    *(replace(row, in_training=True) for row in CLASSIFIER if row.key in ("auroc", "average_precision")),
    Figure(
        "macro_f1", "F1 (mean of the labels)", "of several labels: F1 of each above its threshold, the mean",
        labels.macro_f1, better="larger", place="headline", in_training=True,
    ),
    Figure(
        "micro_f1", "F1 (of all decisions)", "of several labels: F1 of all decisions together", labels.micro_f1,
        better="larger", in_training=True,
    ),
    Figure(
        "exact_match", "exact match", "of several labels: share of images with no wrong one", answers.accuracy,
        better="larger", in_training=True,
    ),
]  # fmt: skip


def _kernel(first: Tensor, samples: Samples) -> tuple[float, float]:
    return kernel_distance(first, samples.counted[1], seed=samples.seed)


TRAINING, NAMES, PROBABILITIES = {"training": ""}, {"names": ""}, {"probabilities": ""}
ASKED = {
    "names": "the generator is unconditional: nothing was asked for that could be recognised",
    "probabilities": "no classifier was given; --classifier RUN names one",
}
NEAR = {"neighbourhoods": ""}
TOO_FEW = {
    "neighbourhoods": f"neighbourhoods need more than {neighbours.K_DENSITY} images on each side"
}

GAN = [
    Figure(
        "frechet", "frechet", "Frechet distance of Gaussians fitted to the features",
        lambda samples: Measured.normal(*frechet_distance(*samples.counted), low=0.0),
        better="smaller", place="column", unit="", in_training=True, digits=3,
    ),
    Figure(
        "floor", "its floor", "the same between n real training images and the test images",
        lambda samples: Measured(frechet_distance(samples.training[: samples.n], samples.counted[1])[0]),
        place="column", unit="", interval=False, needs=TRAINING, in_training=True, digits=3,
    ),
    Figure(
        "kernel", "kernel",
        "unbiased squared MMD with the kernel (x·y/d + 1)^3, mean of 20 subsets of 1,000; less biased at small n",
        lambda samples: Measured.normal(*_kernel(samples.counted[0], samples)),
        better="smaller", place="column", unit="", in_training=True, digits=6,
    ),
    Figure(
        "kernel_floor", "its floor", "the same between n real training images and the test images",
        lambda samples: Measured(_kernel(samples.training[: samples.n], samples)[0]),
        place="column", unit="", interval=False, needs=TRAINING, in_training=True, digits=6,
    ),
    Figure(
        "recognised", "recognised", "share of samples that the judge predicts as asked",
        lambda samples: judged.recognised(samples.probabilities, samples.labels[: samples.n], samples.thresholds),
        better="larger", place="headline", needs=ASKED, by_class="recognised_by_class", by_judge=True, in_training=True,
    ),
    Figure(
        "clipped_density", "clipped density (fidelity)",
        "fidelity (clipped density): share of samples that lie where real images are dense. It stops at 1",
        lambda samples: neighbours.clipped_density(samples.neighbourhoods),
        better="larger", place="headline", needs=NEAR,
    ),
    Figure(
        "clipped_coverage", "clipped coverage",
        "coverage (clipped): share of what real images are like that samples show. 80 %: as if two classes of ten were "
        "missing",
        lambda samples: neighbours.clipped_coverage(samples.neighbourhoods),
        better="larger", place="headline", needs=NEAR,
    ),
    Figure(
        "diversity_ratio", "diversity",
        "diversity of the least diverse class, if any: samples' mean pairwise feature distance over real images', of "
        "200 each at most",
        lambda samples: samples.diversity,
        place="headline", unit="", by_class="diversity_by_class", in_training=True, digits=3,
    ),
    Figure(
        "precision", "precision", "precision: share of samples within reach (3rd neighbour) of a real image",
        lambda samples: neighbours.precision(samples.neighbourhoods), better="larger", needs=NEAR,
    ),
    Figure(
        "recall", "recall", "recall: share of real images within reach of a sample. Odd images flatter both",
        lambda samples: neighbours.recall(samples.neighbourhoods), better="larger", needs=NEAR,
    ),
    Figure(
        "density", "density", "density: as precision, with 5th neighbours and counted. Real images have about 1",
        lambda samples: neighbours.density(samples.neighbourhoods), unit="", needs=TOO_FEW,
    ),
    Figure(
        "coverage", "coverage", "coverage: share of real images with a sample nearby. Real images have about 97 %",
        lambda samples: neighbours.coverage(samples.neighbourhoods), better="larger", needs=NEAR,
    ),
    Figure(
        "intra_class_frechet", "frechet within classes",
        "Frechet distance within classes, on average: finds a generator that ignores its labels",
        lambda s: intra_class_frechet(s.fake[: s.n], s.real[: s.n], s.labels[: s.n], len(s.names)),
        better="smaller", unit="", needs=NAMES, by_class="intra_class_frechet_by_class",
    ),
    Figure(
        "class_score", "class score",
        "class score: the Inception score with the judge in Inception's place; blind to diversity within a class",
        lambda samples: judged.class_score(samples.probabilities) if samples.thresholds is None else Measured(None),
        better="larger", unit="", needs=PROBABILITIES, by_judge=True,
    ),
]  # fmt: skip
FIGURES = CLASSIFIER + LABELS[2:] + GAN


def add(rows: list[Figure], figure: Figure) -> None:
    """Add a row to CLASSIFIER, LABELS or GAN: one of your own."""
    rows.append(figure)
    FIGURES.append(figure)


def measured(rows: Iterable[Figure], record: Any, notes: dict[str, str]) -> dict[str, Any]:
    """The keys of a document that the rows give of a record; what is to be said of a figure goes
    into `notes`.
    """
    document: dict[str, Any] = {}
    for row in rows:
        result = row.measure(record)
        document |= row.keys(result, record.names)
        notes |= {row.key: result.note} if result.note else {}
    return document


def history(rows: Iterable[Figure], document: dict[str, Any]) -> dict[str, float]:
    """The figures of a document that are followed during training, by key."""
    return {
        row.key: document[row.key]
        for row in rows
        if row.in_training and document.get(row.key) is not None
    }


# --- their tables in the docs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"


def written(page: str) -> str:
    """docs/evaluation.md with the tables of figures as they are here."""
    for name, rows in (("classifier", CLASSIFIER + LABELS[2:]), ("gan", GAN)):
        start, end = f"<!-- figures: {name} -->\n", "<!-- end -->"
        head, _, rest = page.partition(start)
        table = [
            f"| `{row.key}` | {row.meaning[0].upper()}{row.meaning[1:]} | {row.better or '-'} |"
            for row in rows
        ]
        lines = ["| figure | what it is | better |", "|---|---|---|", *table]
        page = head + start + "\n".join(lines) + f"\n{end}" + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
