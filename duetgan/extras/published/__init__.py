"""Read published classifiers as checkpoints: `torchvision:NAME`, `timm:NAME`, or files."""

ATTACHES = {"duetgan.models.restore": "duetgan.extras.published.classifiers"}
