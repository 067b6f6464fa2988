"""The feature extractor `inception`: the network of published FIDs (docs/evaluation.md)."""

COMMANDS: dict[str, tuple[str, str]] = {}
ATTACHES = {"duetgan.metrics.features.extractors": "duetgan.extras.inception.extractor"}
