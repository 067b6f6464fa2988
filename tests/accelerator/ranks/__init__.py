"""Two processes, each with a pretend device of its own: DDP and the program's collectives over gloo (`group.py`)."""
