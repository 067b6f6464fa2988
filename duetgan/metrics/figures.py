"""Tables of all metrics. Each row has a pure function and settings to show and compare its value.

Evaluation, training, report and comparison read these tables. `python -m duetgan.metrics.figures`
copies them into docs/evaluation.md.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from duetgan.metrics.classification import answers, labels
from duetgan.metrics.intervals import Measured
from duetgan.metrics.protocol import Document
from duetgan.metrics.samples import judged, neighbours
from duetgan.metrics.samples.frechet import frechet_distance
from duetgan.metrics.samples.intra_class import intra_class_frechet
from duetgan.metrics.samples.kernel import kernel_distance

Place = Literal["headline", "tile", "column", ""]


@dataclass(frozen=True, eq=False)
class Figure:
    """A metric: a row of the tables CLASSIFIER, LABELS and GAN."""

    key: str  # in an evaluation's results; its 95 % interval has the key KEY_interval
    title: str  # name in text tables
    meaning: str  # description in a report and in the docs
    compute: Callable[[Any], Measured]  # takes `Answers` or `Samples`
    # better direction in a comparison; a metric with "" is not compared. A verdict needs an
    # interval, or the influence of each image
    better: Literal["larger", "smaller", ""] = ""
    # place in a report: top of the page, a tile, a column of the table of distances, or none
    place: Place = "tile"
    unit: Literal["share", ""] = "share"  # "share": a fraction, shown in percent; "": a number
    interval: bool = True  # if False, the metric never has an interval
    # attributes of `Answers` or `Samples` that `compute` needs, each with a note for the case that
    # it is None or empty
    needs: dict[str, str] = field(default_factory=dict)
    by_class: str = ""  # key of its values by class; "" if it has none
    # if True, the metric depends on the judge's predictions, and has one value for all extractors
    by_judge: bool = False
    in_training: bool = False  # if True, evaluations during training compute it, too

    def measure(self, record: object) -> Measured:
        """Compute the metric from `Answers` or `Samples`.

        If one of the attributes in `needs` is None or empty, the metric is not computed: the value
        is None, and the note is the one that `needs` has for this attribute.
        """
        for name, note in self.needs.items():
            value = getattr(record, name)
            if value is None or (isinstance(value, Sequence) and not value):
                return Measured(None, note=note)
        return self.compute(record)

    def keys(self, measured: Measured, names: Sequence[str]) -> Document:
        """Return the metric's entries for a document: its value, interval and values by class.

        `names` are the class names.
        """
        keys: Document = {self.key: measured.value}
        if self.interval:
            keys[f"{self.key}_interval"] = measured.interval
        if self.by_class:
            by_class = measured.by_class if names else ()
            keys[self.by_class] = dict(zip(names, by_class, strict=True)) if by_class else None
        return keys


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Features of samples and of real images by one extractor, with the judge's predictions.

    Sample i has the label of the i-th real image. Metrics use the first n samples and real images.
    Only the diversity also uses the following ones, which were drawn because their classes are
    rare.
    """

    fake: Tensor  # features of the samples, [m, F]
    real: Tensor  # features of the real test images, [m, F]
    training: Tensor | None  # features of at least n training images, for the floor
    labels: Tensor  # int64 [m], all 0 without classes; bool [m, K] if images have several labels
    n: int
    names: Sequence[str]  # class names; empty for an unconditional generator
    probabilities: Tensor | None  # of the judge, if any, [n, K]
    thresholds: Tensor | None  # of the judge, [K], if images have several labels
    seed: int
    per_class: int  # images of each class for the diversity
    extractor: str  # name of the extractor

    @property
    def pixels(self) -> tuple[Tensor, Tensor] | None:
        """The n samples and n real images at 8x8 px, 0 to 1, both [n, C * 64].

        None unless the extractor is `pixels`.
        """
        return self.counted if self.extractor == "pixels" else None

    @property
    def counted(self) -> tuple[Tensor, Tensor]:
        """Features of the first n samples and of the first n real images, both [n, F]."""
        return self.fake[: self.n], self.real[: self.n]

    @cached_property
    def neighbourhoods(self) -> neighbours.Neighbourhoods | None:
        """Counts of images in each other's balls (neighbourhoods); None if n is too small."""
        return neighbours.neighbourhoods(*self.counted) if self.n > neighbours.K_DENSITY else None

    @cached_property
    def diversity(self) -> Measured:
        """Diversity ratio of the least diverse class, with the ratios by class.

        Without classes, it is the ratio of all images.
        """
        classes = max(1, len(self.names))
        return judged.diversity_by_class(
            self.fake, self.labels, self.real, self.labels, classes=classes, images=self.per_class
        )


