"""Classifiers from few labels: training on unlabelled images (docs/extras/few_labels.md)."""

ATTACHES = {"duetgan.training.engine.tasks": "duetgan.extras.few_labels.task"}
