"""`threads: adapt`, and warnings of a drop in speed."""

COMMANDS: dict[str, tuple[str, str]] = {}
ATTACHES = {"duetgan.training.engine.run": "duetgan.extras.pace.pace"}