# --- the tables

CLASSIFIER = [
    Figure(
        "accuracy", "accuracy", "fraction of the test images that are classified correctly", answers.accuracy,
        better="larger", place="headline", in_training=True,
    ),
    Figure(
        "balanced_accuracy", "balanced accuracy",
        "balanced accuracy: mean of the recall of each class; rare and frequent classes count equally",
        answers.balanced_accuracy, better="larger",
    ),
    Figure(
        "top5_accuracy", "top-5 accuracy",
        "fraction of the test images with the true class among the five most likely classes", answers.top5_accuracy,
        better="larger",
    ),
    Figure(
        "auroc", "AUROC (mean of the classes)",
        "area under the ROC curve of each class against all others, averaged over the classes", answers.auroc,
        better="larger", unit="",
    ),
    Figure(
        "average_precision", "average precision",
        "average precision (as in scikit-learn) of each class against all others, averaged over the classes",
        answers.average_precision, better="larger", unit="",
    ),
    Figure(
        "nll", "negative log-likelihood", "mean negative logarithm of the true class's probability", answers.nll,
        better="smaller", unit="", in_training=True,
    ),
    Figure(
        "ece", "calibration error (ECE)",
        "expected calibration error: mean difference between confidence and accuracy over 15 bins; 0 if the "
        "probabilities are calibrated",
        answers.ece, better="smaller", in_training=True,
    ),
]  # fmt: skip

LABELS = [  # for images that may have several labels
    *(replace(row, in_training=True) for row in CLASSIFIER if row.key in ("auroc", "average_precision")),
    Figure(
        "macro_f1", "F1 (mean of the labels)", "several labels per image: mean of the labels' F1",
        labels.macro_f1, better="larger", place="headline", in_training=True,
    ),
    Figure(
        "micro_f1", "F1 (of all decisions)", "several labels per image: F1 of all decisions together", labels.micro_f1,
        better="larger", in_training=True,
    ),
    Figure(
        "exact_match", "exact match",
        "several labels per image: fraction of the images whose labels are all predicted correctly",
        answers.accuracy, better="larger", in_training=True,
    ),
]  # fmt: skip


def _kernel(first: Tensor, samples: Samples) -> tuple[float, float]:
    return kernel_distance(first, samples.counted[1], seed=samples.seed)


