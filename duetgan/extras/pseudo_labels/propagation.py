"""Labels that propagate between neighbours in a classifier's features."""

import numpy as np
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.extras.few_labels.spreading import spread_to
from duetgan.metrics.features.extractors import RealFeatures, classifier_features
from duetgan.metrics.features.selection import Selection
from duetgan.models.classifier import Classifier


def propagated_labels(
    classifier: Classifier, dataset: Dataset, labelled: Dataset, *, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Propagate the labels of `labelled` images to every image of `dataset` over neighbours in the
    classifier's features.

    Returns the class with the largest propagated weight for each image, int64 [n], and this class's
    fraction of the image's total weight, float64 [n].
    """
    extractors = [classifier_features(classifier, name="classifier")]
    real = RealFeatures(batch_size=batch_size)
    features = []
    for images in (labelled, dataset):
        selection = Selection(np.arange(len(images)), images.label_numbers(), "all")
        features.append(real.get(images, selection, extractors)[0])
    labelled_features, unlabelled_features = features
    weights = spread_to(
        unlabelled_features,
        labelled_features,
        torch.tensor(labelled.labels()),
        len(labelled.classes),
    )
    fractions, labels = weights.max(1)
    return labels.numpy(), fractions.numpy()
