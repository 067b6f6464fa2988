"""Configuration, checkpoints, processes, run folders, and small modules that all packages use."""
