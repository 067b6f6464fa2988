"""What is made from a checkpoint."""

import utils  # noqa: F401  # hears Ctrl-C while the rest is imported
