"""`threads: adapt`, and warnings of a drop in speed."""

ATTACHES = {"duetgan.training.engine.run": "duetgan.extras.pace.pace"}
