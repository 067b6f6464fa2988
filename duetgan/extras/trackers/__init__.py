"""Trackers (`log.tracker`, `duet track`): a run's metrics in Weights & Biases or trackio."""

COMMANDS = {
    "track": ("duetgan.extras.trackers.trackers", "send the metrics of a run to a tracker"),
}
ATTACHES = {"duetgan.training.engine.run": "duetgan.extras.trackers.trackers"}
