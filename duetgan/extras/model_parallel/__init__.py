"""Classifiers split over the devices of a process (`model.split`)."""

ATTACHES = {"duetgan.training.classifier.network": "duetgan.extras.model_parallel.placement"}
