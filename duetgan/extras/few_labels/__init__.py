"""Classifiers from few labels: a GAN's discriminator as the backbone, and unlabelled images."""

ATTACHES = {
    "duetgan.models.classifier": "duetgan.extras.few_labels.discriminator",
    "duetgan.training.engine.tasks": "duetgan.extras.few_labels.task",
}
