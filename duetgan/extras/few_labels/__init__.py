"""Training of classifiers with few labels.

A GAN's discriminator can be the backbone, and unlabelled images can be added.
"""

ATTACHES = {
    "duetgan.models.classifier": "duetgan.extras.few_labels.discriminator",
    "duetgan.training.engine.tasks": "duetgan.extras.few_labels.task",
}
