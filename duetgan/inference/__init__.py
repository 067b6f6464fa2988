"""Products of a checkpoint: samples, edits, predictions and exports."""
