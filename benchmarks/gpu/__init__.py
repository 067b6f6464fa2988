"""The first minutes on a GPU: `python -m benchmarks.gpu`, or `make gpu`. The command line is in `command`."""