TRAINING = {"training": ""}
NAMES = {"names": ""}
JUDGED = {
    "names": "the generator is unconditional: no class was requested that could be recognised",
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
        better="smaller", place="column", unit="", in_training=True,
    ),
    Figure(
        "floor", "frechet (training vs test)", "Frechet distance between n real training images and the test images",
        lambda samples: Measured(frechet_distance(samples.training[: samples.n], samples.counted[1])[0]),
        place="column", unit="", interval=False, needs=TRAINING, in_training=True,
    ),
    Figure(
        "kernel", "kernel",
        "unbiased squared MMD with the kernel (x·y/d + 1)^3, averaged over 20 subsets of 1,000 images",
        lambda samples: Measured.normal(*_kernel(samples.counted[0], samples)),
        better="smaller", place="column", unit="", in_training=True,
    ),
    Figure(
        "kernel_floor", "kernel (training vs test)", "squared MMD between n real training images and the test images",
        lambda samples: Measured(_kernel(samples.training[: samples.n], samples)[0]),
        place="column", unit="", interval=False, needs=TRAINING, in_training=True,
    ),
    Figure(
        "recognised", "recognised",
        "fraction of the samples for which the judge (the classifier) predicts the requested class",
        lambda samples: judged.recognised(samples.probabilities, samples.labels[: samples.n], samples.thresholds),
        better="larger", place="headline", needs=JUDGED, by_class="recognised_by_class",
        by_judge=True, in_training=True,
    ),
    Figure(
        "clipped_density", "clipped density (fidelity)",
        "fidelity (clipped density): fraction of the samples that lie where real images are dense",
        lambda samples: neighbours.clipped_density(samples.neighbourhoods),
        better="larger", place="headline", needs=NEAR,
    ),
    Figure(
        "clipped_coverage", "clipped coverage",
        "coverage (clipped): fraction of the real images' variety that the samples have; for comparison: a generator "
        "that never draws two of ten equally frequent classes has about 80 %",
        lambda samples: neighbours.clipped_coverage(samples.neighbourhoods),
        better="larger", place="headline", needs=NEAR,
    ),
    Figure(
        "diversity_ratio", "diversity",
        "diversity of the least diverse class, or of all samples if there are no classes: mean feature distance "
        "between samples, divided by the mean feature distance between real images",
        lambda samples: samples.diversity,
        place="headline", unit="", by_class="diversity_by_class", in_training=True,
    ),
    Figure(
        "precision", "precision",
        "precision: fraction of the samples that lie within the radius of some real image; the radius is that image's "
        "distance to its 3rd nearest real image",
        lambda samples: neighbours.precision(samples.neighbourhoods), better="larger", needs=NEAR,
    ),
    Figure(
        "recall", "recall",
        "recall: fraction of the real images that lie within the radius of some sample; the radius is that sample's "
        "distance to its 3rd nearest sample",
        lambda samples: neighbours.recall(samples.neighbourhoods), better="larger", needs=NEAR,
    ),
    Figure(
        "density", "density",
        "density: for each sample, the number of real images that are nearer to it than to their own 5th nearest real "
        "image; averaged over the samples and divided by 5; about 1 if the samples are real images",
        lambda samples: neighbours.density(samples.neighbourhoods), unit="", needs=TOO_FEW,
    ),
    Figure(
        "coverage", "coverage",
        "coverage: fraction of the real images that are nearer to some sample than to their own 5th nearest real "
        "image; about 97 % if the samples are real images",
        lambda samples: neighbours.coverage(samples.neighbourhoods), better="larger", needs=NEAR,
    ),
    Figure(
        "intra_class_frechet", "frechet within classes",
        "mean of the Frechet distances within the classes; large if the generator ignores its labels",
        lambda s: intra_class_frechet(s.fake[: s.n], s.real[: s.n], s.labels[: s.n], len(s.names)),
        better="smaller", unit="", needs=NAMES, by_class="intra_class_frechet_by_class",
    ),
]  # fmt: skip
# metrics of two sets of images that need neither classes, nor a judge, nor training images
UNLABELLED = [
    row
    for row in GAN
    if not row.by_class and {"names", "probabilities", "training"}.isdisjoint(row.needs)
]
FIGURES = CLASSIFIER + LABELS[2:] + GAN


def add(rows: list[Figure], figure: Figure) -> None:
    """Add a metric to `rows`, which is one of the tables CLASSIFIER, LABELS and GAN."""
    rows.append(figure)
    FIGURES.append(figure)


def measured(
    rows: Iterable[Figure], record: Samples | answers.Answers, notes: dict[str, str]
) -> Document:
    """Compute the metrics of `rows` from `Answers` or `Samples`, and return their entries by key.

    A note on a metric is added to `notes` under the metric's key.
    """
    document: Document = {}
    for row in rows:
        result = row.measure(record)
        document |= row.keys(result, record.names)
        if result.note:
            notes[row.key] = result.note
    return document


def rows_of(document: Document) -> Iterator[tuple[Figure, Document]]:
    """Yield each metric that an evaluation's results have, and the dict that has its value.

    The dict is `document` or, for a metric of features, an entry of `distances`.
    """
    for results in (document, *(document.get("distances") or ())):
        for row in FIGURES:
            of_features = row in GAN and not row.by_judge
            if of_features == (results is not document) and results.get(row.key) is not None:
                yield row, results


def history(rows: Iterable[Figure], document: Document) -> dict[str, float]:
    """Return the metrics in `document` that are logged during training, by key."""
    return {
        row.key: document[row.key]
        for row in rows
        if row.in_training and document.get(row.key) is not None
    }


# --- copies of the tables in docs/evaluation.md

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"


def written(page: str) -> str:
    """Return the text `page` of docs/evaluation.md with its tables of metrics up to date."""
    for name, rows in (("classifier", CLASSIFIER + LABELS[2:]), ("gan", GAN)):
        start, end = f"<!-- figures: {name} -->\n", "<!-- end -->"
        head, _, tail = page.partition(start)
        table = [
            f"|`{row.key}`|{row.meaning[0].upper()}{row.meaning[1:]}|{row.better or '-'}|"
            for row in rows
        ]
        lines = ["|metric|meaning|better|", "|---|---|---|", *table]
        page = head + start + "\n".join(lines) + f"\n{end}" + tail.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
