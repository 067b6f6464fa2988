"""The graph of a run's networks in TensorBoard."""

COMMANDS: dict[str, tuple[str, str]] = {}
ATTACHES = {"duetgan.training.engine.run": "duetgan.extras.graph.graph"}
