"""Published classifiers of other programs as checkpoints: `torchvision:NAME`, `timm:NAME`, files."""

COMMANDS: dict[str, tuple[str, str]] = {}
ATTACHES = {"duetgan.models.restore": "duetgan.extras.published.classifiers"}
