"""Published classifiers of other programs as checkpoints: `torchvision:NAME`, `timm:NAME`, files."""

ATTACHES = {"duetgan.models.restore": "duetgan.extras.published.classifiers"}
